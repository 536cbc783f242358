"""A search's overrides and their dimensions; the overrides that can't be searched, and the fix for each."""

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from refused import problems_of

from runner.errors import RunnerError
from runner.sweep.search.space import Dimension, Space, read_space

#: an override, its dimension
DIMENSIONS = [
    ("a=interval(0,0.5)", "a", FloatDistribution(0, 0.5)),
    ("a=tag(log,interval(1e-4,1e-1))", "a", FloatDistribution(1e-4, 0.1, log=True)),
    ("a=int(interval(3,9))", "a", IntDistribution(3, 9)),
    ("a=tag(log,int(interval(16,512)))", "a", IntDistribution(16, 512, log=True)),
    ("a=range(1,10,4)", "a", IntDistribution(1, 9, step=4)),
    ("a=range(10,1,-3)", "a", IntDistribution(4, 10, step=3)),
    ("a=tag(log,range(1,9))", "a", IntDistribution(1, 8, log=True)),
    ("a=range(0.1,0.5,0.1)", "a", FloatDistribution(0.1, 0.4, step=0.1)),
    ("a=[32],[64,8]", "a", CategoricalDistribution(("[32]", "[64,8]"))),
    ("+a.b=0.1,null", "+a.b", CategoricalDistribution(("0.1", "null"))),
    ("a=shuffle(3,1,2,1)", "a", CategoricalDistribution(("3", "1", "2"))),
    ("a=cuda:0,cpu", "a", CategoricalDistribution((r"cuda\:0", "cpu"))),
    ("a=choice('x y',true)", "a", CategoricalDistribution((r"x\ y", "True"))),
]

#: overrides that are not a search space, and the text that the message must contain
MISTAKES = [
    (["a=1"], "optimizer.lr=tag(log,interval(1e-4,1e-1))"),
    ([], "optimizer.lr=tag(log,interval(1e-4,1e-1))"),
    (["a=interval(2,1)"], "a=interval(1,2)"),
    (["a=tag(log,interval(0,1))"], "a=tag(log,interval(0.001,1))"),
    (["a=tag(log,int(interval(0,64)))"], "a=tag(log,interval(1,64))"),
    (["a=tag(lgo,interval(1,2))"], "a=tag(log,interval(1e-4,1e-1))"),
    (["train.batch_size=interval(16,64)"], "train.batch_size=int(interval(16,64))"),
    (["train.batch_size=tag(log,interval(16,64))"], "train.batch_size=tag(log,int(interval(16,64)))"),
    (["a=range(1,1)"], "a=range(1,2)"),
    (["a=range(1,5,0)"], "a=range(1,5)"),
    (["a=tag(log,range(1,9,2))"], "a=tag(log,interval(1,7))"),
    (["a=tag(log,range(1.0,9.0))"], "a=tag(log,interval(1,8))"),
    (["a=tag(log,choice(1,2))"], "remove `tag(log, ...)` from `a`"),
    (["a=1,2", "a=3,4"], "set `a` once"),
]


@pytest.mark.parametrize(("override", "key", "distribution"), DIMENSIONS, ids=[text for text, _, _ in DIMENSIONS])
def test_override_becomes_a_dimension(override, key, distribution):
    space = read_space(["fixed=1", override, "sweep.strict=true"], None)
    assert space == Space(("fixed=1",), {key.lstrip("+"): Dimension(key, distribution)})


@pytest.mark.parametrize(("words", "mend"), MISTAKES, ids=[" ".join(words) for words, _ in MISTAKES])
def test_read_space_error_has_help(words, mend):
    with pytest.raises(RunnerError) as caught:
        read_space(words, None)
    assert mend in caught.value.problems[0].help


def test_read_space_reports_all_errors():
    assert len(problems_of(read_space, ["a=interval(2,1)", "b=range(1,1)", "c=1,2", "c=2,3"], None)) == 3


def test_read_space_params_give_way():
    space = read_space(["a=1,2"], None, more={"a": "interval(0,1)", "b.c": "range(1,4)", "d": "7"})
    dimensions = {"b.c": Dimension("b.c", IntDistribution(1, 3)), "a": Dimension("a", CategoricalDistribution("12"))}
    assert space == Space(("d=7",), dimensions)
    with pytest.raises(RunnerError, match="interval"):
        read_space([], None, more={"a": "interval(0,x"})


def test_overrides_survive_hydras_parser():
    from hydra.core.override_parser.overrides_parser import OverridesParser

    space = read_space(
        ["m=mlp", "a=interval(0,1)", "b=int(interval(1,9))", "c=range(0.1,0.5,0.1)", "+d=cuda:0,[1,2]"], None
    )
    values = {"a": 1.25e-05, "b": 4, "c": 0.1 + 0.2, "d": r"cuda\:0"}
    overrides = space.overrides(values)
    read = {found.key_or_group: found.value() for found in OverridesParser.create().parse_overrides(list(overrides))}
    assert read == {"m": "mlp", "a": 1.25e-05, "b": 4, "c": 0.3, "d": "cuda:0"}
    assert overrides[-1] == r"+d=cuda\:0"
    assert space.name({**values, "a": 0.123456}) == "a=0.1235 b=4 c=0.3 d=cuda:0"


def test_corners_have_choices_and_ends():
    space = read_space(["a=interval(0,1)", "b=x,y,z", "c=range(1,5)"], None)
    corners = space.corners()
    assert len(corners) == 1 + 1 + 2 + 1 and corners[0] == {"a": 0.0, "b": "x", "c": 1}
    for key, expected in {"a": {0.0, 1.0}, "b": {"x", "y", "z"}, "c": {1, 4}}.items():
        assert {corner[key] for corner in corners} == expected


def test_listed_gives_all_values_of_dimension():
    space = read_space(["a=x,y", "b=range(1,10,4)", "c=range(0.1,0.5,0.1)", "d=interval(0,1)"], None)
    values = [["x", "y"], [1, 5, 9], [0.1, 0.2, 0.3, 0.4], None]
    assert [each.listed() for each in space.dimensions.values()] == values
    assert space.dimensions["b"].text(5.0) == "5"
