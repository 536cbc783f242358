"""Finds what a try is compared with: the last try that was kept, or a run or a sweep's jobs, with its words, values and code.

For cli/try_out.py.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from runner.cli import compare
from runner.config.compose import composed_with, composer, hydra_session
from runner.config.identity import changes, chosen
from runner.errors import Problem, RunnerError
from runner.experiment.provenance import code, digest
from runner.experiment.terminal import short
from runner.runs import find
from runner.sweep import tries
from runner.sweep.report.ranking import Goal
from runner.sweep.trying import Side
from runner.tracking.journal_reader import read_events

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
        with hydra_session(["runner"]):
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
