"""What a run's end says of numbers that no table is made for."""

import io

import pytest
from rich.console import Console

from runner.experiment.console import Screen


@pytest.fixture
def screen():
    return Screen(Console(file=io.StringIO(), width=80))


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
