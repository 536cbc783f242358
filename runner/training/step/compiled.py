"""Compiles a step: forward, loss, backward, clipping, optimizer and averages in one function, or a part of it: train.compile."""

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
from runner.errors import Problem, RunnerError, first_line
from runner.training.step.fused_update import CannotTraceError, FixedUpdate
from runner.training.step.on_device import Sizes, Steps, host_generators

Step = Callable[[Sequence[Any]], Mapping[str, Tensor]]
CPU = torch.device("cpu")
#: that several steps of a call take, at most
SECONDS_A_CALL = 0.02
#: calls that show whether a step has anything of the host's: torch compiles the second anew where it has a number
LOOKED_AT = 2


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

    @property
    def options(self) -> dict[str, Any] | None:
        """Inductor's."""
        return {"layout_optimization": False} if self.keeps_layout else None


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
        options=kind.options,
    )
    plain = make()
    compiled: Step | _Whole | None = None

    def step(batches: Sequence[Any]) -> Mapping[str, Tensor]:
        nonlocal is_first, compiled
        if is_first or (kind.usual_rows is not None and num_rows(batches[-1]) != kind.usual_rows):
            is_first = False
            if isinstance(compiled, _Whole):
                compiled.was_passed_by()
            return plain(batches)
        if compiled is not None and not isinstance(compiled, _Whole):
            return compiled(batches)
        why = kind.in_part
        if not why:
            try:
                compiled = compiled or _Whole(make, optimizer, torch_compile, say=say)
                return compiled(batches)
            except (CannotTraceError, _compiling_errors()) as error:
                check_compiler(error)
                why = f"the step can't be one function: {first_line(error)}"
        say(f"compile: the forward pass alone, as {why}")
        compiled = make(compile_forward=torch_compile)
        try:
            return compiled(batches)
        except _compiling_errors() as error:
            check_compiler(error)
            problem = f"torch can't compile this model: {first_line(error)}"
            raise RunnerError(Problem("train.compile=true", problem, "train.compile=false")) from error

    return step


class _Whole:
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
        self._step = compile(make(update=self._update), fullgraph=True)
        self._say, self._is_new = say, True
        self._taken = 0

    def was_passed_by(self) -> None:
        """A step was taken without it."""
        self._taken += 1

    def __call__(self, batches: Sequence[Any]) -> Mapping[str, Tensor]:
        self._taken += 1
        self._update.set_numbers(self._taken)
        began = time.perf_counter()
        values: Mapping[str, Tensor] = self._step(batches)
        if self._is_new:
            self._is_new = False
            self._say(f"compile: the whole step is one function; made in {time.perf_counter() - began:.1f} s")
        return values


class Repeated:
    """A Repeater: one step of each size as one compiled function, run as often as steps are to be taken.

    What torch looks at around a call of a compiled function costs half as much as the small step in it: 333 us with it, 220
    without, of an MLP 64-128-10 with batches of 128 (1 thread, torch 2.13, 2026-11). The function's inputs lie where they
    are for good, so that the second step of a call needs no look, if nothing of a step is the host's: no number in the task
    that counts, no draw of Python's or NumPy's, no attribute that is another tensor afterwards. The first two steps of each
    size show that.

    steps: those to take. say: hears what was made of them. options: Inductor's. compile_graph: torch's compiler of what it
    has traced, but in tests.
    """

    def __init__(
        self,
        steps: Steps,
        *,
        say: Callable[[str], None],
        options: Mapping[str, Any] | None = None,
        compile_graph: Callable[..., Callable[..., Any]] | None = None,
    ) -> None:
        self._steps, self._say = steps, say
        # 20 assertions take 15 us a step; torch looked at each call's first
        options = {**(options or {}), "size_asserts": False}
        self._compile_graph = compile_graph or partial(torch_private.compile_graph, options=options)
        self._functions: dict[Sizes, _Function] = {}

    def at_once(self, sizes: Sizes, room: int) -> int:
        """See Repeater: as many as take SECONDS_A_CALL, which is how long a signal may have to wait. One that take() refuses
        is one step, as the schedule would have gone on for more."""
        function = self._functions.get(sizes)
        if function is None or function.is_looked_at or function.of_host:
            return 1
        return max(1, min(room, int(SECONDS_A_CALL / function.seconds)))

    def take(self, sizes: Sizes, num: int) -> None:
        """See Repeater. Raises: RunnerError where there is nothing to compile with."""
        function = self._functions.get(sizes)
        if function is None:
            config: Any = torch_private.dynamo_config
            if not hasattr(config, "trace_autograd_ops"):
                raise CannotTraceError(f"torch {torch.__version__} compiles no backward pass with what is around it")
            config.trace_autograd_ops = True  # for good: what is compiled holds only as long as the settings do
            function = self._functions[sizes] = _Function(self._steps, sizes, self._compile_graph)
        if function.of_host:
            raise CannotTraceError(f"{function.of_host}, which a step that is repeated would not see")
        if not function.is_looked_at:
            function.run(num)
            return
        try:
            function.look()
        except _compiling_errors() as error:
            check_compiler(error)
            raise CannotTraceError(f"the step can't be one function: {first_line(error)}") from error
        if function.calls == 1 and len(self._functions) == 1:
            self._say(f"compile: the whole step is one function; made in {function.seconds:.1f} s")


class _Function:
    def __init__(self, steps: Steps, sizes: Sizes, compile_graph: Callable[..., Callable[..., Any]]) -> None:
        self.calls, self.seconds, self.of_host = 0, 0.0, ""
        self._num, self._made, self._compile_graph = 1, 0, compile_graph
        self._prepare = partial(steps.prepare, sizes)
        take = torch.compile(steps.take_one, backend=self._make, fullgraph=True, dynamic=False)
        self._take = partial(take, sizes)

    @property
    def is_looked_at(self) -> bool:
        """Whether the next call is one that shows what is the host's."""
        return self.calls < LOOKED_AT

    def look(self) -> None:
        """One step, timed. Raises: what the compiler raises."""
        before = host_generators(CPU)
        self.run(1)
        self.calls += 1
        drawn = [name for name, state in host_generators(CPU).items() if state != before[name]]
        if drawn:
            self.of_host = f"the step draws from {' and '.join(drawn)}"
        elif self._made > 1:
            self.of_host = "a number of the host is another one in each step"

    def run(self, num: int) -> None:
        """`num` steps by one call."""
        began, self._num = time.perf_counter(), num
        self._prepare(0)
        self._take()
        self.seconds = max(1e-6, (time.perf_counter() - began) / num)

    def _make(self, graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        self._made += 1
        if graph.graph.output_node().args[0]:  # what torch writes to an attribute after the call
            self.of_host = "an attribute is another tensor after each step"
        compiled = self._compile_graph(graph, inputs)

        def several(*args: Any) -> Any:
            taken = compiled(*args)
            for index in range(1, self._num):
                self._prepare(index)
                taken = compiled(*args)
            return taken

        return several


def _compiling_errors() -> type[Exception]:
    found: type[Exception] = torch_private.dynamo_errors.TorchDynamoException
    return found


def check_compiler(error: BaseException) -> None:
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
    raise RunnerError(Problem("train.compile=true", problem, fix)) from error
