"""`compare`: two configurations over their seeds, or every configuration of a sweep with the best one."""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from runner.command import Arguments, Facts
from runner.config.identity import NOT_CHOSEN
from runner.config.trust import check_folder
from runner.errors import RunnerError, nearest
from runner.experiment.summary import Summary
from runner.experiment.terminal import Terminal, text_table
from runner.runs import find
from runner.sweep.jobs import ledger
from runner.sweep.mlflow_parent import MAX_SEEDS
from runner.sweep.report import tables
from runner.sweep.report.report import (
    Comparison,
    Configuration,
    against_best,
    as_values,
    compared,
    configurations,
    num_looks,
    words_of,
)
from runner.sweep.report.results import BestOfJob, Goal, JobResult, as_fold, as_keys, find_goals, read_results
from runner.tasks.metric_names import is_rising
from runner.tracking import mlflow_store, store_uri, stores
from runner.tracking.ack import read_ack

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

#: in KEY=VALUE,KEY=VALUE: quoted texts, brackets, and commas that a key follows
TOKEN = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[\[({]|[\])}]|,(?=[+~]?[\w./@-]+=)""")
COLUMNS = ("A - B", "95 %", "p", "n", "A is")
PIPE_WIDTH = 200  # of a table in a pipe, unless COLUMNS is set
STATES = {"FINISHED": "finished", "RUNNING": "running", "KILLED": "killed", "FAILED": "failed"}
PARENT = "mlflow.parentRunId"
MAX_RUNS = 1000
FORMS = "name a sweep, or name A and B, each a run, a sweep or SWEEP:KEY=VALUE,... for some of its jobs"


def run(given: Arguments) -> Facts:
    found = compare(given.values, metric=given["metric="] or None, uri=stores.named(given.words) or stores.USUAL)
    if not any(map(is_in_store, given.values)):
        stores.note_unused(given.words)
    show(found)
    return {"comparisons": [as_values(each) for each in found]}


def compare(words: Sequence[str], *, metric: str | None = None, uri: str = stores.USUAL) -> list[Comparison]:
    """Compare A and B, or the configurations of one sweep with its best one.

    Args:
        words: Runs or sweeps.
        metric: None for all metrics that both have.
        uri: The store of ids without a directory here.

    Raises:
        RunnerError: An unknown run or sweep, or nothing in common.
    """
    if len(words) == 1:
        return _compare_sweep(words[0], metric, uri)
    if len(words) != 2:
        problem = "compare takes two runs or sweeps, or one sweep"
        raise RunnerError.of(f"compare {' '.join(words)}".strip(), problem, FORMS)
    a, b = (one(word, uri) for word in words)
    names, looks = _names(a.name, b.name), max(a.num_looks, b.num_looks)
    found = [compared(a, b, goal, names, num_comparisons=looks) for goal in _shared_goals(a, b, metric)]
    if comparisons := [each for each in found if each is not None]:
        return comparisons
    asked = f"compare {' '.join(words)}{f' metric={metric}' if metric else ''}"
    shared = [name for name in _metric_names(a) if name in _metric_names(b)]
    ways = [f"metric={name}" for name in (nearest(metric, shared) if metric else []) or shared]
    problem = f"they have no {metric or 'metric'} in common"
    raise RunnerError.suggest(asked, problem, ways, "use two finished runs or sweeps with a metric in common")


def show(found: Sequence[Comparison]) -> None:
    """Print A and B with a row per metric; for a sweep, its best with a row per other configuration."""
    console, first = Terminal(soft_wrap=False), found[0]
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_WIDTH
    is_pair = len({(each.a, each.b) for each in found}) == 1
    if is_pair:
        heads = [f"A  {first.a}", f"B  {first.b}"]
    else:
        mean = max(found, key=lambda each: each.difference.n).mean_a  # over the most seeds
        heads = [f"A  {first.a}, the best {first.metric}: {tables.value(mean)}"]
    for head in heads:
        console.print(Text(head), soft_wrap=True)
    titles = ("", "A", "B", *COLUMNS) if is_pair else ("B", "", *COLUMNS)
    rows = [_row(each, is_pair=is_pair) for each in found]
    console.print(text_table(titles, rows, right=range(1, len(titles) - 1)))
    console.print(f"p by {' and '.join(sorted({each.difference.test for each in found}))}", soft_wrap=True)
    if any(not each.difference.is_paired for each in found):
        console.print("no seed is on both sides: not paired, which takes more seeds", soft_wrap=True)


def _row(each: Comparison, *, is_pair: bool) -> list[Text]:
    apart = each.difference
    interval = "" if apart.low is None or apart.high is None else f"{apart.low:+.3g} to {apart.high:+.3g}"
    a, b = tables.value(each.mean_a), tables.value(each.mean_b)
    cells = [each.metric, a, b] if is_pair else [each.b, b]
    cells += [f"{apart.mean:+.3g}", interval, f"{apart.p_value:.2g}", str(apart.n), words_of(each)]
    return [Text(cell, "bold" if apart.is_decided else "") for cell in cells]


def _compare_sweep(word: str, metric: str | None, uri: str) -> list[Comparison]:
    results, goals, looks = _read(word, uri)
    groups = configurations(results)
    known = sorted({name for each in results for name in each.metrics} | {each.metric for each in goals})
    if metric is not None and metric not in known:
        ways = [f"metric={name}" for name in nearest(metric, known) or known]
        asked, problem = f"compare {word} metric={metric}", f"no job of `{word}` has a metric `{metric}`"
        raise RunnerError.suggest(asked, problem, ways, "use a sweep with finished jobs")
    goal = goal_of(metric, goals) if metric is not None else goals[0] if goals else None
    if goal is not None and (found := against_best(groups, goal, num_looks=looks)):
        return found
    are = "configuration" if len(groups) == 1 else "configurations"
    problem = f"`{word}` has {len(groups)} {are} with a finished job and a value"
    ways = []
    tests = [name for name in known if name.startswith("test/")]
    if goal is not None and len(groups) > 1 and tests:  # without a validation split
        problem = f"fewer than two configurations of `{word}` have `{goal.metric}`"
        ways = [f"python -m runner compare {shlex.quote(word)} metric={name}" for name in tests]
    otherwise = "name A and B, or a sweep over two configurations and some seeds"
    raise RunnerError.suggest(f"compare {word}", problem, ways, otherwise)


def one(word: str, uri: str = stores.USUAL, *, verb: str = "compare") -> Configuration:
    """Return the run, or the jobs of a sweep, that a word names. Raises: RunnerError if it isn't one configuration."""
    results, goals, looks = _read(word, uri, verb)
    groups = configurations(results)
    if len(groups) == 1:
        (of_group,) = groups.values()
        return Configuration(word, tuple(of_group), goals, looks)
    names = [name for name in groups if name != "all"]
    if not names:
        raise RunnerError.of(f"{verb} {word}", f"no job of `{word}` has finished", "use a run that has finished")
    pairs = [f"{key}={value}" for key, value in groups[names[0]][0].keys.items()]
    chosen = ",".join(pair for pair in pairs if pair in names[0])  # the name is made of those that differ
    fix = f"run `{verb} {shlex.quote(word.partition(':')[0] + ':' + chosen)} ...`"
    problem = f"`{word}` has {len(groups)} configurations: {', '.join(names)}"
    raise RunnerError.of(f"{verb} {word}", problem, fix)


def _read(word: str, uri: str, verb: str = "compare") -> tuple[list[JobResult], tuple[Goal, ...], int]:
    place, chosen = _split(word)
    folder = sweep_folder(place)
    objectives: tuple[dict[str, str], ...] = ()
    max_seeds = None
    if is_in_store(word):
        results, max_seeds = read_stored(place, uri=uri)
    elif folder is None:
        run = find.find(place, verb=verb)
        state = Summary.read(run).status or "running"
        job = ledger.Job(0, (), run.name, state=state, folder_name=run.name)
        results = read_results(ledger.Sweep(run.parent, "", 0, (), jobs={0: job}))
    else:
        check_folder(folder)
        sweep = ledger.read(folder)
        results, objectives, max_seeds = read_results(sweep), sweep.objectives, sweep.max_seeds
    if chosen:
        results = _chosen(results, chosen, f"{verb} {word}")
    return results, find_goals(objectives, results), num_looks(max_seeds)


def is_in_store(word: str) -> bool:
    """Return whether it is an MLflow id without a directory here."""
    place, _ = _split(word)
    return find.is_in_store(place) and sweep_folder(place) is None and not Path(place).exists()


def _split(word: str) -> tuple[str, str]:
    place, _, chosen = word.partition(":") if not os.path.exists(word) else (word, "", "")  # noqa: PTH110  # as below
    return place, chosen


def sweep_folder(place: str) -> Path | None:
    """Return the directory of a sweep: its path, its MLflow id, or `last` if the newest run is a job of one."""
    folder = Path(place)
    if os.path.isfile(folder / ledger.FILE):  # noqa: PTH113  # Path's method raises for a name of 300 letters
        return folder
    if place == "last":
        newest = find.newest_first()
        return newest[0].parent if newest and (newest[0].parent / ledger.FILE).is_file() else None
    if not place or os.path.exists(folder):  # noqa: PTH110  # as above
        return None
    sweeps = [path.parent for path in Path(find.ROOTS[1]).glob(f"**/{ledger.FILE}")]
    return next((each for each in sweeps if (read_ack(each).run_id or "").startswith(place)), None)


def _chosen(results: list[JobResult], chosen: str, asked: str) -> list[JobResult]:
    pairs = _pairs(chosen)
    # as keys are shown, and as they were typed
    wanted = dict(pair.partition("=")[::2] for pair in pairs), as_keys(tuple(pairs))
    if found := [each for each in results if any(_has(each, keys) for keys in wanted)]:
        return found
    known = list(dict.fromkeys(f"{key}={value}" for each in results for key, value in each.keys.items()))
    near = [hit for pair in pairs for hit in nearest(pair, known)] or known[:6]
    raise RunnerError.suggest(asked, "no job of the sweep has these values", near, "leave `:KEY=VALUE` out")


def _has(result: JobResult, keys: Mapping[str, str]) -> bool:
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


def _shared_goals(a: Configuration, b: Configuration, metric: str | None) -> list[Goal]:
    if metric is not None:
        return [goal_of(metric, (*a.goals, *b.goals))]
    of_b = _metric_names(b)
    tests = [name for name in _metric_names(a) if name.startswith("test/") and name in of_b]
    return [goal for goal in a.goals if goal in b.goals or goal.metric in of_b] + [goal_of(name, ()) for name in tests]


def goal_of(metric: str, known: Sequence[Goal]) -> Goal:
    """Return the goal of this metric, by default higher or lower as the metric's name says."""
    default = Goal(metric, "max" if is_rising(metric) else "min")
    return next((goal for goal in known if goal.metric == metric), default)


def _metric_names(found: Configuration) -> list[str]:
    return list(dict.fromkeys(name for result in found.results for name in result.metrics))


def _names(a: str, b: str) -> tuple[str, str]:
    (place, _, of_a), (other, _, of_b) = a.partition(":"), b.partition(":")
    return (of_a, of_b) if place == other and of_a and of_b else (a, b)


def read_stored(run_id: str, *, uri: str) -> tuple[list[JobResult], int | None]:
    """Return the run of this id, or the jobs of the sweep and its max_seeds. Imports MLflow (1 s); one request per run.

    Raises:
        RunnerError: When the store does not answer, or has no such run.
    """
    command, problem = f"compare {run_id}", f"there is no directory and no run `{run_id}` here"
    fix = f"name a directory, or the store: `{command} tracking.uri=URI`"
    path = store_uri.sqlite_path(uri)
    if path is not None and not path.is_file():  # opening it would make it
        raise RunnerError.of(command, f"{problem}, and there is no store {store_uri.shown(uri)}", fix)
    try:
        with mlflow_store.settings():
            client = mlflow_store.open_store(uri)
            run = client.get_run(run_id)
            runs, most = _jobs(client, run_id) or [run], run.data.tags.get(MAX_SEEDS)
            results = [_result(client, number, each, _differing(runs)) for number, each in enumerate(runs)]
            return results, int(most) if most else None
    except Exception as error:
        raise RunnerError.of(command, f"{problem}; the store: {mlflow_store.explain(error, uri=uri)}", fix) from error


def _as_sent(value: float) -> float:
    return math.copysign(math.inf, value) if abs(value) >= sys.float_info.max else value


def _jobs(client: MlflowClient, run_id: str) -> list[Run]:
    experiments = [each.experiment_id for each in client.search_experiments()]
    query = f"tags.`{PARENT}` = '{run_id}'"
    page = client.search_runs(experiments, query, max_results=MAX_RUNS)
    jobs = list(page)
    while page.token:
        page = client.search_runs(experiments, query, max_results=MAX_RUNS, page_token=page.token)
        jobs += page
    return sorted(jobs, key=lambda job: int(job.info.start_time))


def _differing(runs: list[Run]) -> list[str]:
    names = dict.fromkeys(name for run in runs for name in run.data.params)
    left_out = (*NOT_CHOSEN, "name", "tracking.")
    known = [name for name in names if not name.startswith(left_out)]
    return [name for name in known if len({run.data.params.get(name) for run in runs}) > 1]


def _result(client: MlflowClient, number: int, run: Run, differing: list[str]) -> JobResult:
    params = run.data.params
    metric = params.get("train.early_stopping.metric", "None")
    metric = "val/loss" if metric in ("None", "null", "") else metric
    mode = params.get("train.early_stopping.mode", "None")
    mode = mode if mode in ("min", "max") else "max" if is_rising(metric) else "min"
    seed = params.get("seed", "")
    points = client.get_metric_history(run.info.run_id, metric) if metric in run.data.metrics else []
    known = [point for point in points if math.isfinite(_as_sent(point.value))]
    best = None
    if known:
        found = (min if mode == "min" else max)(known, key=lambda point: point.value)
        best = BestOfJob(metric, mode, found.value, found.step)
    metrics = {name: _as_sent(value) for name, value in run.data.metrics.items()}
    state = STATES.get(str(run.info.status), "running")
    return JobResult(
        number,
        str(run.info.run_name),
        (),
        {name: str(params[name]) for name in differing if name in params},
        state,
        "",
        int(seed) if seed.isdecimal() else 0,
        as_fold(params.get("data.fold", ""), params.get("data.num_folds", "")),
        metrics=metrics,
        best=best,
        run_id=run.info.run_id,
        diverged=state == "failed"
        and not all(math.isfinite(metrics[name]) for name in metrics if name.startswith("train/")),
    )
