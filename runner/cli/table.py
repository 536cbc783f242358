"""The table of commands. Parsing, `--help`, shell completion and the reference in runner/docs/reference.md are made from it.

A command is one entry in COMMANDS and one function, in commands.py or where the entry says. runner/README.md says how another
package adds one.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from runner.command import ANY_KEY, Command, Option, amount, input_path, number, output_path
from runner.version import CONF

ENTRY_POINTS = "runner.commands"
GROUPS = ("Train", "Inspect", "Use", "Track", "Tune")
OTHER_GROUP = "From other packages"
#: keys that change how a run is computed, not which run it is
COMPUTING = ("device", "train.precision", "backends.")
JSON = "--json"
JSON_HELP = "Print the result as JSON to stdout"

EXAMPLES = """\
  python -m runner device=cuda:0 model=mlp data=digits train.num_epochs=5
  python -m runner -m model=linear,mlp,cnn seed=1,2,3
  python -m runner data=table data.path=people.csv data.target=buys model=mlp"""


#: flags, by what they do
HELP = frozenset({"--help", "-h"})
SHELL = frozenset({"--shell-completion", "-sc"})
INFO = frozenset({"--info", "-i"})
CFG = frozenset({"--cfg", "-c"})
ONE_RUN = frozenset({"--config-name", "-cn", "--config-dir", "-cd"})
MULTIRUN = frozenset({"-m", "--multirun"})
SHOWS = CFG | {"--resolve", "-p", "--package"}
EVERY_FLAG = ONE_RUN | MULTIRUN | SHOWS | INFO | {"-cp", "--config-path", "-r", "--run"}

_URI = Option("tracking.uri=", "URI", "Tracking server or store to ask")
_METRIC = Option("metric=", "NAME", "Metric to compare by")
_OUTPUT = Option("--output", "FILE", "File to write", output_path)

# fmt: off
_TABLE = (
    Command("train", "Train", "Train one run (the default command)", keys=ANY_KEY, hydra_flags=EVERY_FLAG, composes=True,
        details="`-m KEY=A,B` trains a sweep: every combination of the values. `--cfg job` prints the configuration.\n"
        "`train.check=true` tests in a few seconds whether a run would work."),
    Command("resume", "Train", "Resume an interrupted run", values="[RUN]", keys=ANY_KEY,
        details="The run continues in its directory and in its MLflow run."),
    Command("reproduce", "Train", "Repeat a run and compare the metrics", values="[RUN]", keys=ANY_KEY,
        hydra_flags=EVERY_FLAG - MULTIRUN, options=(
            Option("--anyway", help="Repeat the run with other code, data or versions"),
            Option("--trust", help="Trust the configuration: you have looked at it")),
        details="Exit code 0 if the metrics are the same, else 1."),
    Command("try", "Train", "Keep a change only if it is better across seeds", "runner.tools.try_out:try_out", keys=ANY_KEY,
        hydra_flags=EVERY_FLAG, options=(
            Option("--against", "RUN", "Run or sweep to compare with (`best`: the best try)", default="best"),
            Option("--budget", "SECONDS", "Seconds to train, from the first job on", amount), _METRIC),
        details="Tries a change of the configuration or the code. Exit code 0 if it is kept, else 1."),
    Command("devices", "Inspect", "List this machine's devices, and why others are missing", "runner.cli.devices:show",
        options=(Option("--bench", help="Measure each device, about 10 seconds each"),)),
    Command("plan", "Inspect", "Estimate memory and speed on a device you may not have", keys=ANY_KEY,
        hydra_flags=ONE_RUN | MULTIRUN | SHOWS, composes=True,
        details="Simulates the run, or with `-m` several; trains and tracks nothing.\n"
        "`plan.device_name=T4` or `plan.device_memory=80GiB` describes the device. Exit code 0 if it would run, else 1."),
    Command("watch", "Inspect", "Show live curves of a run or a sweep", "runner.tools.watch:watch", values="[RUN]",
        details="Prints them once if the run has ended, or in a pipe."),
    Command("explain", "Inspect", "Find the operation behind a NaN, or where time went", values="[RUN]",
        keys=("device", "train.compile", "train.cuda_graph"), options=(
            Option("--step", "N", "Explain step N instead of the first NaN, e.g., a loss spike", number(1), default=0),
            Option("--time", help="Show where the time went, and what would save most"),
            Option("--trace", help="Trace 20 steps again for Perfetto, in `profile/`")),
        details="Replays the run to the step that went wrong. Names the operation, line and examples."),
    Command("diff", "Inspect", "Show differences between runs", "runner.tools.diff:run", values="A B [...]", options=(_URI,),
        details="Configuration, code, data, versions, machine, and the step at which the curves diverge."),
    Command("compare", "Inspect", "Compare runs or sweeps, with a confidence interval", "runner.tools.compare:run",
        values="A B | SWEEP", options=(_METRIC, _URI),
        details="A and B are runs, sweeps or `SWEEP:KEY=VALUE`. SWEEP: its best configuration with each other one."),
    Command("report", "Inspect", "Write a sweep's table, CSV file and HTML page", values="[SWEEP]",
        details="SWEEP: the directory of a sweep, by default the last one in `multirun/`."),
    Command("history", "Inspect", "Print or export all points of a run", values="[RUN]", options=(_OUTPUT, _URI),
        details="Counts the points of each metric, also of a run in progress. `--output` writes one row per point."),
    Command("evaluate", "Use", "Evaluate a run's best weights again", "runner.runs.evaluate:evaluate", values="[RUN]",
        keys=(*COMPUTING, "data", "train.eval_batch_size"),
        details="`data=...` evaluates all of this data, or its splits if it has any. A checkpoint instead of a run:\n"
        "`evaluate DIRECTORY/checkpoints/step-120.pt`, also for `predict`, `export` and `serve`."),
    Command("predict", "Use", "Write predictions for new data", "runner.runs.predict:predict",
        values="[RUN]", keys=COMPUTING, options=(
            Option("--input", "FILE", "Data to predict for", input_path, is_required=True),
            Option("--output", "FILE", "Predictions: .csv .tsv .parquet .feather .jsonl .npz", output_path, is_required=True),
            Option("--batch-size", "ROWS", "Examples at a time", number(), default=1024))),
    Command("export", "Use", "Export the model: safetensors, onnx, pt2 or mlflow", "runner.runs.export:export",
        values="[RUN]", keys=(), options=(
            Option("--format", "FORMAT", "`safetensors`, `onnx`, `pt2` or `mlflow`", is_required=True),
            Option("--output", "PATH", "File or directory to write", output_path),
            Option("--predictions", help="Export predictions, e.g., probabilities, instead of raw outputs")),
        details="Checks the exported model against the original."),
    Command("serve", "Use", "Serve the model over HTTP on localhost", values="[RUN]", keys=(), options=(
            Option("--port", "PORT", "Port of the server", number(1, 65535), default=5001),
            Option("--predictions", help="Answer with probabilities instead of raw outputs")),
        details='MLflow\'s scoring server: `POST /invocations` with `{"inputs": [...]}`, for a table `{"dataframe_records": [...]}`.'),
    Command("register", "Use", "Register the model in MLflow's registry", "runner.runs.register:register",
        values="[RUN]", keys=("tracking.uri",), options=(
            Option("--name", "NAME", "Name of the registered model", is_required=True),
            Option("--alias", "ALIAS", "Alias of the new version, e.g., `champion`"),
            Option("--again", help="Add a version even if this model is already registered"))),
    Command("sync", "Track", "Send points that MLflow has not received yet", values="[DIR ...]", options=(_URI,),
        details="Sends the journals in the directories, by default `outputs/` and `multirun/`, each to the store of its run.\n"
        "Exit code 0 if MLflow has everything then, else 1."),
    Command("ui", "Track", "Open MLflow's page on localhost", options=(_URI,
            Option("--port", "PORT", "Port of the page (default: a free one from 5000)", number(1, 65535))),
        details="Shows the store of the last run. Ctrl-C ends it."),
    Command("lr-find", "Tune", "Find a learning rate with a range test", "runner.tools.lr_find:find_rate", keys=ANY_KEY,
        hydra_flags=ONE_RUN, options=(
            Option("--steps", "STEPS", "Number of steps", number(10), default=100),
            Option("--from", "RATE", "First learning rate", amount, default=1e-7),
            Option("--to", "RATE", "Last learning rate", amount, default=10.0)),
        details="Trains a few steps with a rising rate. Writes `lr_find.png` and `lr_find.json` in `outputs/`, and no run."),
    Command("tune", "Tune", "Find the fastest settings with the same numbers", "runner.tools.tune.tune:tune", keys=ANY_KEY,
        hydra_flags=ONE_RUN, options=(
            Option("--seconds", "SECONDS", "Seconds to measure", amount, default=30.0),
            Option("--name", "NAME", "Name of the file that is written"),
            Option("--precision", help="Try other precisions too (other numbers)")),
        details="Writes an option of the group `tuned`, for `python -m runner ... tuned=NAME`."),
    Command("docs", "Inspect", "Read a page of the documentation", "runner.cli.docs:show", values="[TOPIC]",
        details="Without TOPIC: the pages."),
    Command("schema", "Tune", "Write a JSON schema of conf/ for editors", options=(_OUTPUT,),
        details="Covers your options. Prints the line that names the schema to an editor."),
)
# fmt: on
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
    commands = dict(COMMANDS)
    for entry in entry_points(group=ENTRY_POINTS):
        if entry.name in COMMANDS:
            problem = f"the command `{entry.name}` of {entry.value} has a built-in command's name"
            print(f"warning: {problem}", file=sys.stderr)
        elif (command := _load(entry)) is not None:
            commands[entry.name] = command
    return commands


def _load(entry: Any) -> Command | None:
    try:
        command = entry.load()
    except Exception as error:  # the other package's own code
        print(f"warning: the command `{entry.name}` can't be loaded from {entry.value}: {error}", file=sys.stderr)
        return None
    if isinstance(command, Command) and command.name == entry.name:
        return command
    problem = f"is the command `{command.name}`" if isinstance(command, Command) else "is not a runner.cli.Command"
    print(f"warning: {entry.value} {problem}: `{entry.name}` is left out", file=sys.stderr)
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
        others = [] if group in GROUPS else [each for each in commands.values() if each.group not in GROUPS]
        rows = {name: each.help for name, each in commands.items() if each.group == group or each in others}
        if group == "Train":
            rows |= {"-m": "Train a sweep: every combination of the values"}
        if rows:
            lines += ["", group, *(f"  {name:<{width}}  {text}" for name, text in rows.items())]
    options = {JSON: JSON_HELP, "--version": "Print the version", "--help": "Print this help"}
    lines += ["", "Options", *(f"  {name:<{width}}  {text}" for name, text in options.items())]
    lines += ["", "Examples", EXAMPLES, "", "Groups and their options", *_config_groups(), ""]
    lines.append(
        "`COMMAND --help` explains a command, `--cfg job` prints every key with its value. Documentation: `docs`"
    )
    return "\n".join(lines)


def _config_groups() -> list[str]:
    """List the groups of ./conf and the built-in conf/ with their options, as Hydra does, which is slow to import."""
    groups: dict[str, set[str]] = {}
    for folder in (CONF, Path("conf")):
        for file in folder.glob("*/**/*.yaml"):
            groups.setdefault(file.parent.relative_to(folder).as_posix(), set()).add(file.stem)
    shown = [group for group in sorted(groups) if not group.startswith("hydra/")]
    return [f"{group}: {', '.join(sorted(groups[group]))}" for group in shown]


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
    """Return the table of our commands in runner/docs/reference.md."""
    rows = ["| command | does |", "|---|---|"]
    for command in COMMANDS.values():
        usage = command.usage.removeprefix("python -m runner ").replace("|", "\\|")
        rows.append(f"| `{usage}` | {' '.join([f'{command.help}.', *command.details.splitlines()])} |")
    return "\n".join(rows)
