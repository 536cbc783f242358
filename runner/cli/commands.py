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
from runner.cli.train import RunStart, check, refuse_check, train, train_composed
from runner.command import Arguments, Facts
from runner.config import override_errors
from runner.config.compose import CONF, CheckedLoader, Compose, composed_with, composer
from runner.config.identity import key_of
from runner.config.importing import loading, logging_to
from runner.errors import Problem, RunnerError, nearest_files, refuse, without_password
from runner.experiment.summary import Summary, length_key
from runner.experiment.terminal import short
from runner.tracking import stores
from runner.tracking.store_uri import sqlite_path

#: overrides of a trace only: the steps are the same
TRACE_KEYS = ("train.compile", "train.cuda_graph")
PORT = 5000  # the first one for MLflow's page


def resume(given: Arguments) -> tuple[int, Facts]:
    from runner.runs import find

    wanted, overrides = given.run, given.overrides
    folder = find.find(wanted).absolute()
    asked = f"resume {shlex.quote(wanted)}"
    compose = composer(["-cd", str(folder), "-cn", "rerun"])
    with override_errors.explained(overrides, compose=compose, check=check):
        before = composed_with(compose, [word for word in overrides if word.startswith("tracking.")])
        cfg = composed_with(compose, overrides)
    refuse_check(cfg, asked)
    find.check(before, cfg)
    _check_length(asked, cfg, overrides)
    if (summary := Summary.read(folder)).is_over(overrides):
        if overrides:
            _check_overrides(cfg, compose=compose)
        print(f"{wanted}: it has finished; for more of it: {asked} {length_key(cfg)}=...")
        return 0, {"folder": str(folder), **vars(summary)}
    with loading():
        from runner.experiment.context import RunContext
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


def _check_length(asked: str, cfg: DictConfig, overrides: list[str]) -> None:
    given = {key_of(word): word for word in overrides}
    num_steps = cfg.train.num_steps
    if "train.num_epochs" in given and "train.num_steps" not in given and num_steps is not None:
        epochs = given["train.num_epochs"]
        problem = f"the run has `train.num_steps={num_steps}`, which takes precedence over the number of epochs"
        way = f"python -m runner {asked} {epochs} train.num_steps=null"
        raise RunnerError.suggest(f"{asked} {epochs}", problem, [way], code="conflict")


def reproduce(given: Arguments) -> int:
    from runner.runs.reproduce import reproduce as repeating  # torch
    from runner.runs.reproduce.recorded import default_uri, open_recorded

    results: list[bool] = []
    with open_recorded(given.run, uri=default_uri(given.overrides), trusted=given["--trust"]) as original:

        def run_again(cfg: DictConfig, folder: Path, start: RunStart) -> tuple[Summary, dict[str, Any]]:
            summary, is_same = repeating.repeat(original, cfg, folder, checked=start.checked, anyway=given["--anyway"])
            results.append(is_same)
            return summary, {"reproduced": original.run_id or original.name, "is_same": is_same}

        flags = [*given.flags, "-cd", str(original.folder), "-cn", "rerun"]
        code = train_composed(flags, given.overrides, run_again)
    return int(not results[0]) if results else code


def plan(given: Arguments) -> int | tuple[int, Facts]:
    if CFG & set(given.flags):
        return train(given)  # what is composed is the same
    is_sweep = bool(MULTIRUN & set(given.flags))
    flags, overrides = [flag for flag in given.flags if flag not in MULTIRUN], given.overrides
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
    from runner.sweep.jobs.prepare import combinations, zips_of

    params = dict(master.hydra.sweeper.get("params") or {})
    return combinations(overrides, CheckedLoader(), params=params, zipped=zips_of(master))


def devices(given: Arguments) -> tuple[int, Facts]:
    from runner.cli.devices import show

    facts = show(measured=given["--bench"])
    return int("bench" in facts and not facts["bench"]["devices"]), facts


def report(given: Arguments) -> int:
    from runner.sweep.report.text import rewrite

    is_last = given.run == "last" and not Path("last").is_dir()
    answer.give_report(rewrite(None if is_last else Path(given.run)))
    return 0


def history(given: Arguments) -> Facts:
    from runner.runs import history as reading

    uri = stores.named(given.words) or stores.USUAL
    if reading.folder_of(given.run) is not None:
        stores.note_unused(given.words)
    if given["--output"] is not None:
        written = reading.write(given.run, given["--output"], uri=uri)
        print(f"{written['points']:,} points in {written['output']}")
        return {"run": given.run, **written}
    show_history(found := reading.summary(reading.history(given.run, uri=uri)))
    return {"run": given.run, "metrics": found}


def show_history(found: Mapping[str, Mapping[str, Any]]) -> None:
    from runner.experiment.terminal import Terminal, text_table
    from runner.sweep.report import tables

    titles = ("metric", "points", "steps", "first", "last", "least", "greatest")
    rows = []
    for name, metric in found.items():
        first, last = metric["first_step"], metric["last_step"]
        steps = f"{first:,} to {last:,}" if first != last else f"{last:,}"
        values = (tables.value(metric[key]) for key in titles[3:])
        rows.append((name, f"{metric['points']:,}", steps, *values))
    table = text_table(titles, rows, right=range(1, len(titles)))
    table.collapse_padding = True  # a name is whole in 80 columns
    Terminal(soft_wrap=False).print(table)


def explain(given: Arguments) -> Facts:
    kinds = [name for name in ("--time", "--trace", "--step") if given[name]]
    command = f"python -m runner explain {given.run}"
    if len(kinds) > 1:
        ways = [f"{command} {each}" for each in kinds if each != "--step"]
        problem = "these flags explain different things"
        raise RunnerError.suggest(f"explain {' '.join(kinds)}", problem, ways, code="conflict")
    of_a_trace = [word for word in given.overrides if key_of(word) in TRACE_KEYS and kinds != ["--trace"]]
    unused = given.overrides if kinds == ["--time"] else of_a_trace
    problem = "`explain --time` computes nothing" if kinds == ["--time"] else "only `explain --trace` takes this key"
    refuse(Problem.suggest(each, problem, [f"{command} --trace {each}"], code="unknown-key") for each in unused)
    if not kinds or kinds == ["--step"]:
        from runner.tools.explain.explain import explain  # torch

        return explain(given.run, given.overrides, step=given["--step"] or None)
    from runner.tools.explain.time import show_time, time_of, trace

    if kinds == ["--trace"]:
        return trace(given.run, given.overrides)
    show_time(found := time_of(given.run))
    return found


def evaluate(given: Arguments) -> Facts:
    from runner.runs.evaluate import evaluate  # torch

    found = evaluate(given.run, given.overrides, tracked=given["--track"])
    uris = [word for word in given.overrides if key_of(word) == "tracking.uri"]
    if uris and not given["--track"]:
        print(f"note: {without_password(uris[-1])} gets nothing of this: --track sends it there")
    return found


def predict(given: Arguments) -> Facts:
    from runner.runs.predict import predict  # torch

    files, size = (given["--input"], given["--output"]), given["--batch-size"]
    return predict(given.run, *files, batch_size=size, keep=given["--keep"], overrides=given.overrides)


def export(given: Arguments) -> Facts:
    from runner.runs.export import export  # torch

    return export(given.run, given["--format"], given["--output"], predictions=given["--predictions"])


def serve(given: Arguments) -> int:
    from runner.runs.serve import serve  # torch

    return serve(given.run, given["--port"], predictions=given["--predictions"], ready=answer.give)


def register(given: Arguments) -> Facts:
    from runner.runs.register import register

    alias, again = given["--alias"], given["--again"]
    return register(given.run, given["--name"], given.overrides, alias=alias, again=again)


def lr_find(given: Arguments) -> Facts:
    from runner.tools.lr_find import find_rate  # torch

    num_steps, lowest, highest = given["--steps"], given["--from"], given["--to"]
    return find_rate(given.flags, given.overrides, num_steps=num_steps, lowest=lowest, highest=highest)


def tune(given: Arguments) -> Facts:
    from runner.tools.tune.tune import tune  # torch

    seconds, name, precision = given["--seconds"], given["--name"], given["--precision"]
    return tune(given.flags, given.overrides, seconds=seconds, name=name, precision=precision)


def schema(given: Arguments) -> Facts:
    from runner.config import json_schema

    output, here = given["--output"], Path("conf")
    own = [here] if here.is_dir() and not here.samefile(CONF) else []
    file = Path(output) if output else here / json_schema.FILE
    if output and not file.parent.is_dir():
        problem = f"the directory `{file.parent}` does not exist"
        fix = f"run `{shlex.join(['mkdir', '-p', str(file.parent)])}`"
        raise RunnerError.of(f"schema --output {output}", problem, fix, code="missing-file")
    with loading():  # torch, whose signatures are read
        lines = json_schema.write(file, *own)
    print(f"{file}; an editor checks by it what has at its head")
    print("\n".join(f"  in {f'conf/{group}/':<22} {line}" for group, line in lines.items()))
    return {"output": str(file), "lines": lines}


def sync(given: Arguments) -> tuple[int, Facts]:
    from runner.runs.sync import replay

    rows = replay([Path(folder) for folder in given.values], uri=stores.named(given.words))
    return int(not all(row["is_complete"] for row in rows)), {"runs": rows}


def ui(given: Arguments) -> tuple[int, Facts]:
    from runner.runs import find

    runs = find.newest_first()
    uri = stores.named(given.words) or stores.of_last(runs, asked="ui")
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
    port = str(given["--port"] or _free_port(PORT))
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
