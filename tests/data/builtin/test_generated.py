import math

import pytest
import torch
from refused import problems_of

from runner.data.builtin.generated import SHAPES, mnist1d, playground, synthetic
from runner.data.split import split


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: mnist1d(50, 20, seed=seed),
        lambda seed: synthetic(50, 4, seed=seed),
        *(lambda seed, shape=shape: playground(shape, 50, noise=0.1, seed=seed) for shape in SHAPES),
    ],
)
def test_rows_depend_only_on_the_seed(make):
    torch.manual_seed(1)
    first = make(3).rows
    torch.manual_seed(2)
    again, other = make(3).rows, make(4).rows
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], other[0])


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


def test_test_split_is_not_cut_from_training():
    splits = split(mnist1d(400, 100), val_fraction=0.1, test_fraction=0.5, limit=None, seed=0)
    assert splits.sizes == {"train": 360, "val": 40, "test": 100}


def test_percentiles_equal_those_of_the_authors():
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


@pytest.mark.parametrize("settings", [{"num_rows": 9}, {"num_test_rows": 0}], ids=str)
def test_sizes_of_mnist1d_are_checked(settings, messages):
    messages(problems_of(mnist1d, **settings))


@pytest.mark.parametrize("shape", SHAPES)
def test_two_classes_of_points(shape):
    source = playground(shape, 1001, noise=0.2)
    points, targets = source.rows
    assert (points.shape, points.dtype, targets.dtype) == ((1001, 2), torch.float32, torch.int64)
    assert source.facts == {"input_shape": [2], "in_features": 2, "num_classes": 2, "out_features": 2}
    assert 400 < targets.sum() < 600
    assert 4 < points.abs().max() < 12
    assert source.around is None


def test_without_noise_the_formulas_hold():
    points, targets = playground("circle", 2000).rows
    radii = points.norm(dim=1)
    assert torch.equal(targets, (radii < 2.5).long())
    assert not ((radii > 2.5) & (radii < 3.5)).any()
    assert radii.max() <= 5
    points, targets = playground("xor", 2000).rows
    assert torch.equal(targets, (points.prod(1) >= 0).long())
    assert points.abs().min() >= 0.3
    assert 5 < points.abs().max() <= 5.3
    points, targets = playground("spiral", 200).rows
    along = torch.arange(100) / 100
    torch.testing.assert_close(points.norm(dim=1), 5 * along.repeat(2), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(points[:100], -points[100:], atol=1e-5, rtol=1e-5)  # the classes are half a turn apart
    angles = torch.atan2(points[1:100, 0], points[1:100, 1])
    expected = 1.75 * 2 * math.pi * along[1:]
    torch.testing.assert_close(angles.sin(), expected.sin(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("noise", "variance"), [(0.0, 0.5), (0.5, 4.0)])
def test_clouds_grow_with_the_noise(noise, variance):
    points, targets = playground("gauss", 20_000, noise=noise).rows
    for label, centre in ((1, 2.0), (0, -2.0)):
        cloud = points[targets == label]
        torch.testing.assert_close(cloud.mean(0), torch.full((2,), centre), atol=0.1, rtol=0)
        torch.testing.assert_close(cloud.var(0), torch.full((2,), variance), atol=0, rtol=0.1)


def test_noise_blurs_the_border():
    points, targets = playground("circle", 2000, noise=0.3).rows
    wrong = targets != (points.norm(dim=1) < 2.5)
    assert 0.02 < wrong.float().mean() < 0.4
    clean, noisy = playground("spiral", 200).rows[0], playground("spiral", 200, noise=0.5).rows[0]
    off = (noisy - clean).abs().max()
    assert 0.4 < off <= 0.5


@pytest.mark.parametrize("settings", [{"shape": "spirals"}, {"noise": 0.6}, {"noise": -1}, {"num_rows": 0}], ids=str)
def test_invalid_playground_is_refused(settings, messages):
    messages(problems_of(playground, **settings))


def test_any_size():
    source = synthetic(500, shape=[3, 5], num_classes=4)
    assert source.rows[0].shape == (500, 3, 5)
    assert source.facts == {"input_shape": [3, 5], "in_features": 15, "num_classes": 4, "out_features": 4}
    assert synthetic(20, 7).rows[0].shape == (20, 7)


def test_facts_of_few_rows_have_all_classes():
    assert synthetic(1, 4, num_classes=10).facts["out_features"] == 10


def test_classes_can_be_learned_and_cut():
    inputs, targets = synthetic(5000, 16, num_classes=10).rows
    assert targets.bincount(minlength=10).min() > 100
    design = torch.cat([inputs, torch.ones(5000, 1)], 1)
    weights = torch.linalg.lstsq(design[:4000], torch.nn.functional.one_hot(targets[:4000]).float()).solution
    accuracy = ((design[4000:] @ weights).argmax(1) == targets[4000:]).float().mean()
    assert accuracy > 0.7


def test_a_regression_has_a_spread_of_one():
    source = synthetic(5000, 16, num_classes=None)
    inputs, targets = source.rows
    assert targets.shape == (5000, 1)
    assert source.facts["num_classes"] is None
    assert source.labels is None
    assert 0.5 < targets.std() < 2
    rest = targets - inputs @ torch.linalg.lstsq(inputs, targets).solution
    assert rest.std().item() == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize(
    "sizes", [{"num_rows": 0}, {"num_features": 0}, {"shape": [1, 0, 8]}, {"shape": None}, {"num_classes": 1}], ids=str
)
def test_sizes_of_synthetic_are_checked(sizes, messages):
    messages(problems_of(synthetic, **sizes))


def test_all_bad_sizes_are_reported():
    assert len(problems_of(synthetic, 0, 0, num_classes=0)) == 3
