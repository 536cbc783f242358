"""The table of commands. Parsing, `--help`, shell completion and the reference in runner/README.md are made from it.

A command is one entry in COMMANDS and one function, in commands.py or where the entry says. Another package adds one by an entry
point that names a `runner.cli.Command`:

    [project.entry-points."runner.commands"]
    hello = "my_package:COMMAND"
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, cast

from runner.errors import RunnerError, path_problems, refuse
from runner.version import CONF

ENTRY_POINTS = "runner.commands"
GROUPS = ("Train", "Inspect", "Use", "Track", "Tune")
OTHER_GROUP = "From other packages"
ANY_KEY = ("",)
#: keys that change how a run is computed, not which run it is
COMPUTING = ("device", "train.precision", "backends.")
JSON = "--json"
JSON_HELP = "Print the result as JSON to stdout"

EXAMPLES = """\
  python -m runner device=cuda:0 model=mlp data=digits train.num_epochs=5
  python -m runner -m model=linear,mlp,cnn seed=1,2,3
  python -m runner data=table data.path=people.csv data.target=buys model=mlp"""


@dataclass(frozen=True)
class Option:
    """A flag (`--keep`), a flag with a value (`--input FILE`) or a setting (`metric=NAME`) of one command."""

    name: str  # a setting's ends in =
    value: str = ""  # what the value is called in the help; "" for a flag without one
    help: str = ""
    read: Callable[[Option, str], Any] = lambda option, value: value
    default: Any = None
    is_required: bool = False

    @property
    def usage(self) -> str:
        return f"{self.name}{self.value}" if self.name.endswith("=") else f"{self.name} {self.value}".rstrip()


def number(least: int = 1, most: int | None = None) -> Callable[[Option, str], int]:
    """Return a reader of whole numbers."""

    def read(option: Option, value: str) -> int:
        if value.isdecimal() and least <= int(value) and (most is None or int(value) <= most):
            return int(value)
        numbers = f"{least} or more" if most is None else f"{least} to {most}"
        problem, way = (
            f"`{option.name}` must be a whole number, {numbers}",
            f"{option.name} {max(least, option.default or 0)}",
        )
        raise RunnerError.suggest(f"{option.name} {value}", problem, [way])

    return read


def amount(option: Option, value: str) -> float:
    """Read a number above 0."""
    with suppress(ValueError):
        if 0 < (found := float(value)) < float("inf"):
            return found
    problem, way = f"`{option.name}` must be a number above 0", f"{option.name} {option.default or 60:g}"
    raise RunnerError.suggest(f"{option.name} {value}", problem, [way])


def input_path(option: Option, value: str) -> str:
    """Read the path of a file of this machine."""
    refuse(path_problems(option.name, value))
    return value


def output_path(option: Option, value: str) -> str:
    """Read the path of a file to write."""
    refuse(path_problems(option.name, value, is_written=True))
    return value


Function = Callable[["Arguments"], "int | Mapping[str, Any]"]


@dataclass(frozen=True)
class Command:
    """What a command is called, what it takes, and the function that runs it.

    Args:
        name: The first argument of the command line.
        group: The heading in `--help`.
        help: One line: imperative, capital, no period, under 60 characters.
        function: Takes `Arguments`; returns the exit code, or the result that `--json` prints. A text is `MODULE:NAME`, or names a
            function in commands.py ("": the command's name).
        values: How the positional arguments are called in the help: `[RUN]` for one, `[DIR ...]` or `A B` for several.
        options: Its flags and settings.
        keys: Beginnings of the configuration keys that it takes as overrides (None: it takes no configuration).
        hydra_flags: Flags of Hydra that it takes.
        composes: Whether composing its overrides reports several values without -m, next to other errors.
        details: More lines for `COMMAND --help` and the reference.
        result: What `--json` prints, in Markdown.
    """

    name: str
    group: str
    help: str
    function: Function | str = ""
    values: str = ""
    options: tuple[Option, ...] = ()
    keys: tuple[str, ...] | None = None
    hydra_flags: frozenset[str] = frozenset()
    composes: bool = False
    details: str = ""
    result: str = "the result"

    def find_function(self) -> Function:
        if not isinstance(self.function, str):
            return self.function
        module, _, name = self.function.rpartition(":")
        found = getattr(import_module(module or "runner.cli.commands"), name or self.name.replace("-", "_"))
        return cast(Function, found)

    def option(self, name: str) -> Option | None:
        return next((option for option in self.options if option.name == name), None)

    @property
    def max_values(self) -> float:
        if not self.values:
            return 0
        return 1 if self.values.endswith("]") and " " not in self.values else float("inf")

    @property
    def usage(self) -> str:
        parts = ["python -m runner", self.name, self.values]
        parts += [option.usage if option.is_required else f"[{option.usage}]" for option in self.options]
        if self.keys:
            parts.append("[KEY=VALUE ...]" if self.keys == ANY_KEY or len(self.keys) > 1 else f"[{self.keys[0]}=...]")
        return " ".join(filter(None, parts))


@dataclass(frozen=True)
class Arguments:
    """The arguments of one command, checked."""

    command: Command
    words: list[str]  # as they were typed
    values: tuple[str, ...]  # positional: runs, sweeps, directories
    options: dict[str, Any]  # by name; the default of an option that was not typed
    flags: list[str]  # Hydra's
    overrides: list[str]

    @property
    def run(self) -> str:
        """The run that is meant: `last` if none was typed."""
        return self.values[0] if self.values else "last"

    def __getitem__(self, option: str) -> Any:
        return self.options[option]


ONE_RUN = frozenset({"--config-name", "-cn", "--config-dir", "-cd"})
MULTIRUN = frozenset({"-m", "--multirun"})
SHOWS = frozenset({"-c", "--cfg", "--resolve", "-p", "--package", "--hydra-help"})
EVERY_FLAG = frozenset({*ONE_RUN, *MULTIRUN, *SHOWS, "-cp", "--config-path", "-i", "--info", "-r", "--run"})

_URI = Option("tracking.uri=", "URI", "Tracking server or store to ask")
_METRIC = Option("metric=", "NAME", "Metric to compare by")
_OUTPUT = Option("--output", "FILE", "File to write", output_path)

_TABLE = (
    Command(
        "train",
        "Train",
        "Train one run (the default command)",
        keys=ANY_KEY,
        hydra_flags=EVERY_FLAG,
        composes=True,
        details="`-m KEY=A,B` trains a sweep: every combination of the values. `--cfg job` prints the configuration.\n"
        "`train.check=true` tests in a few seconds whether a run would work.",
        result="`summary.json` with its `folder`; of a sweep: as `report`",
    ),
    Command(
        "resume",
        "Train",
        "Resume an interrupted run",
        values="[RUN]",
        keys=ANY_KEY,
        details="The run continues in its directory and in its MLflow run.",
        result="`summary.json` with its `folder`",
    ),
    Command(
        "reproduce",
        "Train",
        "Repeat a run and compare the metrics",
        values="[RUN]",
        options=(
            Option("--anyway", help="Repeat the run with other code, data or versions"),
            Option("--trust", help="Trust the configuration: you have looked at it"),
        ),
        keys=ANY_KEY,
        hydra_flags=EVERY_FLAG - MULTIRUN,
        details="Exit code 0 if the metrics are the same, else 1.",
        result="`summary.json` with its `folder`, `reproduced` and `is_same`",
    ),
    Command(
        "try",
        "Train",
        "Keep a change only if it is better across seeds",
        "try_out",
        options=(
            Option("--against", "RUN", "Run or sweep to compare with (`best`: the best try)", default="best"),
            Option("--budget", "SECONDS", "Seconds for all of it", amount),
            _METRIC,
        ),
        keys=ANY_KEY,
        hydra_flags=EVERY_FLAG,
        details="Tries a change of the configuration or the code. Exit code 0 if it is kept, else 1.",
        result="its line in the ledger: `verdict`, `why`, `difference`, `values`, ...",
    ),
    Command(
        "devices",
        "Inspect",
        "List this machine's devices, and why others are missing",
        options=(Option("--bench", help="Measure each device, about 10 seconds each"),),
        result="`devices`, `missing`, `auto`, with `--bench` also `bench`",
    ),
    Command(
        "plan",
        "Inspect",
        "Estimate memory and speed on a device you may not have",
        keys=ANY_KEY,
        hydra_flags=ONE_RUN | MULTIRUN | SHOWS,
        composes=True,
        details="Simulates the run, or with `-m` several; trains and tracks nothing.\n"
        "`plan.device_name=T4` or `plan.device_memory=80GiB` describes the device. Exit code 0 if it would run, else 1.",
        result="`plan.json`; for several jobs `would_run` of all, and `jobs`",
    ),
    Command(
        "watch",
        "Inspect",
        "Show live curves of a run or a sweep",
        values="[RUN]",
        details="Prints them once if the run has ended, or in a pipe.",
        result="`status`, `step`, `num_steps`, `goal`, `metrics` of a run, or a sweep's `jobs`",
    ),
    Command(
        "explain",
        "Inspect",
        "Find the operation behind a NaN, or where time went",
        values="[RUN]",
        options=(
            Option("--step", "N", "Explain step N instead of the first NaN, e.g., a loss spike", number(1), default=0),
            Option("--time", help="Show where the time went, and what would save most"),
            Option("--trace", help="Trace 20 steps again for Perfetto, in `profile/`"),
        ),
        keys=("device", "train.compile", "train.cuda_graph"),
        details="Replays the run to the step that went wrong. Names the operation, line and examples.",
        result="`step`, `operation`, `rows`, `try`, `replay`, ...; `--time`: `time`, `step`, `advice`; `--trace`: the files",
    ),
    Command(
        "diff",
        "Inspect",
        "Show differences between runs",
        values="A B [...]",
        options=(_URI,),
        details="Configuration, code, data, versions, machine, and the step at which the curves diverge.",
        result="`runs`, `configuration`, `made_with`, `curves`, `sentence`",
    ),
    Command(
        "compare",
        "Inspect",
        "Compare runs or sweeps, with a confidence interval",
        values="A B | SWEEP",
        options=(_METRIC, _URI),
        details="A and B are runs, sweeps or `SWEEP:KEY=VALUE`. SWEEP: its best configuration with each other one.",
        result="`comparisons`: each with `a`, `b`, `metric`, `difference`, `verdict`",
    ),
    Command(
        "report",
        "Inspect",
        "Write a sweep's table, CSV file and HTML page",
        values="[SWEEP]",
        details="SWEEP: the directory of a sweep, by default the last one in `multirun/`.",
        result="`report.json` with its `folder`: `jobs`, each with `state`, `error`, `folder`, `best`, `metrics`; `comparisons`",
    ),
    Command(
        "history",
        "Inspect",
        "Print or export all points of a run",
        values="[RUN]",
        options=(_OUTPUT, _URI),
        details="Counts the points of each metric, also of a run in progress. `--output` writes one row per point.",
        result="`metrics`, or the file that was written",
    ),
    Command(
        "evaluate",
        "Use",
        "Evaluate a run's best weights again",
        values="[RUN]",
        options=(Option("--track", help="Log the results to MLflow"),),
        keys=(*COMPUTING, "data", "train.eval_batch_size", "tracking.uri"),
        details="`data=...` evaluates all of this data, or its splits if it has any. A checkpoint instead of a run:\n"
        "`evaluate DIRECTORY/checkpoints/step-120.pt`, also for `predict`, `export` and `serve`.",
    ),
    Command(
        "predict",
        "Use",
        "Write predictions for new data",
        values="[RUN]",
        options=(
            Option("--input", "FILE", "Data to predict for", input_path, is_required=True),
            Option(
                "--output",
                "FILE",
                "Predictions: .csv .tsv .parquet .feather .jsonl .npz",
                output_path,
                is_required=True,
            ),
            Option("--batch-size", "ROWS", "Examples at a time", number(), default=1024),
            Option("--keep", help="Write the input columns too"),
        ),
        keys=COMPUTING,
        result="the result, with the file that was written",
    ),
    Command(
        "export",
        "Use",
        "Export the model: safetensors, onnx, pt2 or mlflow",
        values="[RUN]",
        options=(
            Option("--format", "FORMAT", "`safetensors`, `onnx`, `pt2` or `mlflow`", is_required=True),
            Option("--output", "PATH", "File or directory to write", output_path),
            Option("--predictions", help="Export predictions, e.g., probabilities, instead of raw outputs"),
        ),
        keys=(),
        details="Checks the exported model against the original.",
        result="the result, with the file or directory that was written",
    ),
    Command(
        "serve",
        "Use",
        "Serve the model over HTTP on localhost",
        values="[RUN]",
        options=(
            Option("--port", "PORT", "Port of the server", number(1, 65535), default=5001),
            Option("--predictions", help="Answer with probabilities instead of raw outputs"),
        ),
        keys=(),
        details='MLflow\'s scoring server: `POST /invocations` with `{"inputs": [...]}`.',
        result="`url`, as soon as it is known; the command keeps running",
    ),
    Command(
        "register",
        "Use",
        "Register the model in MLflow's registry",
        values="[RUN]",
        options=(
            Option("--name", "NAME", "Name of the registered model", is_required=True),
            Option("--alias", "ALIAS", "Alias of the new version, e.g., `champion`"),
            Option("--again", help="Add a version even if this model is already registered"),
        ),
        keys=("tracking.uri",),
    ),
    Command(
        "sync",
        "Track",
        "Send points that MLflow has not received yet",
        values="[DIR ...]",
        options=(_URI,),
        details="Sends the journals in the directories, by default `outputs/` and `multirun/`, each to the store of its run.\n"
        "Exit code 0 if MLflow has everything then, else 1.",
        result="`runs`: what was sent of each",
    ),
    Command(
        "ui",
        "Track",
        "Open MLflow's page on localhost",
        options=(_URI, Option("--port", "PORT", "Port of the page (default: a free one from 5000)", number(1, 65535))),
        details="Shows the store of the last run. Ctrl-C ends it.",
        result="`url`, as soon as it is known; the command keeps running",
    ),
    Command(
        "lr-find",
        "Tune",
        "Find a learning rate with a range test",
        options=(
            Option("--steps", "STEPS", "Number of steps", number(10), default=100),
            Option("--from", "RATE", "First learning rate", amount, default=1e-7),
            Option("--to", "RATE", "Last learning rate", amount, default=10.0),
        ),
        keys=ANY_KEY,
        hydra_flags=ONE_RUN,
        details="Trains a few steps with a rising rate. Writes `lr_find.png` and `lr_find.json` in `outputs/`, and no run.",
    ),
    Command(
        "tune",
        "Tune",
        "Find the fastest settings with the same numbers",
        options=(
            Option("--seconds", "SECONDS", "Seconds to measure", amount, default=30.0),
            Option("--name", "NAME", "Name of the file that is written"),
            Option("--precision", help="Try other precisions too (other numbers)"),
        ),
        keys=ANY_KEY,
        hydra_flags=ONE_RUN,
        details="Writes an option of the group `tuned`, for `python -m runner ... tuned=NAME`.",
        result="`settings`, `ratio`, `tried`, `fits_as_it_is`",
    ),
    Command(
        "schema",
        "Tune",
        "Write a JSON schema of conf/ for editors",
        options=(_OUTPUT,),
        details="Covers your options and targets. Prints the line that names the schema to an editor.",
        result="`output`, `lines`",
    ),
)
COMMANDS: dict[str, Command] = {command.name: command for command in _TABLE}


def find(name: str) -> Command | None:
    """Return the command of this name: one of ours, or else one of another package."""
    if name in COMMANDS:
        return COMMANDS[name]
    if not name or name[0] in "-+~" or "=" in name:  # a flag or an override
        return None
    return next((command for each in entry_points(group=ENTRY_POINTS, name=name) if (command := _load(each))), None)


def every_command() -> dict[str, Command]:
    """Return all commands, also of other packages, by name; built-in ones come first. Looks through the installed packages."""
    found = dict(COMMANDS)
    for entry in entry_points(group=ENTRY_POINTS):
        if entry.name in COMMANDS:
            print(
                f"warning: the command `{entry.name}` of {entry.value} has a built-in command's name", file=sys.stderr
            )
        elif (command := _load(entry)) is not None:
            found[entry.name] = command
    return found


def _load(entry: Any) -> Command | None:
    try:
        command = entry.load()
    except Exception as error:  # the other package's own code
        print(f"warning: the command `{entry.name}` can't be loaded from {entry.value}: {error}", file=sys.stderr)
        return None
    if isinstance(command, Command):
        return command
    print(f"warning: {entry.value} is not a runner.cli.Command: `{entry.name}` is left out", file=sys.stderr)
    return None


def overview() -> str:
    """Return what `--help` prints."""
    commands = every_command()
    width = max(map(len, commands))
    lines = [
        "Declarative PyTorch experiments: YAML chooses the device, the model and the data; MLflow tracks every step.",
        "",
        "Usage: python -m runner [COMMAND] [GROUP=OPTION ...] [KEY=VALUE ...]",
        "       python -m runner -m KEY=A,B [...]",
    ]
    for group in (*GROUPS, OTHER_GROUP):
        rows = {name: command.help for name, command in commands.items() if _heading(command) == group}
        if group == "Train":
            rows |= {"-m": "Train a sweep: every combination of the values"}
        if rows:
            lines += ["", group, *(f"  {name:<{width}}  {text}" for name, text in rows.items())]
    options = {JSON: JSON_HELP, "--version": "Print the version", "--help": "Print this help"}
    lines += ["", "Options", *(f"  {name:<{width}}  {text}" for name, text in options.items())]
    lines += ["", "Examples", EXAMPLES, "", "Groups and their options", *_config_groups(), ""]
    lines.append(
        "`COMMAND --help` explains a command, `--cfg job` prints every key with its value. Documentation: README.md"
    )
    return "\n".join(lines)


def _config_groups() -> list[str]:
    """List the groups of ./conf and the built-in conf/ with their options, as Hydra does, which is slow to import."""
    groups: dict[str, set[str]] = {}
    for folder in (CONF, Path("conf")):
        for file in folder.glob("*/**/*.yaml"):
            groups.setdefault(file.parent.relative_to(folder).as_posix(), set()).add(file.stem)
    return [
        f"{group}: {', '.join(sorted(groups[group]))}" for group in sorted(groups) if group.split("/")[0] != "hydra"
    ]


def _heading(command: Command) -> str:
    return command.group if command.group in GROUPS else OTHER_GROUP


def explain(command: Command) -> str:
    """Return what `COMMAND --help` prints."""
    lines = [f"Usage: {command.usage}", "", command.help]
    if command.details:
        lines += ["", command.details]
    rows = {option.usage: _option_help(option) for option in command.options} | {JSON: JSON_HELP}
    width = max(map(len, rows))
    lines += ["", "Options", *(f"  {name:<{width}}  {text}".rstrip() for name, text in rows.items())]
    if "RUN" in command.values:
        lines += ["", "RUN: a run directory, an MLflow run id, or last (the default)"]
    if command.keys is not None and command.keys not in ((), ANY_KEY):
        lines += ["", f"KEY: {', '.join(f'{key}*' if key.endswith('.') else key for key in command.keys)}"]
    return "\n".join(lines)


def _option_help(option: Option) -> str:
    if option.default is None:
        return option.help
    default = f"{option.default:g}" if isinstance(option.default, float) else option.default
    return f"{option.help} (default: {default})" if default != 0 else option.help


def reference() -> str:
    """Return the table of our commands in runner/README.md."""
    rows = ["| command | does | `--json` prints |", "|---|---|---|"]
    for command in COMMANDS.values():
        usage = command.usage.removeprefix("python -m runner ").replace("|", "\\|")
        does = " ".join([f"{command.help}.", *command.details.splitlines()])
        rows.append(f"| `{usage}` | {does} | {command.result} |")
    return "\n".join(rows)
