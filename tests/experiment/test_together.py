"""Groups of runs that one process trains, one after the other."""

import gc
import resource
import weakref

import pytest
from omegaconf import open_dict

from runner.config.compose import composer, hydra_session
from runner.device import Choice
from runner.experiment import hints, session, together
from runner.experiment.given import Given
from runner.experiment.summary import read_summary
from runner.experiment.together import Job, run_together
from runner.tracking.journal_reader import read_events

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


@pytest.mark.parametrize(("module", "name"), [(session, "log_model"), (hints, "find"), (session, "illustrate")])
def test_one_whose_end_fails_fails_alone(tmp_path, monkeypatch, module, name):
    """Of its model, its pictures or its hints: the others have the ends that they had come to."""
    whole, asked = getattr(module, name), []

    def fails_once(*given, **more):
        asked.append(given)
        if len(asked) == 1:
            raise RuntimeError("unexpected pos 704 vs 598\nin its file")
        return whole(*given, **more)

    monkeypatch.setattr(module, name, fails_once)
    jobs = [job(tmp_path, seed) for seed in range(3)]
    summaries = run_together(jobs)
    assert sorted(each["status"] for each in summaries.values()) == ["failed", "finished", "finished"]
    for number, summary in summaries.items():
        ending = read_summary(jobs[number].folder)
        events = [event for event in read_events(jobs[number].folder) if event["kind"] == "end"]
        assert ending["status"] == summary["status"] and ending["metrics"]["val/loss"] > 0
        assert events[-1]["status"] == ("FINISHED" if summary["status"] == "finished" else "FAILED")
        if summary["status"] == "failed":
            assert ending["error"].startswith("RuntimeError: unexpected pos 704")


def test_as_many_runs_as_may_have_their_files_open(monkeypatch):
    """256 are a Mac's usual limit: of 64 runs all failed, 26 of them begun."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        with monkeypatch.context() as refused:
            refused.setattr(resource, "setrlimit", lambda *given: (_ for _ in ()).throw(ValueError))
            assert together._room_for_files(64) == 32
        assert together._room_for_files(64) == 64
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 64 + 6 * 64
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
