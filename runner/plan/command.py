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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.text import Text

from runner.device import Hardware, probe
from runner.device.host_memory import size_in_words
from runner.errors import Problem, RunnerError, at_once, refuse
from runner.experiment.terminal import Terminal
from runner.inspection.findings import Finding
from runner.plan.planned_device import Target, find
from runner.plan.plot import draw
from runner.plan.report import RUNS, report, request
from runner.version import python_path

MOST_PLACES = 8  # of tensors that lie elsewhere
STYLES = {"certain": "bold red", "likely": "yellow", "estimate": "cyan"}


def show(plans: Sequence[dict[str, Any]], written: Sequence[Path]) -> None:
    """Prints each plan, and where they are written."""
    console = Terminal()
    for plan in plans:
        if len(plans) > 1:
            console.print(Text(f"\n{plan['name']}", style="bold"))
        for label, text in lines(plan):
            console.print(Text.assemble((f"{label:<10}", "dim" if label else ""), text))
        for found in plan["findings"]:
            finding = Finding(**found)
            console.print(Text.assemble((f"{finding.grade:<10}", STYLES[finding.grade]), str(finding)))
    console.print(Text(f"{'written':<10}{', '.join(map(str, written))}"))


def lines(plan: dict[str, Any]) -> list[tuple[str, str]]:
    """What is said of a plan, but for its findings: a label and a text each."""
    assumed = plan["assumed"]
    found = [("device", f"{plan['device']} ({plan['device_reason']})")]
    if plan["num_processes"] > 1:
        rows = -(-plan["batch_size"] // plan["num_processes"])
        found.append(("", f"one of {plan['num_processes']} processes, with {rows:,} rows of each batch"))
    memory = size_in_words(assumed["memory_bytes"]) if assumed["memory_bytes"] else "memory"
    found.append(("assumed", f"{memory}: {assumed['memory_from']}; speed: {assumed['speeds_from']}"))
    if plan["fallback"]:
        found.append(("but", plan["fallback"]))
    reason = f": {plan['unknown']}" if plan["unknown"] else ""
    found.append(("verdict", plan["verdict"] + (reason if plan["verdict"] != RUNS else "")))
    if plan["unfollowed"] and plan["verdict"] == RUNS:
        found.append(("but", f"values are read at {', '.join(plan['unfollowed'])}: what they decide is not known here"))
    if plan["memory"] is not None:
        found += _memory(plan)
    if plan["step"] is not None:
        found += _step(plan)
    if plan["placement"]:
        found += _placement(plan)
    return found


def memory_lines(plan: dict[str, Any]) -> list[str]:
    """Of a plan, what it takes and what would fit."""
    found = _memory(plan) if plan["memory"] is not None else []
    return [f"{label:<8}{text}" for label, text in found if label in ("memory", "", "batch")]


def _memory(plan: dict[str, Any]) -> list[tuple[str, str]]:
    memory = plan["memory"]
    share = ""
    if memory.get("usable_bytes"):
        share = f" of {size_in_words(memory['usable_bytes'])} to be used ({memory['peak_bytes'] / memory['usable_bytes']:.0%})"
    found = [
        ("memory", f"{size_in_words(memory['peak_bytes'])} at most{share}, in {memory['peak_phase']}"),
        ("", _named(memory["parts"])),
    ]
    if plan["fits"] is None and memory.get("fits_on"):
        found.append(("fits on", ", ".join(memory["fits_on"][:4])))
    sizes = plan["largest_batch_size"]
    if sizes:
        texts = [f"{_size(size)} ({name})" for name, size in sizes.items()]
        found.append(
            ("batch", f"{plan['batch_size']:,} in {plan['precision']}; the largest that fits: {', '.join(texts)}")
        )
    if plan["largest_eval_batch_size"]:
        found.append(("batch", f"the largest that can be evaluated: {plan['largest_eval_batch_size']:,}"))
    if plan["residency"]:
        found.append(("data", plan["residency"]))
    return found


def _named(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {size_in_words(count)}" for name, count in parts.items())


def _size(size: int | None) -> str:
    if size is None:
        return "not found in time"
    return f"{size:,}" if size else "none"


def _step(plan: dict[str, Any]) -> list[tuple[str, str]]:
    step = plan["step"]
    moved = step["bytes_moved_to_device"]
    work = (
        f"{_short(step['flops'])}FLOP in {step['num_kernels']:,} kernels, {size_in_words(step['touched_bytes'])} read and written: "
        f"{step['arithmetic_intensity']:.1f} FLOP a byte; {size_in_words(moved) if moved else 'nothing'} moved to the device"
    )
    found = [("step", work)]
    if step["least_seconds"] is not None:
        found.append(("time", f"{step['least_seconds'] * 1e3:.3g} ms at least; limited by {step['limited_by']}"))
    reads = len(plan["host_reads"])
    found.append(("reads", "the step reads nothing of the device" if not reads else f"{reads} of the device, below"))
    return found


def _placement(plan: dict[str, Any]) -> list[tuple[str, str]]:
    device = plan["device"] if plan["device"] != "mps" else "mps:0"
    kinds: dict[str, Counter[str]] = {}
    for item in plan["placement"]:
        kinds.setdefault(item["device"], Counter())[KINDS.get(item["kind"], item["kind"])] += 1
    texts = []
    for where, counts in kinds.items():
        several = [f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in counts.items()]
        texts.append(f"on {where}: {', '.join(several)}")
    found = [("tensors", "; ".join(texts))]
    elsewhere = [item for item in plan["placement"] if item["device"] != device and not plan["fallback"]]
    for item in elsewhere[:MOST_PLACES]:
        found.append(("", f"{item['name']} {tuple(item['shape'])} on {item['device']}"))
    if len(elsewhere) > MOST_PLACES:
        found.append(("", f"and {len(elsewhere) - MOST_PLACES:,} more, in plan.json"))
    return found


KINDS = {
    "attribute": "plain attribute",
    "list": "tensor of hidden module",
    "batch": "batch field",
}


def _short(count: float) -> str:
    for unit, name in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.3g} "


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

    show(found, _write(found, Path(str(jobs[0].cfg.plan.folder))))
    return _whole(found)


def what_fits(cfg: DictConfig) -> list[str]:
    """What a plan of this run says of memory and batch sizes, a line each; [] where it can't be planned. Some 6 s."""

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
    answer, why = child.answer()
    fallback = ""
    if answer is None and not child.is_ready and target.device != "cpu":
        fallback = f"{target.device} could not be simulated here ({why}): placement and kernels were not checked"
        with Child() as second:
            second.tell(request(job.cfg, target, seconds=seconds) | {"device": "cpu"})
            answer, why = second.answer()
    if answer is None:
        answer = {"findings": [], "unknown": f"the simulation ended: {why}"}
    refuse(Problem.of(problem) for problem in answer.get("problems", ()))
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
