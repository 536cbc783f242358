"""The words on the command line go in; a verb's work or a run comes out, as an exit code. Imports nothing heavy."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.experimental.callback import Callback
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig

from runner import config, mistakes
from runner.errors import Fault, RunnerError, nearest
from runner.targets import ALLOW_VARIABLE

HERE = Path(__file__).resolve().parent
#: a wheel carries conf/ as runner/conf; in a checkout and an editable install it lies beside runner/
CONF = HERE / "conf" if (HERE / "conf").is_dir() else HERE.parent / "conf"
MISTAKE = 2

#: Hydra's flags that take a value of their own
FLAGS_WITH_VALUE = (
    "--cfg",
    "-c",
    "--package",
    "-p",
    "--config-path",
    "-cp",
    "--config-name",
    "-cn",
    "--config-dir",
    "-cd",
)
FLAGS_WITH_WORDS = ("--info", "-i")  # a value may follow
PLAIN_FLAGS = (
    "--help",
    "-h",
    "--hydra-help",
    "--version",
    "--resolve",
    "--run",
    "-r",
    "--multirun",
    "-m",
    "--shell-completion",
    "-sc",
)


def main(argv: list[str] | None = None) -> int:
    """Runs one command. Returns its exit code: 0 done, 1 failed, 2 the person's mistake, 130 Ctrl-C, 143 SIGTERM."""
    words = list(sys.argv[1:] if argv is None else argv)
    _make_own_code_importable()
    try:
        verb = words.pop(0) if words and words[0] in VERBS else "train"
        return VERBS[verb](words)
    except RunnerError as error:
        return report(error)
    except SystemExit as end:  # Hydra's own flags, CheckFirst, a signal in a sweep
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `... | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def report(error: RunnerError) -> int:
    """Prints a person's mistakes, and returns their exit code."""
    count = len(error.faults)
    head = "runner: this can't be run" if count == 1 else f"runner: this can't be run, for {count} reasons"
    print(f"{head}\n\n{error}", file=sys.stderr)
    return MISTAKE


def train(words: list[str]) -> int:
    """One run or, with -m, several; whatever else Hydra offers (--cfg job, --help, ...) too."""
    flags, overrides = _sorted_words(words)
    summaries: list[dict[str, Any]] = []
    mistaken: list[Fault] = []
    composed: list[bool] = []

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def job(cfg: DictConfig) -> None:
        composed.append(True)
        from runner import app  # torch: not on the way to --help

        _name_data(cfg)
        folder = Path(HydraConfig.get().runtime.output_dir)
        try:
            summary = app.run(cfg, folder)
        except RunnerError as error:  # told at the end: Hydra would print around it
            _leave_nothing(folder)
            mistaken.extend(fault for fault in error.faults if fault not in mistaken)
            return
        summaries.append(summary)
        if summary["exit_code"]:
            sys.exit(summary["exit_code"])  # a signal ends a sweep, too

    with _hydra(["runner", *flags, *overrides]):
        try:
            job()
        except RunnerError:
            raise
        except Exception as error:
            if composed:
                raise
            raise mistakes.explain(error, overrides, compose=_composer(flags), check=check) from None
    if mistaken and not summaries:
        raise RunnerError(*mistaken)
    if mistaken:
        report(RunnerError(*mistaken))
    return int(bool(mistaken) or any(summary["status"] == "failed" for summary in summaries))


def run(overrides: list[str], *, config_name: str = "config", folder: Path | None = None) -> dict[str, Any]:
    """One run from Python; see runner.run."""
    _make_own_code_importable()
    flags = ["-cn", config_name]
    compose = _composer(flags)
    with _hydra(["runner"]):
        try:
            cfg = compose(overrides)
        except Exception as error:
            raise mistakes.explain(error, overrides, compose=compose, check=check) from None
        from runner import app

        folder = folder or Path(cfg.hydra.run.dir).absolute()
        HydraConfig.instance().set_config(cfg)
        _name_data(cfg)
        del cfg.hydra
        return app.run(cfg, folder)


def devices(words: list[str]) -> int:
    """What this machine has, what it lacks and why."""
    _only(words, "devices", ("--json",))
    from runner.devices import show

    return show(as_json="--json" in words)


def sync(words: list[str]) -> int:
    """Sends to MLflow what the journals below a folder (outputs/ and multirun/) hold and it has not got."""
    folders = [Path(word) for word in words if not word.startswith("-") and "=" not in word]
    settings = [word for word in words if word.startswith("tracking.uri=")]
    _only(
        [word for word in words if word.startswith("-") or ("=" in word and word not in settings)],
        "sync",
        ("tracking.uri=URI",),
    )
    uri = settings[-1].partition("=")[2] if settings else os.environ.get("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    from runner.replay import replay

    return replay(folders, uri=uri)


def ui(words: list[str]) -> int:
    """MLflow's own page over the runs of this folder, on localhost; Ctrl-C ends it."""
    settings = dict(word.partition("=")[::2] for word in words if word.startswith(("tracking.uri=", "--port=")))
    _only([word for word in words if word.partition("=")[0] not in settings], "ui", ("tracking.uri=URI", "--port=PORT"))
    uri = settings.get("tracking.uri") or os.environ.get("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    if uri.startswith("http"):
        print(f"{config.without_password(uri)} is a server already: open it in a browser")
        return 0
    command = [sys.executable, "-W", "ignore", "-m", "mlflow", "ui", "--backend-store-uri", uri, "--host", "127.0.0.1"]
    return _become([*command, "--port", settings.get("--port", "5000")])


def _become(command: list[str]) -> NoReturn:
    """This process goes on as another program: signals and the exit code are that one's."""
    os.execv(command[0], command)


VERBS: dict[str, Callable[[list[str]], int]] = {"train": train, "devices": devices, "sync": sync, "ui": ui}


def check(cfg: DictConfig) -> None:
    """Raises a RunnerError with everything that is wrong with a composed configuration."""
    from runner import parts  # torch
    from runner.device import probe

    parts.check(cfg, probe())


class CheckFirst(Callback):
    """Checks a run before Hydra makes its folder: a mistake leaves nothing behind."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        try:
            check(config)
        except RunnerError as error:
            sys.exit(report(error))  # Hydra turns a callback's other exceptions into warnings


class OwnConf(SearchPathPlugin):
    """The current folder's conf/ comes before the built-in one, so that a person's file of the same name wins (hydra#2758)."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        own = Path.cwd() / "conf"
        if own.is_dir() and not own.samefile(CONF):
            search_path.prepend("own", f"file://{own}", anchor="main")


@contextmanager
def _hydra(argv: list[str]) -> Iterator[None]:
    """Hydra with our schema and search path, raising its errors instead of printing them; as it was before, afterwards."""
    config.register()
    if OwnConf not in Plugins.instance().discover(SearchPathPlugin):
        Plugins.instance().register(OwnConf)
    before = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = argv, "1"
    try:
        yield
    finally:
        sys.argv = before[0]
        if before[1] is None:
            os.environ.pop("HYDRA_FULL_ERROR", None)
        else:
            os.environ["HYDRA_FULL_ERROR"] = before[1]


def _composer(flags: list[str]) -> mistakes.Compose:
    """Composes as the command line with these flags would, without running anything."""
    values = dict(pairwise(flags))
    name = values.get("--config-name") or values.get("-cn") or "config"
    folder = values.get("--config-dir") or values.get("-cd")
    extra = [f"hydra.searchpath=[file://{Path(folder).absolute()}]"] if folder else []

    config.register()

    def compose(overrides: list[str]) -> DictConfig:
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            return hydra.compose(name, overrides=[*extra, *overrides], return_hydra_config=True)

    return compose


def _leave_nothing(folder: Path) -> None:
    """Takes away what a run left that never began: Hydra's notes and empty logs, nothing of anybody else's."""
    if (folder / "journal" / "journal.bin").exists():
        return
    for inner in (folder / ".hydra", folder / "journal"):
        shutil.rmtree(inner, ignore_errors=True)
    (folder / "runner.log").unlink(missing_ok=True)
    with suppress(OSError):  # something else lies there
        folder.rmdir()


def _name_data(cfg: DictConfig) -> None:
    """Data without a name is called as its file in conf/data/."""
    if cfg.data.name is None:
        cfg.data.name = HydraConfig.get().runtime.choices.get("data")


def _sorted_words(words: list[str]) -> tuple[list[str], list[str]]:
    """Hydra's flags first, each with its value, then the overrides: Hydra takes them in no other order (hydra#3053)."""
    flags: list[str] = []
    overrides: list[str] = []
    faults: list[Fault] = []
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            overrides.append(word)
        elif name == "--allow":
            _allow(value if equals else next(rest, ""))
        elif name in FLAGS_WITH_VALUE:
            given = value if equals else next(rest, None)
            flags += [name] if given is None else [name, given]
        elif name in FLAGS_WITH_WORDS or name in PLAIN_FLAGS:
            flags.append(word)
        else:
            following = next(rest, None) if not equals else value
            faults.append(_unknown_flag(name, following))
    if "--info" in flags or "-i" in flags or "--shell-completion" in flags or "-sc" in flags:
        return words, []  # these read their own words
    faults += [_not_a_verb(word) for word in overrides if "=" not in word and not word.startswith("~")]
    if not {"-m", "--multirun"} & set(flags):
        faults += [mistakes.ambiguous(word) for word in overrides if _has_bare_comma(word)]
    if faults:
        raise RunnerError(*faults)
    return list(dict.fromkeys(flags)) if flags.count("-m") > 1 else flags, overrides


def _unknown_flag(name: str, value: str | None) -> Fault:
    known = [key for key in config.all_keys(_composer([])([])) if not key.startswith("hydra")]
    flags = [*PLAIN_FLAGS, *FLAGS_WITH_VALUE, *FLAGS_WITH_WORDS, "--allow"]
    keys = config.suggest_keys(name.lstrip("-").replace("-", "_"), known)
    shown = value if value is not None and not value.startswith("-") else "..."
    near = nearest(name, flags) if not keys else []
    write = " or ".join([f"{key}={shown}" for key in keys] + near) or "KEY=VALUE (--help lists the keys)"
    asked = name if value is None else f"{name} {value}"
    return Fault(asked, f"there is no flag {name}; values are set without dashes", write)


def _not_a_verb(word: str) -> Fault:
    verbs = nearest(word, VERBS)
    if verbs:
        return Fault(word, f"there is no command {word}; there are {', '.join(VERBS)}", f"python -m runner {verbs[0]}")
    known = [key for key in config.all_keys(_composer([])([])) if not key.startswith("hydra")]
    return mistakes.not_an_override(word, known, list(VERBS))


def _has_bare_comma(word: str) -> bool:
    """A comma outside of quotes, brackets and parentheses: Hydra would call the value ambiguous."""
    depth, quote = 0, ""
    for char in word.partition("=")[2]:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "[({":
            depth += 1
        elif char in "])}":
            depth -= 1
        elif char == "," and depth == 0:
            return True
    return False


def _allow(prefix: str) -> None:
    """Adds to the prefixes that a `_target_` may have, for this process and those that it starts."""
    if not prefix or prefix.startswith("-") or "=" in prefix:
        raise RunnerError(Fault("--allow", "it needs the name of a package whose classes may be built", "--allow timm"))
    before = os.environ.get(ALLOW_VARIABLE)
    os.environ[ALLOW_VARIABLE] = f"{before},{prefix}" if before else prefix


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
