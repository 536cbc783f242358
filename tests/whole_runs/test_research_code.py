"""Research programs give the losses of the loops that they replace; tests/support/research/programs.py has both."""

import importlib
import shutil
from pathlib import Path

import pytest

from runner import run
from runner.tracking.journal_reader import read_points

PROGRAMS = Path(__file__).parents[1] / "support" / "research" / "programs.py"
NAMES = ["mnist", "word_language_model", "regression", "vae", "simclr", "pinn", "time_sequence"]


@pytest.mark.parametrize("name", NAMES)
def test_port_has_the_losses_of_its_loop(name, own_folder):
    shutil.copy(PROGRAMS, own_folder)
    programs = importlib.import_module("programs")
    words = getattr(programs, name.upper()).split()
    run([*words, "device=cpu", "tracking.enabled=false"], folder="run")
    found = [value for _, value in read_points(own_folder / "run")["train/loss"]]
    expected = getattr(programs, f"{name}_loop")()
    assert found == pytest.approx(expected, rel=1e-6)
