"""Groups of runs that one process trains, one after the other."""

import gc
import weakref

from omegaconf import open_dict

from runner.config.compose import composer, hydra_session
from runner.device import Choice
from runner.experiment import together
from runner.experiment.given import Given
from runner.experiment.together import Job, run_together

WORDS = ["data=digits", "data.limit=100", "model=mlp", "model.hidden_sizes=[8]", "train.num_steps=1"]
WORDS += ["tracking.enabled=false", "task.plots=false", "device=cpu", "sweep.batch=8"]


def job(folder, seed):
    with hydra_session(["runner"]):
        cfg = composer([])([*WORDS, f"seed={seed}"])
    with open_dict(cfg):
        cfg.pop("hydra")
    folder = folder / str(seed)
    folder.mkdir()
    return Job(cfg, folder, Given(choice=Choice("cpu", "as asked", "cpu")))


def test_a_group_finds_nothing_of_the_one_before_in_the_memory(tmp_path, monkeypatch):
    prepare, models, left = together.prepare, [], []

    def watched(*given, **more):
        left.append(sum(model() is not None for model in models))
        parts = prepare(*given, **more)
        models.append(weakref.ref(parts.model))
        return parts

    monkeypatch.setattr(together, "prepare", watched)
    gc.disable()  # it would come at some time
    try:
        for seed in (0, 1):
            assert run_together([job(tmp_path, seed)])[0]["status"] == "finished"
    finally:
        gc.enable()
    assert left == [0, 0]
