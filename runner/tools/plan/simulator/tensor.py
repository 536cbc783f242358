"""The simulated tensor: each operation follows the rules of its device, and returns tensors of that device.

With numbers, the CPU computes it. With only shapes (`pretence.has_numbers = False`) nothing is computed: a step of any size
takes milliseconds and no memory. `pretence` describes what is simulated in this process.
"""

from __future__ import annotations

import copy
import functools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from runner.device import torch_private
from runner.device.capabilities import has_mps_kernel, legal_dtype
from runner.device.placement import tensor_leaves
from runner.device.torch_private import TorchDispatchMode, tree_map
from runner.inspection.host_reads import INDEXING_KERNELS
from runner.tools.plan.simulator import shapes

aten = torch.ops.aten
CPU, META = torch.device("cpu"), torch.device("meta")

#: operations that also accept tensors of the host
COPIES = {aten._to_copy, aten.copy_, aten.copy, aten._foreach_copy_, aten.set_}
#: operations whose lengths are on the host on every device
LENGTHS_OF_HOST = {aten._pack_padded_sequence, aten._pack_padded_sequence_backward, aten._cudnn_rnn}
#: with `pretence.big_is_shapes`, host tensors from this size on have no numbers either
BIG_BYTES = 2**20


@dataclass
class Pretence:
    """What is simulated in this process."""

    device: torch.device = CPU
    current_index: int = 0  # what "cuda" means without a number
    num_transforms: int = 0  # depth of nested torch.func transforms
    has_numbers: bool = True
    big_is_shapes: bool = False
    #: called for a broken rule instead of an exception; the operation then continues
    forgives: Callable[[Exception, Any, Sequence[Tensor]], None] | None = None
    _of_thread: threading.local = field(default_factory=threading.local)

    @property
    def running_backward(self) -> int:
        """State of this thread, as another one may read rows."""
        return getattr(self._of_thread, "running_backward", 0)

    @running_backward.setter
    def running_backward(self, number: int) -> None:
        self._of_thread.running_backward = number


pretence = Pretence()


def _seen_by_modes(method: Callable[..., Any]) -> Callable[..., Any]:

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if has_torch_function_unary(self):
            return handle_torch_function(call, (self,), self, *args, **kwargs)
        return method(self, *args, **kwargs)

    return call


class SimulatedTensor(Tensor):
    """A tensor that reports the simulated device.

    Its values are in `backing`, a tensor of the CPU, or of meta, with only a shape.
    C++ also treats it as a tensor of that device (dispatch_device: it calls `prim.device`, answered below; the backend's
    dispatch keys choose the device's autocast list), but every kernel goes through `__torch_dispatch__`.
    """

    backing: Tensor
    pretended: torch.device
    # results are wrapped below
    __torch_function__ = torch_private.no_torch_function

    @staticmethod
    def __new__(cls: Any, backing: Tensor, device: torch.device) -> SimulatedTensor:
        if backing.dtype != legal_dtype(backing.dtype, device):
            raise _no_float64(backing.dtype)
        self: SimulatedTensor = Tensor._make_subclass(
            cls, backing, dispatch_device=True, device_for_backend_keys=device
        )
        self.backing, self.pretended = backing, device
        return self

    # C++ would answer these by prim.device, which is wrong during backward
    device = property(lambda self: self.pretended)
    is_cuda = property(lambda self: self.pretended.type == "cuda")
    is_mps = property(lambda self: self.pretended.type == "mps")
    is_cpu = property(lambda self: self.pretended.type == "cpu")
    is_meta = property(lambda self: False)

    # Tensor's methods read the numbers of plain tensors only
    @_seen_by_modes
    def __format__(self, spec: str) -> str:
        return format(self.item() if self.dim() == 0 else str(self), spec if self.dim() == 0 else "")

    @_seen_by_modes
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        numbers = repr(self.backing.detach())[:-1] if self.backing.is_cpu else f"tensor(..., size={tuple(self.shape)}"
        return f"{numbers}, device='{self.pretended}')"

    @_seen_by_modes
    def tolist(self) -> Any:
        return self._values().tolist()

    @_seen_by_modes
    def numpy(self, *, force: bool = False) -> Any:
        if force or self.pretended.type == "cpu":
            return self._values().detach().numpy()
        kind = f"can't convert {self.pretended} device type tensor to numpy."
        raise TypeError(f"{kind} Use Tensor.cpu() to copy the tensor to host memory first.")

    @_seen_by_modes
    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.asarray(self.numpy(), dtype=dtype)

    def _values(self) -> Tensor:
        if self.backing.is_cpu:
            return self.backing
        return torch.zeros((), dtype=self.dtype).expand(self.shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> SimulatedTensor:
        if id(self) not in memo:
            new: Any = self.detach().clone().requires_grad_(self.requires_grad)
            memo[id(self)] = new
            new._is_param = getattr(self, "_is_param", False)  # read by nn.Parameter
            new.grad = copy.deepcopy(self.grad, memo)
        found: SimulatedTensor = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle it as a tensor of the CPU: torch.load() needs map_location to return it to the device."""
        return self._values().detach().clone().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return compute(func, args, kwargs or {})


class SimulatedFactories(TorchDispatchMode):
    """Handles operations without a tensor of the device: torch.zeros(..., device="cuda:1"), tensor.to("cuda:1")."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and func.namespace == "aten":
            with self:  # composed operations (to, linear) arrive whole, not as their parts
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        device = kwargs.get("device")
        if any(issubclass(kind, SimulatedTensor) for kind in types) or _is_for_device(device):
            return compute(func, args, kwargs)
        if pretence.big_is_shapes and (device is None or device.type == "cpu") and _is_big(func, args, kwargs):
            return compute(func, args, {**kwargs, "device": CPU})
        return func(*args, **kwargs)


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute one operation with a simulated tensor among its arguments, or with a simulated device as its target."""
    if func is torch.ops.prim.device.default:
        # The autograd engine requests a stream from at::accelerator for each gradient on an accelerator, which raises in a
        # build without one. For "meta" it requests none. Python's `.device` does not come through here.
        device = args[0].pretended
        # Tensors of functorch store the answer when they are created, and reach the engine later.
        return META if device.type != "cpu" and (pretence.running_backward or pretence.num_transforms) else device
    # without modes, which would see each shape rule as an operation
    with torch_private.DisableTorchFunction():
        return _compute(func, args, kwargs)


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    inputs = tensor_leaves((args, kwargs))
    here = _device_of(inputs)
    aim = here
    asked = kwargs.get("device")
    if asked is not None:
        aim = pretence.device if _is_engines(asked) else CPU if asked.type == "cpu" else asked
    if here is not None:
        _check_same_device(func, args, inputs, here)
    if "mps" in (getattr(aim, "type", ""), getattr(here, "type", "")):
        _check_mps_kernel(func, inputs)

    given: dict[int, Tensor] = {}  # by id: an argument that is written in place, or `out=`, is returned as it is

    def back(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        is_lengths = not isinstance(value, SimulatedTensor) and func._overloadpacket in LENGTHS_OF_HOST
        found = value if is_lengths else _backing(value)
        given[id(found)] = value
        return found

    backed_args, backed_kwargs = _mapped(args, back), _mapped(kwargs, back)
    if asked is not None:
        backed_kwargs["device"] = CPU if pretence.has_numbers else torch.device("meta")
    compute_ = func if pretence.has_numbers else functools.partial(shapes.run, func)
    result = compute_(*backed_args, **backed_kwargs)
    if torch.Tag.inplace_view in func.tags:  # squeeze_() and the like change the outer tensor's shape as well
        with torch_private.DisableTorchDispatch():
            func(*args, **kwargs)

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, SimulatedTensor):
            return value
        if id(value) in given:
            return given[id(value)]
        if value.is_cpu and (not pretence.has_numbers or aim is None or aim.type == "cpu"):
            return value
        return _on_device(value, aim or CPU, func, inputs)

    return _mapped(result, wrap)


def _mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([_mapped(part, change) for part in tree])
    if kind is dict:
        return {name: _mapped(part, change) for name, part in tree.items()}
    return tree_map(change, tree) if isinstance(tree, tuple) else change(tree)  # a named tuple, or a leaf


def simulated(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor as one of the device, without counting a copy; with only shapes it loses its numbers."""
    if isinstance(tensor, SimulatedTensor):
        return tensor
    with torch.no_grad():
        return SimulatedTensor(tensor.detach() if pretence.has_numbers else shapes.of(tensor), device)


def _backing(tensor: Tensor) -> Tensor:
    if isinstance(tensor, SimulatedTensor):
        return tensor.backing
    return tensor if pretence.has_numbers else shapes.of(tensor)


def _on_device(value: Tensor, device: torch.device, func: Any, inputs: Sequence[Tensor]) -> SimulatedTensor:
    dtype = legal_dtype(value.dtype, device)
    if dtype != value.dtype and pretence.forgives is not None:
        pretence.forgives(_no_float64(value.dtype), func, inputs)
        value = value.to(dtype)
    return SimulatedTensor(value, device)


def _device_of(inputs: Iterable[Tensor]) -> torch.device | None:
    ours = [tensor.pretended for tensor in inputs if isinstance(tensor, SimulatedTensor)]
    return next((device for device in ours if device.type != "cpu"), ours[0] if ours else None)


def _is_for_device(device: torch.device | None) -> bool:
    if device is None:
        return False
    return _is_engines(device) or (device.type == pretence.device.type and device.type != "cpu")


def _is_engines(device: torch.device) -> bool:
    return device.type == "meta" and (pretence.running_backward > 0 or pretence.num_transforms > 0)


def _is_big(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    if not args or not isinstance(args[0], list | tuple) or not all(type(size) is int for size in args[0]):
        return False
    if not func._schema.returns or tensor_leaves(args):
        return False
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return int(np.prod(args[0], dtype=np.int64)) * dtype.itemsize >= BIG_BYTES


def _break(error: Exception, func: Any, inputs: Sequence[Tensor]) -> None:
    if pretence.forgives is None:
        raise error
    pretence.forgives(error, func, inputs)


def _no_float64(dtype: torch.dtype) -> TypeError:
    return TypeError(
        f"Cannot convert a MPS Tensor to {str(dtype)[6:]} dtype as the MPS framework doesn't support float64. "
        "Please use float32 instead."
    )


def _check_same_device(func: Any, args: Any, inputs: Sequence[Tensor], device: torch.device) -> None:
    kernel = func._overloadpacket
    if kernel in COPIES:
        return
    involved = inputs
    if kernel in INDEXING_KERNELS:  # indices may be on the host, but not the indexed and the written tensor
        involved = [args[0], *args[2:3]]
    elif kernel in LENGTHS_OF_HOST:
        involved = inputs[:1]
    for tensor in involved:
        is_number = tensor.dim() == 0 and tensor.device.type == "cpu"
        if tensor.device != device and not is_number:
            both = f"{device} and {tensor.device}"
            text = f"Expected all tensors to be on the same device, but found at least two devices, {both}! (in {func})"
            _break(RuntimeError(text), func, involved)
            return


def _check_mps_kernel(func: Any, inputs: Sequence[Tensor]) -> None:
    name = func.name().removeprefix("aten::")
    falls_back = os.environ.get("PYTORCH_ENABLE_MPS_FALLBACK") == "1"
    if func.namespace == "aten" and not falls_back and not has_mps_kernel(name):
        text = f"The operator '{func.name()}' is not currently implemented for the MPS device."
        _break(NotImplementedError(text), func, inputs)
