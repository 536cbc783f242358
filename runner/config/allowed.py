"""The parts that a configuration may name. Does not import them.

Our own parts are listed by the name that their package exports (runner.config.exports): other functions of their modules write
files and fetch. In torch and torchmetrics parts are layers, losses, optimizers, schedules, metrics and functions of numbers.
"""

from __future__ import annotations

import inspect
from typing import Any

#: our parts, which conf/ and the nodes that runs write name
PARTS = (
    "runner.data.array_inputs",
    "runner.data.arrays",
    "runner.data.digits",
    "runner.data.Features",
    "runner.data.huggingface",
    "runner.data.images",
    "runner.data.mnist1d",
    "runner.data.playground",
    "runner.data.read_images",
    "runner.data.read_rows",
    "runner.data.scikit",
    "runner.data.synthetic",
    "runner.data.table",
    "runner.data.TableReader",
    "runner.data.text",
    "runner.data.TextReader",
    "runner.data.tokens",
    "runner.data.TokensReader",
    "runner.models.Autoencoder",
    "runner.models.CNN",
    "runner.models.GAN",
    "runner.models.GPT",
    "runner.models.ImageInputs",
    "runner.models.Linear",
    "runner.models.MLP",
    "runner.models.Prepared",
    "runner.models.Recurrent",
    "runner.models.ResNet",
    "runner.models.Scaled",
    "runner.models.TableColumns",
    "runner.models.timm_model",
    "runner.models.Transformer",
    "runner.models.transformers_model",
    "runner.models.ViT",
    "runner.training.Muon",
    "runner.training.warmup_cosine",
    "runner.tasks.Adversarial",
    "runner.tasks.Autoencoding",
    "runner.tasks.Classification",
    "runner.tasks.Language",
    "runner.tasks.Own",
    "runner.tasks.Regression",
)
FUNCTION = "function"
METRIC = ("torchmetrics.metric.Metric",)
#: metrics that only calculate: others download weights
METRICS = dict.fromkeys(
    (
        "torchmetrics.classification",
        "torchmetrics.regression",
        "torchmetrics.aggregation",
        "torchmetrics.image.psnr",
        "torchmetrics.image.ssim",
    ),
    METRIC,
)
#: by the module that defines a part: its base classes, or "function"
KINDS: dict[str, tuple[str, ...]] = {
    "torch.nn.modules": ("torch.nn.modules.module.Module",),
    "torch.nn.functional": (FUNCTION,),
    "torch.nn.init": (FUNCTION,),
    "torch.nn.utils.parametrizations": (FUNCTION,),
    "torch.nn.utils.spectral_norm": (FUNCTION,),
    "torch.nn.utils.weight_norm": (FUNCTION,),
    "torch.optim": ("torch.optim.optimizer.Optimizer", "torch.optim.lr_scheduler.LRScheduler"),
    **METRICS,
}
#: prefixes of their names; other modules are not imported
LIBRARIES = ("torch.nn", "torch.optim", *METRICS)


def is_part(thing: Any, home: str) -> bool:
    """Return whether an object of LIBRARIES, defined in the module `home`, is a part."""
    kinds = next((kinds for room, kinds in KINDS.items() if under(home, (room,))), ())
    if inspect.isclass(thing):
        return any(f"{base.__module__}.{base.__qualname__}" in kinds for base in thing.__mro__)
    return FUNCTION in kinds and inspect.isfunction(thing)


def public_name(path: str, names: tuple[str, ...] = PARTS) -> str | None:
    """Return the part that a path to one of our modules means: runner.models.MLP for runner.models.mlp.MLP."""
    if not path.startswith("runner.") or path in names:
        return None
    return next((name for name in names if name.rpartition(".")[2] == path.rpartition(".")[2]), None)


def under(path: str, prefixes: tuple[str, ...]) -> bool:
    """Return whether a path is one of the prefixes or below one: torch.nnx is not below torch.nn."""
    return any(path == prefix or path.startswith(prefix + ".") for prefix in prefixes)
