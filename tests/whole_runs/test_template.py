"""The table of conf/README.md for users of lightning-hydra-template: rows that no other test runs.

tests/whole_runs/test_readme.py composes every command of the table.
"""

import json
import shlex
from pathlib import Path

import pytest

from runner import cli
from runner.tracking.journal import read_points
from runner.version import PACKAGES

TABLE = (PACKAGES / "conf/README.md").read_text().partition("## From lightning-hydra-template")[2].partition("\n## ")[0]
SMALL = ["model=mlp", "model.hidden_sizes=[8]", "task.plots=false", "hydra.run.dir=outputs/a/run"]
QUIET = "tracking.enabled=false"


@pytest.fixture
def row(own_folder, capfd):
    """Return a function that runs the command with this argument, made smaller, and returns the summary and the points."""

    def run(argument, *smaller):
        (command,) = (cell for cell in TABLE.split("`") if argument in cell)
        first, *given = shlex.split(command)[3:]
        more = smaller if first == "resume" else (*SMALL, QUIET, *smaller)
        assert cli.main([first, *given, *more]) == 0, capfd.readouterr().err
        return json.loads(Path("outputs/a/run/summary.json").read_text()), read_points(Path("outputs/a/run"))

    return run


def test_an_epoch_in_half_precision_finishes(row, device):
    precision = "bf16" if device.type == "cpu" else "fp16"
    summary, _ = row("train.precision=fp16", f"device={device}", f"train.precision={precision}")
    assert (summary["status"], summary["num_steps"]) == ("finished", 12)


def test_half_of_an_epoch_is_evaluated(row):
    assert [step for step, _ in row("train.evaluate_every_steps=6")[1]["val/loss"]] == [6, 12]


def test_checkpoints_of_each_epoch_stay_when_resumed(row):
    row("train.keep_checkpoints=every_epoch")
    _, points = row("resume last")
    kept = {path.name for path in Path("outputs/a/run/checkpoints").iterdir()}
    assert {"last.pt", "step-12.pt", "step-24.pt"} <= kept and "step-36.pt" not in kept
    (_, first), (_, second) = points["val/loss"]
    assert second < first


def test_fifty_rows_are_overfitted(row):
    _, points = row("data.limit=50", "model.hidden_sizes=[256]")
    assert points["train/accuracy"][-1][1] == 1.0


@pytest.mark.slow
def test_search_over_tracked_runs_with_two_processes(own_folder, warm, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # `auto` chooses the CPU, which allows two processes
    (command,) = (cell for cell in TABLE.split("`") if "hydra.sweeper.pruner=none" in cell)
    smaller = [*SMALL[:-1], "tracking.log_model=false", "hydra.sweeper.n_trials=2", "train.num_epochs=1"]
    with warm.command(own_folder, *shlex.split(command)[3:], *smaller) as process:
        said, _ = process.communicate()
    assert process.returncode == 0, said
    jobs = [json.loads(path.read_text()) for path in Path("multirun").glob("*/*/*/summary.json")]
    assert [(job["status"], job["num_processes"]) for job in jobs] == [("finished", 2)] * 2
    assert len({job["run_id"] for job in jobs} - {None}) == 2
