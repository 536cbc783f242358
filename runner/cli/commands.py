"""The functions of the commands in table.py: each takes the arguments and returns the exit code, or what `--json` prints.

Each imports what it needs, so that a command does not wait for torch without a reason.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from hydra.types import RunMode
from omegaconf import DictConfig

from runner.cli import answer
from runner.cli.table import CFG, MULTIRUN
from runner.cli.train import check, refuse_check, train, train_composed
from runner.command import Arguments, Facts
from runner.config import override_errors
from runner.config.compose import CONF, CheckedLoader, Compose, composed_with, composer
from runner.config.identity import key_of
from runner.config.importing import loading, logging_to
from runner.errors import Problem, RunnerError, nearest_files, refuse, without_password
from runner.experiment.context import RunContext
from runner.experiment.summary import Summary, length_key
from runner.experiment.terminal import short
from runner.tracking import stores
from runner.tracking.store_uri import sqlite_path

#: overrides of a trace only: the steps are the same
TRACE_KEYS = ("train.compile", "train.cuda_graph")
PORT = 5000  # the first one for MLflow's page


def resume(arguments: Arguments) -> tuple[int, Facts]:
    from runner.runs import find

    run, overrides = arguments.run, arguments.overrides
    folder = find.find(run).absolute()
    command = f"resume {shlex.quote(run)}"
    compose = composer(["-cd", str(folder), "-cn", "rerun"])
    with override_errors.explained(overrides, compose=compose, check=check):
        before = composed_with(compose, [word for word in overrides if word.startswith("tracking.")])
        cfg = composed_with(compose, overrides)
    refuse_check(cfg, command)
    find.check(before, cfg)
    _check_length(command, cfg, overrides)
    if (summary := Summary.read(folder)).is_over(overrides):
        if overrides:
            _check_overrides(cfg, compose=compose)
        print(f"{run}: it has finished; for more of it: {command} {length_key(cfg)}=...")
        return 0, {"folder": str(folder), **vars(summary)}
    with loading():
        from runner.experiment.run import run as run_experiment

    with logging_to(folder), answer.logged(folder):
        summary = run_experiment(cfg, folder, context=RunContext(owns_process=True))
    return summary.code, {"folder": str(folder), **vars(summary)}


def _check_overrides(cfg: DictConfig, *, compose: Compose) -> None:
    """Raises: RunnerError for the overrides of a finished run, but not for the run, whose device may be missing now."""
    try:
        check(cfg)
    except RunnerError as error:
        known: tuple[Problem, ...] = ()
        try:
            check(composed_with(compose, []))
        except RunnerError as before:
            known = before.problems
        refuse(problem for problem in error.problems if problem not in known)


def _check_length(command: str, cfg: DictConfig, overrides: list[str]) -> None:
    typed, num_steps = {key_of(text): text for text in overrides}, cfg.train.num_steps
    if "train.num_epochs" in typed and "train.num_steps" not in typed and num_steps is not None:
        epochs = typed["train.num_epochs"]
        problem = f"the run has `train.num_steps={num_steps}`, which takes precedence over the number of epochs"
        way = f"python -m runner {command} {epochs} train.num_steps=null"
        raise RunnerError.suggest(f"{command} {epochs}", problem, [way], code="conflict")


def reproduce(arguments: Arguments) -> int:
    from runner.runs import find
    from runner.runs.reproduce import reproduce as repeating  # torch
    from runner.runs.reproduce.recorded import open_recorded

    results: list[bool] = []
    # of a run in a directory, the check of the configuration judges the store
    uri = (stores.named(arguments.overrides) if find.is_in_store(arguments.run) else None) or stores.USUAL
    with open_recorded(arguments.run, uri=uri, trusted=arguments["--trust"]) as original:

        def run_again(cfg: DictConfig, folder: Path, context: RunContext) -> tuple[Summary, dict[str, Any]]:
            summary, is_same = repeating.repeat(original, cfg, folder, context=context, anyway=arguments["--anyway"])
            results.append(is_same)
            code = summary.code or int(not is_same)
            return summary, {"reproduced": original.run_id or original.name, "is_same": is_same, "exit_code": code}

        flags = [*arguments.flags, "-cd", str(original.folder), "-cn", "rerun"]
        code = train_composed(flags, arguments.overrides, run_again)
    return int(not results[0]) if results else code


def plan(arguments: Arguments) -> int | tuple[int, Facts]:
    if CFG & set(arguments.flags):
        return train(arguments)  # what is composed is the same
    is_sweep = bool(MULTIRUN & set(arguments.flags))
    flags, overrides = [flag for flag in arguments.flags if flag not in MULTIRUN], arguments.overrides
    from runner.tools.plan import command  # torch

    loader = CheckedLoader(flags)
    compose = composer(flags, loader=loader)
    with override_errors.explained(overrides, compose=compose, check=command.check):
        master = (composer(flags, mode=RunMode.MULTIRUN, loader=loader) if is_sweep else compose)(overrides)
        is_sweep |= master.hydra.mode == RunMode.MULTIRUN  # in a file
        jobs = []
        for words, name in planned_jobs(overrides, master) if is_sweep else [(tuple(overrides), "")]:
            jobs.append(command.PlannedJob(name, composed_with(compose, words)))
    planned = command.plan(jobs)
    return int(not planned["would_run"]), planned


def planned_jobs(overrides: list[str], master: DictConfig) -> list[tuple[tuple[str, ...], str]]:
    """Return the overrides and the name of each job of a sweep. master: what its jobs have in common."""
    from runner.sweep.jobs.prepare import combinations, zip_of

    params = dict(master.hydra.sweeper.get("params") or {})
    return combinations(overrides, CheckedLoader(), params=params, zipped=zip_of(master))


def report(arguments: Arguments) -> int:
    from runner.sweep.report.build import rewrite

    is_last = arguments.run == "last" and not Path("last").is_dir()
    answer.give_report(rewrite(None if is_last else Path(arguments.run)))
    return 0


def history(arguments: Arguments) -> Facts:
    from runner.runs import history as reading

    uri = stores.named(arguments.words) or stores.USUAL
    if reading.folder_of(arguments.run) is not None:
        stores.note_unused(arguments.words)
    if arguments["--output"] is not None:
        written = reading.write(arguments.run, arguments["--output"], uri=uri)
        print(f"{written['points']:,} points in {written['output']}")
        return {"run": arguments.run, **written}
    show_history(metrics := reading.summary(reading.history(arguments.run, uri=uri)))
    return {"run": arguments.run, "metrics": metrics}


def show_history(metrics: Mapping[str, Mapping[str, Any]]) -> None:
    from runner.experiment.terminal import Terminal, text_table
    from runner.sweep.report import tables

    titles = ("metric", "points", "steps", "first", "last", "least", "greatest")
    rows = []
    for name, metric in metrics.items():
        first, last = metric["first_step"], metric["last_step"]
        steps = f"{first:,} to {last:,}" if first != last else f"{last:,}"
        values = (tables.value(metric[key]) for key in titles[3:])
        rows.append((name, f"{metric['points']:,}", steps, *values))
    table = text_table(titles, rows, right=range(1, len(titles)))
    table.collapse_padding = True  # a name is whole in 80 columns
    Terminal(soft_wrap=False).print(table)


def explain(arguments: Arguments) -> Facts:
    kinds = [name for name in ("--time", "--trace", "--step") if arguments[name]]
    command = f"python -m runner explain {arguments.run}"
    if len(kinds) > 1:
        ways = [f"{command} {each}" for each in kinds if each != "--step"]
        problem = "these flags explain different things"
        raise RunnerError.suggest(f"explain {' '.join(kinds)}", problem, ways, code="conflict")
    of_a_trace = [word for word in arguments.overrides if key_of(word) in TRACE_KEYS and kinds != ["--trace"]]
    unused = arguments.overrides if kinds == ["--time"] else of_a_trace
    problem = "`explain --time` computes nothing" if kinds == ["--time"] else "only `explain --trace` takes this key"
    refuse(Problem.suggest(each, problem, [f"{command} --trace {each}"], code="unknown-key") for each in unused)
    if not kinds or kinds == ["--step"]:
        from runner.tools.explain.explain import explain  # torch

        return explain(arguments.run, arguments.overrides, step=arguments["--step"] or None)
    from runner.tools.explain.time import show_time, time_of, trace

    if kinds == ["--trace"]:
        return trace(arguments.run, arguments.overrides)
    show_time(times := time_of(arguments.run))
    return times


def serve(arguments: Arguments) -> int:
    from runner.runs.serve import serve  # torch

    return serve(arguments.run, arguments["--port"], predictions=arguments["--predictions"], ready=answer.give)


def schema(arguments: Arguments) -> Facts:
    from runner.config import json_schema

    output, here = arguments["--output"], Path("conf")
    own = [here] if here.is_dir() and not here.samefile(CONF) else []
    file = Path(output) if output else here / json_schema.FILE
    if output and not file.parent.is_dir():
        problem = f"the directory `{file.parent}` does not exist"
        fix = f"run `{shlex.join(['mkdir', '-p', str(file.parent)])}`"
        raise RunnerError.of(f"schema --output {output}", problem, fix, code="missing-file")
    lines = json_schema.write(file, *own)
    print(f"{file}; an editor checks by it what has at its head")
    print("\n".join(f"  in {f'conf/{group}/':<22} {line}" for group, line in lines.items()))
    return {"output": str(file), "lines": lines}


def sync(arguments: Arguments) -> tuple[int, Facts]:
    from runner.runs import find
    from runner.runs.sync import replay

    is_last = {word: word == "last" and not Path(word).is_dir() for word in arguments.values}
    folders = [find.find(word) if is_last[word] else Path(word) for word in arguments.values]
    rows = replay(folders, uri=stores.named(arguments.words))
    return int(not all(row["is_complete"] for row in rows)), {"runs": rows}


def ui(arguments: Arguments) -> tuple[int, Facts]:
    from runner.runs import find

    runs = find.newest_first()
    uri = stores.named(arguments.words) or stores.of_last(runs, asked="ui")
    if (path := sqlite_path(uri)) is not None and not path.is_file():  # MLflow would create an empty one
        there = nearest_files(path, lambda file: file.suffix == path.suffix)
        near = [f"python -m runner ui tracking.uri=sqlite:///{short(file)}" for file in there]
        problem = f"the file `{short(path)}` does not exist"
        otherwise = f"run `python -m runner tracking.uri={uri}`, which creates it"
        raise RunnerError.suggest(f"ui tracking.uri={uri}", problem, near, otherwise, code="missing-file")
    page = stores.page_of(uri, runs)
    if uri.startswith("http"):
        print(f"it is a server already: open {without_password(uri.rstrip('/'))}{page} in a browser")
        return 0, {"url": uri, "page": f"{uri.rstrip('/')}{page}"}
    port = str(arguments["--port"] or _free_port(PORT))
    url = f"http://127.0.0.1:{port}"
    print(f"{url}{page}", flush=True)
    answer.give({"url": url, "page": f"{url}{page}"})
    command = [sys.executable, "-W", "ignore", "-m", "mlflow", "ui", "--host", "127.0.0.1", "--port", port]
    return _become(command, os.environ | {"MLFLOW_BACKEND_STORE_URI": uri})  # arguments show in `ps`, passwords too


def _free_port(first: int) -> int:
    # connects to find out: AirPlay on a Mac listens on port 5000 of every address, and 127.0.0.1's can still be bound
    for port in range(first, first + 100):
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            continue
        return port
    return first


def _become(command: list[str], environment: dict[str, str]) -> NoReturn:
    os.execve(command[0], command, environment)
