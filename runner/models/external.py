"""Build models of timm by name, and of transformers by configuration, that return logits.

No code of a hub runs: weights are safetensors, and models are of installed classes. A built model has the node that
builds it without a download in `made_anywhere`.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.config.checks import one_of
from runner.config.packages import not_installed
from runner.device import backends
from runner.errors import Problem, RunnerError, first_line, nearest, refuse
from runner.models.shapes import IMAGES, check_shape

log = logging.getLogger("runner")

#: by head: the class of transformers, and the argument for the inputs
HEADS = {
    "sequence_classification": ("AutoModelForSequenceClassification", "input_ids"),
    "causal_lm": ("AutoModelForCausalLM", "input_ids"),
    "image_classification": ("AutoModelForImageClassification", "pixel_values"),
}
#: similarity from which a key is taken for a typing error of another one
TYPO_SIMILARITY = 0.9
#: a variable in the code of transformers (5.23), of models that classify at the last token before the padding
LAST_TOKEN = "last_non_pad_token"
#: part of the outputs from which the effect of padding is more than rounding in float32
ROUNDING = 2e-5
#: arguments of timm.create_model for files and URLs, and those set by the data
NO_SETTINGS = ("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir", "num_classes", "in_chans")


def timm_model(
    name: str,
    input_shape: Sequence[int],
    out_features: int,
    *,
    pretrained: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Build timm's image model of this name for (B, C, H, W), with an output layer for out_features.

    Args:
        pretrained: Whether to load timm's weights, from the Hugging Face Hub or its cache.
        settings: Further arguments of timm.create_model, e.g., {img_size: 32, drop_rate: 0.1}.

    Raises:
        RunnerError: If timm is not installed, does not have the model, or can't load the weights.
    """
    timm = _library("timm", source=f"model.name={name}")
    check_shape(input_shape, model="timm", takes=[IMAGES])
    if not timm.is_model(name):  # refuses URLs, too: hf-hub:..., local-dir:...
        known = timm.list_models()
        ways = [f"model.name={hit}" for hit in nearest(str(name), known)]
        otherwise = f"use one of the {len(known)} names of `timm.list_models()`"
        raise RunnerError.suggest(f"model.name={name}", f"timm has no model `{name}`", ways, otherwise)
    settings = dict(settings or {})
    if refused := [key for key in settings if key in NO_SETTINGS]:
        problem = "`model.settings` can't set files, addresses or values that follow from the data"
        fix = "remove this key, and use `model.weights=FILE` for weights"
        raise RunnerError.of(f"model.settings.{refused[0]}={settings[refused[0]]}", problem, fix)
    try:
        model: Any = timm.create_model(
            name, pretrained=pretrained, num_classes=out_features, in_chans=input_shape[0], **settings
        )
    except Exception as error:
        if not pretrained:
            raise
        raise RunnerError(_not_reached(f"model.name={name} model.pretrained=true", error)) from error
    sizes = {"name": name, "input_shape": list(input_shape), "out_features": out_features, "settings": settings}
    model.made_anywhere = {"_target_": "runner.models.timm_model", **sizes}
    return model  # type: ignore[no-any-return]


def transformers_model(
    input_shape: Sequence[int],
    out_features: int,
    *,
    config: Mapping[str, Any] | None = None,
    pretrained: str | None = None,
    head: Annotated[str, one_of(("auto", *HEADS))] = "auto",
    vocab_size: int | None = None,
    padding_token: int | None = None,
) -> nn.Module:
    """Build a model of transformers: tokens (B, T) or images (B, C, H, W) to logits (B, out_features), or (B, T, V) of a causal_lm.

    Args:
        config: `model_type` and further configuration of an untrained model, or changes of the one of `pretrained`.
        pretrained: A directory made by save_pretrained(), or a name on the Hub.
        head: `auto` is image_classification for images, causal_lm if the outputs are the vocabulary, else
            sequence_classification.
        padding_token: Ignored in sequence_classification; a decoder classifies at the last token before it (None: texts of
            one length).

    Raises:
        RunnerError: If transformers is not installed, or does not have or can't load the model.
    """
    config = dict(config or {})
    source = f"model.pretrained={pretrained}" if pretrained else f"model.config={config}"
    library = _library("transformers", source=source)
    if head == "auto":
        is_language = vocab_size is not None and out_features == vocab_size
        head = "causal_lm" if is_language else "sequence_classification"
        head = "image_classification" if len(input_shape) == 3 else head
    kind, argument = HEADS[head]
    classifies_texts = head == "sequence_classification"
    defaults: dict[str, Any] = {} if head == "causal_lm" else {"num_labels": out_features}
    if head == "image_classification":
        defaults |= {"num_channels": input_shape[0]} | ({} if pretrained else {"image_size": max(input_shape[1:])})
        settings = _settings(library, config, defaults, pretrained)
    elif vocab_size is None:
        problem = "the model needs tokens, and this data has no vocabulary"
        raise RunnerError.suggest(f"model=huggingface on inputs of shape {tuple(input_shape)}", problem, ["model=mlp"])
    else:
        defaults |= {} if pretrained else {"vocab_size": vocab_size}
        # a cache is of use for generation only
        settings = _settings(library, {**config, "use_cache": False}, defaults, pretrained)
        _check_vocabulary(settings, vocab_size, source, is_pretrained=pretrained is not None)
        if padding_token is not None and not pretrained:
            settings.pad_token_id = padding_token
        elif classifies_texts and getattr(settings, "pad_token_id", None) is None:
            settings.pad_token_id = padding_token or 0
    needs_room = "max_position_embeddings" not in config and head != "image_classification" and not pretrained
    try:
        made = _load_or_build(
            getattr(library, kind), settings, pretrained, length=input_shape[0] if needs_room else None
        )
    except (OSError, ValueError) as error:
        raise RunnerError(_not_reached(source, error)) from error
    plain = json.loads(settings.to_json_string())
    model = Logits(made.float(), argument, padding_token if classifies_texts else None)
    model.made_anywhere = {
        "_target_": "runner.models.transformers_model",
        "input_shape": list(input_shape),
        "out_features": out_features,
        "head": head,
        "vocab_size": vocab_size,
        "padding_token": padding_token,
        "config": {key: value for key, value in plain.items() if key != "transformers_version"},
    }
    if classifies_texts:
        _set_padding(model, is_pretrained=pretrained is not None)
    if model.padding_token is not None and _depends_on_padding(model, input_shape[0]):
        log.warning(
            "the outputs of a model of type %s depend on the padding of a text: predict with the data.context_length of the training, "
            "or use a model type that ignores padding (model.config.model_type=bert)",
            settings.model_type,
        )
    return model


def _load_or_build(make: Any, settings: Any, pretrained: str | None, *, length: int | None) -> Any:
    """Return the library's model. length: of texts whose positions must have room, in a model without weights."""
    if pretrained:
        return make.from_pretrained(
            pretrained,
            config=settings,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # the output layer has other classes
            dtype=torch.float32,  # train.precision decides the type of computations
        )
    device = torch.get_default_device()
    before = backends.generator_states(device)
    try:
        model = make.from_config(settings, trust_remote_code=False)
    except AssertionError:  # torch's, if there is no position for the padding token's number
        if length is None or settings.pad_token_id is None:
            raise
        settings.max_position_embeddings = length + settings.pad_token_id + 1
        backends.set_generator_states(before, device)
        return make.from_config(settings, trust_remote_code=False)
    for name, module in model.named_modules() if length is not None else ():
        if name.endswith("position_embeddings") and (padding := getattr(module, "padding_idx", None)) is not None:
            needed = length + padding + 1  # positions begin behind the padding token's number
            if needed > settings.max_position_embeddings:
                settings.max_position_embeddings = needed
                backends.set_generator_states(before, device)
                return make.from_config(settings, trust_remote_code=False)
    return model


def _settings(library: Any, config: Mapping[str, Any], defaults: Mapping[str, Any], pretrained: str | None) -> Any:
    """Return the library's configuration. Raises: RunnerError for an unknown model type, or for misspelled keys."""
    own = {key: value for key, value in {**defaults, **config}.items() if key != "model_type"}
    if "num_labels" in defaults:
        own["num_labels"] = defaults["num_labels"]
    if pretrained:
        try:
            settings = library.AutoConfig.from_pretrained(pretrained, trust_remote_code=False, **own)
        except (OSError, ValueError) as error:
            raise RunnerError(_not_reached(f"model.pretrained={pretrained}", error)) from error
    else:
        settings = library.AutoConfig.for_model(_known(library, config.get("model_type")), **own)
    _check_keys(settings, config)
    return settings


def _check_vocabulary(settings: Any, vocab_size: int, source: str, *, is_pretrained: bool) -> None:
    known = getattr(settings, "vocab_size", None)
    if isinstance(known, int) and known < vocab_size:
        problem = f"the model knows {known:,} tokens, and the data has {vocab_size:,}"
        fix = f"use `model.config.vocab_size={vocab_size}`, or remove that key"
        if is_pretrained:
            fix = f"use the model's `tokenizer.json` as `data.tokenizer` (`data=text`: `data.tokens`), or a model of {vocab_size:,} tokens"
        raise RunnerError.of(source, problem, fix)


def _set_padding(model: Logits, *, is_pretrained: bool) -> None:
    """Let a classifier of texts ignore the padding, or learn every token where nothing is padding."""
    if _classifies_at_the_end(model.model):
        config: Any = model.model.config
        token = -1 if model.padding_token is None else model.padding_token  # -1: no token is padding
        config.pad_token_id = config.get_text_config().pad_token_id = token
    if model.padding_token is None and not is_pretrained:
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.padding_idx = None  # else its row is never trained


def _classifies_at_the_end(model: nn.Module) -> bool:
    return LAST_TOKEN in inspect.unwrap(type(model).forward).__code__.co_varnames


def _depends_on_padding(logits: Logits, length: int) -> bool:
    """Return whether padding changes the outputs for a text: of half and of a third of a row. Costs four forward passes."""
    first = next(logits.parameters())
    if type(first) is not nn.Parameter or first.device.type != "cpu":
        return False  # only shapes, as in a plan
    was_training = logits.training
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            logits.eval()
            for end in (max(1, length // 2), max(1, length // 3)):
                text = torch.arange(end)[None] % max(1, logits.padding_token or 0)
                padded = logits(F.pad(text, (0, length - end), value=logits.padding_token))
                if (padded - logits(text)).abs().max() > ROUNDING * padded.abs().max():
                    return True
    except Exception:  # a model that can't compute: the run's first step reports why
        return False
    finally:
        logits.train(was_training)
    return False


class Logits(nn.Module):
    """A model of transformers that takes its inputs as the only argument and returns only the logits.

    padding_token: Ignored in the inputs; None: there is no padding.
    """

    made_anywhere: dict[str, Any]

    def __init__(self, model: nn.Module, argument: str, padding_token: int | None = None) -> None:
        super().__init__()
        self.model = model
        self.argument = argument
        self.padding_token = padding_token
        theirs = vars(sys.modules[type(model).__module__])
        self._has_no_mask = "create_causal_mask" in theirs and (
            "create_bidirectional_mask" not in theirs or _classifies_at_the_end(model)
        )  # a causal mask hides the padding after a text
        self._takes_whole_masks = "create_bidirectional_mask" in theirs and not _needs_its_own_masks(
            model.config, theirs
        )

        config: Any = model.config
        # it classifies at a row's last position
        self._is_filled_before = padding_token is not None and getattr(config, "summary_type", None) == "last"

    def forward(self, inputs: Tensor) -> Tensor:
        if self._is_filled_before:
            inputs = _moved_to_the_end(inputs, torch.ne(inputs, self.padding_token))  # type: ignore[arg-type]
        logits: Tensor = self.model(**{self.argument: inputs}, **self._masks(inputs)).logits
        return logits

    def _masks(self, inputs: Tensor) -> dict[str, Tensor]:
        if self.padding_token is None or self._has_no_mask:
            return {}
        is_there = inputs != self.padding_token  # (B, T)
        one = torch.ones_like(is_there[:, :1])  # avoids NaN for a row of only padding
        is_there = torch.cat([is_there[:, :-1], one] if self._is_filled_before else [one, is_there[:, 1:]], 1)
        if not self._takes_whole_masks:
            return {"attention_mask": is_there.long()}
        # for a mask (B, T) it would wait for the device in each step (transformers 5.23, masking_utils.py)
        return {"attention_mask": is_there[:, None, None].expand(-1, 1, inputs.shape[1], -1)}


def _moved_to_the_end(texts: Tensor, is_there: Tensor) -> Tensor:  # (B, T) each
    lengths = is_there.sum(1, keepdim=True)
    return texts.gather(1, (torch.arange(texts.shape[1], device=texts.device) + lengths) % texts.shape[1])


def _needs_its_own_masks(config: Any, theirs: Mapping[str, Any]) -> bool:
    """Return whether a model needs a mask (B, T): for eager attention, sliding windows, or means over the tokens (5.23)."""
    return (
        config._attn_implementation != "sdpa"
        or "create_bidirectional_sliding_window_mask" in theirs
        or hasattr(config, "classifier_pooling")
        or hasattr(config, "token_dropout")
    )


def _check_keys(settings: Any, config: Mapping[str, Any]) -> None:
    """Raises: RunnerError for misspelled keys, which the library would store and ignore.

    Unknown keys that resemble no known one are accepted, as some model types read keys that their class does not name.
    """
    if "architectures" in config:  # a complete configuration that the library wrote
        return
    kind = type(settings)
    makers = [vars(each)["__init__"] for each in kind.__mro__ if "__init__" in vars(each)]
    known = {name for make in makers for name in inspect.signature(make).parameters}
    known |= {name for name in dir(kind) if not name.startswith("_")} | set(kind.attribute_map)
    problems = []
    for key in (key for key in config if key in set(vars(settings)) - known):
        if hits := nearest(key, known, cutoff=TYPO_SIMILARITY):
            problem = f"the configuration of `{settings.model_type}` has no key `{key}`"
            fix = f"set {' or '.join(f'`model.config.{hit}`' for hit in hits)}"
            problems.append(Problem(f"model.config.{key}={config[key]}", problem, fix))
    refuse(problems)


def _known(library: Any, kind: Any) -> str:
    known = list(library.CONFIG_MAPPING)
    if kind in known:
        return str(kind)
    hits = nearest(str(kind), known) or ["bert", "gpt2", "vit"]
    problem = f"transformers has no model type `{kind}`"
    ways = [f"model.config.model_type={hit}" for hit in hits]
    raise RunnerError.suggest(f"model.config.model_type={kind}", problem, ways)


def _library(name: str, *, source: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        problem = (
            f"the package `{name}` is not installed" if error.name == name else f"importing {name} failed: {error}"
        )
        raise not_installed(source, problem, name) from error


def _not_reached(source: str, error: Exception) -> Problem:
    fix = (
        "use a directory made by `save_pretrained()`, or `model.weights=FILE`; a name on the Hub needs a network, "
        "or the cache (`HF_HOME`) of a run that had one"
    )
    return Problem(source, f"the model can't be loaded: {first_line(error)}", fix)
