"""What a run's page in MLflow says of it."""

from pathlib import Path
from types import SimpleNamespace

from omegaconf import OmegaConf

from runner.experiment import run_record


def test_its_note_says_how_it_is_run_again():
    parts = SimpleNamespace(
        splits=SimpleNamespace(sizes={"train": 3}), num_parameters=7, source=SimpleNamespace(name="digits")
    )
    choice = SimpleNamespace(device="cpu", reason="as asked")
    cfg = OmegaConf.create({"model": {"_target_": "my.Net"}})
    note = run_record._note(cfg, parts, choice, Path("my run"), changed="")
    assert "Again: `python -m runner -cd 'my run' -cn rerun`" in note and "**Net** (7 parameters)" in note
