"""The parts that a configuration may name. Does not import them.

Our own parts are listed by the name that their package exports (runner.config.exports): other functions of their modules write
files and fetch. In torch and torchmetrics parts are layers, losses, optimizers, schedules, metrics and functions of numbers.
"""

from __future__ import annotations

import inspect
from typing import Any

#: our parts by package, which conf/ and the nodes that runs write name
NAMES = {
    "runner.data": """
        array_inputs arrays digits Features huggingface images mnist1d playground read_images read_rows
        scikit synthetic table TableReader text TextReader tokens TokensReader
    """,
    "runner.models": """
        Autoencoder CNN GAN GPT ImageInputs Linear MLP Prepared Recurrent ResNet Scaled TableColumns
        timm_model Transformer transformers_model ViT
    """,
    "runner.training": "Muon warmup_cosine",
    "runner.tasks": "Adversarial Autoencoding Classification Language Own Regression",
}
PARTS = tuple(f"{package}.{name}" for package, names in NAMES.items() for name in names.split())
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
