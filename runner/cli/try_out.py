"""`python -m runner try`: runs a change of a configuration for as many seeds as it takes, and keeps it where it is better.

The plan says first whether it would run. Its runs are a sweep below multirun/tries/, sweep/tries.py decides, and a line in
tries.jsonl says what was tried, with which code, and with what result.
"""

from __future__ import annotations

import io
import math
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from omegaconf import DictConfig, OmegaConf

from runner.cli import compare
from runner.config import override_errors, validate
from runner.config.compose import composed_with, composer, sweep_context
from runner.config.identity import changes, chosen, key_of, quoted
from runner.errors import Problem, RunnerError, refuse, without_password
from runner.experiment.provenance import code, digest
from runner.experiment.terminal import say, short
from runner.runs import find
from runner.sweep import hydra_plugins, tries
from runner.sweep.jobs.prepare import OF_THE_SWEEP
from runner.sweep.report import number_format
from runner.sweep.report.ranking import Goal
from runner.sweep.tries import Decision
from runner.sweep.trying import Side, measure
from runner.tracking.journal_reader import read_events

#: what says how long a run is, by what ends it: both sides have the same
LENGTHS = {"seconds": "train.max_seconds", "steps": "train.num_steps", "epochs": "train.num_epochs"}


#: of a sweep's settings, those that a try makes itself
ITS_OWN = (
    "sweep.resume",
    "sweep.retry",
    "sweep.until",
    "sweep.max_seeds",
    "sweep.zip",
    "hydra.sweep.dir",
    "hydra.sweep.subdir",
)


def try_out(
    flags: Sequence[str], overrides: list[str], *, budget: float | None, against: str, metric: str | None
) -> dict[str, Any]:
    """One try; returns its line in the ledger. budget: seconds for all of it. against: see reference().

    Raises: RunnerError for mistakes; SystemExit when it was stopped.
    """
    began = time.monotonic()
    settings = [word for word in overrides if word.startswith(OF_THE_SWEEP)]
    overrides = [word for word in overrides if word not in settings]
    _refuse(flags, overrides, settings)
    with _alone():
        lines = tries.read(tries.LEDGER)
        other = reference(against, lines, metric)
        number = _number(lines)
        folder = tries.FOLDER / str(number)
        own = Side(f"try {number}", other.flags, _merged(other.words, overrides), other.goal, code())
        by, length, cfg = _composed(own, other, overrides)
        is_new = bool(overrides) or not other.may_add
        if not other.may_add and len(other.values) < tries.LEAST:
            raise RunnerError(_too_few(other, against))
        say(
            f"try:    {number}, {' '.join(overrides) or ('other code' if is_new else 'nothing new')}, against {other.name}"
        )
        say(f"fair:   {LENGTHS[by]}={length} on both sides, by {other.goal.metric} ({other.goal.mode})")
        if is_new and (refused := _refused(cfg, folder)):
            found = Decision(tries.DISCARDED, f"it would not run: {refused}", {}, {})
        else:
            left = None if budget is None else budget - (time.monotonic() - began)
            limits = ["sweep.strict=true", f"sweep.batch={'off' if by == 'seconds' else 'auto'}"]
            limits += [] if left is None else [f"sweep.max_seconds={max(left, 1)}"]
            is_over = left is not None and left <= 0  # the plan took it all
            found = _found(own, other, [*limits, *settings], folder, is_new=is_new, is_over=is_over)
        fair = {"by": by, "length": length, "budget": budget, "seconds": round(time.monotonic() - began, 3)}
        line = _line(number, overrides, own, other, found) | {"fair": fair, "folder": str(folder)}
        tries.write(tries.LEDGER, line)
    _show(line)
    return line


def _found(
    own: Side, other: Side, settings: list[str], folder: Path, *, is_new: bool, is_over: bool = False
) -> Decision:
    seeds = _seeds(other)
    size = next((size for size in tries.LOOKS[1:] if size > len(other.values)), tries.LOOKS[-1])
    sides = [own, other] if is_new else [other]

    def look(is_over: bool) -> Decision | list[int]:
        if is_new:
            lost, is_over = own.lost | other.lost, is_over or bool(own.failed)
            return tries.look(own.goal, seeds, own.values, other.values, lost=lost, is_over=is_over)
        if is_over or all(seed in other.values for seed in seeds[:size]):
            return Decision(tries.KEPT, f"the beginning, with {len(other.values)} seeds", other.values, other.values)
        return seeds[:size]

    if is_over and isinstance(decided := look(True), Decision):
        return decided
    place = f"hydra.sweep.dir={quoted(str(folder.absolute()))}"
    with sweep_context(own.flags, [*own.words, *settings, place]) as (context, config):
        refuse(hydra_plugins.part_problems(config.hydra))
        found = measure(sides, look, context, config)
    if own.failed:
        return Decision(tries.DISCARDED, f"a run of it has no value: {own.failed}", found.values, found.against)
    if other.failed and found.verdict != tries.KEPT:
        return replace(found, why=f"{found.why}; a run of {other.name} has no value: {other.failed}")
    return found


def _seeds(other: Side) -> list[int]:
    """Those that are known first; where more may be measured, as many as there are looks for."""
    known = sorted(other.values)
    new = [seed for seed in range(len(known) + tries.LOOKS[-1]) if seed not in other.values]
    return [*known, *new][: max(len(known), tries.LOOKS[-1])] if other.may_add else known


def _composed(own: Side, other: Side, overrides: list[str]) -> tuple[str, Any, DictConfig]:
    """What ends a run, the value of that, and the try's configuration. Raises: RunnerError for mistakes, and unequal lengths."""
    from runner.plan import command  # torch

    compose = composer(own.flags)
    with override_errors.explained(overrides, compose=compose, check=command.check):
        before, now = (composed_with(compose, side.words) for side in (other, own))
    problems = []
    for key in LENGTHS.values():
        was, asked = validate.value(before, key), validate.value(now, key)
        if asked != was:
            problem = f"{other.name} has {key}={was}, and longer training is not a better configuration"
            fix = f"{key}={was}; or a run of its own with {key}={asked}, and try --against that"
            problems.append(Problem(f"{key}={asked}", problem, fix))
    refuse(problems)
    by = next(name for name, key in LENGTHS.items() if validate.value(now, key) is not None)
    return by, validate.value(now, LENGTHS[by]), now


def _refused(cfg: DictConfig, folder: Path) -> str:
    from runner.inspection.findings import CERTAIN
    from runner.plan import command  # torch
    from runner.plan.report import RUNS_NOT

    cfg.plan.folder = str(folder)
    with redirect_stdout(io.StringIO()) as said:
        plan = command.plan([command.Job("", cfg)], search_seconds=0.0)
    say(f"plan:   {plan['verdict']}")
    if plan["verdict"] != RUNS_NOT:
        return ""
    say(said.getvalue())
    reasons = sorted(plan["findings"], key=lambda finding: finding["grade"] != CERTAIN)
    return str(reasons[0]["what"]) if reasons else "see its plan"


def _merged(before: Sequence[str], words: Sequence[str]) -> list[str]:
    new = {key_of(word) for word in words}
    files = tuple(f"{key}." for key in new if "." not in key)
    left = [word for word in before if key_of(word) not in new and not key_of(word).startswith(files)]
    added = {key_of(word) for word in before if word.startswith("+")}  # which no file of conf/ has
    return [*left, *(f"+{word}" if word.partition("=")[0] in added else word for word in words)]


def _refuse(flags: Sequence[str], overrides: Sequence[str], settings: Sequence[str]) -> None:
    problem = "a try has the configuration of what it is tried against"
    problems = [Problem(flag, problem, "use `KEY=VALUE` for what the try changes") for flag in flags]
    problem = "a try takes the seeds of what it is tried against, and more if need be"
    problems += [Problem(word, problem, "the same without seed=") for word in overrides if key_of(word) == "seed"]
    problem = "a try is a sweep of its own, which adds seeds until it is decided"
    problems += [
        Problem(word, problem, f"the same without {key_of(word)}=") for word in settings if key_of(word) in ITS_OWN
    ]
    refuse(problems)


def _too_few(other: Side, against: str) -> Problem:
    has = f"{other.name} has {len(other.values)} seeds, and fewer than {tries.LEAST} keep nothing"
    problem = f"{has}; more can't be measured, as the code here is not the code of that run"
    fix = f"the code as it was (git stash), and python -m runner try --against {against}, for {tries.LOOKS[1]} seeds; then the change"
    return Problem(f"try --against {against}", problem, fix)


@contextmanager
def _alone() -> Iterator[None]:
    tries.FOLDER.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(tries.FOLDER / "tries.lock", timeout=0):
            yield
    except Timeout:
        raise RunnerError(
            Problem("try", "another process is trying a change in this folder", "wait until that has ended")
        ) from None


def _number(lines: Sequence[Mapping[str, Any]]) -> int:
    folders = [int(path.name) for path in tries.FOLDER.iterdir() if path.name.isdecimal()]
    return 1 + max([int(line["try"]) for line in lines] + folders, default=0)


def _line(number: int, overrides: Sequence[str], own: Side, other: Side, found: Decision) -> dict[str, Any]:
    return {
        "try": number,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "verdict": found.verdict,
        "why": found.why,
        "metric": own.goal.metric,
        "mode": own.goal.mode,
        "difference": asdict(found.difference) if found.difference is not None else None,
        "words": list(map(without_password, overrides)),
        "configuration": list(map(without_password, own.words)),
        "flags": own.flags,
        "code": dict(own.code),
        "values": _texts(found.values),
        "against": {"name": other.name, "code": dict(other.code), "values": _texts(other.values)},
    }


def _texts(values: Mapping[int, float]) -> dict[str, float]:
    return {str(seed): values[seed] for seed in sorted(values)}


def _show(line: Mapping[str, Any]) -> None:
    say(f"try {line['try']}:  {line['verdict']}: {line['why']}")
    if (apart := line["difference"]) is not None:
        theirs = [line["against"]["values"][seed] for seed in line["values"]]
        a, b = (number_format.value(sum(side) / len(side)) for side in (list(line["values"].values()), theirs))
        interval = f", {apart['low']:+.3g} to {apart['high']:+.3g}" if apart["low"] is not None else ""
        say(f"        {line['metric']} {a} beside {b}: {apart['mean']:+.3g}{interval}, p {apart['p_value']:.2g}")
    say(f"ledger  {tries.LEDGER}")


#: what a configuration is kept without: it is each try's own
NOT_KEPT = ("seed", "hydra.run.", "hydra.sweep.", "sweep.")
#: where these differ, it is the same configuration
FREE = ("seed", "name", "device", "tracking.")


def reference(against: str, lines: Sequence[Mapping[str, Any]], metric: str | None) -> Side:
    """against: `best`, a run's folder, its id, `last`, a sweep, or SWEEP:KEY=VALUE. lines: the ledger's.

    Raises: RunnerError where there is none, or it has no values.
    """
    if against != "best":
        return _of_runs(against, lines, metric)
    line = tries.best(lines)
    if line is None and not lines:
        problem = "no change has been kept here yet, and a try needs a run to compare with"
        raise RunnerError(Problem("try --against best", problem, "try --against last, or the folder of a run"))
    if line is None:
        return _of_runs(str(lines[-1]["against"]["name"]), lines, metric or str(lines[-1]["metric"]))
    goal = Goal(line["metric"], line["mode"])
    if metric not in (None, goal.metric):
        problem = f"the best try is the best by {goal.metric}"
        raise RunnerError(Problem(f"try metric={metric}", problem, f"begin again with `--against RUN metric={metric}`"))
    name, made = f"try {line['try']}", line["code"]
    values = tries.by_seed(line["values"]) | tries.known_of(name, made, lines)
    return Side(name, list(line["flags"]), list(line["configuration"]), goal, made, values, may_add=made == code())


def _of_runs(word: str, lines: Sequence[Mapping[str, Any]], metric: str | None) -> Side:
    asked = f"try --against {word}"
    found = compare.one(word, verb="try --against")
    goals = [compare.goal_of(metric, found.goals)] if metric else found.goals
    reached = found.values(goals[0]) if goals else {}
    # others are tried with other seeds
    values = {place: value for place, value in reached.items() if math.isfinite(value)}
    if not values:
        problem = f"it has no {metric or 'metric by which a best was kept'}"
        raise RunnerError(Problem(asked, problem, "metric=val/loss, or another run"))
    if len({fold for _, fold in values}) > 1:
        fold = next((each.keys["data.fold"] for each in found.results if "data.fold" in each.keys), "0")
        fix = f"try --against {shlex.quote(f'{word}:data.fold={fold}')}"
        raise RunnerError(Problem(asked, "its jobs have several folds, and a try compares seeds", fix))
    sweep = compare.sweep_folder(word if Path(word).exists() else word.partition(":")[0])
    folder = sweep / found.results[0].folder if sweep else find.find(word, verb="try --against")
    flags, words = _words_of(folder.absolute())
    here, made = code(), _code_of(folder)
    made["files"] = here["files"]  # of these no run notes anything
    name = word if sweep else short(folder.absolute())
    known = {seed: value for (seed, _), value in values.items()} | tries.known_of(name, made, lines)
    return Side(name, flags, words, goals[0], made, known, may_add=made == here)


def _words_of(folder: Path) -> tuple[list[str], list[str]]:
    """Flags and words that compose a run's configuration: those that were typed, where they say the same now; else its file."""
    typed, settings = folder / ".hydra/overrides.yaml", folder / ".hydra/hydra.yaml"
    itself = ["-cd", str(folder), "-cn", "rerun"]
    if not (typed.is_file() and settings.is_file()):
        return itself, []
    if OmegaConf.select(OmegaConf.load(settings), "job.config_name", default="") not in ("config", ""):
        return itself, []
    given = OmegaConf.to_container(OmegaConf.load(typed), resolve=False)
    assert isinstance(given, list)
    words = [str(word) for word in given if not str(word).lstrip("+").startswith(NOT_KEPT)]
    try:
        now = chosen(composed_with(composer([]), words))
    except Exception:  # conf/ has changed since
        return itself, []
    then = chosen(OmegaConf.load(folder / "rerun.yaml"))  # type: ignore[arg-type]
    return (itself, []) if any(not key.startswith(FREE) for key in changes(then, now)) else ([], words)


def _code_of(folder: Path) -> dict[str, Any]:
    """What a run has noted of its code, as provenance.code() has it."""
    starts = [event for event in read_events(folder) if event["kind"] == "start"]
    diff = folder / "git.diff"
    commit = starts[-1]["tags"].get("git_commit") if starts else None
    return {"git_commit": commit, "diff": digest(diff.read_bytes()) if diff.is_file() and diff.stat().st_size else None}
