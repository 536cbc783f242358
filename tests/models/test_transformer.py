import pytest
import torch

from runner.models.transformer import Transformer


def small(shape, out_features=5, **settings):
    torch.manual_seed(0)
    return Transformer(shape, out_features, **{"width": 16, "depth": 2, "num_heads": 2, **settings}).eval()


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("patch_size", [1, 4])
def test_signals(positions, pooling, patch_size):
    model = small([3, 16], positions=positions, pooling=pooling, patch_size=patch_size)
    signals = torch.randn(4, 3, 16)
    outputs = model(signals)
    assert outputs.shape == (4, 5)
    changed = signals.clone()
    changed[:, :, 15] += 1
    assert ((model(changed) - outputs).abs().max(1).values > 1e-6).all(), "the last sample counts"
    assert (model(signals.flip(2)) - outputs).abs().max() > 1e-6, "so does the order"
    model.train()(signals).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_tokens(pooling):
    model = small([7], vocab_size=9, pooling=pooling)
    tokens = torch.randint(9, (4, 7))
    assert model(tokens).shape == (4, 5)
    assert model(tokens[:, :3]).shape == (4, 5), "shorter ones, too"


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_padding_counts_for_nothing(pooling):
    model = small([7], vocab_size=9, pooling=pooling, padding_token=0)
    tokens = torch.tensor([[1, 2, 3]])
    padded = torch.tensor([[1, 2, 3, 0, 0, 0, 0], [0] * 7])
    outputs = model(padded)
    assert torch.allclose(outputs[:1], model(tokens), atol=1e-6)
    assert outputs.isfinite().all(), "a row of nothing else"
    counting = small([7], vocab_size=9, pooling=pooling)
    assert not torch.allclose(counting(padded)[:1], counting(tokens), atol=1e-4)


def test_initial_outputs_have_a_spread_of_one():
    """With a vector that gathers the sequence; a mean over positions of a random signal is smaller."""
    assert 0.5 < small([3, 32], 400, width=64, pooling="cls")(torch.randn(64, 3, 32)).std() < 2
