"""The output of a run in a terminal and in a pipe."""

import io
import logging
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from runner import cli
from runner.experiment import console
from runner.experiment.console import Screen, last_rows
from runner.experiment.summary import Summary
from runner.experiment.terminal import Terminal, readable
from runner.tracking.ack import Ack, write_ack
from runner.tracking.journal import read_points
from runner.training.metric_buffer import Window
from runner.training.observer import EpochEnd

SUMMARY = Summary(
    "finished",
    metrics={"train/loss": 0.5},
    best={"metric": "val/loss", "value": 0.0654, "step": 1120},
    ending="finished",
    num_steps=1200,
    steps_per_second=104.2,
    seconds={"total": 5.71},
    run_id="abc",
    tracker={"points_pending": 0},
)


@pytest.fixture
def screen():
    return Screen(Terminal(file=io.StringIO()))


def shown(screen, summary, rows=None):
    screen.result(summary, folder=Path("run"), rows=rows or {})
    return screen.console.file.getvalue()


def window(step, value):
    return Window(("train/loss",), np.array([step]), np.full((1, 1), value, np.float32), np.array([0]), 1.0, 1, {})


def test_warnings_are_shown_while_a_run_lasts(screen):
    log = logging.getLogger("runner")
    with screen.with_warnings():
        log.warning("column %r: 1 row", "[city]")
        log.warning("a hook failed", exc_info=ValueError("of its own"))
        log.error("the run failed")
        log.info("written")
    log.warning("after it")
    assert screen.console.file.getvalue() == "warning: column '[city]': 1 row\n"


def test_extreme_numbers_fit_into_the_table(screen):
    metrics = {"train/loss": 16417543687602438144.0, "val/loss": 62847922176.0, "test/loss": float("nan")}
    metrics |= {"val/accuracy": 0.99999, "test/accuracy": 1e-12}
    lines = shown(screen, replace(SUMMARY, metrics=metrics)).splitlines()
    assert [line.split() for line in lines[1:4]] == [
        ["train", "val", "test"],
        ["loss", "1.642e+19", "6.285e+10", "nan"],
        ["accuracy", "0.99999", "1.000e-12"],
    ]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "✓ finished in 5.7 s   1,200 steps, 104 steps/s"),
        ({"ending": "patience"}, "✓ finished in 5.7 s (early stopping)   1,200 steps, 104 steps/s"),
        ({"status": "killed", "error": "SIGTERM", "seconds": {"total": 725.0}}, "✗ stopped after 12 min 5 s   SIGTERM"),
        ({"status": "failed", "error": "ValueError: x"}, "✗ failed after 5.7 s   ValueError: x"),
    ],
)
def test_end_of_a_run_has_one_headline(screen, changes, line):
    said = shown(screen, replace(SUMMARY, **changes))
    assert line in said.splitlines() and "best     val/loss 0.0654 (step 1,120)\n" in said


def test_hints_come_last_and_are_three(screen):
    said = shown(screen, replace(SUMMARY, hints=list("abcde")), {"mlflow": "there"})
    assert said.splitlines()[-4:] == ["mlflow   there", "hint: a", "hint: b", "hint: c"]


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({}, {}),
        ({"status": "killed"}, {"resume": "python -m runner resume 'my run'"}),
        ({"ending": "max_seconds"}, {"resume": "python -m runner resume 'my run'"}),
        ({"status": "failed", "ending": "not_finite"}, {"explain": "python -m runner explain 'my run'"}),
        ({"status": "failed", "ending": ""}, {"resume": "python -m runner resume 'my run'"}),
    ],
)
def test_last_rows_name_the_command_that_continues(own_folder, changes, rows):
    folder = own_folder / "my run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints/last.pt").touch()
    off = SimpleNamespace(tracking=SimpleNamespace(enabled=False))
    assert last_rows(off, replace(SUMMARY, **changes), folder, publishes=True) == rows


@pytest.mark.parametrize(
    ("uri", "changes", "text", "link"),
    [
        ("sqlite:///mlflow.db", {}, "sqlite:///mlflow.db  (view: python -m runner ui)", None),
        ("http://there:5000/", {}, "http://there:5000/#/experiments/7/runs/abc", "http://there:5000/#/experiments/7/runs/abc"),
        ("http://me:secret@there", {}, "http://me:***@there  (view: python -m runner ui tracking.uri=http://me:PASSWORD@there)", None),
        ("http://there", {"run_id": None}, "not reached: http://there", None),
    ],
)  # fmt: skip
def test_mlflow_row_links_to_the_run(own_folder, uri, changes, text, link):
    folder = own_folder / "run"
    folder.mkdir()
    write_ack(folder, Ack(experiment_id="7", run_id="abc"))
    on = SimpleNamespace(tracking=SimpleNamespace(enabled=True, uri=uri))
    rows = last_rows(on, replace(SUMMARY, **changes), folder, publishes=True)
    found = rows["mlflow"]
    assert rows.get("sync") == ("python -m runner sync run tracking.uri=http://there" if changes else None)
    assert str(found) == text and getattr(getattr(found, "style", None), "link", None) == link


@pytest.mark.parametrize("num_epochs", [7, 20, 61])
def test_epoch_lines_stay_in_a_terminal(num_epochs):
    screen = Screen(Console(file=io.StringIO(), width=120, force_terminal=True, no_color=True))
    with screen.training(num_steps=3 * num_epochs, num_epochs=num_epochs):
        for epoch in range(1, num_epochs + 1):
            screen.epoch(EpochEnd(epoch, 3 * epoch, {"val/loss": 1.0}, is_best=epoch == 1))
        lines = re.findall(r"step +(\d+).*?(\*)?", screen.console.file.getvalue())
        assert len(lines) <= 20
    said = screen.console.file.getvalue()
    assert len(re.findall(r"step +\d+ ", said)) <= 21 and f"step {3 * num_epochs}  val/loss 1.0000" in said


def test_pipe_gets_first_and_last_epoch(screen, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: clock[0])
    with screen.training(num_steps=5, num_epochs=5):
        for epoch in range(1, 6):
            if epoch < 5:  # no point in the last epoch: metrics.every is larger
                screen.window(window(epoch, 1 / epoch))
            screen.epoch(EpochEnd(epoch, epoch, {"val/loss": 2.0}, is_best=epoch == 5))
            clock[0] += 0.9
    assert screen.console.file.getvalue().splitlines() == [
        "epoch    1/5  step 1  train/loss 1.0000  val/loss 2.0000",
        "epoch    4/5  step 4  train/loss 0.2500  val/loss 2.0000",
        "epoch    5/5  step 5  val/loss 2.0000  *",
    ]


@pytest.mark.parametrize(("words", "num_lines"), [("metrics.every=4", 4), ("train.evaluate_every_steps=4", 5)])
def test_epoch_line_shows_the_epochs_own_points(own_folder, words, num_lines):
    own = ["data=digits", "data.limit=300", "model=linear", "train.batch_size=50", "train.num_epochs=4", "device=cpu"]
    assert cli.main([*own, words, "tracking.enabled=false", "task.plots=false", "hydra.run.dir=run"]) == 0
    losses = dict(map(tuple, read_points(own_folder / "run")["train/loss"]))
    lines = re.findall(r"epoch .*  step +(\d+)  (.*)", Path("run/runner.log").read_text())
    before = 0
    for step, values in lines:
        last = max((at for at in losses if before < at <= int(step)), default=None)
        shown = dict(re.findall(r"(\S+/loss) (\S+)", values)).get("train/loss")
        assert shown == (readable(losses[last]) if last else None)
        before = int(step)
    assert before == 20 and len(lines) == num_lines


def test_terminal_without_unicode_gets_ascii():
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    screen = Screen(Terminal(file=file))
    screen.say("✓ done · übung")
    file.flush()
    assert file.buffer.getvalue() == b"+ done - \\xfcbung\n"
