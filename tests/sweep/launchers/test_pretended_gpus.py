"""Sweeps on a machine with two simulated GPUs: which job runs where, the devices that a job sees, and equal numbers."""

import json

import pytest
from pretended_gpus import sweep

from runner.sweep.jobs import ledger
from runner.tracking.journal_reader import read_series


def visible(found):
    """Return the devices that each job saw, by its number."""
    texts = {number: (found.folder_of(job) / "console.log").read_text() for number, job in found.jobs.items()}
    return {number: text.partition("visible: ")[2].splitlines()[0] for number, text in texts.items()}


def most_at_once(found):
    """Return how many jobs ran at the same time on each device, according to the ledger."""
    lines = [json.loads(line) for line in (found.folder / ledger.FILE).read_text().splitlines()]
    now, most = {}, {}
    for line in lines:
        if line["kind"] == "state" and line["device"]:
            now[line["device"]] = now.get(line["device"], 0) + (1 if line["state"] == "running" else -1)
            most[line["device"]] = max(most.get(line["device"], 0), now[line["device"]])
    return most


@pytest.mark.slow
def test_jobs_see_only_their_gpu(own_folder, warm):
    out, found = sweep(warm, own_folder, "device=cuda:0,cuda:1,cpu", "seed=1,2")
    assert "slots    cuda:0, cuda:1, cpu" in out
    assert [job.state for job in found.jobs.values()] == ["finished"] * 6
    assert [job.device for job in found.jobs.values()] == ["cuda:0", "cuda:0", "cuda:1", "cuda:1", "cpu", "cpu"]
    assert visible(found) == {0: "0", 1: "0", 2: "1", 3: "1", 4: "", 5: ""}
    assert most_at_once(found) == {"cuda:0": 1, "cuda:1": 1, "cpu": 1}
    summaries = [json.loads((found.folder_of(job) / "summary.json").read_text()) for job in found.jobs.values()]
    assert [summary["device"] for summary in summaries] == [job.device for job in found.jobs.values()]
    losses = [read_series(found.folder_of(job))["train/loss"][2].tolist() for job in found.jobs.values()]
    assert losses[:2] == losses[2:4] == losses[4:], "the same seed gives bitwise identical losses on every device"


@pytest.mark.slow
def test_automatic_jobs_spread_over_visible_gpus(own_folder, warm):
    _, found = sweep(warm, own_folder, "device=auto", "seed=1,2,3", "sweep.slots.cuda=2", CUDA_VISIBLE_DEVICES="5,7")
    assert {job.device for job in found.jobs.values()} == {"cuda:0", "cuda:1"}
    assert {(job.device, seen) for job, seen in zip(found.jobs.values(), visible(found).values(), strict=True)} == {
        ("cuda:0", "5"),
        ("cuda:1", "7"),
    }
    reasons = [
        json.loads((found.folder_of(job) / "summary.json").read_text())["device_reason"] for job in found.jobs.values()
    ]
    assert all(reason.startswith("auto: ") for reason in reasons)
    assert max(most_at_once(found).values()) <= 2
    reruns = [(found.folder_of(job) / "rerun.yaml").read_text() for job in found.jobs.values()]
    assert all("memory_fraction: 0.5" in text and "sweep:" not in text for text in reruns)


@pytest.mark.slow
def test_mps_has_a_separate_slot(own_folder, warm):
    out, found = sweep(warm, own_folder, "device=mps,cpu,auto,cuda", device="mps")
    assert "slots    mps, cpu" in out
    assert [(job.state, job.device) for job in found.jobs.values()] == [
        ("finished", "mps"),
        ("finished", "cpu"),
        ("finished", "mps"),
        ("skipped", None),
    ]
