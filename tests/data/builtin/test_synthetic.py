import pytest
import torch
from refused import problems_of

from runner.data.builtin.generated import synthetic
from runner.data.source import as_source


def test_any_size():
    source = synthetic(500, shape=[3, 5], num_classes=4)
    assert source.rows[0].shape == (500, 3, 5)
    assert source.facts == {"input_shape": [3, 5], "in_features": 15, "num_classes": 4, "out_features": 4}
    assert synthetic(20, 7).rows[0].shape == (20, 7)
    assert as_source(source, name="mine").name == "mine"


def test_the_seed_alone_decides():
    torch.manual_seed(1)
    first = synthetic(50, 4, seed=3).rows
    torch.manual_seed(2)
    again, other = synthetic(50, 4, seed=3).rows, synthetic(50, 4, seed=4).rows
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], other[0])


def test_few_rows_have_all_classes_in_their_facts():
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
    "sizes",
    [
        {"num_rows": 0},
        {"num_features": 0},
        {"shape": [1, 0, 8]},
        {"shape": None},
        {"num_classes": 1},
    ],
    ids=str,
)
def test_sizes_that_are_none(sizes, messages):
    messages(problems_of(synthetic, **sizes))


def test_all_of_them_at_once():
    assert len(problems_of(synthetic, 0, 0, num_classes=0)) == 3
