"""`plan`: has each configuration looked at in a process of its own (worker.py), shows it, and writes plan.json and plan.png.

Called by cli/commands.py; what_fits() by cli/train.py, after a run that the memory did not take.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from runner.device import Hardware, probe
from runner.errors import Fault, RunnerError, at_once, refuse
from runner.plan.planned_device import Target, find
from runner.plan.plot import draw
from runner.plan.report import report, request
from runner.version import python_path

SECONDS_TO_SEARCH = 6.0  # from the start of a plan, for the largest batch sizes
SECONDS_FOR_A_PLAN = 300.0


@dataclass(frozen=True)
class Job:
    """One run to be planned; its name is empty where there is but one."""

    name: str
    cfg: DictConfig


def plan(jobs: Sequence[Job], *, search_seconds: float = SECONDS_TO_SEARCH) -> dict[str, Any]:
    """Plans, prints and writes; returns what is in plan.json. Starts a process for each, some 4 s.

    search_seconds: for the largest batch sizes.
    Raises: RunnerError for mistakes of the configuration, those of all jobs at once.
    """
    began = time.monotonic()
    with ExitStack() as stack:
        children = [stack.enter_context(Child())]  # it imports torch while this process does
        hardware = probe()
        targets = at_once(*(partial(check, job.cfg, hardware) for job in jobs))
        found: list[dict[str, Any]] = []
        for job, target in zip(jobs, targets, strict=True):
            child = children.pop()
            if len(found) + 1 < len(jobs):
                children.append(stack.enter_context(Child()))
            answer, fallback = _answer(child, job, target, seconds=search_seconds)
            found.append(report(job.name, job.cfg, target, answer, fallback=fallback, seconds=time.monotonic() - began))
            began = time.monotonic()
    from runner.plan.text import show

    show(found, _write(found, Path(str(jobs[0].cfg.plan.folder))))
    return _whole(found)


def what_fits(cfg: DictConfig) -> list[str]:
    """What a plan of this run says of memory and batch sizes, a line each; [] where it can't be planned. Some 6 s."""
    from runner.plan.text import memory_lines

    try:
        target = check(cfg)
        with Child() as child:
            answer, fallback = _answer(child, Job("", cfg), target)
    except RunnerError:
        return []
    return memory_lines(report("", cfg, target, answer, fallback=fallback, seconds=0.0))


@contextmanager
def planning(cfg: DictConfig) -> Iterator[Callable[[], dict[str, Any]]]:
    """Has a run planned meanwhile; the call waits for it, and says what plan.json would, but for the largest batch.

    Writes and prints nothing.
    """
    target = check(cfg)
    with Child() as child:
        child.tell(request(cfg, target, seconds=0.0))

        def answer() -> dict[str, Any]:
            found, fallback = _heard(child, Job("", cfg), target, seconds=0.0)
            return report("", cfg, target, found, fallback=fallback, seconds=0.0)

        yield answer


class Child:
    """A process that simulates one device; it waits for its request."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="runner-plan-")
        self._answer = Path(self._folder.name) / "answer.json"
        self._process = subprocess.Popen(
            # -P: a folder `runner` of the person's must not take this package's place
            [sys.executable, "-P", "-W", "ignore", "-m", "runner.plan.worker", str(self._answer)],
            env={**os.environ, "PYTHONPATH": python_path(own=True)},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()
        self._folder.cleanup()

    def tell(self, request: dict[str, Any]) -> None:
        """Sends what is to be planned; waits for nothing."""
        with suppress(BrokenPipeError):  # it has ended: its last words say why
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def answer(self) -> tuple[dict[str, Any] | None, str]:
        """Of what it was told; or None, and why there is none. `is_ready` says whether the simulation itself worked."""
        try:
            _, said = self._process.communicate(timeout=SECONDS_FOR_A_PLAN)
        except subprocess.TimeoutExpired:
            return None, f"it took more than {SECONDS_FOR_A_PLAN:.0f} s"
        if self._answer.exists():
            answer: dict[str, Any] = json.loads(self._answer.read_text())
            return answer, ""
        last = said.strip().splitlines()[-1:] or [""]
        code = self._process.returncode
        return None, last[0] or f"its process ended with {code}"

    @property
    def is_ready(self) -> bool:
        return self._answer.with_suffix(".ready").exists()


def check(cfg: DictConfig, hardware: Hardware | None = None) -> Target:
    """The device, which need not be here, and what is assumed of it. Raises: RunnerError with everything that is wrong."""
    from runner.experiment.check import check as check_config

    target = find(cfg, hardware or probe())
    check_config(cfg, target.hardware, choice=target.choice)
    return target


def _answer(
    child: Child, job: Job, target: Target, *, seconds: float = SECONDS_TO_SEARCH
) -> tuple[dict[str, Any], str]:
    child.tell(request(job.cfg, target, seconds=seconds))
    import matplotlib.figure  # noqa: F401  # for the picture, while the other process works

    return _heard(child, job, target, seconds=seconds)


def _heard(child: Child, job: Job, target: Target, *, seconds: float) -> tuple[dict[str, Any], str]:
    """What the child found; where it could not simulate the device, what the CPU's step tells, and the reason."""
    answer, why = child.answer()
    fallback = ""
    if answer is None and not child.is_ready and target.device != "cpu":
        fallback = f"{target.device} could not be simulated here ({why}): placement and kernels were not checked"
        with Child() as second:
            second.tell(request(job.cfg, target, seconds=seconds) | {"device": "cpu"})
            answer, why = second.answer()
    if answer is None:
        answer = {"findings": [], "unknown": f"the simulation ended: {why}"}
    refuse(Fault(**fault) for fault in answer.get("faults", ()))
    return answer, fallback


def _whole(found: list[dict[str, Any]]) -> dict[str, Any]:
    return found[0] if len(found) == 1 else {"would_run": all(each["would_run"] for each in found), "jobs": found}


def _write(found: list[dict[str, Any]], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "plan.json"]
    files[0].write_text(json.dumps(_whole(found), indent=2) + "\n")
    drawn = [each for each in found if each["memory"]]
    if drawn:
        files.append(folder / "plan.png")
        draw(drawn, files[1])
    else:
        with suppress(FileNotFoundError):  # an earlier plan's
            (folder / "plan.png").unlink()
    return files
