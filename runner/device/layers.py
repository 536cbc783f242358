"""Orders a model's weights in memory for its device, and lets oneDNN compute large linear layers on some CPUs.

MKL, torch's library for products, uses AVX2 on AMD's CPUs, and Zen 5 computes 512 bits at a time. oneDNN, with a Python
function in the backward pass, takes longer to start, so MKL computes smaller products.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual
from torch.nn import functional as F

from runner.device import torch_private
from runner.errors import RunnerError

#: settings of conf/base.yaml's backends that lay_out() takes; set_switches() takes the others
LAYOUT_SETTINGS = ("channels_last", "onednn")
#: minimum inputs with which a 1x1 convolution with a stride is safe with channels last: a block of oneDNN's
SAFE_INPUTS = 16
#: minimum multiplications, and minimum numbers of the result with several threads, with which oneDNN is faster
MIN_MULTIPLICATIONS, MIN_SHARED_NUMBERS = 8_000_000, 48_000
#: AMD's CPU family of Zen 5
ZEN_5 = 26
CPUINFO = Path("/proc/cpuinfo")
DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
#: other classes are fake, distributed or otherwise special tensors
PLAIN = (Tensor, nn.Parameter)


def lay_out(model: nn.Module, *, device: torch.device, precision: str, settings: Mapping[str, Any]) -> str:
    """Order the model's weights for the device and choose the library of its linear layers.

    Args:
        settings: `backends` of this kind of device.

    Returns:
        The order and its reason, if there was a choice.

    Raises:
        RunnerError: A setting is impossible here.
    """
    if device.type == "cpu":
        take_onednn(model, requested=settings.get("onednn"))
    requested = settings.get("channels_last")
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


def take_onednn(model: nn.Module, *, requested: bool | None) -> None:
    """Make each nn.Linear of a model on a CPU multiply by oneDNN; None: if it is known to be faster on this CPU.

    Subclasses of nn.Linear stay as they are. Raises: RunnerError if it is requested and torch was built without it.
    """
    is_there = torch.backends.mkldnn.is_available()
    if requested and not is_there:
        problem = "this torch was built without oneDNN"
        raise RunnerError.suggest("backends.cpu.onednn=true", problem, ["backends.cpu.onednn=null"])
    if requested or (requested is None and is_there and _is_faster_here()):
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = OneDNNLinear


@functools.cache
def _is_faster_here() -> bool:
    """Return whether MKL uses only half of this CPU."""
    try:
        text = CPUINFO.read_text()
    except OSError:  # not Linux
        return False
    facts = dict(re.findall(r"^(vendor_id|cpu family|flags)\s*: (.*)$", text, re.MULTILINE))
    is_zen_5 = facts.get("vendor_id") == "AuthenticAMD" and int(facts.get("cpu family", "0")) >= ZEN_5
    return is_zen_5 and "avx512f" in facts.get("flags", "").split()


class OneDNNLinear(nn.Linear):
    """nn.Linear whose large float32 products are computed by oneDNN.

    It uses nn.Linear's products when compiled, under autocast, in torch.func, and for tensors of another type,
    layout or shape: oneDNN reads a bias of the wrong shape without an error.
    """

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or not self._takes(input):
            return super().forward(input)
        rows = input.reshape(-1, input.shape[-1]).contiguous()  # windows of a series may overlap
        return _product(rows, self.weight, self.bias).view(*input.shape[:-1], len(self.weight))

    def _takes(self, input: Tensor) -> bool:
        if type(input) not in PLAIN or input.numel() * self.out_features < MIN_MULTIPLICATIONS or not _is_plain(input):
            return False
        weight, bias = self.weight, self.bias
        own = (weight,) if bias is None else (weight, bias)
        if not all(_is_plain(each) and each.is_contiguous() for each in own):
            return False
        fits = input.shape[-1:] == weight.shape[1:] and (bias is None or bias.shape == weight.shape[:1])
        return fits and not torch.is_autocast_enabled("cpu") and not _is_transformed(input, *own)


OneDNNLinear.__name__ = nn.Linear.__name__  # print(model) and errors show what the user wrote


def _is_plain(tensor: Tensor) -> bool:
    is_float32 = type(tensor) in PLAIN and tensor.dtype == torch.float32
    return is_float32 and tensor.is_cpu and tensor.layout == torch.strided and not tensor.is_nested


def _is_transformed(*tensors: Tensor) -> bool:
    return torch_private.transforms_are_active() or any(unpack_dual(each).tangent is not None for each in tensors)


class OneDNNProduct(torch.autograd.Function):
    """Rows (M, K) by a weight (N, K), and a bias (N) or None: (M, N). Its gradients are such products, and so are theirs."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return _multiply(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        gradient = gradients[0].contiguous()  # that of a sum is one number with strides of 0
        of_rows, of_weight, of_bias = ctx.needs_input_grad
        product = F.linear if _is_transformed(gradient, rows, weight) else _product
        return (
            product(gradient, weight.t()) if of_rows else None,
            product(gradient.t(), rows.t()) if of_weight else None,
            gradient.sum(0) if of_bias else None,
        )


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not torch.is_grad_enabled():
        return _multiply(rows, weight, bias)
    product: Tensor = OneDNNProduct.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
    return product


def _multiply(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if len(rows) * len(weight) < MIN_SHARED_NUMBERS and torch.get_num_threads() > 1:
        return F.linear(rows, weight, bias)
    product: Tensor = torch_private.onednn_linear(rows, weight, bias, "none", [], "")
    return product
