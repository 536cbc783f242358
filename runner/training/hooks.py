"""Calls a person's functions between steps with a view of the training; what they return goes the way of all metrics.

Called by fit.Training, in the process that tracks and the thread that trains. A hook that fails is not called again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from runner.device import backends
from runner.errors import OF_CODE, first_line, in_words, traceback_of, without_password
from runner.training.hook_values import Shown, sorted_out
from runner.training.parts import Parts
from runner.training.view import Hook, View

log = logging.getLogger("runner")

#: names of numbers that begin so are the run's own; the test's are until it is over, when they are known
RESERVED = ("train/", "speed/", "system/")
BEFORE_THE_END = (*RESERVED, "test/")


class Hooks:
    """Those of a training; keeps which have failed, and the seconds that they took."""

    def __init__(
        self,
        hooks: Sequence[Hook],
        parts: Parts,
        folder: Path,
        *,
        say: Callable[[str], None],
        must_work: bool = False,
    ) -> None:
        """must_work: whether what a hook raises ends the training."""
        self.seconds = 0.0
        self._must_work = must_work
        self._hooks, self._parts, self._folder, self._say = list(hooks), parts, folder, say
        self._measured: set[str] = set()  # names of the validation's values, at any time

    def call(self, when: str, *, epoch: int, step: int, values: dict[str, float]) -> Shown:
        """What they return now, by name. Modes, gradients and all generators are as before, whatever they do and draw."""
        if when == "epoch":
            self._measured |= values.keys()
        due = [hook for hook in self._hooks if when in hook.at]
        if not due:
            return Shown()
        began, parts = time.perf_counter(), self._parts
        generators, model = backends.generator_states(parts.device), parts.kept_model
        splits = {"val": parts.val, "test": parts.test}
        modes = {module: module.training for module in model.modules()}
        gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
        found = Shown()
        try:
            for hook in due:
                model.eval()
                for parameter, _ in gradients:
                    parameter.grad = None  # what a hook computes of its own is no part of the next step's
                known = {**values, **found.numbers}
                view = View(when, model, parts.device, epoch, step, known, self._folder, splits)
                try:
                    with torch.no_grad():
                        shown = sorted_out(hook.call(view))
                    _check_names(shown.numbers, when)
                    found = found.with_(shown, taken=known.keys() | self._measured)
                except OF_CODE as error:
                    if self._must_work:
                        raise
                    self._hooks.remove(hook)
                    log.error("hook %s failed at step %d\n%s", hook.name, step, traceback_of(error))
                    problem = without_password(first_line(in_words(error)))
                    self._say(f"hook:   {hook.name} failed at step {step:,}, and is not called any more: {problem}")
        finally:
            for module, training in modes.items():
                module.training = training
            for parameter, gradient in gradients:
                parameter.grad = gradient
            backends.set_generator_states(generators, parts.device)
            self.seconds += time.perf_counter() - began
        return found


def _check_names(names: Iterable[str], when: str) -> None:
    """Raises: ValueError."""
    reserved = RESERVED if when == "end" else BEFORE_THE_END
    for name in names:
        if begin := next((each for each in reserved if name.startswith(each)), ""):
            raise ValueError(f"{name} is a name of the run's own, as all with {begin} are; call it otherwise")
