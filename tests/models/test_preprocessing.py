"""The layers around a model: images of bytes, rows of tables, and outputs in the units of the targets."""

from collections import OrderedDict, namedtuple
from types import SimpleNamespace

import pytest
import torch
from refused import problems_of
from simulated import run_simulated
from torch.utils._python_dispatch import TorchDispatchMode

from runner.models.preprocessing import ImageInputs, Scaled, TableColumns


def test_bytes_are_normalised_by_channel():
    module = ImageInputs([0.5, 0.0], [0.25, 1.0])
    images = torch.tensor([[[[0, 255]], [[51, 255]]]], dtype=torch.uint8)
    assert module(images).flatten().tolist() == pytest.approx([-2.0, 2.0, 0.2, 1.0])
    assert module(images.long()).tolist() == module(images).tolist()


def test_floats_are_in_0_to_1_already():
    module = ImageInputs([0.5], [0.25])
    images = torch.randint(256, (2, 1, 3, 3), dtype=torch.uint8)
    torch.testing.assert_close(module(images.float() / 255), module(images))


def test_constant_channel_stays_finite():
    assert ImageInputs([0.2], [0.0])(torch.full((1, 1, 1, 1), 51, dtype=torch.uint8)).item() == pytest.approx(0)


def test_statistics_are_saved_and_not_trained():
    module = ImageInputs([0.5], [0.25])
    assert list(module.parameters()) == []
    other = ImageInputs([0.0], [1.0])
    other.load_state_dict(module.state_dict())
    assert other.mean.item() == 0.5
    assert other.std.item() == 0.25


def test_half_precision_models_get_their_own_type():
    assert ImageInputs([0.5], [0.25]).bfloat16()(torch.zeros(1, 1, 2, 2, dtype=torch.uint8)).dtype == torch.bfloat16


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names = [*getattr(self, "names", []), func.overloadpacket.__name__]
        return func(*args, **(kwargs or {}))


def kernels_and_values(device):
    """Return the kernels and values after loading another module's numbers."""
    module = ImageInputs([0.0, 0.0], [1.0, 1.0])
    module.load_state_dict(ImageInputs([0.5, 0.1], [0.25, 0.3]).state_dict())
    module, images = module.to(device), torch.arange(16, dtype=torch.uint8).mul(16).view(2, 2, 2, 2).to(device)
    values = []
    for given in (images, images / 255):
        with Seen() as seen:
            found = module(given)
        values.append(found.cpu().flatten().tolist())
    return seen.names, values


def test_images_take_one_kernel_on_gpu():
    names, values = run_simulated("cuda:0", kernels_and_values)
    assert [name for name in names if name.strip("_") in ("addcmul", "add", "sub", "mul", "div")] == ["addcmul"]
    expected = kernels_and_values("cpu")[1]
    assert values[0] == pytest.approx(expected[0], abs=1e-5) and values[1] == pytest.approx(expected[1], abs=1e-5)


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


def test_unseen_categories_are_zeros():
    seen = [1, 0, 1, 1, 1, 0, 1]  # five categories, two flags
    rows = torch.tensor([[NAN, 1.0, 1.0, NAN], [NAN, 2.0, 1.0, 1.0]])
    found = columns(flagged=[0, 3], seen=seen)(rows)[:, 2:]
    assert found.tolist() == [[0, 0, 0, 0, 0, 0, 1], [0, 0, 1, 0, 1, 0, 0]]


@pytest.mark.parametrize(
    ("sizes", "numbers", "row", "expected"),
    [((0,), 1, [3.0], [3.0]), ((2,), 0, [1.0], [0.0, 1.0]), ((0, 0), 2, [1, 2], [1, 2])],
)
def test_columns_of_one_kind_are_encoded(sizes, numbers, row, expected):
    module = TableColumns(sizes, [0.0] * numbers, [1.0] * numbers, [0.0] * numbers)
    assert module(torch.tensor([row], dtype=torch.float32)).tolist() == [expected]


def test_columns_layer_is_exported_with_the_model():
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


Pair = namedtuple("Pair", "answer other")
ANSWER, OTHER = torch.tensor([[1.0]]), torch.tensor([[7.0, 7.0]])


def test_outputs_come_in_the_targets_units():
    module = Scaled([100.0, 0.0], [50.0, 2.0])
    assert module(torch.tensor([[0.0, 1.0], [-2.0, 0.5]])).tolist() == [[100.0, 2.0], [0.0, 1.0]]
    assert set(module.state_dict()) == {"means", "spreads"}


@pytest.mark.parametrize(
    ("given", "output", "taken"),
    [
        ((ANSWER, OTHER), 0, lambda found: found),
        ([OTHER, ANSWER], 1, lambda found: found[::-1]),
        (Pair(ANSWER, OTHER), 0, lambda found: (found.answer, found.other)),
        (Pair(ANSWER, OTHER), "answer", lambda found: found),
        (OrderedDict(answer=ANSWER, other=OTHER), "answer", lambda found: found.values()),
        (SimpleNamespace(answer=ANSWER, other=OTHER), "answer", lambda found: (found.answer, found.other)),
    ],
)
def test_only_the_named_output_is_scaled(given, output, taken):
    found = Scaled([100.0], [50.0], output=output)(given)
    answer, other = taken(found)
    assert type(found) is type(given) and answer.item() == 150.0 and other is OTHER
    assert next(iter(taken(given))) is ANSWER


@pytest.mark.parametrize(
    ("given", "output", "typed"),
    [
        ((ANSWER, OTHER), None, ("task.output=0", "task.output=1")),
        ({"answer": ANSWER, "n": 3}, None, ("task.output=answer",)),
        ({"answer": ANSWER, "other": OTHER}, "anwser", ("task.output=answer",)),
    ],
)
def test_output_without_name_is_refused(given, output, typed, messages):
    (problem,) = messages(problems_of(Scaled([100.0], [50.0], output=output), given))
    assert problem.suggestions == typed


def test_other_outputs_are_left_to_the_task():
    assert Scaled([100.0], [50.0])(None) is None
