"""Orders a model's weights in memory for its device."""

from __future__ import annotations

import torch
from torch import nn

from runner.errors import RunnerError

#: minimum inputs with which a 1x1 convolution with a stride is safe with channels last: a block of oneDNN's
SAFE_INPUTS = 16
DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def lay_out(model: nn.Module, *, device: torch.device, precision: str, requested: bool | None) -> str:
    """Order the model's weights for the device, and return the order with its reason, if there was a choice.

    Args:
        requested: `channels_last` of this kind of device.

    Raises:
        RunnerError: The requested order is impossible here.
    """
    channels_last, why = takes_channels_last(model, device=device, precision=precision, requested=requested)
    if channels_last:
        for tensor in (*model.parameters(), *model.buffers()):  # the batches need not be changed
            if tensor.dim() == 4:  # Module.to() would change tensors of 5 dimensions too, and fail
                tensor.data = tensor.data.to(memory_format=torch.channels_last)
    return f"channels {'last' if channels_last else 'first'} ({why})" if why else ""


def takes_channels_last(
    model: nn.Module, *, device: torch.device, precision: str, requested: bool | None
) -> tuple[bool, str]:
    """Decide whether 2-d convolutions keep their channels last in memory, and give the reason of a choice.

    It is faster on a CPU, and on CUDA's tensor cores, which plain float32 does not use. On a CPU dropout draws masks in the
    order of the memory, so that a loop without it would have other losses. On MPS BatchNorm would be wrong (pytorch#175189).
    Raises: RunnerError if the requested layout would overwrite memory.
    """
    if not any(isinstance(module, nn.Conv2d) for module in model.modules()):
        return False, ""
    layer = overruns(model) if device.type == "cpu" else ""
    if requested and layer:
        problem = f"oneDNN overwrites memory in the backward pass of {layer} then: a 1x1 convolution with a stride and few inputs"
        fix = f"use `backends.cpu.channels_last=null`, or {SAFE_INPUTS} inputs or more in that layer"
        raise RunnerError.of("backends.cpu.channels_last=true", f"{problem} (oneDNN's issue 6035)", fix)
    if requested is not None:
        return requested, "as asked" if requested else ""
    if layer:
        return False, f"auto: oneDNN overwrites memory in {layer} otherwise"
    if device.type == "cpu" and any(isinstance(each, DROPOUT) and each.p for each in model.modules()):
        return (
            False,
            "auto: dropout draws the masks of a hand-written loop; backends.cpu.channels_last=true may be faster",
        )
    on = device.type == "cpu" or (device.type == "cuda" and precision not in ("fp32", "fp64"))
    return on, "auto: it has 2-d convolutions" if on else ""


def overruns(model: nn.Module) -> str:
    """Name the first layer whose backward pass overwrites memory on a CPU with channels last; "" without one.

    It is a 1x1 convolution with a stride and fewer inputs than a block of oneDNN's has: wrong gradients, a crash or a hang
    (uxlfoundation/oneDNN#6035, torch 2.13). When it compiles, torch puts channels last on its own.
    """
    for name, layer in model.named_modules():
        is_small = isinstance(layer, nn.Conv2d | nn.Conv3d) and 1 < layer.in_channels // layer.groups < SAFE_INPUTS
        if is_small and set(layer.kernel_size) == {1} and set(layer.stride) != {1}:
            return name or type(layer).__name__
    return ""
