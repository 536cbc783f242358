import torch

from runner.models.linear import Linear


def test_any_shape_becomes_one_linear_map():
    model = Linear(12, 3)
    with torch.no_grad():
        model.output.weight.copy_(torch.arange(36.0).reshape(3, 12))
        model.output.bias.fill_(1)
    x = torch.randn(5, 3, 2, 2)
    torch.testing.assert_close(model(x), x.reshape(5, 12) @ torch.arange(36.0).reshape(3, 12).T + 1)


def test_it_starts_with_every_class_equally_likely():
    assert Linear(4, 3)(torch.randn(5, 4)).abs().max() == 0
