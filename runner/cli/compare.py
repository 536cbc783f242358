"""`python -m runner compare A B`: compares two configurations over their seeds, or all of a sweep with its best one."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from runner.config.trust import check_folder
from runner.errors import Problem, RunnerError, nearest
from runner.experiment.summary import read_summary
from runner.experiment.terminal import Terminal
from runner.runs import find
from runner.sweep.jobs import ledger
from runner.sweep.report import number_format
from runner.sweep.report.comparisons import (
    Comparison,
    Configuration,
    against_best,
    as_values,
    compared,
    num_looks,
    words_of,
)
from runner.sweep.report.ranking import Goal, find_goals
from runner.sweep.report.results import Result, as_keys, read_results
from runner.sweep.report.seeds import configurations
from runner.sweep.report.stored import read_stored
from runner.tasks.metric_names import is_rising
from runner.tracking import stores
from runner.tracking.ack import read_ack

__all__ = ["as_values", "compare", "show"]

ID = re.compile(r"[0-9a-f]{32}")  # of a run in MLflow
#: of KEY=VALUE,KEY=VALUE: what stands in quotes, brackets, and the commas behind which another key begins
TOKEN = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[\[({]|[\])}]|,(?=[+~]?[\w./@-]+=)""")
PIPE_WIDTH = 200  # of a table in a pipe, unless COLUMNS is set
FORMS = "compare SWEEP; or compare A B, each a run, a sweep or SWEEP:KEY=VALUE,... for some of its jobs"


def compare(words: Sequence[str], *, metric: str | None = None, uri: str = stores.USUAL) -> list[Comparison]:
    """words: one sweep, whose configurations stand beside its best, or A and B. metric: None for all that both have.

    uri: of the store that is asked for an id that is of nothing here.
    Raises: RunnerError for what is no run and no sweep, and for what has nothing in common.
    """
    if len(words) == 1:
        return _of_a_sweep(words[0], metric, uri)
    if len(words) != 2:
        raise RunnerError(
            Problem(f"compare {' '.join(words)}".strip(), "compare takes two runs or sweeps, or one sweep", FORMS)
        )
    a, b = (one(word, uri) for word in words)
    names = _names(a.name, b.name, words)
    looks = max(a.num_looks, b.num_looks)
    found = [compared(a, b, goal, names, num_comparisons=looks) for goal in _metrics(a, b, metric)]
    together = [each for each in found if each is not None]
    if not together:
        asked = f"compare {' '.join(words)}{f' metric={metric}' if metric else ''}"
        shared = [name for name in _metric_names(a) if name in _metric_names(b)]
        problem = f"they have no {metric} in common" if metric else "they have no metric in common"
        hits = nearest(metric, shared) if metric else []
        fix = " or ".join(f"metric={name}" for name in hits or shared)
        raise RunnerError(Problem(asked, problem, fix or "two finished runs or sweeps with a metric in common"))
    return together


def show(found: Sequence[Comparison]) -> None:
    """Print A and B with a row for each metric; for a sweep, its best with a row for each other configuration."""
    console = Terminal(soft_wrap=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_WIDTH
    of_two = len({(each.a, each.b) for each in found}) == 1
    first = found[0]
    named = [("A", first.a), ("B", first.b)]
    if not of_two:
        mean = max(found, key=lambda each: each.difference.n).mean_a  # over the most seeds
        named = [("A", f"{first.a}, the best {first.metric}: {number_format.value(mean)}")]
    for letter, name in named:
        console.print(Text(f"{letter}  {name}"), soft_wrap=True)
    titles = (
        ["", "A", "B", "A - B", "95 %", "p", "n", "A is"] if of_two else ["B", "", "A - B", "95 %", "p", "n", "A is"]
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, title in enumerate(titles):
        table.add_column(title, justify="left" if number in (0, len(titles) - 1) else "right", overflow="fold")
    for each in found:
        apart = each.difference
        interval = "" if apart.low is None or apart.high is None else f"{_short(apart.low)} to {_short(apart.high)}"
        means = [number_format.value(each.mean_a), number_format.value(each.mean_b)]
        cells = [each.metric, *means] if of_two else [each.b, means[1]]
        cells += [_short(apart.mean), interval, f"{apart.p_value:.2g}", str(apart.n), words_of(each)]
        table.add_row(*(Text(cell, style="bold" if apart.is_decided else "") for cell in cells))
    console.print(table)
    if any(not each.difference.is_paired for each in found):
        console.print("no seed is on both sides: not paired, which takes more seeds", soft_wrap=True)


def _of_a_sweep(word: str, metric: str | None, uri: str) -> list[Comparison]:
    results, goals, times = _read(word, uri)
    groups = configurations(results)
    goal = goal_of(metric, goals) if metric is not None else goals[0] if goals else None
    known = sorted({name for each in results for name in each.metrics} | {each.metric for each in goals})
    if metric is not None and metric not in known:
        fix = " or ".join(f"metric={name}" for name in nearest(metric, known) or known) or "a sweep with finished jobs"
        raise RunnerError(Problem(f"compare {word} metric={metric}", f"no job of it has a metric {metric!r}", fix))
    found = against_best(groups, goal, num_looks=times) if goal is not None else []
    if not found:
        problem = f"it has {len(groups)} configuration{'' if len(groups) == 1 else 's'} with a finished job and a value"
        fix = "compare A B, or a sweep over two configurations and some seeds"
        tests = [name for name in known if name.startswith("test/")]
        if goal is not None and len(groups) > 1 and tests:  # there were no rows to validate on
            problem = f"fewer than two of its configurations have a {goal.metric}"
            fix = " or ".join(f"compare {shlex.quote(word)} metric={name}" for name in tests)
        raise RunnerError(Problem(f"compare {word}", problem, fix))
    return found


def one(word: str, uri: str = stores.USUAL, *, verb: str = "compare") -> Configuration:
    """The run, or the jobs of a sweep, that a word names. Raises: RunnerError where it is not one configuration."""
    results, goals, times = _read(word, uri, verb)
    groups = configurations(results)
    if len(groups) != 1:
        names = [name for name in groups if name != "all"]
        fix = "a run that has finished"
        if names:
            pairs = [f"{key}={value}" for key, value in groups[names[0]][0].keys.items()]
            apart = [pair for pair in pairs if pair in names[0]]  # the name has them one after the other
            fix = f"{verb} {shlex.quote(word.partition(':')[0] + ':' + ','.join(apart))} ..."
        problem = f"it has {len(groups)} configurations: {', '.join(names)}" if names else "no job of it has finished"
        raise RunnerError(Problem(f"{verb} {word}", problem, fix))
    (results_of_it,) = groups.values()
    return Configuration(word, tuple(results_of_it), goals, times)


def _read(word: str, uri: str, verb: str = "compare") -> tuple[list[Result], tuple[Goal, ...], int]:
    place, chosen = _place_and_jobs(word)
    folder = sweep_folder(place)
    objectives: tuple[dict[str, str], ...] = ()
    max_seeds = None
    if is_of_a_store(word):
        results, max_seeds = read_stored(place, uri=uri)
    elif folder is None:
        run = find.find(place, verb=verb)
        state = str(read_summary(run).get("status") or "running")
        job = ledger.Job(0, (), run.name, state=state, folder_name=run.name)
        results = read_results(ledger.Sweep(run.parent, "", 0, (), jobs={0: job}))
    else:
        check_folder(folder)
        sweep = ledger.read(folder)
        results, objectives, max_seeds = read_results(sweep), sweep.objectives, sweep.max_seeds
    if chosen:
        results = _chosen(results, chosen, f"{verb} {word}")
    return results, find_goals(objectives, results), num_looks(max_seeds)


def is_of_a_store(word: str) -> bool:
    """Whether it is an id in MLflow that is of nothing here."""
    place, _ = _place_and_jobs(word)
    if not ID.fullmatch(place):
        return False
    return sweep_folder(place) is None and not Path(place).exists() and not find.with_id(place)


def _place_and_jobs(word: str) -> tuple[str, str]:
    place, _, chosen = word.partition(":") if not os.path.exists(word) else (word, "", "")  # noqa: PTH110  # likewise
    return place, chosen


def sweep_folder(place: str) -> Path | None:
    """The folder of a sweep: by its path, its id in MLflow, or `last` where the newest run is a job of it."""
    folder = Path(place)
    if os.path.isfile(folder / ledger.FILE):  # noqa: PTH113  # Path's own raises for a name of 300 letters
        return folder
    if place == "last":
        newest = find.newest_first()
        return newest[0].parent if newest and (newest[0].parent / ledger.FILE).is_file() else None
    if os.path.exists(folder):  # noqa: PTH110  # likewise
        return None
    sweeps = [path.parent for path in Path(find.ROOTS[1]).glob(f"**/{ledger.FILE}")]
    return next((each for each in sweeps if (read_ack(each).run_id or "").startswith(place)), None) if place else None


def _chosen(results: list[Result], chosen: str, asked: str) -> list[Result]:
    pairs = _pairs(chosen)
    wanted = (
        dict(pair.partition("=")[::2] for pair in pairs),
        as_keys(tuple(pairs)),
    )  # as it is shown, and as it was typed
    found = [each for each in results if any(_has(each, keys) for keys in wanted)]
    if not found:
        known = list(dict.fromkeys(f"{key}={value}" for each in results for key, value in each.keys.items()))
        near = [hit for pair in pairs for hit in nearest(pair, known)] or known[:6]
        raise RunnerError(Problem(asked, "no job of it has these values", " or ".join(near) or "no :KEY=VALUE"))
    return found


def _has(result: Result, keys: Mapping[str, str]) -> bool:
    return all(key in result.keys and _is_same(result.keys[key], value) for key, value in keys.items())


def _is_same(one: str, other: str) -> bool:
    try:
        return one == other or float(one) == float(other)
    except ValueError:
        return False


def _pairs(chosen: str) -> list[str]:
    found, begin, depth = [], 0, 0
    for token in TOKEN.finditer(chosen):
        if token[0] == "," and depth == 0:
            found.append(chosen[begin : token.start()])
            begin = token.end()
        depth += (token[0] in "[({") - (token[0] in "])}")
    return [*found, chosen[begin:]]


def _metrics(a: Configuration, b: Configuration, metric: str | None) -> list[Goal]:
    if metric is not None:
        return [goal_of(metric, (*a.goals, *b.goals))]
    tests = [name for name in _metric_names(a) if name.startswith("test/") and name in _metric_names(b)]
    goals = [goal for goal in a.goals if goal in b.goals or goal.metric in _metric_names(b)]
    return goals + [goal_of(name, ()) for name in tests]


def goal_of(metric: str, known: Sequence[Goal]) -> Goal:
    own = Goal(metric, "max" if is_rising(metric) else "min")
    return next((goal for goal in known if goal.metric == metric), own)


def _metric_names(found: Configuration) -> list[str]:
    return list(dict.fromkeys(name for result in found.results for name in result.metrics))


def _names(a: str, b: str, words: Sequence[str]) -> tuple[str, str]:
    (place, _, own), (other, _, others) = a.partition(":"), b.partition(":")
    return (own, others) if place == other and own and others else (a, b)


def _short(value: float) -> str:
    return f"{value:+.3g}"
