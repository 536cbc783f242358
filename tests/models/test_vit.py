import torch

from runner.models.vit import ViT


def test_images_that_are_not_square():
    assert ViT((1, 8, 12), 5, width=16, depth=1, num_heads=2)(torch.zeros(3, 1, 8, 12)).shape == (3, 5)


def test_its_size_is_the_published_one():
    with torch.device("meta"):
        model = ViT((3, 224, 224), 1000, 16, width=192, depth=12, num_heads=3)  # DeiT-Ti: 5.7 million
    assert sum(parameter.numel() for parameter in model.parameters()) == 5_717_416 - 2 * 192  # no class token


def test_positions_distinguish_patches():
    torch.manual_seed(0)
    model = ViT((1, 8, 8), 5, width=16, depth=2, num_heads=2).eval()
    x = torch.randn(2, 1, 8, 8)
    moved = x.roll(4, 3)  # the patches exchange positions
    assert not torch.allclose(model(x), model(moved))
    with torch.no_grad():
        model.positions.zero_()
    torch.testing.assert_close(model(x), model(moved))
