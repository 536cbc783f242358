"""The verdict on the findings, and the suggested settings."""

from dataclasses import asdict, replace

import pytest
from omegaconf import OmegaConf

from runner.device import Choice, Gpu, Hardware
from runner.device.hardware import Speeds
from runner.inspection.findings import CERTAIN, LIKELY, Finding
from runner.tools.plan.planned_device import PlannedDevice
from runner.tools.plan.report import num_processes, report, request, usable_bytes

GIB = 2**30


def target(memory=10 * GIB, **speeds):
    known = Speeds({"fp32": 1e12} if "memory_bytes_per_second" in speeds else {}, **speeds)
    here = Hardware(cuda=(Gpu("GPU"),))
    return PlannedDevice(Choice("cuda:0", "as asked"), here, memory, "said", known, speeds_from="said", capability=None)


def cfg(**train):
    settings = {"precision": "fp32", "batch_size": 64, "eval_batch_size": None, **train}
    return OmegaConf.create({"train": settings, "task": {}, "backends": {"cuda": {"memory_fraction": None}}})


def answer(*findings, peak=GIB, evaluation=0, unknown="", sizes=None, is_whole=True):
    step = {
        "batch_size": 64,
        "bytes_moved_to_device": 10**6,
        "num_kernels": 100,
        "compute_seconds": 1e-3,
        "memory_seconds": 2e-3,
    }
    return {
        "findings": [asdict(finding) for finding in findings],
        "unknown": unknown,
        "is_whole": is_whole,
        "memory": {
            "peak_bytes": max(peak, evaluation),
            "step_bytes": peak,
            "evaluation_bytes": evaluation or None,
            "parts": {"weights": peak},
        },
        "step": {**step, "roofline_seconds": 2.5e-3},
        "largest_batch_size": sizes or {},
        "residency": "on the device (auto: 1 MiB of 1024 GiB free)",
    }


def judged(given, where=None, **train):
    return report("", cfg(**train), where or target(), given, seconds=1.0)


WRONG = Finding(CERTAIN, "mixed devices", "a meets b")
SLOW = Finding(LIKELY, "host read", "float(tensor)")


@pytest.mark.parametrize(
    ("given", "verdict"),
    [
        (answer(), "would run"),
        (answer(SLOW), "would run"),
        (answer(WRONG), "would not run"),
        (answer(peak=9 * GIB), "would run"),
        (answer(peak=int(9.1 * GIB)), "would not run"),
        (answer(unknown="it goes by values"), "can't be told"),
        (answer(WRONG, unknown="it goes by values"), "would not run"),
        (answer(peak=20 * GIB, unknown="it goes by values", is_whole=False), "can't be told"),
        ({"findings": [], "unknown": "the simulation ended"}, "can't be told"),
    ],
)
def test_verdicts(given, verdict):
    found = judged(given)
    assert (found["verdict"], found["would_run"]) == (verdict, verdict == "would run")


def test_unknown_memory_gives_no_verdict():
    found = judged(answer(peak=30 * GIB), target(memory=None))
    assert (found["verdict"], found["fits"]) == ("would run", None)
    assert found["memory"]["fits_on"][0] == "A100-40GB"
    assert found["residency"] == "on the device"


@pytest.mark.parametrize(
    ("sizes", "write"),
    [
        ({"fp32": 30, "bf16": 55}, "train.batch_size=30 or train.precision=bf16 train.batch_size=55"),
        ({"fp32": 30, "bf16": 500}, "train.batch_size=30 or train.precision=bf16 train.batch_size=64"),
        ({"fp32": 30, "tf32": 30}, "train.batch_size=30"),
        ({"fp32": 0, "bf16": 0}, "a smaller model, or another device"),
        ({"fp32": None}, "a smaller model, or another device"),
    ],
)
def test_what_does_not_fit_says_what_would(sizes, write):
    (finding,) = judged(answer(peak=20 * GIB, sizes=sizes))["findings"]
    assert (finding["kind"], finding["grade"], finding["write"]) == ("memory", "estimate", write)


def test_own_loader_report_names_batch_size_line():
    given = answer(peak=20 * GIB, sizes={"fp32": 30, "bf16": 500})
    given["step"]["batch_size"] = 256
    (finding,) = judged(given | {"has_own_loader": True})["findings"]
    assert finding["write"] == (
        "batch_size=30 in your DataLoader or train.precision=bf16 batch_size=256 in your DataLoader"
    )


def test_too_large_evaluation_is_reported():
    (finding,) = judged(answer(evaluation=20 * GIB, sizes={"fp32": 500}))["findings"]
    assert (finding["what"], finding["write"]) == (
        "an evaluation takes 20 GiB, and 9 GiB are there to be used",
        "a smaller train.eval_batch_size",
    )


@pytest.mark.parametrize(("metrics", "rows"), [([], 50), (["auroc"], 100)])
def test_processes_share_evaluation_unless_metrics_need_split(metrics, rows):
    here = replace(target(), hardware=Hardware(cuda=(Gpu("GPU"), Gpu("GPU"))))
    changed = {"device": "all", "placement": {"strategy": "ddp"}, "task": {"metrics": metrics}}
    several = OmegaConf.merge(cfg(num_processes=2, eval_batch_size=100), changed)
    assert OmegaConf.create(request(several, here, seconds=1.0)["yaml"]).train.eval_batch_size == rows


def test_batch_of_several_processes_is_total():
    where = target()
    here = replace(where, hardware=Hardware(cuda=(Gpu("GPU"), Gpu("GPU"))))
    several = OmegaConf.merge(cfg(num_processes="auto"), {"device": "all", "placement": {"strategy": "ddp"}})
    assert (num_processes(several, here), num_processes(several, where)) == (2, 1)
    assert request(several, here, seconds=1.0)["processes"] == {"num_processes": 2, "in_parts": False}
    assert OmegaConf.create(request(several, here, seconds=1.0)["yaml"]).train.batch_size == 32
    found = report("", several, here, answer(peak=20 * GIB, sizes={"fp32": 10}), seconds=1.0)
    assert found["largest_batch_size"] == {"fp32": 20}
    assert found["findings"][0]["write"] == "train.batch_size=20 or placement.strategy=fsdp"


@pytest.mark.parametrize(
    ("speeds", "least", "side"),
    [
        ({}, 2.5e-3, "memory bandwidth"),
        ({"copy_bytes_per_second": 1e8}, 1e-2, "copies to the device"),
        ({"launch_seconds": 1e-3}, 0.1, "launches"),
    ],
)
def test_least_time_is_of_slowest_resource(speeds, least, side):
    step = judged(answer(), target(memory_bytes_per_second=1e9, **speeds))["step"]
    assert (step["least_seconds"], step["limited_by"]) == (least, side)
    assert judged(answer())["step"]["least_seconds"] is None


def test_a_fraction_of_the_memory_is_obeyed():
    config = cfg()
    config.backends.cuda.memory_fraction = 0.5
    assert usable_bytes(config, target()) == 5 * GIB


def test_fitting_recompute_is_proposed_first():
    given = answer(peak=20 * GIB, sizes={"fp32": 10}) | {"recompute": "blocks.*"}
    found = judged(given)
    write = found["findings"][0]["write"]
    assert write.startswith("train.recompute=[blocks.*] (the same numbers") and "train.batch_size=10" in write
    assert found["recompute"] == "blocks.*"
    assert "recompute" not in judged(answer(peak=20 * GIB, sizes={"fp32": 10}))["findings"][0]["write"]
