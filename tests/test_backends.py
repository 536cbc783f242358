"""How a model lies in memory, by device, precision and what was asked."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from runner import cli
from runner.backends import takes_channels_last

PLAIN, CONV, CONV_1D = nn.Linear(2, 2), nn.Sequential(nn.Conv2d(1, 4, 3)), nn.Conv1d(1, 4, 3)


@pytest.mark.parametrize(
    ("model", "device", "precision", "asked", "takes"),
    [
        (CONV, "cpu", "fp32", None, True),
        (CONV, "cuda", "fp32", None, False),
        (CONV, "cuda", "bf16", None, True),
        (CONV, "cuda", "tf32", None, True),
        (CONV, "mps", "fp32", None, False),
        (CONV, "cuda", "fp32", True, True),
        (CONV, "cpu", "fp32", False, False),
        (PLAIN, "cpu", "fp32", None, False),
        (PLAIN, "cpu", "fp32", True, False),
        (CONV_1D, "cpu", "fp32", None, False),
    ],
)
def test_channels_last(model, device, precision, asked, takes):
    found, why = takes_channels_last(model, device=torch.device(device), precision=precision, asked=asked)
    assert found is takes
    assert bool(why) is (model is CONV)


def test_a_run_says_it_keeps_it_and_exports_it(own_folder, capsys):
    words = ["device=cpu", "tracking.enabled=false", "train.num_epochs=1", "data.limit=300", "model=cnn"]
    for name, more in (("mine", []), ("plain", ["backends.cpu.channels_last=false"])):
        assert cli.main([*words, *more, f"hydra.run.dir={name}"]) == 0
        assert ("channels last (auto: it has 2-d convolutions)" in capsys.readouterr().out) is (name == "mine")
    weights = {
        name: torch.load(own_folder / name / "checkpoints/best.pt", weights_only=True)["model"]
        for name in ("mine", "plain")
    }
    filters = next(key for key, value in weights["mine"].items() if value.dim() == 4 and value.shape[1] > 1)
    assert weights["mine"][filters].is_contiguous(memory_format=torch.channels_last)
    assert weights["plain"][filters].is_contiguous()
    torch.testing.assert_close(weights["mine"][filters], weights["plain"][filters], rtol=1e-2, atol=1e-3)
    assert cli.main(["export", "mine", "--format", "safetensors"]) == 0
    assert cli.main(["evaluate", "mine"]) == 0
