"""One function per command: takes the arguments and returns the exit code.

What a command works with is imported in its function: --help loads nothing.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.types import RunMode
from omegaconf import DictConfig

from runner.cli import answer, options, unexpected
from runner.cli.arguments import MULTIRUN, ONE_RUN, refuse_flags, sorted_words
from runner.cli.check_first import CheckFirst, check
from runner.cli.options import is_a_runs_path
from runner.cli.train import refuse_check, train, train_composed
from runner.config import override_errors, validate
from runner.config.compose import CONF, Compose, composed_with, composer, hydra_session
from runner.config.identity import key_of
from runner.config.importing import loading
from runner.config.logs import logging_to
from runner.errors import Fault, RunnerError, nearest_files
from runner.experiment.summary import is_over, length_key, read_summary
from runner.experiment.terminal import short
from runner.tracking import stores
from runner.tracking.store_uri import sqlite_path

#: settings that a trace may have otherwise than its run: the steps are the same
OF_TRACES = ("train.compile", "train.cuda_graph")
PORT = 5000  # of MLflow's page, where nobody answers at it


def resume(words: list[str]) -> int:
    """Resume an interrupted run, in its directory and in its MLflow run."""
    from runner.runs import find as resuming

    wanted, given = (words[0], words[1:]) if words and _may_be_a_folder(words[0]) else ("last", words)
    flags, overrides = sorted_words(given)
    folder = resuming.find(wanted).absolute()
    asked = f"resume {shlex.quote(wanted)}"
    refuse_flags(asked, flags, shown=shlex.join(["-cd", short(folder), "-cn", "rerun"]))
    compose = composer(["-cd", str(folder), "-cn", "rerun"])
    with resuming.retelling(folder, "resume", overrides), hydra_session(["runner"]):
        with override_errors.explained(overrides, compose=compose, check=check):
            before = composed_with(compose, [word for word in overrides if word.startswith("tracking.")])
            cfg = composed_with(compose, overrides)
        refuse_check(cfg, asked)
        resuming.check(before, cfg)
        _check_length(asked, cfg, overrides)
        if is_over(read_summary(folder), overrides):
            _check_words(overrides, cfg, compose=compose)
            print(f"{wanted}: it has finished; for more of it: {asked} {length_key(cfg)}=...")
            answer.give({"folder": str(folder), **read_summary(folder)})
            return 0
        with loading():
            from runner.experiment.given import Given
            from runner.experiment.run import run as run_experiment

        with logging_to(folder), unexpected.noting(folder):
            done = run_experiment(cfg, folder, given=Given(owns_process=True))
    answer.give({"folder": str(folder), **done})
    return int(done["exit_code"] or done["status"] == "failed")


def _check_words(overrides: list[str], cfg: DictConfig, *, compose: Compose) -> None:
    """Raises: RunnerError for what these words make wrong of a run that is not gone on with; what is so without them, it bears."""
    if not overrides:
        return
    try:
        check(cfg)
    except RunnerError as error:
        before: tuple[Fault, ...] = ()
        try:
            check(composed_with(compose, []))
        except RunnerError as own:  # its device is not here, say
            before = own.faults
        if found := [fault for fault in error.faults if fault not in before]:
            raise RunnerError(*found) from None


def _check_length(asked: str, cfg: DictConfig, overrides: list[str]) -> None:
    given = {key_of(word): word for word in overrides}
    num_steps = cfg.train.num_steps
    if "train.num_epochs" in given and "train.num_steps" not in given and num_steps is not None:
        epochs = given["train.num_epochs"]
        problem = f"the run has train.num_steps={num_steps}, which says how long it is, whatever the number of epochs"
        fix = f"{asked} train.num_steps=..., or {asked} {epochs} train.num_steps=null"
        raise RunnerError(Fault(f"{asked} {epochs}", problem, fix))


def reproduce(words: list[str]) -> int:
    """Repeat a run's configuration as a new run and compare the metrics. Exit code 0 if they are the same."""
    from runner.runs import find
    from runner.runs.reproduce import reproduce as repeating  # torch

    given = [word for word in words if word not in repeating.FLAGS]
    wanted = given.pop(0) if given and _may_be_a_folder(given[0]) else "last"
    flags, overrides = sorted_words(given, takes=repeating.FLAGS)
    if MULTIRUN & set(flags):
        raise RunnerError(Fault("reproduce -m", "one run is repeated at a time", f"reproduce {wanted}"))
    agreed: list[bool] = []
    with repeating.original(wanted, overrides, trusted="--trust" in words) as original:

        def run_again(cfg: DictConfig, folder: Path) -> dict[str, Any]:
            summary, is_same = repeating.repeat(
                original, cfg, folder, checked=CheckFirst.checked, anyway="--anyway" in words
            )
            agreed.append(is_same)
            return {**summary, "reproduced": original.run_id or original.name, "is_same": is_same}

        retold = partial(find.retold, folder=original.folder, verb="reproduce", words=overrides)
        flags = [*flags, "-cd", str(original.folder), "-cn", "rerun"]
        code = train_composed(flags, overrides, run_again, retold=retold)
    return int(not agreed[0]) if agreed else code


def plan(words: list[str]) -> int:
    """Estimate memory and speed of a run, or with -m of several, on a device you may not have; trains and tracks nothing.

    Accepts the same overrides as a training run. Describe the device with plan.device_name=T4 or plan.device_memory=80GiB.
    Exit code 0 if it would run.
    """
    flags, overrides = sorted_words(words)
    is_sweep = bool(MULTIRUN & set(flags))
    flags = [flag for flag in flags if flag not in MULTIRUN]
    if {"-c", "--cfg", "--hydra-help"} & set(flags):
        return train(words)  # what is composed is the same
    refuse_flags("plan", flags, ONE_RUN)
    from runner.plan import command  # torch

    compose = composer(flags)
    with hydra_session(["runner"]):
        with override_errors.explained(overrides, compose=compose, check=command.check):
            master = (composer(flags, mode=RunMode.MULTIRUN) if is_sweep else compose)(overrides)
            is_sweep |= master.hydra.mode == RunMode.MULTIRUN  # in a file
            jobs = []
            for given, name in _planned(overrides, master) if is_sweep else [(tuple(overrides), "")]:
                with override_errors.of_a_job(given):
                    jobs.append(command.Job(name, composed_with(compose, given)))
        answer.give(planned := command.plan(jobs))
        return int(not planned["would_run"])


def _planned(overrides: list[str], master: DictConfig) -> list[tuple[tuple[str, ...], str]]:
    from hydra.core.global_hydra import GlobalHydra

    from runner.sweep.jobs.prepare import combinations, zips_of

    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        params = dict(master.hydra.sweeper.get("params") or {})
        loader = GlobalHydra.instance().config_loader()
        return combinations(overrides, loader, params=params, zipped=zips_of(master))


def devices(words: list[str]) -> int:
    """List this machine's devices, and why others are missing; with --bench, measure each device."""
    options.refuse_others("devices", [word for word in words if word != "--bench"])
    from runner.cli.devices import show

    answer.give(facts := show(measured="--bench" in words))
    return int("bench" in facts and not facts["bench"]["devices"])


def report_sweep(words: list[str]) -> int:
    """Print a sweep's table and write its files again; by default for the last sweep in multirun/."""
    wanted = [word for word in words if _may_be_a_folder(word)][:1]
    options.refuse_others("report", [word for word in words if word not in wanted])
    from runner.sweep.report.show import show

    is_last = wanted == ["last"] and not Path("last").is_dir()
    answer.give_report(show(Path(wanted[0]) if wanted and not is_last else None))
    return 0


def compare(words: list[str]) -> int:
    """Compare two configurations across their seeds, or the best configuration of a sweep with each other one."""
    from runner.cli import compare as comparing

    metrics = [word.partition("=")[2] for word in words if word.startswith("metric=")]
    own = [word for word in words if not word.startswith(("-", "metric=", "tracking.uri="))]
    misspelt = [word for word in own if options.is_a_setting("compare", word)]
    options.refuse_others("compare", [*(word for word in words if word.startswith("-")), *misspelt])
    metric, uri = metrics[-1] if metrics else None, stores.named(words) or stores.USUAL
    found = comparing.compare(own, metric=metric, uri=uri)
    _say_not_asked(words, is_asked=any(map(comparing.is_of_a_store, own)))
    comparing.show(found)
    answer.give({"comparisons": [comparing.as_values(each) for each in found]})
    return 0


def try_out(words: list[str]) -> int:
    """Try a change of the configuration on as many seeds as a decision needs. Exit code 0 if the change is kept."""
    from runner.cli import try_out as trying

    words, against = _taken_out(words, "--against", "RUN, or best")
    words, budget = _taken_out(words, "--budget", "SECONDS")
    metrics = [word.partition("=")[2] for word in words if word.startswith("metric=")]
    try:
        seconds = float(budget) if budget is not None else None
    except ValueError:
        seconds = 0.0
    if seconds is not None and not 0 < seconds < float("inf"):
        raise RunnerError(Fault(f"--budget {budget}", "it is a number of seconds above 0", "--budget 600"))
    rest = [word for word in words if not word.startswith("metric=")]
    line = trying.try_out(rest, budget=seconds, against=against or "best", metric=metrics[-1] if metrics else None)
    answer.give(line)
    return int(line["verdict"] != "kept")


def history(words: list[str]) -> int:
    """Count the points of each metric of a run, or write them to --output, one row each."""
    from runner.runs import history as reading

    words, output = _taken_out(words, "--output")
    runs = [word for word in words if _may_be_a_folder(word)][:1]
    rest = [word for word in words if word not in runs and not word.startswith("tracking.uri=")]
    options.refuse_others("history", rest)
    wanted, uri = runs[0] if runs else "last", stores.named(words) or stores.USUAL
    _say_not_asked(words, is_asked=reading.folder_of(wanted) is None)
    if output is not None:
        answer.give({"run": wanted, **(written := reading.write(wanted, output, uri=uri))})
        print(f"{written['points']:,} points in {written['output']}")
        return 0
    from runner.cli.history import show

    show(found := reading.summary(reading.history(wanted, uri=uri)))
    answer.give({"run": wanted, "metrics": found})
    return 0


def _say_not_asked(words: list[str], *, is_asked: bool) -> None:
    """That the store which these words name is not asked for anything, where it is not."""
    uris = [validate.without_password(word) for word in words if word.startswith("tracking.uri=")]
    if uris and not is_asked:
        print(f"note: {uris[-1]} is not asked: all that is named has its folder here, with all points in it")


def diff(words: list[str]) -> int:
    """Show differences between runs: configuration, code, data, versions, machine, and where their curves diverge."""
    from runner.cli import diff as showing
    from runner.runs import diff as comparing

    runs = [word for word in words if _may_be_a_folder(word)]
    options.refuse_others("diff", [word for word in words if word not in runs and not word.startswith("tracking.uri=")])
    wanted, uri = showing.runs_of(runs), stores.named(words) or stores.USUAL
    with comparing.opened(wanted, uri=uri) as originals:
        found = comparing.diff(originals)
        _say_not_asked(words, is_asked=any(each.store for each in originals))
        showing.show(found)
    answer.give(comparing.as_values(found))
    return 0


def watch(words: list[str]) -> int:
    """Show live curves of a run or a sweep in the terminal; once if it has ended, or in a pipe."""
    from runner.cli import watch as watching

    runs = [word for word in words if _may_be_a_folder(word)][:1]
    options.refuse_others("watch", [word for word in words if word not in runs])
    answer.give(watching.watch(runs[0] if runs else "last", once=answer.is_asked()))
    return 0


def explain(words: list[str]) -> int:
    """Find what went wrong in a step; with --time where the time went, with --trace a trace of 20 steps for Perfetto."""
    if options.HELP & set(words) or not {"--time", "--trace"} & set(words):
        return _after_training("explain", words)
    from runner.cli.explain_time import explain_time, trace

    asked = options.parse("explain", words)
    asked.check()
    _, settings = sorted_words(asked.rest)
    kind = "--trace" if "--trace" in asked.flags else "--time"
    if beside := [flag for flag in asked.flags if flag != kind]:
        problem = f"{kind} is of the whole run" if kind == "--time" else f"{kind} is of the run's first steps"
        write = f"explain {asked.run} {kind}, or explain {asked.run} {beside[0]}"
        raise RunnerError(Fault(f"explain {kind} {beside[0]}", problem, write))
    if kind == "--trace":
        options.check_keys("explain", [word for word in settings if key_of(word) not in OF_TRACES])
        answer.give(trace(asked.run, settings))
    else:
        options.refuse_others("explain --time", settings)
        answer.give(explain_time(asked.run))
    return 0


def schema(words: list[str]) -> int:
    """Write the JSON schema of conf/, with your options and targets, and print the line that names it to an editor."""
    from runner.config import json_schema

    rest, output = _taken_out(words, "--output")
    options.refuse_others("schema", rest)
    here = Path("conf")
    own = [here] if here.is_dir() and not here.samefile(CONF) else []
    file = Path(output) if output else here / json_schema.FILE
    if output and not file.parent.is_dir():
        fix = shlex.join(["mkdir", "-p", str(file.parent)])
        raise RunnerError(Fault(f"schema --output {output}", f"there is no directory {file.parent}", fix))
    with loading():  # torch, whose signatures are read
        lines = json_schema.write(file, *own)
    answer.give({"output": str(file), "lines": lines})
    print(f"{file}; an editor checks by it what has at its head")
    print("\n".join(f"  in {f'conf/{group}/':<22} {line}" for group, line in lines.items()))
    return 0


def _taken_out(words: list[str], flag: str, what: str = "FILE") -> tuple[list[str], str | None]:
    """The other words, and the value of a flag: `flag VALUE` or `flag=VALUE`. Raises: RunnerError for one without a value."""
    rest, value, given = [], None, iter(words)
    for word in given:
        name, equals, text = word.partition("=")
        if name != flag:
            rest.append(word)
            continue
        value = text if equals else next(given, "")
        if not value:
            raise RunnerError(Fault(flag, "it has no value", f"{flag} {what}"))
    return rest, value


def sync(words: list[str]) -> int:
    """Send the points in a directory's journals (by default outputs/ and multirun/) that MLflow has not received.

    Each run goes to the store named by tracking.uri or the environment, by default to the one it was tracked to.
    """
    folders = [Path(word) for word in words if _may_be_a_folder(word)]
    settings = [word for word in words if word.startswith("tracking.uri=")]
    known = [*settings, *map(str, folders)]
    options.refuse_others("sync", [word for word in words if word not in known and (word[:1] == "-" or "=" in word)])
    from runner.cli.sync import replay

    answer.give({"runs": (rows := replay(folders, uri=stores.named(settings)))})
    return int(not all(row["is_complete"] for row in rows))


def ui(words: list[str]) -> int:
    """Open MLflow's page on localhost, by default for the store of the last run; Ctrl-C ends it."""
    words, port = _taken_out(words, "--port", "PORT")
    options.refuse_others("ui", [word for word in words if not word.startswith("tracking.uri=")])
    if port and not (port.isdecimal() and 1 <= int(port) <= 65535):
        raise RunnerError(Fault(f"--port {port}", "it is a whole number, 1 to 65535", f"--port {PORT}"))
    from runner.runs import find as resuming

    runs = resuming.newest_first()
    uri = stores.named(words) or stores.of_last(runs, asked="ui")
    if (path := sqlite_path(uri)) is not None and not path.is_file():  # MLflow would create an empty one
        there = nearest_files(path, lambda file: file.suffix == path.suffix)
        near = [f"python -m runner ui tracking.uri=sqlite:///{short(file)}" for file in there]
        problem, otherwise = f"there is no file {short(path)}", f"python -m runner tracking.uri={uri}, which creates it"
        raise RunnerError(Fault.suggest(f"ui tracking.uri={uri}", problem, near, otherwise))
    page = stores.page_of(uri, runs)
    if uri.startswith("http"):
        print(f"it is a server already: open {validate.without_password(uri.rstrip('/'))}{page} in a browser")
        answer.give({"url": uri, "page": f"{uri.rstrip('/')}{page}"})
        return 0
    port = port or str(_free_port(PORT))
    url = f"http://127.0.0.1:{port}"
    print(f"{url}{page}", flush=True)
    answer.give({"url": url, "page": f"{url}{page}"})
    command = [sys.executable, "-W", "ignore", "-m", "mlflow", "ui", "--host", "127.0.0.1", "--port", port]
    return _become(command, os.environ | {"MLFLOW_BACKEND_STORE_URI": uri})  # arguments show in `ps`, passwords too


def _free_port(first: int) -> int:
    """The first one that nobody answers at. Not by binding it: AirPlay on a Mac has all addresses' 5000, and lets 127.0.0.1's be had."""
    for port in range(first, first + 100):
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            continue
        return port
    return first


def _after_training(verb: str, words: list[str]) -> int:
    from runner.cli import after_training as command

    if options.HELP & set(words):
        print(options.explained(verb))
        return 0
    asked = options.parse(verb, words)
    flags, overrides = sorted_words(asked.rest)
    refuse_flags(f"{verb} {asked.run}".rstrip(), flags, ONE_RUN)
    return command.do(asked, flags, overrides)


def _become(command: list[str], environment: dict[str, str]) -> NoReturn:
    os.execve(command[0], command, environment)


def _may_be_a_folder(word: str) -> bool:
    return word[:1] not in ("-", "~") and ("=" not in word or is_a_runs_path(word))


#: by the name that is typed; cli/arguments.py knows the names
COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "resume": resume,
    "reproduce": reproduce,
    "evaluate": partial(_after_training, "evaluate"),
    "predict": partial(_after_training, "predict"),
    "export": partial(_after_training, "export"),
    "serve": partial(_after_training, "serve"),
    "register": partial(_after_training, "register"),
    "lr-find": partial(_after_training, "lr-find"),
    "tune": partial(_after_training, "tune"),
    "plan": plan,
    "devices": devices,
    "report": report_sweep,
    "compare": compare,
    "try": try_out,
    "diff": diff,
    "history": history,
    "watch": watch,
    "explain": explain,
    "schema": schema,
    "sync": sync,
    "ui": ui,
}
