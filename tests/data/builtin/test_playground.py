import math

import pytest
import torch
from refused import problems_of

from runner.config.instantiate import build
from runner.data.builtin.generated import SHAPES, Features, playground


@pytest.mark.parametrize("shape", SHAPES)
def test_two_classes_of_points(shape):
    source = playground(shape, 1001, noise=0.2)
    points, targets = source.rows
    assert (points.shape, points.dtype, targets.dtype) == ((1001, 2), torch.float32, torch.int64)
    assert source.facts == {"input_shape": [2], "in_features": 2, "num_classes": 2, "out_features": 2}
    assert 400 < targets.sum() < 600
    assert 4 < points.abs().max() < 12
    assert source.around is None


@pytest.mark.parametrize("shape", SHAPES)
def test_the_seed_alone_decides(shape):
    torch.manual_seed(1)
    first = playground(shape, 50, noise=0.1, seed=3).rows
    torch.manual_seed(2)
    again, other = playground(shape, 50, noise=0.1, seed=3).rows, playground(shape, 50, noise=0.1, seed=4).rows
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], other[0])


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


def test_features_are_a_layer_before_the_model():
    names = ["x2", "x1_squared", "x2_squared", "x1_times_x2", "sin_x1", "sin_x2"]
    source = playground(features=names)
    assert (source.facts["input_shape"], source.facts["in_features"]) == ([6], 6)
    assert source.rows[0].shape == (1000, 2)
    layer = build(source.around(source.rows).before)
    assert isinstance(layer, Features)
    assert layer(torch.tensor([[2.0, 3.0]]))[0].tolist() == pytest.approx([3, 4, 9, 6, math.sin(2), math.sin(3)])


@pytest.mark.parametrize(
    "settings",
    [
        {"shape": "spirals"},
        {"noise": 0.6},
        {"noise": -1},
        {"num_rows": 0},
        {"features": ["x1", "x1_sqared"]},
        {"features": []},
        {"features": "x1"},
    ],
    ids=str,
)
def test_what_is_no_playground(settings, messages):
    messages(problems_of(playground, **settings))
