"""Sets up the precision that a step computes in (train.precision): autocast, gradient scaler, TF32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runner.device.unavailable import AMPERE

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class NoScaler:
    """Leaves gradients unscaled. fp16 has a torch.amp.GradScaler instead."""

    def is_enabled(self) -> bool:
        return False

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    def unscale_(self, optimizer: Any) -> None:
        pass

    def get_scale(self) -> float:
        return 1.0

    def state_dict(self) -> None:
        return None

    def load_state_dict(self, state: Any) -> None:
        pass


class SkippingScaler(torch.amp.GradScaler):
    """Leaves gradients unscaled, and skips the steps in which one is not finite (train.on_nonfinite=skip).

    Fused optimizers decide on the device; for others the host waits for the answer, as with fp16.

    Attributes:
        last: 1 for a skipped step, else 0, () on the device; None before the first step.
    """

    last: Tensor | None = None
    _num_skipped: float | Tensor = 0.0

    def __init__(self, device: str) -> None:
        super().__init__(device, init_scale=1.0)

    def scale(self, loss: Any) -> Any:
        """Return the loss; one that is not finite with a factor that makes its gradients NaN."""
        return super().scale(loss * torch.ones_like(loss).where(loss.detach().isfinite(), torch.nan))

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Count the step, and keep the scale."""
        states = self._per_optimizer_states.values()
        answers = [answer for state in states for answer in state["found_inf_per_device"].values()]
        self.last = torch.stack([answer.reshape(()) for answer in answers]).amax()
        self._num_skipped = self._num_skipped + self.last
        super().update(1.0)

    def num_skipped(self) -> int:
        """The skipped steps so far. Waits for the device."""
        return int(self._num_skipped)

    def state_dict(self) -> dict[str, Any]:
        return {"num_skipped": self.num_skipped()}

    def load_state_dict(self, state: Any) -> None:
        self._num_skipped = float((state or {}).get("num_skipped", 0))


@dataclass(frozen=True)
class Precision:
    """Precision of a step: `autocast()` opens the context of a forward pass, `scaler` keeps fp16 gradients in range."""

    name: str
    autocast: Callable[[], AbstractContextManager[Any]]
    scaler: torch.amp.GradScaler | NoScaler


def make_precision(name: str, *, device: torch.device, skips: bool = False) -> Precision:
    """Return no autocast for fp32, tf32 and fp64 (float64 weights); for bf16 and fp16 autocast, with weights and optimizer in float32.

    skips: Whether steps with gradients that are not finite are skipped; fp16 always does that.
    """
    scaler: torch.amp.GradScaler | NoScaler = SkippingScaler(device.type) if skips else NoScaler()
    if name not in HALVES:
        return Precision(name, nullcontext, scaler)
    scaler = torch.amp.GradScaler(device.type) if name == "fp16" else scaler
    return Precision(name, lambda: torch.autocast(device.type, HALVES[name]), scaler)


def number_type(name: str) -> torch.dtype:
    """Return the type of weights, optimizer and data."""
    return torch.float64 if name == "fp64" else torch.float32


@contextmanager
def default_type(dtype: torch.dtype) -> Iterator[None]:
    """Make this the type of tensors of Python numbers. Random numbers that are drawn in the block depend on it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return a tensor of halves or integers as float32, and any other one as it is."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def set_float32(*, has_tf32_products: bool, has_tf32_cudnn: bool) -> None:
    """Allow or forbid TF32 for products of float32 matrices, and for cuDNN's convolutions and recurrent layers.

    torch has two interfaces for this, and reading one raises if only the other was used; Inductor and torch.export read the
    first one. So set that one, and reset the values of the second one (torch 2.9) above the operations.
    """
    for backend in (torch.backends, torch.backends.cudnn, torch.backends.mkldnn):
        backend.fp32_precision = "none"  # type: ignore[attr-defined]
    torch.set_float32_matmul_precision("high" if has_tf32_products else "highest")
    torch.backends.cudnn.allow_tf32 = has_tf32_cudnn


def precision_note(device: torch.device, precision: str) -> str:
    """Describe what tensor cores do with this precision on the device, with the setting to change it; "" for nothing."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < AMPERE:
        return ""
    if precision == "tf32":
        return "tf32 uses the tensor cores, and rounds factors of products to 10 bits; train.precision=fp32 keeps 23"
    if precision != "fp32":
        return ""
    if not torch.backends.cudnn.allow_tf32:
        return "fp32 does not use the tensor cores; train.precision=tf32 or train.precision=bf16 does"
    convolutions = (
        "only for convolutions and recurrent layers, as torch does (TF32; backends.cuda.cudnn_tf32=false: never)"
    )
    return (
        f"fp32 uses the tensor cores {convolutions}; train.precision=tf32 or train.precision=bf16 does for all products"
    )
