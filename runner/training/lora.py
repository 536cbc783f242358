"""LoRA (Hu 2021, arXiv 2106.09685): trains two small matrices next to a frozen linear layer instead of its weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.errors import RunnerError
from runner.training.optimizer import freeze, matching

DOWN, UP = "lora_down", "lora_up"
NODE = "runner.training.add_lora"


def add_lora(
    model: nn.Module, match: str | Sequence[str], *, rank: int = 8, alpha: float = 16.0, train: str | Sequence[str] = ()
) -> nn.Module:
    """Add small trained matrices to linear layers of a model, in place, and freeze everything else.

    A layer returns x W^T + b + alpha / rank * (x D^T) U^T. D (rank, inputs) is drawn as nn.Linear draws its weights, and U
    (outputs, rank) is 0, so that the model computes the same as before its first step.

    Args:
        match: Patterns of the layers: nn.Linear, and Conv1D of transformers.
        rank: Number of rows of D and columns of U.
        alpha: The product U D is multiplied by alpha / rank.
        train: Patterns of other parameters that are trained, such as a new output layer.

    Raises:
        RunnerError: A pattern matches no linear layer, or no parameter.
    """
    layers = {name: module for name, module in model.named_modules() if _is_linear(module)}
    if not layers:
        raise RunnerError.of("model.lora", "the model has no linear layers", "use `model.freeze`, or another model")
    patterns = [match] if isinstance(match, str) else list(match)
    chosen = {name for each in patterns for name in matching(each, list(layers), key="model.lora.match", kind="layer")}
    names = [name for name, _ in model.named_parameters()]
    patterns = [train] if isinstance(train, str) else list(train)
    trained = {name for each in patterns for name in matching(each, names, key="model.lora.train")}
    for name in sorted(chosen):
        _add(layers[name], rank, alpha / rank)
    freeze(model, [name for name in names if name not in trained])
    return model


def merged_node(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the node of a model after merge(): without add_lora()."""
    inner = node.get("model")
    if not isinstance(inner, dict):
        return dict(node)
    return merged_node(inner) if node["_target_"] == NODE else {**node, "model": merged_node(inner)}


def merge(model: nn.Module) -> nn.Module:
    """Add each layer's U D to its weights and remove the small matrices: a plain model with the same outputs, up to rounding."""
    for layer in adapted(model):
        with torch.no_grad():
            product = (layer.get_parameter(UP) @ layer.get_parameter(DOWN)) * layer.lora_factor
            layer.weight += product if isinstance(layer, nn.Linear) else product.T
        layer.lora_hook.remove()
        for name in (DOWN, UP, "lora_factor", "lora_hook"):
            delattr(layer, name)
    return model


def adapted(model: nn.Module) -> Iterator[Any]:
    """Yield the layers that add_lora() has changed."""
    return (module for module in model.modules() if hasattr(module, DOWN))


def _is_linear(module: nn.Module) -> bool:
    is_read_by_attention = isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)  # never called
    is_conv1d = type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"
    return (isinstance(module, nn.Linear) and not is_read_by_attention) or is_conv1d


def _add(layer: Any, rank: int, factor: float) -> None:
    outputs, inputs = layer.weight.shape if isinstance(layer, nn.Linear) else layer.weight.shape[::-1]
    down = nn.Parameter(layer.weight.new_empty(rank, inputs))
    nn.init.kaiming_uniform_(down, a=math.sqrt(5))
    layer.register_parameter(DOWN, down)
    layer.register_parameter(UP, nn.Parameter(layer.weight.new_zeros(outputs, rank)))
    layer.lora_factor = factor
    layer.lora_hook = layer.register_forward_hook(_adapt)


def _adapt(layer: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    adapted: Tensor = output + F.linear(F.linear(inputs[0], layer.lora_down), layer.lora_up) * layer.lora_factor
    return adapted
