"""Research programs give the losses of the loop that they replace; programs.py has both."""

import importlib
import shutil
from pathlib import Path

import pytest

from runner import run
from runner.tracking.journal_reader import read_points


@pytest.mark.parametrize("name", ["mnist", "word_language_model", "vae", "pinn"])
def test_port_has_the_losses_of_its_loop(name, own_folder):
    shutil.copy(Path(__file__).with_name("programs.py"), own_folder)
    overrides, loop = importlib.import_module("programs").PROGRAMS[name]
    run([*overrides.split(), "task=own", "device=cpu", "tracking.enabled=false"], folder="run")
    losses = [value for _, value in read_points(own_folder / "run")["train/loss"]]
    assert losses == pytest.approx(loop(), rel=1e-6)
