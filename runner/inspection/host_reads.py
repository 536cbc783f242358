"""Finds each line that reads a tensor's value on the host, or waits for the device; for the guard and `plan`.

Nothing remains after the `with` block.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import attrgetter
from types import FrameType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from runner.device.capabilities import KERNELS_THAT_READ_INSIDE
from runner.device.placement import tensor_leaves
from runner.inspection import call_site
from runner.inspection.operations import Operation, OperationObserver, observe
from runner.inspection.tensor_names import storage_of

aten = torch.ops.aten

#: calls that return a value to Python, as a user writes them
READING_CALLS = {
    **{f"__{name}__": f"{name}(tensor)" for name in ("bool", "float", "int", "complex")},
    **{name: f"tensor.{name}()" for name in ("cpu", "item", "numpy", "tolist")},
    "__index__": "a tensor used as an index",
    "__repr__": "print(tensor)",
    "__format__": "f'{tensor}'",
    "__array__": "numpy.asarray(tensor)",
    "__contains__": "value in tensor",
}
COPIES_TO_HOST = {"cpu": "tensor.cpu()", "to": "tensor.to('cpu')"}
#: kernels that read a value, or whose result's size depends on values
READING_KERNELS = {
    *(aten._linalg_check_errors, aten._local_scalar_dense, aten._unique, aten._unique2, aten.allclose, aten.bincount),
    *(aten.equal, aten.is_nonzero, aten.masked_select, aten.nonzero, aten.unique_consecutive, aten.unique_dim),
    *(aten.linspace, aten.logspace),  # with a tensor instead of a number
}
INDEXING_KERNELS = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}

_INDEXING_CALLS = {"__getitem__": "tensor[tensor]", "__setitem__": "tensor[tensor] = value"}
_WAITING_MODULES, _WAITING_CLASSES = ("accelerator", "cpu", "cuda", "mps", "xpu"), ("cuda.Stream", "cuda.Event")


@dataclass(frozen=True)
class HostRead:
    """One read: the call, its line, and the module whose forward pass was running ("" outside of any)."""

    what: str  # float(tensor)
    line: str  # my_models.py:42
    module: str = ""  # Net.layers.2

    def __str__(self) -> str:
        return f"{self.what} at {self.line}" + (f" in {self.module}" if self.module else "")


class HostReads:
    """Watches the code in its `with` block; `reads` lists each read of the device and each wait for it, in order.

    It sees values that Python gets (`float`, `item`, `if`, `print`, `tolist`, `numpy`, ...), results whose size depends on
    values (`nonzero`, `unique`, `x[mask]`), copies that wait, in both directions, and `synchronize()`. It sees reads inside a
    kernel only where they are known (KERNELS_THAT_READ_INSIDE), and no pickling.

    With `cpu` the CPU simulates a device, so that a machine without one can check a step. Then _Host knows the tensors of the
    host, and `.to("cpu")` is a read, unlike `.to(x.device)`.

    It takes a mode for torch's functions and one for its kernels: on the CPU `.cpu()` and `.tolist()` run no kernel, and a
    read inside a C++ function is not a call. Modes belong to a thread: only the thread of the `with` block is watched, with
    its backward passes. The model is not changed.

    Cost: about 30 us for each torch call in the block, without a wait.
    """

    def __init__(self, device: torch.device | str, *, observers: Sequence[OperationObserver] = ()) -> None:
        self.device = torch.device(device)
        self.observers = observers
        self.reads: list[HostRead] = []
        self.host = _Host() if self.device.type == "cpu" else None
        self.call = ""  # the torch function that is running
        self.is_reported = False  # a call is reported once, for all of its kernels
        self._copied: tuple[str, int] | None = None
        self._caller: FrameType | None = None
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._caller = sys._getframe(1)
        with ExitStack() as stack:
            if self.host:
                stack.callback(register_optimizer_step_pre_hook(self.host.add_state).remove)
            calls = _Calls(self)
            _watch_synchronize(self, stack)
            _watch_backward(calls, stack)
            stack.enter_context(observe(_Kernels(self), *self.observers))
            stack.enter_context(calls)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._caller = self._copied = None
        self._open.__exit__(*error)

    def is_on_device(self, tensor: Tensor) -> bool:
        return tensor.device.type == self.device.type and not (self.host and tensor in self.host)

    def read(self, tensors: Iterable[Any], what: str) -> None:
        """Record a read of `tensors`, if one of them is on the device."""
        for tensor in tensors:
            if isinstance(tensor, Tensor) and self.is_on_device(tensor):
                self.wait(READING_CALLS.get(self.call, what), on=tensor)
                return

    def wait(self, what: str, on: Tensor | None = None) -> None:
        """Record a wait for the device. on: the tensor that is read or copied."""
        if self.is_reported:
            return
        self.is_reported = bool(self.call)
        stack = list(call_site.frames(self._caller))
        read = HostRead(what, call_site.line(stack), call_site.module(stack))
        # x.cpu().numpy() reads once; if the CPU simulates the device, cpu() returns x itself, and numpy() reads that again
        here = (read.line, 0 if on is None else storage_of(on))
        if self.host and self._copied == here and self.reads[-1].what != what:
            return
        self._copied = here if what in COPIES_TO_HOST.values() else None
        self.reads.append(read)


class _Host:
    """The tensors that a machine with a device would keep on the host, where the CPU simulates the device.

    Their origin decides: made in the block without a device or with device="cpu", or computed only from these
    (torch.from_numpy can't be seen); and an optimizer's step counts and rates, which torch.optim reads, and so keeps on the CPU.
    """

    def __init__(self) -> None:
        self._storages: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()

    def __contains__(self, tensor: Tensor) -> bool:
        return storage_of(tensor) in self._storages

    def add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor.layout is torch.strided:
                self._storages[storage_of(tensor)] = tensor.untyped_storage()

    def discard(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._storages.pop(storage_of(tensor), None)

    def add_state(self, optimizer: Optimizer, *_: Any) -> None:
        """Add what an optimizer keeps on the host; torch calls this before each step of any optimizer."""
        counts = [state.get(name) for state in optimizer.state.values() for name in ("step", "mu_product")]
        self.add(tensor_leaves((counts, [{**group, "params": None} for group in optimizer.param_groups])))


class _Calls(TorchFunctionMode):
    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reads = self.reads
        reads.call, reads.is_reported = getattr(func, "__name__", ""), False
        try:
            self._look(reads.call, args, kwargs)
            result = func(*args, **kwargs)
        except Exception as error:
            for observer in reads.observers:
                observer.failed(reads.call, tensor_leaves((args, kwargs)), error)
            raise
        finally:
            reads.call, reads.is_reported = "", False
        if reads.host and not tensor_leaves((args, kwargs)) and not isinstance(kwargs.get("device"), torch.device):
            reads.host.add(tensor_leaves(result))
        return result

    def _look(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        reads = self.reads
        if name in READING_CALLS:
            reads.read(args[:1], READING_CALLS[name])
        elif name in _INDEXING_CALLS:
            self._index(*args)
        elif name in ("tensor", "as_tensor", "new_tensor"):
            self._make(name, args, kwargs)
        elif name == "to" and reads.host:
            self._move(args, kwargs, reads.host)
        elif name == "one_hot" and reads.host:
            # with the number of classes, only the CPU's one_hot reads the values, to check them
            reads.is_reported = (args[1] if len(args) > 1 else kwargs.get("num_classes", -1)) >= 0

    def _index(self, target: Tensor, index: Any, value: Any = None) -> None:
        reads, parts = self.reads, index if isinstance(index, tuple) else (index,)
        if reads.is_on_device(target) and any(isinstance(part, list | np.ndarray) and len(part) for part in parts):
            reads.wait("tensor[list], a copy of the list to the device", on=target)
        if isinstance(value, Tensor) and reads.is_on_device(value):
            reads.read(filter(_is_mask, parts), "tensor[mask] = value")

    def _make(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        reads, data, device = self.reads, args[-1] if args else kwargs.get("data"), kwargs.get("device")
        if isinstance(data, Tensor):
            return  # it stays where it is, or is seen as a copy
        reads.read(tensor_leaves(data), f"torch.{name}([tensor, ...])")
        if name == "new_tensor" and device is None:
            is_for_device = reads.is_on_device(args[0])
        elif reads.host:
            is_for_device = isinstance(device, torch.device)
        else:
            is_for_device = device is not None and torch.device(device).type == reads.device.type
        if is_for_device:
            reads.wait(f"{'tensor' if name == 'new_tensor' else 'torch'}.{name}(number), a copy to the device")

    def _move(self, args: Sequence[Any], kwargs: Mapping[str, Any], host: _Host) -> None:
        reads, tensor = self.reads, args[0]
        target = kwargs.get("device", kwargs.get("other", args[1] if len(args) > 1 else None))
        if not isinstance(target, str | torch.device | Tensor):
            return  # a dtype
        to_device = reads.is_on_device(target) if isinstance(target, Tensor) else isinstance(target, torch.device)
        is_waiting = not (kwargs.get("non_blocking") or (len(args) > 3 and args[3]))
        if not to_device and is_waiting:
            reads.read([tensor], COPIES_TO_HOST["to"])
        elif to_device and tensor in host:
            if is_waiting:
                reads.wait("tensor.to(device), a copy from the host", on=tensor)
            host.discard([tensor])


class _Kernels(OperationObserver):
    def __init__(self, reads: HostReads) -> None:
        self._reads = reads

    def after(self, done: Operation) -> None:
        if (host := self._reads.host) and done.inputs:
            (host.add if all(tensor in host for tensor in done.inputs) else host.discard)(done.outputs)

    def before(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        reads, kernel = self._reads, op._overloadpacket
        is_waiting = not kwargs.get("non_blocking")
        if kernel in READING_KERNELS or kernel.__name__ in KERNELS_THAT_READ_INSIDE.get(reads.device.type, ()):
            reads.read(args, _INDEXING_CALLS.get(reads.call, f"{reads.call or kernel.__name__}()"))
        elif op is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            reads.read(args, "repeat_interleave() without output_size")
        elif kernel in INDEXING_KERNELS:
            self._index(args[0], [index for index in args[1] if index is not None], *args[2:3])
        elif op in (aten.copy_.default, aten._foreach_copy_.default):
            pairs = [args[:2]] if op is aten.copy_.default else zip(*args[:2], strict=True)
            for target, source in pairs if is_waiting and not any(args[2:]) else ():
                self._copy(source, to_device=reads.is_on_device(target))
        elif op is aten._to_copy.default and is_waiting and not reads.host and (device := kwargs.get("device")):
            self._copy(args[0], to_device=device.type == reads.device.type)

    def _index(self, target: Tensor, indices: Sequence[Tensor], value: Tensor | None = None) -> None:
        reads = self._reads
        if not reads.is_on_device(target):
            return
        # x[mask] = 0 is a masked_fill (not on MPS, where C++ makes a tensor of the device of the 0); every other use of a
        # mask first counts its true values
        is_fill = value is not None and value.numel() == 1 and value.device.type == "cpu"
        if not is_fill:
            reads.read(filter(_is_mask, indices), "tensor[mask]" if value is None else "tensor[mask] = value")
        if any(index.numel() and not _is_mask(index) and not reads.is_on_device(index) for index in indices):
            reads.wait("tensor[index], a copy of the index to the device", on=target)

    def _copy(self, source: Tensor, *, to_device: bool) -> None:
        reads = self._reads
        if not source.numel() or reads.is_on_device(source) == to_device:
            return
        name = f"tensor.{reads.call}()" if reads.call else "a copy"
        if not to_device:
            what = COPIES_TO_HOST.get(reads.call, f"{name}, a copy to the host")
        else:
            what = "tensor.to(device), a copy from the host" if reads.call == "to" else f"{name}, a copy to the device"
        reads.wait(what, on=source)


def _watch_synchronize(reads: HostReads, stack: ExitStack) -> None:
    thread = threading.get_ident()
    for name in (*_WAITING_MODULES, *_WAITING_CLASSES):
        owner: Any = attrgetter(name)(torch)
        original = vars(owner).get("synchronize")
        if original is None:
            continue

        def watched(*args: Any, _original: Any = original, _name: str = name, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:  # another thread may wait
                reads.wait(f"torch.{_name}.synchronize()")
            return _original(*args, **kwargs)

        _replace(owner, "synchronize", watched, stack)


def _watch_backward(calls: _Calls, stack: ExitStack) -> None:
    """Enable the mode in backward(), a torch function, inside of which it is off: for hooks and the user's Functions."""
    thread, run = threading.get_ident(), vars(torch.autograd).get("_engine_run_backward")
    if run is None:  # private, so it may go (see test_simulated.py); then hooks are seen only by their kernels
        return

    def watched(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return run(*args, **kwargs)
        with calls:
            calls.reads.call, calls.reads.is_reported = "", False
            return run(*args, **kwargs)

    _replace(torch.autograd, "_engine_run_backward", watched, stack)


def _replace(owner: Any, name: str, value: Any, stack: ExitStack) -> None:
    stack.callback(setattr, owner, name, vars(owner)[name])
    setattr(owner, name, value)


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
