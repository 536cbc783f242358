"""What a run's end says of numbers that no table is made for."""

import io
import logging
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

from runner.device.capabilities import slow_layers
from runner.experiment.console import Screen, parts_in_words
from runner.models.recurrent import Recurrent
from runner.training.metric_buffer import Window


@pytest.fixture
def screen():
    return Screen(Console(file=io.StringIO(), width=80))


def test_warnings_are_shown_while_a_run_lasts_and_errors_are_its_status(screen):
    log = logging.getLogger("runner")
    with screen.with_warnings():
        log.warning("column %r: 1 row", "[city]")
        log.warning("a hook failed", exc_info=ValueError("of its own"))
        log.error("the run failed")
        log.info("written")
    log.warning("after it")
    assert screen.console.file.getvalue() == "note:   column '[city]': 1 row\n"


def test_extreme_numbers_fit_into_the_table_and_its_lines(screen):
    metrics = {"train/loss": 16417543687602438144.0, "val/loss": 62847922176.0, "test/loss": float("nan")}
    metrics |= {"val/accuracy": 0.99999, "test/accuracy": 1e-12}
    best = {"metric": "val/loss", "value": 84960673792.0, "step": 7}
    seconds = {"train": 1.0}
    summary = {"metrics": metrics, "best": best, "seconds": seconds, "status": "finished", "error": None, "ending": ""}
    screen.result({**summary, "num_steps": 0}, folder="run", next_lines={})
    lines = screen.console.file.getvalue().splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["train", "val", "test"],
        ["loss", "1.642e+19", "6.285e+10", "nan"],
        ["accuracy", "0.99999", "1.000e-12"],
    ]
    assert "best    val/loss 8.496e+10 at step 7" in lines
    screen.epoch(1, 7, {"val/loss": 62847922176.0, "val/accuracy": 0.99999})
    assert "val/loss 6.285e+10  val/accuracy 0.99999" in screen.console.file.getvalue()


@pytest.mark.parametrize(("device", "model", "notes"), [("mps", "gru", 1), ("mps", "lstm", 0), ("cpu", "gru", 0)])
def test_what_has_no_kernel_on_a_mac_is_told_at_the_start(device, model, notes):
    words = slow_layers(Recurrent((3, 7), 2, cell=model), torch.device(device))
    assert len(words) == notes and all("8 times slower" in word for word in words)
    splits = SimpleNamespace(sizes={"train": 3})
    source = SimpleNamespace(name="x", notes=(), labels=None, classes=None)
    parts = SimpleNamespace(
        source=source, splits=splits, residency="", num_parameters=1, layout="", threads="", weights="",
        model=Recurrent((3, 7), 2, cell=model), device=torch.device(device),
    )  # fmt: skip
    settings = SimpleNamespace(train=SimpleNamespace(precision="fp32"), model="lstm")
    assert [line for line in parts_in_words(settings, parts) if "slower" in line] == [
        f"model:  {word}" for word in words
    ]


def test_a_window_that_comes_while_an_epochs_end_is_written_waits_for_it(screen, monkeypatch):
    """It adds names, and both are of one dictionary: a run once failed of that, on a busy machine."""
    late = Window(("train/late",), np.array([1]), np.ones((1, 1), np.float32), np.array([0]), 1.0, 1, {})
    threads = []

    def readable(value):
        if not threads:
            threads.append(threading.Thread(target=screen.window, args=(late,)))
            threads[0].start()
            threads[0].join(0.2)
        return str(value)

    monkeypatch.setattr("runner.experiment.console.readable", readable)
    screen.epoch(1, 1, {"val/loss": 1.0, "val/accuracy": 2.0})
    threads[0].join()
    screen.epoch(2, 2, {})
    assert "train/late 1.0" in screen._shown()
