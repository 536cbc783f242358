"""Has a CPU's large linear layers multiply by oneDNN, where torch's own library for products, MKL, leaves half of the CPU idle.

MKL keeps to AVX2 on AMD's CPUs, and Zen 5 computes 512 bits at a time: of 128 rows, 512 by 512, a layer's three products,
forward and backward, take 0.86 ms for 1.86 (1 thread of an AMD EPYC, torch 2.13, 2026-11). oneDNN, and a function of our own in
the way back, take longer to begin: below LEAST it is MKL's. Called by backends.py, once for each model.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual
from torch.nn import functional as F

from runner.device import torch_private
from runner.errors import Problem, RunnerError

#: multiplications of a product, from which on oneDNN is faster; and numbers of its result, where it has several threads: of a
#: few it gives each thread too little
LEAST = 8_000_000
LEAST_SHARED = 48_000
#: AMD's number for Zen 5, the first family of theirs that computes 512 bits at a time
ZEN_5 = 26
CPUINFO = Path("/proc/cpuinfo")
#: torch's own kinds of tensors; a fake one, a part of a divided one and the like are others
PLAIN = (Tensor, nn.Parameter)


def take_onednn(model: nn.Module, *, asked: bool | None) -> None:
    """Makes each nn.Linear of a model on a CPU one that multiplies by oneDNN. asked: None for where it is known to be faster.

    What has another class (a layer of the person's own, one with a parametrization) keeps torch's products. Raises:
    RunnerError where it is asked for and this torch has none.
    """
    is_there = torch.backends.mkldnn.is_available()
    if asked and not is_there:
        problem = "this torch was built without oneDNN"
        raise RunnerError(Problem("backends.cpu.onednn=true", problem, "backends.cpu.onednn=null"))
    if asked or (asked is None and is_there and _is_faster_here()):
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = Linear


def is_faster(cpuinfo: str) -> bool:
    """Whether MKL leaves half of this CPU idle. cpuinfo: what Linux says of its CPUs, /proc/cpuinfo."""
    family = re.search(r"^cpu family\s*: (\d+)$", cpuinfo, re.MULTILINE)
    is_amd = re.search(r"^vendor_id\s*: AuthenticAMD$", cpuinfo, re.MULTILINE) is not None
    return is_amd and family is not None and int(family[1]) >= ZEN_5 and re.search(r"\bavx512f\b", cpuinfo) is not None


@functools.cache
def _is_faster_here() -> bool:
    try:
        return is_faster(CPUINFO.read_text())
    except OSError:  # not Linux
        return False


class Linear(nn.Linear):
    """nn.Linear, whose large products in float32 are oneDNN's. Compiled, traced, under autocast and in torch.func they are
    torch's, and so is what doesn't lie as a layer's own tensors do, or doesn't fit: oneDNN reads such a bias wrongly."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or torch_private.is_traced() or not self._takes(input):
            return super().forward(input)
        rows = input.reshape(-1, input.shape[-1]).contiguous()  # windows of a series may overlap
        return _product(rows, self.weight, self.bias).view(*input.shape[:-1], len(self.weight))

    def __prepare_scriptable__(self) -> nn.Linear:
        """torch.jit.script compiles a class, and forward() of this one it can't: from then on the layer is torch's."""
        self.__class__ = nn.Linear  # type: ignore[assignment]
        return self

    def _takes(self, input: Tensor) -> bool:
        if type(input) not in PLAIN or input.numel() * self.out_features < LEAST or not _is_plain(input):
            return False
        weight, bias = self.weight, self.bias
        own = (weight,) if bias is None else (weight, bias)
        if not all(_is_plain(each) and each.is_contiguous() for each in own):
            return False
        fits = input.shape[-1:] == weight.shape[1:] and (bias is None or bias.shape == weight.shape[:1])
        return fits and not torch.is_autocast_enabled("cpu") and not _is_transformed(input, *own)


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
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        gradient = given[0].contiguous()  # that of a sum is one number with strides of 0
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
    found: Tensor = OneDNNProduct.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
    return found


def _multiply(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if len(rows) * len(weight) < LEAST_SHARED and torch.get_num_threads() > 1:
        return F.linear(rows, weight, bias)
    product: Tensor = torch_private.onednn_linear(rows, weight, bias, "none", [], "")
    return product
