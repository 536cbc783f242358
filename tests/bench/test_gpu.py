"""What is ready for a GPU: the words of each run are those of conf/ today, and the tables say what was told."""

from __future__ import annotations

import pytest

from runner.config import compose, validate


@pytest.fixture
def gpu(bench, monkeypatch):
    """tests/bench/gpu.py, whose runs are composed and not run."""
    gpu = bench("gpu")
    gpu.told = []

    def told(words, device):
        words = [word for word in words if word != "plan"]
        assert validate.faults(compose.composer([])([*words, f"device={device}"])) == []
        gpu.told.append(words)
        answer = {"peak_memory_bytes": 2**21, "memory": {"peak_bytes": 2**20}, "num_parameters": 7, "num_steps": 9}
        return answer | {"samples_per_second": 100.0, "seconds": {"train": 3.0}}

    monkeypatch.setattr(gpu, "_told", told)
    return gpu


def test_a_plan_beside_the_allocators_peak_of_six_models(gpu, capsys):
    gpu.memory("cpu", 3, [])
    rows = capsys.readouterr().out.splitlines()[2:]
    assert len(rows) == 6 and all(row.endswith("| 1 | 2 | 0.50 |") for row in rows)


def test_the_arithmetic_of_a_gpt_is_set_beside_the_data_sheet(gpu, capsys, monkeypatch):
    monkeypatch.setattr(gpu, "_name_of", lambda device: "NVIDIA H100 80GB HBM3")
    gpu.gpt("cuda:0", None, ["train.precision=bf16"])
    tokens = 100 * 1024
    flops = tokens * (6 * 12 * 640**2 * 10 + 12 * 10 * 640 * 1024)  # a weight six, a pair of width and place twelve
    assert f"| 7 | bf16 | {tokens:,} | {flops / 1e12:.3g} | {flops / 989e12:.1%} |" in capsys.readouterr().out
    assert "train.max_seconds=300" in gpu.told[0]


def test_the_recipe_of_the_record_says_its_seconds(gpu, capsys):
    gpu.cifar("cpu", 2, ["train.compile=true"])
    assert "| train.compile=true | 9 | 3.00 | 100 |" in capsys.readouterr().out


def test_waits_of_the_steps_are_counted_beside_the_pulls(gpu, capsys, own_folder):
    """Here, where nothing waits; torch counts on CUDA alone."""
    gpu.syncs("cpu", 30, ["data.num_rows=5000", "metrics.pull_every=10"])
    assert "| 30, as written | 0 | 3 | 0 |" in capsys.readouterr().out
