"""The words on the command line go in; a verb's work or a run comes out, as an exit code. Imports nothing heavy."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from runner import claim, completion, config, mistakes, notebook, stores, stranger, unexpected
from runner.checks import CheckFirst, check, check_place
from runner.compose import CONF, Compose, asks_for_a_sweep, composer, hydra_session, name_data
from runner.errors import MISTAKE, SECRETS, Fault, RunnerError, report
from runner.loading import loading
from runner.ranks.around import Place, place_of
from runner.summary import is_over, read_summary
from runner.targets import ALLOW_VARIABLE
from runner.terminal import leave_unread
from runner.words import MULTIRUN, ONE_RUN, sorted_words

TRUST = "--trust"  # a run's folder, or a store's configuration, has been looked at
RunOne = Callable[[DictConfig, Path], dict[str, Any]]


@contextmanager
def restored(variable: str) -> Iterator[None]:
    """An environment variable is as it was, afterwards."""
    before = os.environ.get(variable)
    try:
        yield
    finally:
        os.environ.pop(variable, None)
        if before is not None:
            os.environ[variable] = before


@restored(SECRETS)
def main(argv: list[str] | None = None) -> int:
    """Runs one command. Returns its exit code: 0 done, 1 failed, 2 the person's mistake, 130 Ctrl-C, 143 SIGTERM."""
    words = list(sys.argv[1:] if argv is None else argv)
    logging.raiseExceptions = False  # a log that can't be written, on a full disk, is no reason for a traceback
    _make_own_code_importable()
    code = 0
    try:
        _refuse_unread(words)
        verb = words.pop(0) if words and words[0] in VERBS else "train"
        with stranger.trusting(TRUST in words):
            code = VERBS[verb]([word for word in words if word != TRUST or verb == "reproduce"])
        print(end="", flush=True)  # at the interpreter's end nobody would catch what it meets
        return code
    except RunnerError as error:
        place = place_of(os.environ)
        return (
            MISTAKE if place is not None and place.rank else report(error)
        )  # of several processes the first one tells it
    except SystemExit as end:  # Hydra's own flags, CheckFirst, a signal in a sweep
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        # one that passed through an exec of text (a dataclass being made, in an import) has CPython end the process by the
        # signal, caught or not; the next exec of text takes that back (run_eval_code_obj in CPython's pythonrun.c)
        exec("")
        return 130
    except BrokenPipeError:  # `... | head` has read enough
        leave_unread()
        return code
    except Exception as error:
        return unexpected.tell(error)


def _refuse_unread(words: list[str]) -> None:
    """Letters that this Python could not read from the command line: it takes them for ASCII, as LANG=C says."""
    unread = [word for word in words if any("\udc80" <= char <= "\udcff" for char in word)]
    if unread:
        so = "this Python reads the command line as ASCII, and these letters are none"
        write = "export PYTHONUTF8=1 (or LANG=C.UTF-8) before the command"
        raise RunnerError(*(Fault(ascii(word), so, write) for word in unread))


def train(words: list[str]) -> int:
    """One run or, with -m, several; whatever else Hydra offers (--cfg job, --help, ...) too."""
    if set(completion.FLAGS) & set(words):
        return completion.complete(words, VERBS, lambda: _train(words, []))
    flags, overrides = sorted_words(words, VERBS)
    place = place_of(os.environ)  # of torchrun or srun
    if place is not None and (MULTIRUN & set(flags) or asks_for_a_sweep(flags, overrides)):
        so = f"{place.by} has started {place.num} processes, and a sweep starts its jobs itself"
        asked = "-m" if MULTIRUN & set(flags) else "hydra.mode: MULTIRUN, in a file"
        raise RunnerError(Fault(asked, so, "python -m runner -m ..., once; or one run at a time: hydra.mode=RUN"))
    if place is not None and place.rank:
        return _follow(flags, overrides, place)
    return _train(flags, overrides)


def _follow(flags: list[str], overrides: list[str], place: Place) -> int:
    """A process beside the first one of a run: no folder and no log of Hydra's."""
    compose = composer(flags)
    with hydra_session(["runner"]):
        cfg = composed_with(compose, overrides)
        try:  # as the first one does, and then is not there to meet
            claim.refuse_used(Path(HydraConfig.get().run.dir), cfg)
        except claim.OverError:
            return 0
        from runner.following import follow

        done = follow(cfg, place)
    return int(done["exit_code"] or done["status"] == "failed")


def _train(flags: list[str], overrides: list[str], run_one: RunOne | None = None) -> int:
    """Hands each composed configuration to `run_one` (None: app.run), as Hydra's job. Returns the exit code."""
    summaries: list[dict[str, Any]] = []
    mistaken: list[Fault] = []
    composed: list[bool] = []
    is_sweep = bool(MULTIRUN & set(flags))
    if is_sweep:
        from runner.sweep import plugins

        plugins.register()

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def job(cfg: DictConfig) -> None:
        composed.append(True)
        with loading():
            from runner import app  # torch: not on the way to --help

        name_data(cfg)
        folder = Path(HydraConfig.get().runtime.output_dir)
        try:
            with unexpected.noting(folder):
                summary = (run_one or partial(app.run, owns_process=True))(cfg, folder)
        except KeyboardInterrupt:  # before the training began
            claim.leave_nothing(folder)
            raise
        except RunnerError as error:  # told at the end: Hydra would print around it
            claim.leave_nothing(folder)
            mistaken.extend(fault for fault in error.faults if fault not in mistaken)
            return
        summaries.append(summary)
        if summary["ending"] == "out_of_memory":
            _say_what_fits(cfg)
        if summary["exit_code"]:
            sys.exit(summary["exit_code"])  # a signal ends a sweep, too

    CheckFirst.folder = None
    with hydra_session(["runner", *flags, *overrides]):
        try:
            job()
        except (RunnerError, BrokenPipeError):
            raise
        except Exception as error:
            if composed or (is_sweep and not mistakes.is_about_composition(error)):
                raise
            if CheckFirst.folder is not None:  # Hydra failed after it was taken: at its log, say
                claim.leave_nothing(CheckFirst.folder)
            raise mistakes.explain(error, overrides, compose=composer(flags), check=check) from None
        finally:
            claim.let_go()
    if mistaken and not summaries:
        raise RunnerError(*mistaken)
    if mistaken:
        report(RunnerError(*mistaken))
    return int(bool(mistaken) or any(summary["status"] == "failed" for summary in summaries))


def run(words: list[str], *, config_name: str = "config", folder: Path | None = None) -> notebook.Result:
    """One run from Python; see runner.run."""
    _make_own_code_importable()
    notebook.forget_edited()
    with restored(ALLOW_VARIABLE), restored(SECRETS):
        flags, overrides = sorted_words(words, VERBS)
        if others := [flag for flag in flags[::2] if flag not in ONE_RUN]:
            write = "python -m runner ..., or run() for each"
            raise RunnerError(
                *(Fault(flag, "run() is one run, and takes -cn, -cd and --allow", write) for flag in others)
            )
        try:
            result = _run_one(["-cn", config_name, *flags], overrides, folder)
        finally:
            notebook.note_loaded()
    if result["exit_code"] == 130:
        raise KeyboardInterrupt  # it has saved where it stands; the cells that follow are not to run
    return result


def _run_one(flags: list[str], overrides: list[str], folder: Path | None) -> notebook.Result:
    compose = composer(flags)
    with hydra_session(["runner"]):
        try:
            cfg = compose(overrides)
        except Exception as error:
            raise mistakes.explain(error, overrides, compose=compose, check=check) from None
        if cfg.hydra.mode == RunMode.MULTIRUN:
            raise RunnerError(
                Fault("hydra.mode=MULTIRUN", "run() is one run", "hydra.mode=RUN, or python -m runner -m ...")
            )
        with loading():
            from runner import app

        folder = folder or Path(cfg.hydra.run.dir).absolute()
        check_place(folder, key="hydra.run.dir")
        HydraConfig.instance().set_config(cfg)
        name_data(cfg)
        del cfg.hydra
        place = place_of(os.environ)
        if place is not None and place.rank:  # the first of several processes holds the folder
            return notebook.Result(app.run(cfg, folder), folder)
        try:
            claim.begin(folder, cfg, anew="-cd" in flags)
        except claim.OverError as over:
            print(claim.over_line(over))
            return notebook.Result(read_summary(folder), folder)
        try:
            with logging_to(folder):
                return notebook.Result(app.run(cfg, folder), folder)
        except RunnerError:
            claim.leave_nothing(folder)
            raise
        finally:
            claim.let_go()


def resume(words: list[str]) -> int:
    """Goes on with a run where it stopped, in its folder and in its page of MLflow."""
    from runner import resume as resuming

    wanted, given = (words[0], words[1:]) if words and _may_be_a_folder(words[0]) else ("last", words)
    flags, overrides = sorted_words(given, VERBS)
    folder = resuming.find(wanted).absolute()
    compose = composer([*flags, "-cd", str(folder), "-cn", "rerun"])
    with hydra_session(["runner"]):
        try:
            before = composed_with(compose, [word for word in overrides if word.startswith("tracking.")])
            cfg = composed_with(compose, overrides)
        except Exception as error:
            raise mistakes.explain(error, overrides, compose=compose, check=check) from None
        resuming.check(before, cfg)
        if is_over(read_summary(folder), overrides):
            print(f"{wanted}: it has finished; for more of it: resume {wanted} train.num_epochs=...")
            return 0
        with loading():
            from runner import app

        with logging_to(folder), unexpected.noting(folder):
            done = app.run(cfg, folder, owns_process=True)
    return int(done["exit_code"] or done["status"] == "failed")


def reproduce(words: list[str]) -> int:
    """A tracked run's configuration once more, as a new run, and how far its metrics are the same. Exit code 0 if they are."""
    from runner.reproduce import command

    given = [word for word in words if word not in command.FLAGS]
    wanted = given.pop(0) if given and _may_be_a_folder(given[0]) else "last"
    flags, overrides = sorted_words(given, VERBS)
    if MULTIRUN & set(flags):
        raise RunnerError(Fault("reproduce -m", "one run is repeated at a time", f"reproduce {wanted}"))
    agreed: list[bool] = []
    with command.original(wanted, overrides, trusted="--trust" in words) as original:

        def run_again(cfg: DictConfig, folder: Path) -> dict[str, Any]:
            summary, is_same = command.repeat(original, cfg, folder, anyway="--anyway" in words)
            agreed.append(is_same)
            return summary

        code = _train([*flags, "-cd", str(original.folder), "-cn", "rerun"], overrides, run_again)
    return int(not agreed[0]) if agreed else code


def plan(words: list[str]) -> int:
    """The run, or with -m each of several, on devices that need not be here; nothing is trained or tracked."""
    flags, overrides = sorted_words([word for word in words if word != "--json"], VERBS)
    is_sweep = bool(MULTIRUN & set(flags))
    flags = [flag for flag in flags if flag not in MULTIRUN]
    if {"-h", "--help", "-c", "--cfg", "--hydra-help"} & set(flags):
        return train(words)  # what is composed is the same
    from runner.plan import command  # torch

    compose = composer(flags)
    with hydra_session(["runner"]):
        try:
            master = (composer(flags, mode=RunMode.MULTIRUN) if is_sweep else compose)(overrides)
            is_sweep |= master.hydra.mode == RunMode.MULTIRUN  # in a file
            jobs = [
                command.Job(name, composed_with(compose, given))
                for given, name in (_planned(overrides, master) if is_sweep else [(tuple(overrides), "")])
            ]
        except RunnerError:
            raise
        except Exception as error:
            raise mistakes.explain(error, overrides, compose=compose, check=command.check) from None
        return command.plan(jobs, as_json="--json" in words)


def _planned(overrides: list[str], master: DictConfig) -> list[tuple[tuple[str, ...], str]]:
    """Each job's overrides and name. master: what they have in common."""
    from hydra.core.global_hydra import GlobalHydra

    from runner.sweep.jobs import combinations

    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        params = dict(master.hydra.sweeper.get("params") or {})
        return combinations(overrides, GlobalHydra.instance().config_loader(), params=params)


def composed_with(compose: Compose, overrides: Sequence[str]) -> DictConfig:
    cfg = compose(list(overrides))
    HydraConfig.instance().set_config(cfg)
    name_data(cfg)
    del cfg.hydra
    return cfg


def devices(words: list[str]) -> int:
    """What this machine has, what it lacks and why; with --bench, how fast each device is."""
    _only(words, "devices", ("--json", "--bench"))
    from runner.devices import show

    return show(as_json="--json" in words, measured="--bench" in words)


def report_sweep(words: list[str]) -> int:
    """A sweep's table, once more, and its files anew; without a folder, that of the last sweep below multirun/."""
    folders = [Path(word) for word in words if _may_be_a_folder(word)]
    _only([word for word in words if Path(word) not in folders[:1]], "report", ("multirun/DATE/TIME",))
    from runner.report.show import show

    return show(folders[0] if folders else None)


def sync(words: list[str]) -> int:
    """Sends to MLflow what the journals below a folder (outputs/ and multirun/) hold and it has not got.

    Each goes to the store that these words or the environment name, else to the one that its run was tracked to.
    """
    folders = [Path(word) for word in words if _may_be_a_folder(word)]
    settings = [word for word in words if word.startswith("tracking.uri=")]
    _only(
        [
            word
            for word in words
            if word.startswith("-") or ("=" in word and word not in settings and Path(word) not in folders)
        ],
        "sync",
        ("tracking.uri=URI",),
    )
    from runner.replay import replay

    return replay(folders, uri=stores.named(settings))


def ui(words: list[str]) -> int:
    """MLflow's own page over a store, the last run's unless one is named, on localhost; Ctrl-C ends it."""
    settings = dict(word.partition("=")[::2] for word in words if word.startswith(("tracking.uri=", "--port=")))
    _only([word for word in words if word.partition("=")[0] not in settings], "ui", ("tracking.uri=URI", "--port=PORT"))
    from runner import resume as resuming

    uri = stores.named(words) or stores.of_last(resuming.newest_first(), asked="ui")
    if uri.startswith("http"):
        print(f"{config.without_password(uri)} is a server already: open it in a browser")
        return 0
    command = [sys.executable, "-W", "ignore", "-m", "mlflow", "ui", "--host", "127.0.0.1", "--port"]
    command.append(settings.get("--port", "5000"))
    return _become(command, os.environ | {"MLFLOW_BACKEND_STORE_URI": uri})  # arguments show in `ps`, passwords too


def _after_training(verb: str, words: list[str]) -> int:
    """evaluate, predict, export, serve, register, lr-find; see runner.trained.asking."""
    from runner.trained import asking, command

    if set(command.HELP) & set(words):
        return command.help_of(verb)
    asked = asking.asked(verb, words)
    return command.do(asked, *sorted_words(asked.rest, VERBS))


def _become(command: list[str], environment: dict[str, str]) -> NoReturn:
    """This process goes on as another program: signals and the exit code are that one's."""
    os.execve(command[0], command, environment)


VERBS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "resume": resume,
    "reproduce": reproduce,
    "evaluate": partial(_after_training, "evaluate"),
    "predict": partial(_after_training, "predict"),
    "export": partial(_after_training, "export"),
    "serve": partial(_after_training, "serve"),
    "register": partial(_after_training, "register"),
    "lr-find": partial(_after_training, "lr-find"),
    "plan": plan,
    "devices": devices,
    "report": report_sweep,
    "sync": sync,
    "ui": ui,
}


@contextmanager
def logging_to(folder: Path) -> Iterator[None]:
    """runner.log, where Hydra does not see to it."""
    root = logging.getLogger()
    handler, level = logging.FileHandler(folder / "runner.log", encoding="utf-8", delay=True), root.level
    handler.setFormatter(logging.Formatter("[%(asctime)s][%(name)s][%(levelname)s] - %(message)s"))
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        handler.close()


def _say_what_fits(cfg: DictConfig) -> None:
    """The plan's numbers for a run that the memory did not take."""
    from runner.plan.command import what_fits

    print("plan    of this run, on the whole of that memory:")
    for line in what_fits(cfg):
        print(line)


def _may_be_a_folder(word: str) -> bool:
    """A word that names a run or a folder; a sweep's job may have a folder with = in its name."""
    return word[:1] not in ("-", "~") and ("=" not in word or Path(word).is_dir())


def _only(words: list[str], verb: str, takes: tuple[str, ...]) -> None:
    unknown = [word for word in words if word not in takes]
    if unknown:
        listed = " or ".join([f"python -m runner {verb}", *(f"python -m runner {verb} {word}" for word in takes)])
        raise RunnerError(*(Fault(f"{verb} {word}", f"{verb} does not take {word}", listed) for word in unknown))


def _make_own_code_importable() -> None:
    """`runner` finds the person's modules in the current folder as `python -m runner` does."""
    here = str(Path.cwd())
    if not sys.flags.safe_path and here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
