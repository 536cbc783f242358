import torch

from runner.data.builtin.scikit import digits


def test_the_digits_are_images_and_ten_classes():
    source = digits()
    images, targets = source.rows
    assert images.shape == (1797, 1, 8, 8)
    assert images.dtype == torch.float32
    assert (images.min().item(), images.max().item()) == (0, 1)
    assert targets.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert source.facts == {"input_shape": [1, 8, 8], "in_features": 64, "num_classes": 10, "out_features": 10}
    assert source.classes == tuple("0123456789")
    assert (source.name, source.origin) == ("digits", "scikit-learn load_digits")
