"""Shows each operation (kernel call) of a block of code to observers: the guard, `plan`, `explain`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runner.device.placement import tensor_leaves
from runner.device.torch_private import TorchDispatchMode, WithoutDynamo


@dataclass(frozen=True, slots=True)
class Operation:
    """A finished operation, e.g., aten.addmm.default, with its arguments and result, and the tensors among them."""

    op: Any
    args: Any
    kwargs: Any
    result: Any
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]

    @property
    def name(self) -> str:
        return str(self.op._overloadpacket.__name__)


class OperationObserver:
    """Observes the operations of a block, except its own. Each method is called for one operation."""

    def before(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None: ...

    def after(self, done: Operation) -> None: ...

    def failed(self, what: str, inputs: Sequence[Tensor], error: Exception) -> None:
        """May raise an error that explains more."""


@contextmanager
def observe(*observers: OperationObserver) -> Iterator[None]:
    """Show the observers the operations of this thread in the block, including its backward passes.

    A compiled model runs uncompiled there: under a mode torch's compiler gives up a function permanently (2.13).
    """
    is_loaded = "torch._dynamo" in sys.modules  # else nothing is compiled, and loading it takes seconds
    with torch.compiler.set_stance("force_eager") if is_loaded else nullcontext(), _Operations(observers):
        yield


class _Operations(WithoutDynamo, TorchDispatchMode):
    def __init__(self, observers: Sequence[OperationObserver]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observers = observers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and func.namespace == "aten":
            with self:  # in inference mode composed operations (item, to) are not called by their parts
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func.namespace == "prim":  # C++ reads a tensor's device
            return func(*args, **kwargs)
        for observer in self._observers:
            observer.before(func, args, kwargs)
        inputs = tensor_leaves((args, kwargs))
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            for observer in self._observers:
                observer.failed(func._overloadpacket.__name__, inputs, error)
            raise
        done = Operation(func, args, kwargs, result, inputs, tensor_leaves(result))
        for observer in self._observers:
            observer.after(done)
        return result
