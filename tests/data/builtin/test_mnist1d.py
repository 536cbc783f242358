import pytest
import torch
from refused import problems_of

from runner.data.builtin.generated import TEMPLATES, _blurred, _stretched, make_signals, mnist1d
from runner.data.loading.order import generator
from runner.data.split import split


def test_the_paper_s_sizes():
    source = mnist1d()
    inputs, targets = source.rows
    assert (inputs.shape, inputs.dtype, targets.dtype) == ((4000, 1, 40), torch.float32, torch.int64)
    assert source.given["test"][0].shape == (1000, 1, 40)
    both = torch.cat([targets, source.given["test"][1]])
    assert both.bincount().tolist() == [500] * 10
    assert source.facts == {"input_shape": [1, 40], "in_features": 40, "num_classes": 10, "out_features": 10}
    assert inputs.mean().item() == pytest.approx(0, abs=1e-5)
    assert inputs.std().item() == pytest.approx(1, rel=1e-5)


def test_the_test_split_is_not_cut_from_training():
    splits = split(mnist1d(400, 100), val_fraction=0.1, test_fraction=0.5, limit=None, seed=0)
    assert splits.sizes == {"train": 360, "val": 40, "test": 100}


def test_the_seed_alone_decides():
    torch.manual_seed(1)
    first = mnist1d(50, 20, seed=3).rows
    torch.manual_seed(2)
    again, other = mnist1d(50, 20, seed=3).rows, mnist1d(50, 20, seed=4).rows
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], other[0])


def test_what_is_known_of_the_authors_own_rows():
    """Percentiles of the authors' 4,000 signals by class, from github.com/greydanus/mnist1d with its seed 42."""
    inputs, targets = mnist1d(20_000, 10).rows
    levels = torch.tensor([0.01, 0.1, 0.5, 0.9, 0.99])
    for label, theirs in THEIRS.items():
        found = inputs[targets == label].flatten()[:100_000].quantile(levels)
        torch.testing.assert_close(found, torch.tensor(theirs), rtol=0.05, atol=0.12)


THEIRS = {
    0: [-1.65, -0.83, 0.25, 2.44, 3.60],
    1: [-2.49, -1.24, -0.03, 0.92, 1.73],
    4: [-2.75, -1.21, -0.04, 0.90, 1.75],
    6: [-3.50, -2.32, -0.18, 0.88, 1.76],
    9: [-2.86, -1.23, -0.06, 0.91, 1.78],
}


def test_more_padding_makes_a_narrower_shape():
    shapes = torch.ones(2, 12, dtype=torch.float64)
    stretched, is_template = _stretched(shapes, torch.tensor([[36], [60]]))
    assert is_template.sum(1).tolist() == [19, 12]  # of 72 points: 12 / 47 and 12 / 71 of the way
    assert (stretched[is_template] > 0).all()
    assert stretched[~is_template].abs().max() == 0


def test_a_blur_keeps_what_is_even_and_mirrors_the_ends():
    torch.testing.assert_close(
        _blurred(torch.full((1, 72), 3.0, dtype=torch.float64)), torch.full((1, 72), 3.0).double()
    )
    spike = torch.zeros(2, 72, dtype=torch.float64)
    spike[0, 36], spike[1, 0] = 1, 1
    middle, end = _blurred(spike)
    assert middle[36].item() == pytest.approx(0.19947, abs=1e-4)  # 1 / (2 sqrt(2 pi))
    assert end[0].item() == pytest.approx((middle[36] + middle[37]).item())
    assert end.sum().item() == pytest.approx(1)


def test_the_shape_shows_through_the_noise():
    signals = make_signals(torch.arange(10).repeat(200), generator(1))
    assert signals.shape == (2000, 40)
    means = signals.reshape(200, 10, 40).mean(0)
    assert means[0].mean() > 0 > means[6].mean()  # 0 curves upwards, 6 downwards
    assert len(TEMPLATES) == 10


@pytest.mark.parametrize("settings", [{"num_rows": 9}, {"num_test_rows": 0}], ids=str)
def test_sizes_that_are_none(settings, messages):
    messages(problems_of(mnist1d, **settings))
