"""A search's overrides and their dimensions; the overrides that can't be searched, and the fix for each."""

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from refused import problems_of

from runner.errors import RunnerError
from runner.sweep.search.space import Choices, Numbers, Space, read_space

CATEGORIES, FLOATS, INTEGERS = CategoricalDistribution, FloatDistribution, IntDistribution
#: an override, its dimension, Optuna's distribution
DIMENSIONS = [
    ("a=interval(0,0.5)", Numbers("a", 0.0, 0.5), FLOATS(0, 0.5)),
    ("a=tag(log,interval(1e-4,1e-1))", Numbers("a", 1e-4, 0.1, is_log=True), FLOATS(1e-4, 0.1, log=True)),
    ("a=int(interval(3,9))", Numbers("a", 3, 9, 1), INTEGERS(3, 9)),
    ("a=tag(log,int(interval(16,512)))", Numbers("a", 16, 512, 1, is_log=True), INTEGERS(16, 512, log=True)),
    ("a=range(1,10,4)", Numbers("a", 1, 9, 4), INTEGERS(1, 9, step=4)),
    ("a=range(10,1,-3)", Numbers("a", 4, 10, 3), INTEGERS(4, 10, step=3)),
    ("a=range(3)", Numbers("a", 0, 2, 1), INTEGERS(0, 2)),
    ("a=tag(log,range(1,9))", Numbers("a", 1, 8, 1, True), INTEGERS(1, 8, log=True)),
    ("a=range(0.1,0.5,0.1)", Numbers("a", 0.1, 0.4, 0.1), FLOATS(0.1, 0.4, step=0.1)),
    ("a=shuffle(range(1,4))", Numbers("a", 1, 3, 1), INTEGERS(1, 3)),
    ("a=[32],[64,8]", Choices("a", ("[32]", "[64,8]")), CATEGORIES(("[32]", "[64,8]"))),
    ("+a.b=0.1,null", Choices("+a.b", ("0.1", "null")), CATEGORIES(("0.1", "null"))),
    ("a=shuffle(3,1,2,1)", Choices("a", ("3", "1", "2")), CATEGORIES(("3", "1", "2"))),
    ("a=cuda:0,cpu", Choices("a", (r"cuda\:0", "cpu")), CATEGORIES((r"cuda\:0", "cpu"))),
    ("a=choice('x y',true)", Choices("a", (r"x\ y", "True")), CATEGORIES((r"x\ y", "True"))),
]

#: overrides that are not a search space, and the text that the message must contain
MISTAKES = [
    (["a=1"], "optimizer.lr=tag(log,interval(1e-4,1e-1))"),
    ([], "optimizer.lr=tag(log,interval(1e-4,1e-1))"),
    (["a=interval(2,1)"], "a=interval(1,2)"),
    (["a=tag(log,interval(2,1))"], "a=tag(log,interval(1,2))"),
    (["a=tag(log,interval(0,1))"], "a=tag(log,interval(0.001,1))"),
    (["a=tag(log,int(interval(0,64)))"], "a=tag(log,interval(1,64))"),
    (["a=tag(lgo,interval(1,2))"], "a=tag(log,interval(1e-4,1e-1))"),
    (["train.batch_size=interval(16,64)"], "train.batch_size=int(interval(16,64))"),
    (["train.batch_size=tag(log,interval(16,64))"], "train.batch_size=tag(log,int(interval(16,64)))"),
    (["a=range(1,1)"], "a=range(1,2)"),
    (["a=range(5,1)"], "a=range(1,5)"),
    (["a=range(1,5,0)"], "a=range(1,5)"),
    (["a=tag(log,range(1,9,2))"], "a=tag(log,interval(1,7))"),
    (["a=tag(log,choice(1,2))"], "remove `tag(log, ...)` from `a`"),
    (["a=1,2", "a=3,4"], "set `a` once"),
    (["sweep.slots.cpu=1,2", "a=1,2"], "`sweep.slots.cpu=...` with one value"),
]


@pytest.mark.parametrize(("override", "dimension", "optunas"), DIMENSIONS, ids=[text for text, _, _ in DIMENSIONS])
def test_override_becomes_a_dimension(override, dimension, optunas):
    space = read_space(["fixed=1", override, "sweep.strict=true"], None)
    assert space == Space(("fixed=1",), {dimension.key.lstrip("+"): dimension})
    assert dimension.distribution() == optunas and type(dimension.distribution()) is type(optunas)


@pytest.mark.parametrize(("words", "mend"), MISTAKES, ids=[" ".join(words) for words, _ in MISTAKES])
def test_read_space_error_has_help(words, mend):
    with pytest.raises(RunnerError) as caught:
        read_space(words, None)
    assert mend in caught.value.problems[0].help


def test_read_space_reports_all_errors():
    assert len(problems_of(read_space, ["a=interval(2,1)", "b=range(1,1)", "c=1,2", "c=2,3"], None)) == 3


def test_read_space_params_give_way():
    space = read_space(["a=1,2"], None, more={"a": "interval(0,1)", "b.c": "range(1,4)", "d": "7"})
    assert space == Space(("d=7",), {"b.c": Numbers("b.c", 1, 3, 1), "a": Choices("a", ("1", "2"))})
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


def test_all_values_of_a_dimension():
    assert Choices("a", ("x", "y")).listed() == ["x", "y"]
    assert Numbers("a", 1, 9, 4).listed() == [1, 5, 9]
    assert Numbers("a", 0.1, 0.4, 0.1).listed() == [0.1, 0.2, 0.3, 0.4]
    assert Numbers("a", 0.1, 0.4).listed() is None
    assert Numbers("a", 1, 9, 4).text(5.0) == "5"
