"""A dotted path, or what it leads to, goes in; whether a configuration may name it comes out. Nothing listed is imported here.

Our own parts are listed by name, for what stands beside them in their modules also writes files and fetches. In torch and
torchmetrics a part is of a kind: a layer, a loss, an optimizer, a schedule, a metric, or a function of numbers alone.
"""

from __future__ import annotations

import inspect
from typing import Any

#: the runner's own: what conf/, and the nodes that runs write, name
PARTS = (
    "runner.data.array_data.array_inputs",
    "runner.data.array_data.arrays",
    "runner.data.builtin.digits.digits",
    "runner.data.hub.datasets.huggingface",
    "runner.data.hub.reader.read_rows",
    "runner.data.vision.reader.read_images",
    "runner.data.vision.images.images",
    "runner.data.builtin.mnist1d.mnist1d",
    "runner.data.builtin.plane.Features",
    "runner.data.builtin.playground.playground",
    "runner.data.builtin.scikit.scikit",
    "runner.data.builtin.synthetic.synthetic",
    "runner.data.tables.table.table",
    "runner.data.tables.reader.TableReader",
    "runner.data.language.text.TextReader",
    "runner.data.language.text.text",
    "runner.data.language.tokens.TokensReader",
    "runner.data.language.tokens.tokens",
    "runner.models.autoencoder.Autoencoder",
    "runner.models.cnn.CNN",
    "runner.models.table_inputs.TableColumns",
    "runner.models.gpt.GPT",
    "runner.models.image_inputs.ImageInputs",
    "runner.models.external.timm_model",
    "runner.models.external.transformers_model",
    "runner.models.linear.Linear",
    "runner.models.mlp.MLP",
    "runner.models.with_preprocessing.Prepared",
    "runner.models.recurrent.Recurrent",
    "runner.models.resnet.ResNet",
    "runner.models.scaled_outputs.Scaled",
    "runner.models.transformer.Transformer",
    "runner.models.vit.ViT",
    "runner.training.optimizer.warmup_cosine",
    "runner.tasks.autoencoding.Autoencoding",
    "runner.tasks.classification.Classification",
    "runner.tasks.language.Language",
    "runner.tasks.custom.Own",
    "runner.tasks.regression.Regression",
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


def under(path: str, prefixes: tuple[str, ...]) -> bool:
    """Whether the path is one of the prefixes, or lies below one: torch.nnx is not below torch.nn."""
    return any(path == prefix or path.startswith(prefix + ".") for prefix in prefixes)
