import pytest
import torch

from runner.models.table_inputs import TableColumns

NAN = float("nan")
#: a number, a category of three, a number, a category of two
SIZES = (0, 3, 0, 2)


def columns(**settings):
    given = {"sizes": SIZES, "means": [10.0, 0.0], "spreads": [2.0, 1.0], "fills": [10.0, 5.0]}
    return TableColumns(**{**given, **settings})


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([12, 0, 3, 1], [1, 3, 1, 0, 0, 0, 1]),
        ([8, 2, 0, 0], [-1, 0, 0, 0, 1, 1, 0]),
        # a missing number becomes its fill value, a missing category zeros
        ([NAN, 1, NAN, NAN], [0, 5, 0, 1, 0, 0, 0]),
        ([10, -1, 0, 7], [0, 0, 0, 0, 0, 0, 0]),  # unknown categories
    ],
)
def test_numbers_first_then_a_column_a_category(row, expected):
    assert columns()(torch.tensor([row], dtype=torch.float32)).tolist() == [expected]


def test_a_column_says_what_is_missing():
    rows = torch.tensor([[1, 0, 1, NAN], [NAN, 0, 1, 0]])
    assert columns(flagged=[0, 3])(rows)[:, -2:].tolist() == [[0, 1], [1, 0]]


def test_what_training_did_not_meet_is_all_zeros():
    seen = [1, 0, 1, 1, 1, 0, 1]  # five categories, two flags
    rows = torch.tensor([[NAN, 1.0, 1.0, NAN], [NAN, 2.0, 1.0, 1.0]])
    found = columns(flagged=[0, 3], seen=seen)(rows)[:, 2:]
    assert found.tolist() == [[0, 0, 0, 0, 0, 0, 1], [0, 0, 1, 0, 1, 0, 0]]


@pytest.mark.parametrize(
    ("sizes", "numbers", "row", "expected"),
    [((0,), 1, [3.0], [3.0]), ((2,), 0, [1.0], [0.0, 1.0]), ((0, 0), 2, [1, 2], [1, 2])],
)
def test_numbers_alone_and_categories_alone(sizes, numbers, row, expected):
    module = TableColumns(sizes, [0.0] * numbers, [1.0] * numbers, [0.0] * numbers)
    assert module(torch.tensor([row], dtype=torch.float32)).tolist() == [expected]


def test_it_is_exported_as_it_is_and_goes_with_the_weights():
    module = columns(flagged=[0])
    rows = torch.tensor([[12, 0, 3, 1], [NAN, 1, NAN, NAN], [10, -1, 0, 7]])
    exported = torch.export.export(module, (rows,)).module()
    assert torch.equal(exported(rows), module(rows))
    other = columns(means=[0.0, 0.0], flagged=[0])
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(rows), module(rows))


def test_on_the_device(device):
    rows = torch.tensor([[12, 0, 3, 1], [NAN, 1, NAN, NAN]])
    assert torch.equal(columns().to(device)(rows.to(device)).cpu(), columns()(rows))
