import pytest
from refused import problems_of

from runner.models.checks import probability, widths


def problem(call, value, **settings):
    return problems_of(call, value, **settings)[0]


def test_widths():
    assert widths((3, 4), key="model.hidden_sizes", example="[256]") == [3, 4]
    assert widths([], key="model.hidden_sizes", example="[256]") == []


@pytest.mark.parametrize(
    ("values", "asked", "write"),
    [
        (256, "model.hidden_sizes=256", "model.hidden_sizes=[256]"),
        ("256", "model.hidden_sizes=256", "model.hidden_sizes=[256]"),
        (None, "model.hidden_sizes=None", "model.hidden_sizes=[8,8]"),
        ([64, 0], "model.hidden_sizes=[64,0]", "model.hidden_sizes=[8,8]"),
        ([64, 2.5], "model.hidden_sizes=[64,2.5]", "model.hidden_sizes=[8,8]"),
        (["big"], "model.hidden_sizes=[big]", "model.hidden_sizes=[8,8]"),
        ([True], "model.hidden_sizes=[True]", "model.hidden_sizes=[8,8]"),
    ],
)
def test_what_are_no_widths(values, asked, write):
    found = problem(widths, values, key="model.hidden_sizes", example="[8,8]")
    assert (found.source, found.help) == (asked, write)


def test_probabilities():
    assert [probability(value, key="model.dropout") for value in (0, 0.0, 0.5)] == [0, 0, 0.5]


@pytest.mark.parametrize("value", [1, -0.1, 1.5, "half", None, True, float("nan")])
def test_what_is_no_probability(value):
    assert problem(probability, value, key="model.dropout").help == "model.dropout=0.1"
