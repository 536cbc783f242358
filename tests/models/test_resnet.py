import pytest
import torch
from torch import nn

from runner.models.resnet import ResNet


@pytest.mark.parametrize(
    ("depth", "shape", "num_classes", "count"),
    [  # the numbers of parameters of other implementations of the paper, e.g., torchvision's
        (18, (3, 224, 224), 1000, 11_689_512),
        (34, (3, 224, 224), 1000, 21_797_672),
        (50, (3, 224, 224), 1000, 25_557_032),
    ],
)
def test_it_is_the_paper_s_network(depth, shape, num_classes, count):
    with torch.device("meta"):
        model = ResNet(shape, num_classes, depth)
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_the_depth_counts_layers_with_weights():
    for depth in (18, 20, 32, 34, 50, 56, 101):
        with torch.device("meta"):
            model = ResNet((3, 32, 32), 10, depth)
        layers = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
        shortcuts = [path for path, _ in model.named_modules() if path.endswith("shortcut.0")]
        assert len(layers) - len(shortcuts) == depth


@pytest.mark.parametrize(
    ("side", "stem", "last"),
    [(32, "auto", 4), (95, "auto", 12), (96, "auto", 3), (32, "imagenet", 1), (96, "cifar", 12)],
)
def test_stem_follows_the_image_size(side, stem, last):
    with torch.device("meta"):
        model = ResNet((3, side, side), 10, 18, stem=stem)
        assert model.blocks(model.stem(torch.zeros(2, 3, side, side))).shape == (2, 512, last, last)


def test_a_block_starts_as_its_shortcut():
    model = ResNet((3, 16, 16), 10, 50, width=8).eval()
    x = torch.randn(2, 8, 16, 16)
    torch.testing.assert_close(model.blocks[0](x), model.blocks[0].shortcut(x).relu())
    assert torch.equal(model.blocks[1](model.blocks[0](x)), model.blocks[0](x))
