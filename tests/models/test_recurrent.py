import types

import pytest
import torch
from simulated import run_simulated
from torch.nn import functional as F

from runner.models.recurrent import Recurrent


def test_signal_is_a_sequence_of_channels():
    model = Recurrent((2, 7), 3, "gru", 4)
    x = torch.randn(5, 2, 7)
    assert model.layers.input_size == 2
    states, _ = model.layers(x.transpose(1, 2))
    torch.testing.assert_close(model(x), model.output(states[:, -1]))


def test_both_directions_end_at_the_whole_text():
    model = Recurrent((2, 7), 3, "lstm", 4, num_layers=2, bidirectional=True)
    x = torch.randn(5, 2, 7)
    states, _ = model.layers(x.transpose(1, 2))  # (B, L, 8)
    torch.testing.assert_close(model(x), model.output(torch.cat([states[:, -1, :4], states[:, 0, 4:]], 1)))


def test_poolings():
    torch.manual_seed(0)
    x = torch.randn(5, 2, 7)
    mean = Recurrent((2, 7), 3, "gru", 4, pooling="mean")
    states, _ = mean.layers(x.transpose(1, 2))
    torch.testing.assert_close(mean(x), mean.output(states).mean(1))
    each = Recurrent((2, 7), 3, "gru", 4, pooling="each")
    assert each(x).shape == (5, 7, 3)
    assert torch.equal(each(x)[:, :4], each(x[:, :, :4]))  # later values change nothing


@pytest.mark.parametrize("pooling", ["last", "mean", "each"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_padding_counts_for_nothing(cell, bidirectional, pooling):
    torch.manual_seed(0)
    settings = {"num_layers": 2, "bidirectional": bidirectional, "pooling": pooling}
    model = Recurrent((7,), 3, cell, 4, **settings, vocab_size=9, padding_token=0)
    texts = torch.tensor([[1, 2, 3, 0, 0, 0, 0], [4, 0, 0, 0, 0, 0, 0], [0] * 7])
    outputs = model(texts)
    for row, length in ((0, 3), (1, 1)):
        own = outputs[row, :length] if pooling == "each" else outputs[row]
        torch.testing.assert_close(own, model(texts[row : row + 1, :length])[0])
    assert outputs.isfinite().all(), "a row of nothing else"
    model.padding_token = None
    assert (pooling == "each" and not bidirectional) or not torch.allclose(model(texts)[0], outputs[0], atol=1e-4)


@pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning")  # from torch, about its GRU
def test_both_directions_export_with_any_batch():
    model = Recurrent((7,), 3, "gru", 4, bidirectional=True, vocab_size=9, padding_token=0).eval()
    rows, other = torch.randint(9, (4, 7)), torch.randint(9, (3, 7))
    graph = torch.export.export(model, (rows,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    torch.testing.assert_close(graph.module()(other), model(other))


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_both_directions_equal_torchs_without_padding(cell, pooling):
    """From the same seed, with the same weights."""
    made = []
    for padding_token in (0, None):
        torch.manual_seed(0)
        settings = {"num_layers": 2, "bidirectional": True, "pooling": pooling, "padding_token": padding_token}
        made.append(Recurrent((4,), 3, cell, 4, **settings, vocab_size=9))
    texts = torch.tensor([[1, 2, 3, 4]])
    torch.testing.assert_close(made[0](texts), made[1](texts))
    made[0].padding_token = None
    torch.testing.assert_close(made[0](texts), made[1](texts))


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_how_it_starts(cell):
    torch.manual_seed(0)
    layers = Recurrent((300, 7), 3, cell, 16, num_layers=2).layers
    gates = {"gru": 3, "lstm": 4}[cell]
    for layer in range(2):
        for gate in getattr(layers, f"weight_hh_l{layer}").split(16):
            torch.testing.assert_close(gate @ gate.T, torch.eye(16))
    assert layers.weight_ih_l0.std().item() == pytest.approx(300**-0.5, rel=0.05)
    biases = (layers.bias_ih_l1 + layers.bias_hh_l1).reshape(gates, 16)
    assert biases.tolist() == [[1.0 if cell == "lstm" and gate == 1 else 0.0] * 16 for gate in range(gates)]


def test_dropout_is_between_layers_and_before_output():
    model = Recurrent((2, 7), 3, "gru", 64, num_layers=2, dropout=0.5)
    assert model.layers.dropout == 0.5
    # torch would warn: a single layer has no dropout in between
    assert Recurrent((2, 7), 3, "gru", 64, dropout=0.5).layers.dropout == 0


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_lstm_by_layers_equals_torchs(bidirectional, pooling, monkeypatch):
    """As on MPS, whose dropout between the layers is missing in the backward pass."""
    torch.manual_seed(0)
    shape = (3, 7)
    model = Recurrent(
        shape, 2, cell="lstm", hidden_size=4, num_layers=3, bidirectional=bidirectional, pooling=pooling, dropout=0.5
    )
    rows, drawn = torch.randn(5, *shape), []
    monkeypatch.setattr(F, "dropout", lambda x, p, *more: drawn.append(p) or x)
    model.dropout.p = model.layers.dropout = 0.0
    expected = model(rows)
    gradients = torch.autograd.grad(expected.sum(), list(model.layers.parameters()))
    model.layers.dropout = 0.5
    monkeypatch.setattr(model, "_has_problems", lambda steps: True)
    found = model(rows)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), list(model.layers.parameters())), gradients)
    assert [p for p in drawn if p] == [0.5, 0.5]


def test_only_on_mps_with_dropout_between_layers():
    model = Recurrent((3, 7), 2, cell="lstm", hidden_size=4, num_layers=2, dropout=0.5)
    on_mps = types.SimpleNamespace(device=torch.device("mps"))
    assert model._has_problems(on_mps) and not model._has_problems(torch.zeros(1))
    assert not model.eval()._has_problems(on_mps)
    assert not Recurrent((3, 7), 2, cell="gru", hidden_size=4, num_layers=2, dropout=0.5)._has_problems(on_mps)


def gradients_of_inputs(device):
    """Return whether the inputs of MPS' LSTM are contiguous for a batch that is a view."""
    seen = []
    usual = torch._VF.lstm
    torch._VF.lstm = lambda steps, *rest: seen.append(steps.is_contiguous()) or usual(steps, *rest)
    model = Recurrent((3, 7), 2, cell="lstm", hidden_size=4).to(device)
    model(torch.zeros(5, 3, 7, device=device))
    return seen


def test_mps_gets_its_signals_in_one_piece():
    """Its LSTM computes the wrong gradient for a view."""
    assert run_simulated("mps", gradients_of_inputs) == [True]
