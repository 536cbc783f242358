import pytest
import torch
from torch import nn

from runner.models.autoencoder import Autoencoder


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 7, 10), (2, 1, 5), (1, 40), (3, 7), (12,), (2, 3, 4, 5)])
def test_any_shape_comes_back(shape):
    model = Autoencoder(shape, 5)
    x = torch.randn(3, *shape)
    assert model.encode(x).shape == (3, 5)
    assert model(x).shape == x.shape
    assert torch.equal(model(x), model.decode(model.encode(x)))


def test_the_kind_follows_the_shape():
    def kinds(**settings):
        return {type(layer) for layer in Autoencoder(**settings).encoder}

    assert nn.Conv2d in kinds(input_shape=(1, 8, 8))
    assert nn.Conv1d in kinds(input_shape=(1, 8))
    assert nn.Conv2d not in kinds(input_shape=(1, 8, 8), kind="mlp")
    assert nn.Linear in kinds(input_shape=(8,))


def test_the_decoder_mirrors_the_layers():
    model = Autoencoder((12,), 3, hidden_sizes=[8, 5])
    sizes = [(layer.in_features, layer.out_features) for layer in model.modules() if isinstance(layer, nn.Linear)]
    assert sizes == [(12, 8), (8, 5), (5, 3), (3, 5), (5, 8), (8, 12)]
    assert isinstance(model.encoder[-1], nn.Linear)  # no activation on the code or the outputs
    assert isinstance(model.decoder[-2], nn.Linear)
