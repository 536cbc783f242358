"""The layout of weights in memory."""

import pytest
import torch
from refused import problems_of
from torch import nn

from runner import cli
from runner.device import torch_private
from runner.device.layers import lay_out, overruns, takes_channels_last
from runner.models.resnet import ResNet

PLAIN, CONV_1D = nn.Linear(2, 2), nn.Conv1d(1, 4, 3)
CONV, WITH_DROPOUT = (nn.Sequential(nn.Conv2d(1, 4, 3), nn.Dropout2d(rate)) for rate in (0.0, 0.5))


@pytest.mark.parametrize(
    ("model", "device", "precision", "requested", "takes", "reason"),
    [
        (CONV, "cpu", "fp32", None, True, "auto"),
        (CONV, "cuda", "fp32", None, False, ""),
        (CONV, "cuda", "bf16", None, True, "auto"),
        (CONV, "cuda", "tf32", None, True, "auto"),
        (CONV, "mps", "fp32", None, False, ""),
        (CONV, "cuda", "fp32", True, True, "as asked"),
        (CONV, "cpu", "fp32", False, False, ""),
        (PLAIN, "cpu", "fp32", None, False, ""),
        (PLAIN, "cpu", "fp32", True, False, ""),
        (CONV_1D, "cpu", "fp32", None, False, ""),
        (WITH_DROPOUT, "cpu", "bf16", None, False, "dropout"),  # another layout would draw other masks
        (WITH_DROPOUT, "cuda", "bf16", None, True, "auto"),
    ],
)
def test_channels_last(model, device, precision, requested, takes, reason):
    decision = takes_channels_last(model, device=torch.device(device), precision=precision, requested=requested)
    assert decision[0] is takes and reason in decision[1] and bool(reason) is bool(decision[1])


def test_channels_last_only_with_four_dimensions():
    model = nn.Sequential(nn.Conv2d(8, 4, 3), nn.Conv3d(8, 4, 3))
    model.register_buffer("table", torch.rand(2, 3, 4, 5))
    model.register_buffer("wide_table", torch.rand(2, 3, 4, 5, 6))
    before = dict(model.state_dict(keep_vars=True))
    values = {name: value.detach().clone() for name, value in before.items()}
    said = lay_out(model, device=torch.device("cpu"), precision="fp32", requested=None)
    assert said.startswith("channels last")
    after = dict(model.state_dict(keep_vars=True))
    assert all(after[name] is before[name] and torch.equal(after[name], values[name]) for name in before)
    last = {name for name, value in after.items() if value.dim() == 4}
    assert last == {"0.weight", "table"}
    assert all(after[name].is_contiguous(memory_format=torch.channels_last) for name in last)
    assert all(value.is_contiguous() for name, value in after.items() if name not in last)


NARROW, WIDE = ResNet((1, 8, 8), 10, depth=8, width=4), ResNet((1, 8, 8), 10, depth=8)


def test_channels_last_is_skipped_if_unsafe():
    """oneDNN#6035: a 1x1 convolution with a stride and 2 to 7 inputs (15 with AVX-512)."""
    choose, layer = {"device": torch.device("cpu"), "precision": "fp32"}, overruns(NARROW)
    reason = f"auto: oneDNN overwrites memory in {layer} otherwise"
    assert takes_channels_last(NARROW, **choose, requested=None) == (False, reason)
    assert takes_channels_last(NARROW, **choose, requested=False) == (False, "")
    assert takes_channels_last(WIDE, **choose, requested=None)[0] is True
    (problem,) = problems_of(takes_channels_last, NARROW, **choose, requested=True)
    assert layer in problem.message and "backends.cpu.channels_last=null" in problem.help
    assert takes_channels_last(NARROW, device=torch.device("cuda"), precision="bf16", requested=None)[0] is True


@pytest.mark.parametrize(
    ("layer", "is_so"),
    [
        (nn.Conv2d(4, 8, 1, stride=2), True),
        (nn.Conv2d(15, 8, 1, stride=(1, 2)), True),
        (nn.Conv2d(32, 8, 1, stride=2, groups=8), True),
        (nn.Conv2d(16, 8, 1, stride=2), False),
        (nn.Conv2d(1, 8, 1, stride=2), False),
        (nn.Conv2d(4, 8, 1), False),
        (nn.Conv2d(4, 8, 3, stride=2), False),
        (nn.Linear(4, 8), False),
    ],
)
def test_which_layers_overwrite_memory(layer, is_so):
    assert overruns(nn.Sequential(layer)) == ("0" if is_so else "")


def test_compiled_step_skips_unsafe_channels_last(own_folder, monkeypatch):
    requests = []

    def compile_graph(graph, inputs, *, options):
        requests.append(options.get("layout_optimization"))
        return graph

    monkeypatch.setattr(torch_private, "compile_graph", compile_graph, raising=False)
    words = ["device=cpu", "tracking.enabled=false", "train.compile=true", "task.plots=false"]
    words += ["model=resnet", "model.depth=8"]
    words += ["data.limit=320", "train.num_steps=2"]  # one batch size; the first step is eager
    for width in (4, 16):
        assert cli.main([*words, f"model.width={width}", f"hydra.run.dir=w{width}"]) == 0
    assert requests == [False, None]


def test_channels_last_run_reports_and_exports(own_folder, capsys):
    words = ["device=cpu", "tracking.enabled=false", "train.num_epochs=1", "data.limit=300", "model=cnn"]
    for name, more in (("mine", []), ("plain", ["backends.cpu.channels_last=false"])):
        assert cli.main([*words, *more, f"hydra.run.dir={name}"]) == 0
        assert ("channels last" in capsys.readouterr().out) is (name == "mine")
    mine, plain = (torch.load(f"{name}/checkpoints/best.pt", weights_only=True)["model"] for name in ("mine", "plain"))
    filters = next(key for key, value in mine.items() if value.dim() == 4 and value.shape[1] > 1)
    assert mine[filters].is_contiguous(memory_format=torch.channels_last) and plain[filters].is_contiguous()
    torch.testing.assert_close(mine[filters], plain[filters], rtol=1e-2, atol=1e-3)
    assert cli.main(["export", "mine", "--format", "safetensors"]) == 0
