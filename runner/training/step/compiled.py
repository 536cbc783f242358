"""Compiles a step: forward, loss, backward, clipping, optimizer and averages in one function, or only the forward pass."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.device import torch_private
from runner.device.placement import num_rows
from runner.errors import RunnerError, first_line
from runner.training.step.fused_update import CannotTraceError, FixedUpdate
from runner.training.step.on_device import Compiling, OnDevice, Sizes, host_generators
from runner.training.step.train_step import Step

CPU = torch.device("cpu")
#: that several steps of a call take, at most
SECONDS_A_CALL = 0.02
#: calls that test a function: torch compiles again at the second if a number of the host changed
TESTED_CALLS = 2


def make_compiled(
    make: Callable[..., Step], *, optimizer: Optimizer, is_first: bool, kind: Compiling, say: Callable[[str], None]
) -> Step:
    """Make a step that is one compiled function; only the forward pass with its loss if torch can't compile the whole.

    Compiling costs seconds when a size first occurs. The step raises a RunnerError without a compiler.

    Args:
        make: train_step.make_step of the run, which takes StepOptions by name.
        is_first: Whether the first step is eager: it makes the optimizer's state, and the guard watches it.
        say: Prints what was compiled.
    """
    torch_compile = partial(torch.compile, dynamic=False if kind.fixed_shapes else None, options=kind.options)
    plain, in_part = make(), kind.in_part
    update: FixedUpdate | None = None
    whole: Step | None = None
    forward_only: Step | None = None
    num_steps = 0  # since `update` was made

    def take_whole(batches: Sequence[Any]) -> Mapping[str, Tensor]:
        nonlocal update, whole, num_steps
        began, is_new = time.perf_counter(), update is None
        if update is None or whole is None:
            _trace_backward()
            update = FixedUpdate(optimizer, as_formula=True)
            whole = torch_compile(make(update=update), fullgraph=True)
        num_steps += 1
        update.set_numbers(num_steps)
        values = whole(batches)
        if is_new:
            say(f"compile: the whole step is one function; made in {time.perf_counter() - began:.1f} s")
        return values

    def step(batches: Sequence[Any]) -> Mapping[str, Tensor]:
        nonlocal is_first, in_part, forward_only, num_steps
        if is_first or kind.usual_rows not in (None, num_rows(batches[-1])):
            is_first = False
            num_steps += update is not None
            return plain(batches)
        if not in_part:
            try:
                return take_whole(batches)
            except (CannotTraceError, _compiling_errors()) as error:
                check_compiler(error)
                in_part = f"the step can't be one function: {first_line(error)}"
        if forward_only is None:
            say(f"compile: only the forward pass, as {in_part}")
            forward_only = make(compile_forward=torch_compile)
        try:
            return forward_only(batches)
        except _compiling_errors() as error:
            check_compiler(error)
            problem = f"torch can't compile this model: {first_line(error)}"
            raise RunnerError.suggest("train.compile=true", problem, ["train.compile=false"]) from error

    return step


class CompiledSteps:
    """A Repeater that compiles one step of each size, and calls the compiled function several times without torch's guards.

    Guards cost half as much as a small step. They are not needed if nothing in a step depends on the host: a counter in
    the task, a draw of Python's or NumPy's generator, an attribute that is replaced. The first two steps of each size show
    that. The function's inputs stay in the same memory.

    Args:
        options: Inductor's.
        compile_graph: Compiles a traced graph; tests replace it.
    """

    is_required = False
    most_calls = 1

    def __init__(
        self,
        *,
        say: Callable[[str], None],
        options: Mapping[str, Any] | None = None,
        compile_graph: Callable[..., Callable[..., Any]] | None = None,
    ) -> None:
        self._say = say
        # torch checks the sizes at the first call only
        options = {**(options or {}), "size_asserts": False}
        self._compile_graph = compile_graph or partial(torch_private.compile_graph, options=options)
        self._functions: dict[Sizes, _Function] = {}

    def at_once(self, sizes: Sizes, room: int) -> int:
        """As many as fit into SECONDS_A_CALL, as a signal waits that long; 1 for a step that take() may refuse."""
        function = self._functions.get(sizes)
        if function is None or function.is_tested or function.of_host:
            return 1
        return max(1, min(room, int(SECONDS_A_CALL / function.seconds)))

    def take(self, steps: OnDevice, sizes: Sizes, num: int) -> None:
        """Raises: RunnerError without a compiler."""
        function = self._functions.get(sizes)
        if function is None:
            _trace_backward()
            function = self._functions[sizes] = _Function(steps, sizes, self._compile_graph)
        if function.of_host:
            raise CannotTraceError(f"{function.of_host}, which a step that is repeated would not see")
        if not function.is_tested:
            function.run(num)
            return
        try:
            function.test()
        except _compiling_errors() as error:
            check_compiler(error)
            raise CannotTraceError(f"the step can't be one function: {first_line(error)}") from error
        if function.calls == 1 and len(self._functions) == 1:
            self._say(f"compile: the whole step is one function; made in {function.seconds:.1f} s")


class _Function:
    def __init__(self, steps: OnDevice, sizes: Sizes, compile_graph: Callable[..., Callable[..., Any]]) -> None:
        self.calls, self.seconds, self.of_host = 0, 0.0, ""
        self._num, self._made, self._compile_graph = 1, 0, compile_graph
        self._prepare = partial(steps.prepare, sizes)
        take = torch.compile(steps.take_one, backend=self._make, fullgraph=True, dynamic=False)
        self._take = partial(take, sizes)

    @property
    def is_tested(self) -> bool:
        """Whether the next call tests for dependence on the host."""
        return self.calls < TESTED_CALLS

    def test(self) -> None:
        """Take one step; sets `of_host` if something in it depends on the host."""
        before = host_generators(CPU)
        self.run(1)
        self.calls += 1
        drawn = [name for name, state in host_generators(CPU).items() if state != before[name]]
        if drawn:
            self.of_host = f"the step draws from {' and '.join(drawn)}"
        elif self._made > 1:
            self.of_host = "a number of the host changes in each step"

    def run(self, num: int) -> None:
        began, self._num = time.perf_counter(), num
        self._prepare(0)
        self._take()
        self.seconds = max(1e-6, (time.perf_counter() - began) / num)

    def _make(self, graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        self._made += 1
        if graph.graph.output_node().args[0]:  # attributes that torch sets after the call
            self.of_host = "an attribute is another tensor after each step"
        compiled = self._compile_graph(graph, inputs)

        def several(*args: Any) -> Any:
            taken = compiled(*args)
            for index in range(1, self._num):
                self._prepare(index)
                taken = compiled(*args)
            return taken

        return several


def _trace_backward() -> None:
    config: Any = torch_private.dynamo_config
    if not hasattr(config, "trace_autograd_ops"):
        raise CannotTraceError(
            f"torch {torch.__version__} can't compile a backward pass together with the rest of a step"
        )
    config.trace_autograd_ops = True  # not restored: compiled code is valid only with the same settings


def _compiling_errors() -> type[Exception]:
    kind: type[Exception] = torch_private.dynamo_errors.TorchDynamoException
    return kind


def check_compiler(error: BaseException) -> None:
    """Raise a RunnerError if the cause of an error is a missing compiler."""
    text = "".join(traceback.format_exception(error)) + repr(getattr(error, "inner_exception", ""))
    if "InvalidCxxCompiler" in text or "No working C++ compiler" in text:
        problem = "torch finds no C++ compiler here"
        fix = "use `train.compile=false`, or install g++ or clang++, or name one in the environment variable `CXX`"
    elif "TritonMissing" in text:
        problem, fix = "torch finds no Triton here", "use `train.compile=false`, or install triton"
    else:
        return
    raise RunnerError.of("train.compile=true", problem, fix) from error
