"""The checks of arguments: `depth: Count` in a signature."""

from typing import Annotated

import pytest
from refused import problems_in

from runner.cli.dispatch import main
from runner.config.allowed import PARTS
from runner.config.checks import COUNT, SHARE, WIDTHS, Count, Share, argument_problems, one_of
from runner.config.instantiate import locate, problems
from runner.models import ResNet

KIND = one_of(("mlp", "conv"))


def part(kind: Annotated[str, KIND] = "mlp", depth: Count = 4, width: Count | None = None, *, dropout: Share = 0.0):
    pass


def test_valid_values_have_no_problem():
    for check, values in ((WIDTHS, ((3, 4), [])), (SHARE, (0, 0.0, 0.5)), (COUNT, (1, 3)), (KIND, ("mlp",))):
        assert not [value for value in values if check.problems(value, "key")]
    assert not argument_problems(part, {"width": None, "depth": "${data.limit}", "dropout": 0}, "model")


@pytest.mark.parametrize("values", [256, "256", None, [64, 0], [64, 2.5], ["big"], [True]], ids=str)
def test_bad_widths_suggest_a_list(values):
    (problem,) = WIDTHS.problems(values, "model.hidden_sizes", (8, 8))
    usual = "[256]" if str(values) == "256" else "[8,8]"
    assert problem.code == "bad-value" and problem.suggestions == (f"'model.hidden_sizes={usual}'",)


@pytest.mark.parametrize("value", [1, -0.1, 1.5, "half", None, True, float("nan")])
def test_bad_share_suggests_a_valid_one(value):
    assert SHARE.problems(value, "model.dropout")[0].suggestions == ("model.dropout=0.1",)


@pytest.mark.parametrize(
    ("value", "suggestions"), [("mpl", ["mlp"]), ("other", ["mlp", "conv"]), (None, ["mlp", "conv"])]
)
def test_unknown_choice_suggests_the_nearest(value, suggestions):
    (problem,) = KIND.problems(value, "model.kind")
    assert problem.suggestions == tuple(f"model.kind={each}" for each in suggestions)


def test_bad_arguments_are_reported_with_defaults():
    values = {"kind": "mpl", "depth": 0, "width": "big", "dropout": 2}
    keys = [problem.suggestions[0] for problem in argument_problems(part, values, "model")]
    assert keys == ["model.kind=mlp", "model.depth=4", "model.width=64", "model.dropout=0.1"]


def test_builtin_part_arguments_are_checked():
    node = {"_target_": "runner.models.MLP", "in_features": 4, "out_features": 2, "dropout": 2, "activation": "rleu"}
    assert [problem.source for problem in problems(node, key="model")] == ["model.activation=rleu", "model.dropout=2"]


def test_missing_values_and_lists_are_skipped():
    assert not argument_problems(part, {"depth": "???"}, "model")
    assert [each.source for each in argument_problems(ResNet, {"depth": [18]}, "model")] == ["model.depth=[18]"]


@pytest.mark.parametrize("target", PARTS)
def test_signature_of_every_part_can_be_read(target):
    assert argument_problems(locate(target), {}, "key") == []


def test_bad_arguments_of_all_groups_are_reported_together(capsys):
    bad = ["data=images", "data.path=.", "data.mode=grey", "data.augment=[flop]", "data.decode=never", "model=cnn"]
    assert main([*bad, "model.dropout=2", "model.widths=3", "train.batch_sise=1", "--json"]) == 2
    sources = {problem.source for problem in problems_in(capsys.readouterr().out)}
    assert sources >= {"data.mode=grey", "data.augment.flop=True", "data.decode=never", "model.dropout=2"}
    assert sources >= {"model.widths=3", "train.batch_sise=1"}
