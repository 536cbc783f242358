import pytest
from refused import problems_of

from runner.config.checks import choice, count, probability, widths


def test_values_in_range_are_returned():
    assert widths((3, 4), key="model.hidden_sizes", example="[256]") == [3, 4]
    assert widths([], key="model.hidden_sizes", example="[256]") == []
    assert [probability(value, key="model.dropout") for value in (0, 0.0, 0.5)] == [0, 0, 0.5]
    assert choice("mlp", ("mlp", "conv"), key="model.kind") == "mlp" and count(3, key="model.width") == 3


@pytest.mark.parametrize("values", [256, "256", None, [64, 0], [64, 2.5], ["big"], [True]], ids=str)
def test_widths_out_of_range_are_refused(values):
    (problem,) = problems_of(widths, values, key="model.hidden_sizes", example="[8,8]")
    usual = "[256]" if str(values) == "256" else "[8,8]"
    assert problem.code == "bad-value" and problem.suggestions == (f"'model.hidden_sizes={usual}'",)


@pytest.mark.parametrize("value", [1, -0.1, 1.5, "half", None, True, float("nan")])
def test_probabilities_out_of_range_are_refused(value):
    assert problems_of(probability, value, key="model.dropout")[0].suggestions == ("model.dropout=0.1",)


@pytest.mark.parametrize(
    ("value", "suggestions"), [("mpl", ["mlp"]), ("other", ["mlp", "conv"]), (None, ["mlp", "conv"])]
)
def test_unknown_choices_name_the_nearest(value, suggestions):
    (problem,) = problems_of(choice, value, ("mlp", "conv"), key="model.kind")
    assert problem.suggestions == tuple(f"model.kind={each}" for each in suggestions)
