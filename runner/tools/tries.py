"""What `try` decides by: the seeds that are compared, look by look, the sweep that runs them, and the ledger of all tries."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from runner.experiment.provenance import TRIES
from runner.sweep.grid import add_jobs
from runner.sweep.jobs.ledger import Sweep
from runner.sweep.jobs.prepare import PreparedJob, name_of
from runner.sweep.report.results import Goal, read_results
from runner.sweep.report.significance import ALPHA, Difference, difference
from runner.sweep.scheduler import Rounds
from runner.sweep.sweep import Plan, SweepContext, run_sweep

#: below the current directory: the ledger, and a directory for each try with its sweep
FOLDER = TRIES
LEDGER = FOLDER / "tries.jsonl"
#: numbers of seeds after which a try is judged; at the first one it can be discarded, but not kept
LOOKS = (4, 12, 24, 48)
#: how often a try without any effect is called better or worse, over all looks; one in 400 is kept
ALPHA_OF_A_TRY = 0.005
#: for significance.difference()
NUM_COMPARISONS = round(ALPHA / ALPHA_OF_A_TRY * (len(LOOKS) - 1))
#: pairs that reach this level if all have one sign: fewer keep nothing
LEAST = 11
KEPT, DISCARDED, UNDECIDED = "kept", "discarded", "undecided"

Values = Mapping[int, float]  # by seed
Words = tuple[str, ...]


@dataclass(frozen=True)
class Decision:
    """The verdict on a try, the reason, and the values of the seeds that both sides have."""

    verdict: str
    why: str
    values: Values
    against: Values
    difference: Difference | None = None


def look(
    goal: Goal, seeds: Sequence[int], ours: Values, theirs: Values, *, lost: Collection[int] = (), is_over: bool = False
) -> Decision | list[int]:
    """Return a decision, or the seeds that both sides need for the next look.

    A try is kept only if the comparison of `compare` says better, at a level at which few are kept by luck. It is
    discarded as soon as it does not look better: an error there costs one try.

    Args:
        goal: The metric to compare by.
        seeds: All possible seeds in their order.
        ours: The values of the try.
        theirs: The values of the other side.
        lost: Seeds with which a run has failed; other seeds take their places.
        is_over: Whether this is the last look.
    """
    seeds = [seed for seed in seeds if seed not in lost]
    shared = [seed for seed in seeds if seed in ours and seed in theirs]
    a, b = {seed: ours[seed] for seed in shared}, {seed: theirs[seed] for seed in shared}
    most = min(len(seeds), LOOKS[-1])
    sizes = [*(size for size in LOOKS if size < most), most]
    wanted = next((size for size in sizes if size > len(shared)), None)
    if len(shared) not in sizes and not is_over and wanted is not None:
        return seeds[:wanted]
    verdict, why = _judged(a, b, goal.mode)
    if verdict == UNDECIDED and wanted is not None and not is_over:
        return seeds[:wanted]
    apart = difference(a, b, num_comparisons=NUM_COMPARISONS)
    return Decision(verdict, why or _left_open(apart, len(shared), most), a, b, apart)


def _judged(ours: Values, theirs: Values, mode: str) -> tuple[str, str]:
    n = len(ours)
    gains = [(ours[seed] - theirs[seed]) * (1 if mode == "max" else -1) for seed in ours]
    if n < LOOKS[0]:
        return UNDECIDED, ""
    if not any(gains):
        return DISCARDED, f"bitwise identical values with {n} seeds"
    if max(gains) <= 0:
        return DISCARDED, f"better with none of {n} seeds"
    if n < LEAST:
        return UNDECIDED, ""
    if sum(gains) <= 0:
        return DISCARDED, f"no better, over {n} seeds"
    apart = difference(ours, theirs, num_comparisons=NUM_COMPARISONS)
    is_better = apart is not None and apart.is_decided
    return (KEPT, f"better, over {n} seeds") if is_better else (UNDECIDED, "")


def _left_open(apart: Difference | None, n: int, most: int) -> str:
    if n >= most:
        more = f": about {apart.more_seeds:,} more would" if apart is not None and apart.more_seeds else ""
        return f"{n} seeds do not decide it{more}"
    return f"the time was up after {n} seeds of both" + (f"; fewer than {LEAST} keep nothing" if n < LEAST else "")


@dataclass
class Side:
    """One of the two that are compared."""

    name: str  # try N, or a run's folder
    flags: list[str]  # of the command line, that find its file
    words: list[str]
    goal: Goal
    code: Mapping[str, Any]
    values: dict[int, float] = field(default_factory=dict)  # by seed
    may_add: bool = True  # its code is here, so that more seeds can be measured
    failed: str = ""  # why a run of it has no value
    lost: set[int] = field(default_factory=set)  # the seeds of such runs

    def jobs(self, seeds: Sequence[int]) -> list[Words]:
        """Return the overrides of jobs for the seeds that are not known yet, if they can be run."""
        return [(*self.words, f"seed={seed}") for seed in seeds if self.may_add and seed not in self.values]


def measure(
    sides: Sequence[Side], look: Callable[[bool], Decision | list[int]], hydra_context: Any, config: DictConfig
) -> Decision:
    """Run the seeds of each look, add the values to the sides, and return the decision.

    Args:
        sides: The try, and what it is compared with.
        look: Takes whether it is the last look; returns a decision, or the seeds that it needs.
        hydra_context: Of a sweep.
        config: The configuration of the sweep.

    Raises:
        RunnerError: Errors of the user.
        SystemExit: It was stopped.
    """
    found = look(False)
    if isinstance(found, Decision):
        return found
    owners: list[Side] = []  # of the jobs, by their numbers
    jobs = _jobs(sides, found, owners)
    if not jobs:
        return _last(look)
    swept = {word.partition("=")[0] for words in jobs for word in set(words) ^ set(jobs[0])} | {"seed"}
    listed = [(words, name_of(words, swept)) for words in jobs]
    given = tuple(sides[0].words)

    def more(context: SweepContext) -> list[PreparedJob]:
        before = _num_known(sides)
        note(context.sweep, owners)
        found = look(False)
        if isinstance(found, Decision) or sides[0].failed or _num_known(sides) == before:
            return []  # no progress: the time limit of a queue ended each job, and would end the next ones too
        return add_jobs(context, _jobs(sides, found, owners), swept)

    plan = Plan(given, listed, lambda context: Rounds(context.prepared, partial(more, context)), adds_seeds=True)
    note(run_sweep(plan, hydra_context, config), owners)
    return _last(look)


def _last(look: Callable[[bool], Decision | list[int]]) -> Decision:
    found = look(True)
    assert isinstance(found, Decision)
    return found


def _jobs(sides: Sequence[Side], seeds: Sequence[int], owners: list[Side]) -> list[Words]:
    found = []
    for side in sides:
        new = side.jobs(seeds)
        owners += [side] * len(new)
        found += new
    return found


def _num_known(sides: Sequence[Side]) -> int:
    return sum(len(side.values) + len(side.lost) for side in sides)


def note(sweep: Sweep, owners: Sequence[Side]) -> None:
    """Fills in what the sweep's jobs have reached, and why one has no value."""
    for result in read_results(sweep):
        side = owners[result.job]
        value = result.value(side.goal.metric)
        if result.state == "finished" and value is not None:
            side.values[result.seed] = value
        elif result.state in ("finished", "failed", "killed"):
            side.lost.add(result.seed)
            side.failed = side.failed or f"seed {result.seed}: {result.error or f'it has no {side.goal.metric}'}"


def read(file: Path) -> list[dict[str, Any]]:
    """Return the tries in their order, without a last line that a kill has cut."""
    text = file.read_text() if file.is_file() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def write(file: Path, line: Mapping[str, Any]) -> None:
    """Add a try; it is on the disk when this returns."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+b") as stream:
        stream.seek(0)
        stream.truncate(stream.read().rfind(b"\n") + 1)  # a kill may have torn off the last one
        stream.write(json.dumps(line).encode() + b"\n")
        stream.flush()
        os.fsync(stream.fileno())


def best(lines: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the last try that was kept."""
    return next((line for line in reversed(lines) if line["verdict"] == KEPT), None)


def known_of(name: str, code: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Return the values by seed that tries have measured of another side. name: `try N` or a directory; code: its own."""
    found: dict[int, float] = {}
    for line in lines:
        if line["against"]["name"] == name and line["against"]["code"] == code:
            found |= by_seed(line["against"]["values"])
    return found


def by_seed(values: Mapping[str, float]) -> dict[int, float]:
    """Return values with numbers for keys, which JSON does not have."""
    return {int(seed): value for seed, value in values.items()}
