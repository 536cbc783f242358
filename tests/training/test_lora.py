"""model.lora and model.head_only: what is trained, what it computes, and what remains of it in exports and sweeps."""

import copy
import json

import pytest
import torch
from members import SMALL, built, largest_difference, trained_alone, trained_together
from refused import problems_of
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from runner import cli
from runner.device import torch_private
from runner.training.lora import add_lora, merge, merged_node
from runner.training.stacked.compiled import Compiled
from runner.training.step.choose import how_to_compile

QUIET = ["tracking.enabled=false", "device=cpu", "model=mlp", "model.hidden_sizes=[16,16]"]


class Conv1D(nn.Module):
    """The layer of transformers: its weights are (inputs, outputs)."""

    __module__ = "transformers.pytorch_utils"

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Conv1D(8, 6), nn.ReLU(), nn.Linear(6, 3))


def trained(net):
    return [name for name, parameter in net.named_parameters() if parameter.requires_grad]


def test_adapters_first_change_nothing():
    net, rows = network(), torch.randn(5, 4)
    before = net(rows)
    assert torch.equal(add_lora(net, ["0", "2"], rank=2)(rows), before)
    assert trained(net) == ["0.lora_down", "0.lora_up", "2.lora_down", "2.lora_up"]


def test_adapters_compute_the_scaled_product():
    net, rows = add_lora(network(), "0", rank=2, alpha=6), torch.randn(5, 4)
    nn.init.normal_(net[0].lora_up)
    own = net[0]
    expected = F.linear(rows, own.weight + 6 / 2 * own.lora_up @ own.lora_down, own.bias)
    torch.testing.assert_close(own(rows), expected)


def test_merged_model_is_plain_and_equal():
    net, rows = add_lora(network(), ["0", "2"], rank=2, train="4"), torch.randn(5, 4)
    for layer in (net[0], net[2]):
        nn.init.normal_(layer.lora_up)
    expected = net(rows)
    plain = merge(copy.deepcopy(net))
    assert plain.state_dict().keys() == network().state_dict().keys()
    torch.testing.assert_close(plain(rows), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(net(rows), expected)  # the copy's hooks are its own


def test_train_names_layers_that_learn_whole():
    assert trained(add_lora(network(), "0", rank=2, train="4")) == ["0.lora_down", "0.lora_up", "4.weight", "4.bias"]


def test_unknown_layer_names_the_nearest():
    (problem,) = problems_of(add_lora, nn.ModuleDict({"output": nn.Linear(2, 2)}), "ouput")
    assert problem.source == "model.lora.match: ouput" and "`output`" in problem.help


def test_attention_that_reads_weights_itself_is_refused():
    (problem,) = problems_of(add_lora, nn.MultiheadAttention(4, 2), "out_proj")
    assert "no linear layers" in problem.message


def test_merged_node_keeps_preprocessing():
    node = {"_target_": "runner.training.add_lora", "model": {"_target_": "runner.models.MLP"}, "match": "a"}
    wrapped = {"_target_": "runner.models.Prepared", "before": {"_target_": "b"}, "model": node}
    assert merged_node(wrapped) == {**wrapped, "model": {"_target_": "runner.models.MLP"}}


def test_run_saves_resumes_and_exports(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    words = [*SMALL, *QUIET, "model.weights=base", "model.lora={match: 'hidden.*', rank: 2, train: output}"]
    assert cli.main([*SMALL, *QUIET, "hydra.run.dir=base"]) == 0
    assert cli.main([*words, "hydra.run.dir=whole"]) == 0
    assert cli.main([*words, "hydra.run.dir=cut", "train.num_epochs=1"]) == 0
    assert cli.main(["resume", "cut", "train.num_epochs=2"]) == 0
    last = [torch.load(f"{each}/checkpoints/last.pt", weights_only=True)["model"] for each in ("whole", "cut")]
    assert last[0].keys() == last[1].keys() and all(torch.equal(last[0][name], last[1][name]) for name in last[0])
    base = torch.load("base/checkpoints/best.pt", weights_only=True)["model"]
    assert all(torch.equal(last[0][name], base[name]) for name in base if name.startswith("hidden"))
    capfd.readouterr()
    assert cli.main(["evaluate", "whole", "--json"]) == 0
    evaluation = json.loads(capfd.readouterr().out)
    assert evaluation["metrics"] == pytest.approx(evaluation["in_the_run"], rel=1e-6)
    assert cli.main(["export", "whole", "--format", "safetensors"]) == 0
    weights = load_file("whole/exports/model.safetensors")
    assert weights.keys() == base.keys()
    layer = "hidden.0"
    assert not torch.equal(weights[f"{layer}.weight"], base[f"{layer}.weight"])


def test_bad_settings_are_refused_together(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    words = ["model.lora={rank: 0}", "model.head_only=maybe", "train.num_epochs=-1"]
    assert cli.main([*QUIET, *words]) == 2
    errors = capfd.readouterr().err
    assert all(key in errors for key in ("model.lora", "model.head_only", "train.num_epochs"))
    assert cli.main([*QUIET, "model.lora={match: output}", "model.head_only=true"]) == 2
    assert list(tmp_path.iterdir()) == []


def test_head_only_trains_the_last_layer(tmp_path):
    (run,), _ = built(tmp_path, [*QUIET, "model.head_only=true"], [[]])
    assert trained(run.parts.model) == ["output.weight", "output.bias"]


def test_members_share_the_frozen_body(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (run,), _ = built(tmp_path / "base", QUIET, [[]])
    torch.save(run.parts.model.state_dict(), "base.pt")
    words = [*QUIET, "model.weights=base.pt", "model.lora={match: 'hidden.*', rank: 2, train: output}"]
    seeds = [[f"seed={seed}"] for seed in (1, 2, 3)]
    alone = trained_alone(tmp_path / "alone", words, seeds)
    monkeypatch.setattr(torch_private, "compile_graph", lambda graph, inputs, options: graph)
    kind = how_to_compile(run.parts, is_alone=True)
    for compiled in (None, Compiled(kind, print)):
        together = trained_together(tmp_path / f"together{bool(compiled)}", words, seeds, 2, compiled=compiled)
        weights, points = largest_difference(alone, together)
        assert weights < 1e-5 and points < 1e-5
    own = [each.parts.model for each in together]
    assert len({each.hidden[0].weight.data_ptr() for each in own}) == 2  # two members, and one on its own
    assert len({each.hidden[0].lora_up.data_ptr() for each in own}) == 3
