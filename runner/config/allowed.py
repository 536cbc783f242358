"""Says whether a configuration may name a dotted path, or what it leads to. Imports nothing of what it lists.

Our own parts are listed by the name that their package exports (runner.config.exports), and by no other: what stands beside
them in their modules also writes files and fetches. In torch and torchmetrics a part is of a kind: a layer, a loss, an
optimizer, a schedule, a metric, or a function of numbers alone.
"""

from __future__ import annotations

import inspect
from typing import Any

#: the runner's own: what conf/, and the nodes that runs write, name; never the module that a part lies in, which may move
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
#: of torchmetrics what is arithmetic alone: other parts of it download weights
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
#: by the module in which a thing is defined: what it is, or which classes it descends from
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
#: where such things are named; a path that begins otherwise is not even imported
LIBRARIES = ("torch.nn", "torch.optim", *METRICS)


def is_part(thing: Any, home: str) -> bool:
    """Whether what a path of LIBRARIES leads to, defined in the module `home`, is a part."""
    kinds = next((kinds for room, kinds in KINDS.items() if under(home, (room,))), ())
    if inspect.isclass(thing):
        return any(f"{base.__module__}.{base.__qualname__}" in kinds for base in thing.__mro__)
    return FUNCTION in kinds and inspect.isfunction(thing)


def public_name(path: str, names: tuple[str, ...] = PARTS) -> str | None:
    """Of `names`, the one that a path to a module of ours means: runner.models.mlp.MLP is runner.models.MLP. None: no such one."""
    if not path.startswith("runner.") or path in names:
        return None
    return next((name for name in names if name.rpartition(".")[2] == path.rpartition(".")[2]), None)


def under(path: str, prefixes: tuple[str, ...]) -> bool:
    """Whether the path is one of the prefixes, or lies below one: torch.nnx is not below torch.nn."""
    return any(path == prefix or path.startswith(prefix + ".") for prefix in prefixes)
