"""`try`: runs a change of the configuration or the code with as many seeds as it takes, and keeps it if it is better.

First `plan` says whether it would run. The runs are a sweep below multirun/tries/, tries.py decides, and a line in
tries.jsonl records what was tried, with which code, and the result.
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

from runner.command import Arguments, Facts
from runner.config import override_errors, validate
from runner.config.compose import composed_with, composer, sweep_context
from runner.config.identity import changes, chosen, key_of, quoted
from runner.errors import Problem, RunnerError, refuse, without_password
from runner.experiment import provenance
from runner.experiment.terminal import say, short
from runner.runs import find
from runner.sweep import hydra_plugins
from runner.sweep.jobs.prepare import SWEEP_PREFIXES
from runner.sweep.report import tables
from runner.sweep.report.results import Goal
from runner.tools import compare, tries
from runner.tools.tries import Decision, Side, measure
from runner.tracking.journal_reader import read_events

#: the length of a run, by what ends it: both sides have the same
LENGTHS = {"seconds": "train.max_seconds", "steps": "train.num_steps", "epochs": "train.num_epochs"}
#: settings of a sweep that a try makes itself
SWEEP_KEYS = (
    *("sweep.resume", "sweep.retry", "sweep.until", "sweep.max_seeds", "sweep.zip"),
    *("hydra.sweep.dir", "hydra.sweep.subdir"),
)
#: keys that are not part of a kept configuration: each try has its own
RUN_KEYS = ("seed", "hydra.run.", "hydra.sweep.", "sweep.")
#: suffixes of the user's code, and directories where runs write such files
CODE, RUN_FOLDERS = (".py", ".yaml", ".yml"), ("outputs", "multirun")
#: keys that may differ in the same configuration
FREE_KEYS = ("seed", "name", "device", "tracking.")


def try_out(given: Arguments) -> tuple[int, Facts]:
    """Try a change once. Returns the exit code, and the line in the ledger.

    Raises:
        RunnerError: Errors of the user.
        SystemExit: It was stopped.
    """
    began, budget = time.monotonic(), given["--budget"]
    settings = [word for word in given.overrides if word.startswith(SWEEP_PREFIXES)]
    overrides = [word for word in given.overrides if word not in settings]
    _check(given.flags, overrides, settings)
    with _locked():
        lines = tries.read(tries.LEDGER)
        other = find_reference(given["--against"], lines, given["metric="])
        folders = [int(path.name) for path in tries.FOLDER.iterdir() if path.name.isdecimal()]
        number = 1 + max([*(int(line["try"]) for line in lines), *folders], default=0)
        folder = tries.FOLDER / str(number)
        own = Side(f"try {number}", other.flags, _merged(other.words, overrides), other.goal, code())
        by, length, cfg = _composed(own, other, overrides)
        is_new = bool(overrides) or not other.may_add
        if not other.may_add and len(other.values) < tries.LEAST:
            raise RunnerError(_too_few(other, given["--against"]))
        changed = " ".join(overrides) or ("other code" if is_new else "nothing new")
        say(f"try:    {number}, {changed}, against {other.name}")
        say(f"fair:   {LENGTHS[by]}={length} on both sides, by {other.goal.metric} ({other.goal.mode})")
        if is_new and (reason := _plan(cfg, folder)):
            found = Decision(tries.DISCARDED, f"it would not run: {reason}", {}, {})
        else:
            limits = ["sweep.strict=true", f"sweep.batch={'off' if by == 'seconds' else 'auto'}"]
            left = math.inf if budget is None else budget - (time.monotonic() - began)
            limits += [] if budget is None else [f"sweep.max_seconds={max(left, 1)}"]
            found = _decide(own, other, [*limits, *settings], folder, is_new=is_new, is_over=left <= 0)
        fair = {"by": by, "length": length, "budget": budget, "seconds": round(time.monotonic() - began, 3)}
        line = _line(number, overrides, own, other, found) | {"fair": fair, "folder": str(folder)}
        tries.write(tries.LEDGER, line)
    _show(line)
    return int(line["verdict"] != tries.KEPT), line


def _decide(
    own: Side, other: Side, settings: list[str], folder: Path, *, is_new: bool, is_over: bool = False
) -> Decision:
    """Run both sides until it is decided. is_over: the budget is used up, so that nothing is run."""
    # known seeds first; if more can be measured, as many as the last look takes
    seeds = sorted(other.values)
    if other.may_add:
        seeds += [seed for seed in range(len(seeds) + tries.LOOKS[-1]) if seed not in other.values]
        seeds = seeds[: max(len(other.values), tries.LOOKS[-1])]
    size = next((size for size in tries.LOOKS[1:] if size > len(other.values)), tries.LOOKS[-1])

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
        found = measure([own, other] if is_new else [other], look, context, config)
    if own.failed:
        return Decision(tries.DISCARDED, f"a run of it has no value: {own.failed}", found.values, found.against)
    if other.failed and found.verdict != tries.KEPT:
        return replace(found, why=f"{found.why}; a run of {other.name} has no value: {other.failed}")
    return found


def _composed(own: Side, other: Side, overrides: list[str]) -> tuple[str, Any, DictConfig]:
    """Return what ends a run, its value, and the configuration. Raises: RunnerError for errors and unequal lengths."""
    from runner.tools.plan import command  # torch

    compose = composer(own.flags)
    with override_errors.explained(overrides, compose=compose, check=command.check):
        before, now = (composed_with(compose, side.words) for side in (other, own))
    problems = []
    for key in LENGTHS.values():
        was, asked = validate.value(before, key), validate.value(now, key)
        if asked != was:
            problem = f"{other.name} has {key}={was}, and longer training is not a better configuration"
            fix = f"use `{key}={was}`, or make a separate run with `{key}={asked}` and name it after `--against`"
            problems.append(Problem(f"{key}={asked}", problem, fix))
    refuse(problems)
    by = next(name for name, key in LENGTHS.items() if validate.value(now, key) is not None)
    return by, validate.value(now, LENGTHS[by]), now


def _plan(cfg: DictConfig, folder: Path) -> str:
    from runner.inspection.findings import CERTAIN
    from runner.tools.plan import command  # torch
    from runner.tools.plan.report import RUNS_NOT

    cfg.plan.folder = str(folder)
    with redirect_stdout(io.StringIO()) as printed:
        plan = command.plan([command.PlannedJob("", cfg)], search_seconds=0.0)
    say(f"plan:   {plan['verdict']}")
    if plan["verdict"] != RUNS_NOT:
        return ""
    say(printed.getvalue())
    reasons = sorted(plan["findings"], key=lambda finding: finding["grade"] != CERTAIN)
    return str(reasons[0]["what"]) if reasons else "see its plan"


def _merged(before: Sequence[str], words: Sequence[str]) -> list[str]:
    new = {key_of(word) for word in words}
    groups = tuple(f"{key}." for key in new if "." not in key)
    left = [word for word in before if key_of(word) not in new and not key_of(word).startswith(groups)]
    added = {key_of(word) for word in before if word.startswith("+")}  # keys that are in no file of conf/
    return [*left, *(f"+{word}" if word.partition("=")[0] in added else word for word in words)]


def _check(flags: Sequence[str], overrides: Sequence[str], settings: Sequence[str]) -> None:
    problem = "a try has the configuration of what it is tried against"
    problems = [Problem(flag, problem, "use `KEY=VALUE` for what the try changes") for flag in flags]
    problem = "a try takes the seeds of what it is tried against, and more if need be"
    problems += [Problem(word, problem, "leave `seed` out") for word in overrides if key_of(word) == "seed"]
    problem = "a try starts its own sweep, which adds seeds until it is decided"
    own = [word for word in settings if key_of(word) in SWEEP_KEYS]
    refuse([*problems, *(Problem(word, problem, f"leave `{key_of(word)}` out") for word in own)])


def _too_few(other: Side, against: str) -> Problem:
    has = f"{other.name} has {len(other.values)} seeds, and fewer than {tries.LEAST} keep nothing"
    problem = f"{has}; more can't be measured, as the code here is not the code of that run"
    again = f"run `python -m runner try --against {against}` for {tries.LOOKS[1]} seeds, and then try the change"
    return Problem(f"try --against {against}", problem, f"restore the code as it was (`git stash`), {again}")


@contextmanager
def _locked() -> Iterator[None]:
    tries.FOLDER.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(tries.FOLDER / "tries.lock", timeout=0):
            yield
    except Timeout:
        problem = "another process is trying a change in this directory"
        raise RunnerError.of("try", problem, "wait until that has ended") from None


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
        "values": _by_seed(found.values),
        "against": {"name": other.name, "code": dict(other.code), "values": _by_seed(other.values)},
    }


def _by_seed(values: Mapping[int, float]) -> dict[str, float]:
    return {str(seed): values[seed] for seed in sorted(values)}


def _show(line: Mapping[str, Any]) -> None:
    say(f"try {line['try']}:  {line['verdict']}: {line['why']}")
    if (apart := line["difference"]) is not None:
        ours, theirs = line["values"], line["against"]["values"]
        a, b = (tables.value(sum(side[seed] for seed in ours) / len(ours)) for side in (ours, theirs))
        interval = f", {apart['low']:+.3g} to {apart['high']:+.3g}" if apart["low"] is not None else ""
        figures = f"{apart['mean']:+.3g}{interval}, p {apart['p_value']:.2g}"
        say(f"        {line['metric']} {a} compared with {b}: {figures}")
    say(f"ledger  {tries.LEDGER}")


def find_reference(against: str, lines: Sequence[Mapping[str, Any]], metric: str | None) -> Side:
    """Return what a try is compared with.

    Args:
        against: `best`, a run (directory, id or `last`), a sweep, or SWEEP:KEY=VALUE.
        lines: The ledger.
        metric: What to compare by (None: what that side is judged by).

    Raises:
        RunnerError: Nothing to compare with, or no values in it.
    """
    if against != "best":
        return _side_of_runs(against, lines, metric)
    line = tries.best(lines)
    if line is None and not lines:
        problem = "no change has been kept here yet, and a try needs a run to compare with"
        raise RunnerError.of("try --against best", problem, "use `--against last`, or the directory of a run")
    if line is None:
        return _side_of_runs(str(lines[-1]["against"]["name"]), lines, metric or str(lines[-1]["metric"]))
    goal = Goal(line["metric"], line["mode"])
    if metric not in (None, goal.metric):
        problem = f"the best try is the best by {goal.metric}"
        raise RunnerError.of(f"try metric={metric}", problem, f"begin again with `--against RUN metric={metric}`")
    name, made = f"try {line['try']}", line["code"]
    values = tries.by_seed(line["values"]) | tries.known_of(name, made, lines)
    return Side(name, list(line["flags"]), list(line["configuration"]), goal, made, values, may_add=made == code())


def _side_of_runs(word: str, lines: Sequence[Mapping[str, Any]], metric: str | None) -> Side:
    verb = "try --against"
    found = compare.one(word, verb=verb)
    goals = [compare.goal_of(metric, found.goals)] if metric else found.goals
    reached = found.values(goals[0]) if goals else {}
    values = {place: value for place, value in reached.items() if math.isfinite(value)}  # else other seeds are tried
    if not values:
        problem = f"`{word}` has no {metric or 'metric by which a best was kept'}"
        raise RunnerError.of(f"{verb} {word}", problem, "use `metric=val/loss`, or another run")
    if len({fold for _, fold in values}) > 1:
        fold = next((each.keys["data.fold"] for each in found.results if "data.fold" in each.keys), "0")
        problem = f"the jobs of `{word}` have several folds, and a try compares seeds"
        way = f"python -m runner {verb} {shlex.quote(f'{word}:data.fold={fold}')}"
        raise RunnerError.suggest(f"{verb} {word}", problem, [way])
    sweep = compare.sweep_folder(word if Path(word).exists() else word.partition(":")[0])
    folder = (sweep / found.results[0].folder if sweep else find.find(word, verb=verb)).absolute()
    flags, words = _words_of(folder)
    here, made = code(), _code_of(folder)
    made["files"] = here["files"]  # which no run records
    name = word if sweep else short(folder)
    known = {seed: value for (seed, _), value in values.items()} | tries.known_of(name, made, lines)
    return Side(name, flags, words, goals[0], made, known, may_add=made == here)


def _words_of(folder: Path) -> tuple[list[str], list[str]]:
    """Return the flags and overrides of a run's configuration: as typed, if they still mean the same; else its rerun.yaml."""
    typed, settings = folder / ".hydra/overrides.yaml", folder / ".hydra/hydra.yaml"
    rerun = ["-cd", str(folder), "-cn", "rerun"]
    if not (typed.is_file() and settings.is_file()):
        return rerun, []
    if OmegaConf.select(OmegaConf.load(settings), "job.config_name", default="") not in ("config", ""):
        return rerun, []
    overrides = OmegaConf.to_container(OmegaConf.load(typed), resolve=False)
    assert isinstance(overrides, list)
    words = [str(word) for word in overrides if not str(word).lstrip("+").startswith(RUN_KEYS)]
    try:
        now = chosen(composed_with(composer([]), words))
    except Exception:  # conf/ has changed since
        return rerun, []
    then = chosen(OmegaConf.load(folder / "rerun.yaml"))  # type: ignore[arg-type]
    return (rerun, []) if any(not key.startswith(FREE_KEYS) for key in changes(then, now)) else ([], words)


def code() -> dict[str, str | None]:
    """Return the commit, a digest of the changes, and one of the files that git does not track; None for what is missing."""
    git, root = provenance.git_state(), Path.cwd()
    listed = provenance.run_git("ls-files", "--others", "--exclude-standard", "-z") if git is not None else None
    python_files, conf_files = map(str, root.glob("*.py")), map(str, root.glob("conf/**/*"))
    names = listed.split("\0") if listed is not None else [*python_files, *conf_files]
    own = [root / name for name in sorted(names) if name.endswith(CODE) and Path(name).parts[0] not in RUN_FOLDERS]
    texts = [f"{path.relative_to(root)}\0".encode() + path.read_bytes() for path in own if path.is_file()]
    diff = provenance.diff_without_secrets(git.diff) if git is not None else ""
    return {
        "git_commit": git.commit if git is not None else None,
        "diff": provenance.digest(diff.encode()) if diff else None,
        "files": provenance.digest(b"\0".join(texts)) if texts else None,
    }


def _code_of(folder: Path) -> dict[str, Any]:
    """Return what a run has recorded of its code, as `code` does."""
    starts = [event for event in read_events(folder) if event["kind"] == "start"]
    diff = folder / "git.diff"
    commit = starts[-1]["tags"].get("git_commit") if starts else None
    return {
        "git_commit": commit,
        "diff": provenance.digest(diff.read_bytes()) if diff.is_file() and diff.stat().st_size else None,
    }
