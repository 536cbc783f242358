import pytest
from refused import problems_of

from runner.models.checks import probability, widths


def test_widths():
    assert widths((3, 4), key="model.hidden_sizes", example="[256]") == [3, 4]
    assert widths([], key="model.hidden_sizes", example="[256]") == []


@pytest.mark.parametrize("values", [256, "256", None, [64, 0], [64, 2.5], ["big"], [True]], ids=str)
def test_what_are_no_widths(values, messages):
    messages(problems_of(widths, values, key="model.hidden_sizes", example="[8,8]"))


def test_probabilities():
    assert [probability(value, key="model.dropout") for value in (0, 0.0, 0.5)] == [0, 0, 0.5]


@pytest.mark.parametrize("value", [1, -0.1, 1.5, "half", None, True, float("nan")])
def test_what_is_no_probability(value, messages):
    messages(problems_of(probability, value, key="model.dropout"))
