"""A step goes in; the same step comes out compiled: forward, loss, backward, clipping, optimizer and averages in one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.device import torch_private
from runner.device.placement import num_rows
from runner.errors import Fault, RunnerError, first_line
from runner.training.step.fused_update import CannotTraceError, FixedUpdate

Step = Callable[[Sequence[Any]], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Compiling:
    """What torch is told of the batches and the model.

    fixed_shapes: whether batches differ by their number of rows alone: a function for each number then, two in all; else
    torch makes one for all sizes when it meets the second.
    usual_rows: of all batches but rare ones, which are not worth those seconds and are taken as they are written.
    in_part: why the whole can't be one function, where that is known. keeps_layout: torch may not lay channels last.
    """

    fixed_shapes: bool = True
    usual_rows: int | None = None
    in_part: str = ""
    keeps_layout: bool = False


def make_compiled(
    make: Callable[..., Step],
    *,
    optimizer: Optimizer,
    is_first: bool,
    kind: Compiling,
    say: Callable[[str], None],
) -> Step:
    """The step of a run as one compiled function, where that can be had.

    make: the run's train_step.make_step, with options of StepOptions by their names.
    A run's first step (is_first) is taken as it is written: it makes the optimizer's state, and the guard can watch it.
    What can't be one function is compiled in part, the forward pass with its loss, and `say` hears why.
    Costs seconds where it first meets a size, and none later.
    Raises: RunnerError, from a step, where there is nothing to compile with.
    """
    torch_compile = partial(
        torch.compile,
        dynamic=False if kind.fixed_shapes else None,
        options={"layout_optimization": False} if kind.keeps_layout else None,
    )
    plain = make()
    compiled: Step | None = None
    is_whole = False

    def step(batches: Sequence[Any]) -> Mapping[str, Tensor]:
        nonlocal is_first, compiled, is_whole
        if is_first or (kind.usual_rows is not None and num_rows(batches[-1]) != kind.usual_rows):
            is_first = False
            return plain(batches)
        if compiled is not None and not is_whole:
            return compiled(batches)
        why = kind.in_part
        if not why:
            try:
                compiled, is_whole = compiled or _Whole(make, optimizer, torch_compile, say=say), True
                return compiled(batches)
            except (CannotTraceError, _compiling_errors()) as error:
                _check_compiler(error)
                why = f"the step can't be one function: {first_line(error)}"
        say(f"compile: the forward pass alone, as {why}")
        compiled, is_whole = make(compile_forward=torch_compile), False
        try:
            return compiled(batches)
        except _compiling_errors() as error:
            _check_compiler(error)
            problem = f"torch can't compile this model: {first_line(error)}"
            raise RunnerError(Fault("train.compile=true", problem, "train.compile=false")) from error

    return step


class _Whole:
    """The whole step as one function."""

    def __init__(
        self,
        make: Callable[..., Step],
        optimizer: Optimizer,
        compile: Callable[..., Step],
        *,
        say: Callable[[str], None],
    ) -> None:
        """Raises: CannotTraceError where the optimizer, or this torch, does not take part in it."""
        config: Any = torch_private.dynamo_config
        if not hasattr(config, "trace_autograd_ops"):
            raise CannotTraceError(f"torch {torch.__version__} compiles no backward pass with what is around it")
        config.trace_autograd_ops = True  # for good: what is compiled holds only as long as the settings do
        self._update = FixedUpdate(optimizer, as_formula=True)
        self._step = compile(make(update=self._update.update), fullgraph=True)
        self._say, self._is_new = say, True

    def __call__(self, batches: Sequence[Any]) -> Mapping[str, Tensor]:
        self._update.set_rates()
        began = time.perf_counter()
        values: Mapping[str, Tensor] = self._step(batches)
        if self._is_new:
            self._is_new = False
            self._say(f"compile: the whole step is one function; made in {time.perf_counter() - began:.1f} s")
        return values


def _compiling_errors() -> type[Exception]:
    found: type[Exception] = torch_private.dynamo_errors.TorchDynamoException
    return found


def _check_compiler(error: BaseException) -> None:
    """Raises: RunnerError where there is no compiler, as nothing else would help either."""
    inductor = torch_private.inductor_errors

    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or getattr(cause, "inner_exception", None)
    words = "\n".join(str(cause) for cause in causes)
    if any(isinstance(cause, inductor.InvalidCxxCompiler) for cause in causes) or "No working C++ compiler" in words:
        problem = "torch finds no C++ compiler here"
        fix = "train.compile=false; or install g++ or clang++, or name one in the environment variable CXX"
    elif any(isinstance(cause, inductor.TritonMissing) for cause in causes):
        problem, fix = "torch finds no Triton here", "train.compile=false; or install triton"
    else:
        return
    raise RunnerError(Fault("train.compile=true", problem, fix)) from error
