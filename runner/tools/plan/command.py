"""`plan`: simulate each configuration in its own process (worker.py), print it, and write plan.json.

print_what_fits() is for a run that ran out of memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from runner.device import Hardware, probe
from runner.errors import Problem, RunnerError, at_once, refuse
from runner.tools.plan.planned_device import PlannedDevice, find
from runner.tools.plan.report import memory_lines, report, request, show
from runner.version import python_path

SECONDS_TO_SEARCH = 6.0  # from the start of a plan, for the largest batch sizes
MAX_SECONDS = 300.0  # of a plan


@dataclass(frozen=True)
class PlannedJob:
    """One run to plan; the name of a single one is empty."""

    name: str
    cfg: DictConfig


def plan(jobs: Sequence[PlannedJob], *, search_seconds: float | None = None) -> dict[str, Any]:
    """Plan, print and write; return the content of plan.json. Starts a process for each job.

    Args:
        search_seconds: For the largest batch sizes (None: SECONDS_TO_SEARCH).

    Raises:
        RunnerError: With the errors of all configurations.
    """
    began = time.monotonic()
    plans: list[dict[str, Any]] = []
    with ExitStack() as stack:
        child: Child | None = stack.enter_context(Child())  # it imports torch while this process checks
        hardware = probe()
        targets = at_once(*(partial(check, job.cfg, hardware) for job in jobs))
        for job, target in zip(jobs, targets, strict=True):
            now, child = child, stack.enter_context(Child()) if job is not jobs[-1] else None
            assert now is not None
            answer = now.ask(
                request(job.cfg, target, seconds=SECONDS_TO_SEARCH if search_seconds is None else search_seconds)
            )
            plans.append(report(job.name, job.cfg, target, answer, seconds=time.monotonic() - began))
            began = time.monotonic()
    would_run = all(each["would_run"] for each in plans)
    whole = plans[0] if len(plans) == 1 else {"would_run": would_run, "jobs": plans}
    file = Path(str(jobs[0].cfg.plan.folder), "plan.json")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(whole, indent=2) + "\n")
    show(plans, file)
    return whole


def print_what_fits(cfg: DictConfig) -> None:
    """Print the memory and the possible batch sizes of a run that ran out of memory."""
    lines: list[str] = []
    with suppress(RunnerError):
        target = check(cfg)
        with Child() as child:
            answer = child.ask(request(cfg, target, seconds=SECONDS_TO_SEARCH))
        lines = memory_lines(report("", cfg, target, answer, seconds=0.0))
    print("plan    of this run, on the whole of that memory:")
    print("\n".join(lines or ["        not known: it could not be planned"]))


def check(cfg: DictConfig, hardware: Hardware | None = None) -> PlannedDevice:
    """Return the device, which may be missing here, and its assumed properties. Raises: RunnerError with all errors."""
    from runner.experiment.check import check as check_config

    target = find(cfg, hardware or probe())
    check_config(cfg, target.hardware, choice=target.choice)
    return target


class Child:
    """A process that simulates one device; it imports torch while it waits for its request."""

    def __enter__(self) -> Child:
        self._folder = tempfile.TemporaryDirectory(prefix="runner-plan-")
        self._answer = Path(self._folder.name) / "answer.json"
        self._process = subprocess.Popen(
            # -P: a user's directory `runner` must not replace this package
            [sys.executable, "-P", "-W", "ignore", "-m", "runner.tools.plan.worker", str(self._answer)],
            env={**os.environ, "PYTHONPATH": python_path(own=True)},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()
        self._folder.cleanup()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the result of the simulation, or why the process ended without one. Raises: RunnerError."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: its output has the reason
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        try:
            _, errors = self._process.communicate(timeout=MAX_SECONDS)
        except subprocess.TimeoutExpired:
            return {"findings": [], "unknown": f"the simulation took more than {MAX_SECONDS:.0f} s"}
        if not self._answer.exists():
            last = (errors.strip().splitlines() or [f"its process ended with {self._process.returncode}"])[-1]
            return {"findings": [], "unknown": f"the simulation ended: {last}"}
        answer: dict[str, Any] = json.loads(self._answer.read_text())
        refuse(Problem.of(problem) for problem in answer.get("problems", ()))
        return answer
