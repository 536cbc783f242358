"""Arrays of any type become tensors, and rows of a Dataset batches."""

import numpy as np
import pandas as pd
import pytest
import torch
from refused import problems_of
from torch.utils.data import Dataset, IterableDataset, Subset

from runner.data.conversion import Called, Conversion, collate, to_inputs, to_targets
from runner.data.loading.streamed import Streamed
from runner.data.source import describe_dataset

NAN, INF = float("nan"), float("inf")


def inputs(values, called="the inputs", **settings):
    return to_inputs(values, Called("data=mine", called), **settings)


def targets(values, called="the targets", **settings):
    tensor, classes = to_targets(values, Called("data=mine", called), **settings)
    return tensor.tolist(), classes


def mistake(call, values, **settings):
    (problem,) = problems_of(call, values, **settings)
    assert problem.source.startswith("data")
    return problem


SOUND = [
    np.arange(6, dtype=np.uint8).reshape(3, 2),
    np.arange(6, dtype=">i4").reshape(3, 2),
    np.arange(6, dtype=np.float16).reshape(3, 2),
    np.arange(6, dtype=np.longdouble).reshape(3, 2),
    np.arange(6.0)[::-1][::-1].reshape(3, 2),
    [[0, 1], [2, 3], [4, 5]],
    torch.arange(6.0, requires_grad=True).reshape(3, 2),
    torch.arange(6).reshape(3, 2).bfloat16(),
    pd.DataFrame({"a": [0, 2, 4], "b": [1.0, 3.0, 5.0]}),
]


@pytest.mark.parametrize("values", SOUND, ids=lambda values: str(getattr(values, "dtype", type(values).__name__)))
def test_numbers_of_any_kind_become_float32(values):
    tensor = inputs(values)
    assert tensor.dtype == torch.float32
    assert tensor.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert not tensor.requires_grad
    assert tensor.is_contiguous()


def test_unchanged_values_share_their_memory():
    values = np.ones((3, 2), dtype=np.float32)
    assert inputs(values).data_ptr() == values.ctypes.data


def test_read_only_arrays_are_copied_without_warning():
    values = np.ones((3, 2), dtype=np.float32)
    values.setflags(write=False)
    assert inputs(values).tolist() == inputs(np.broadcast_to(np.float32(1), (3, 2))).tolist() == [[1, 1]] * 3


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("uint8", "uint8"),
        ("int16", "int16"),
        ("int64", "int64"),
        ("uint16", "int32"),
        ("uint32", "int64"),
        (">i8", "int64"),
    ],
)
def test_integers_stay_when_asked(given, kept):
    tensor = inputs(np.array([[1, 2]], dtype=given), keep_integers=True)
    assert str(tensor.dtype) == f"torch.{kept}"
    assert tensor.tolist() == [[1, 2]]


def test_floats_are_float32_also_then():
    assert inputs(np.ones((2, 2)), keep_integers=True).dtype == torch.float32


@pytest.mark.parametrize(
    "values",
    [
        [["a", "b"]],
        np.array([["a", 1]], dtype=object),
        np.ones((2, 2), dtype=complex),
        np.array([["2026-01-01"]], dtype="M8[D]"),
        [[1, 2], [3]],
        5,
        {"a": [1]},
        [],
        np.ones((3, 0)),
    ],
)
def test_values_without_numbers_are_refused(values, messages):
    messages(mistake(inputs, values))


def test_values_that_are_not_finite_are_counted(messages):
    values = np.zeros((5, 4))
    values[3, 1], values[3, 2], values[4, 1] = NAN, INF, -INF
    messages(mistake(inputs, values, called="array x of good.npz"))
    messages(mistake(inputs, [[1.0, NAN]]))


def test_what_float32_can_not_hold_is_infinite(messages):
    messages(mistake(inputs, [[1e300]]))
    assert inputs([[3e38, -3e38]]).isfinite().all()


CLASSES = [
    ([0, 1, 2, 1], [0, 1, 2, 1], ("0", "1", "2")),
    ([3, 1, 10, 1], [1, 0, 2, 0], ("1", "3", "10")),
    ([-1, 1], [0, 1], ("-1", "1")),
    (["b", "a", "b"], [1, 0, 1], ("a", "b")),
    (np.array([b"b", b"a"]), [1, 0], ("a", "b")),
    (np.array([True, False]), [1, 0], ("False", "True")),
    (np.array([[5], [4]], dtype=np.uint8), [1, 0], ("4", "5")),
    (torch.tensor([7, 7]), [0, 0], ("7",)),
    (pd.Series(["x", "y"]), [0, 1], ("x", "y")),
    (pd.Series(["x", "y"], dtype="category"), [0, 1], ("x", "y")),
]


@pytest.mark.parametrize(("values", "indices", "names"), CLASSES, ids=[str(case[2]) for case in CLASSES])
def test_classes_are_numbered_in_sorted_order(values, indices, names):
    assert targets(values) == (indices, names)
    assert to_targets(values, Called(""))[0].dtype == torch.int64


def test_floats_are_a_regression():
    assert targets([1.0, 2.5]) == ([[1.0], [2.5]], ())
    assert targets(np.ones((2, 3))) == ([[1, 1, 1]] * 2, ())
    assert to_targets([1.0], Called(""))[0].dtype == torch.float32


def test_kind_overrides_the_type_of_targets():
    assert targets([4, 5], kind="regression") == ([[4.0], [5.0]], ())
    assert targets([2.0, 7.0], kind="classification") == ([0, 1], ("2", "7"))


def test_another_split_keeps_the_numbers():
    assert targets([30, 10], like=("10", "20", "30")) == ([2, 0], ("10", "20", "30"))
    assert targets([1, 3], like=("0", "1", "2", "3")) == ([1, 3], ("0", "1", "2", "3"))


@pytest.mark.parametrize(
    ("values", "settings"),
    [
        ([1.0, NAN], {}),
        ([1.0, INF], {"kind": "classification"}),
        ([1.0, 0.5], {"kind": "classification"}),
        (np.eye(3, dtype=int), {}),
        (["a"], {"kind": "regression"}),
        (np.array([None, 1], dtype=object), {}),
        ([5], {"like": ("1", "2")}),
        ([], {}),
        (np.ones((3, 0)), {}),
    ],
)
def test_invalid_targets_are_refused(values, settings, messages):
    messages(mistake(lambda values, **settings: targets(values, **settings), values, **settings))


class Rows(Dataset):
    def __init__(self, row, count=4, **told):
        self.row, self.count = row, count
        vars(self).update(told)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.row


IMAGE = torch.zeros(3, 8, 8)


def test_sizes_come_from_the_first_row():
    told = describe_dataset(Rows((IMAGE, 1), classes=["cat", "dog"]), setting="data=mine")
    assert told.facts == {"input_shape": [3, 8, 8], "in_features": 192, "num_classes": 2, "out_features": 2}
    assert told.classes == ("cat", "dog")
    assert told.labels is None


@pytest.mark.parametrize("name", ["targets", "labels"])
@pytest.mark.parametrize("values", [[0, 2, 1, 2], torch.tensor([0, 2, 1, 2]), np.array([0, 2, 1, 2], dtype=np.int16)])
def test_labels_of_a_torchvision_like_set(name, values):
    told = describe_dataset(Rows((IMAGE, 1), **{name: values}), setting="data=mine")
    assert told.labels.tolist() == [0, 2, 1, 2]
    assert told.labels.dtype == torch.int64
    assert told.facts["num_classes"] == 3


@pytest.mark.parametrize(
    "values", [[0, 1], [0.5] * 4, [{"box": 1}] * 4, ["a"] * 4, [[1], [2], [3], [4]], [-1, 0, 1, 2], None]
)
def test_labels_of_another_kind_are_ignored(values):
    told = describe_dataset(Rows((IMAGE, 1), targets=values), setting="data=mine")
    assert told.labels is None
    assert "num_classes" not in told.facts


@pytest.mark.parametrize("indices", [[2, 0], range(2), torch.tensor([2, 0])])
def test_subset_has_the_facts_of_its_dataset(indices):
    """Subsets as random_split() returns them: without labels, nothing could be stratified or drawn by class."""
    whole = Rows((IMAGE, 1), targets=[0, 1, 0, 2])
    told = describe_dataset(Subset(Subset(whole, range(4)), indices), setting="data=mine")
    assert told.labels.tolist() == [whole.targets[index] for index in indices]
    assert told.facts["num_classes"] == told.facts["out_features"] == 3
    named = Rows((IMAGE, 1), targets=[0, 1, 0, 2], classes=["a", "b", "c", "d"])
    assert describe_dataset(Subset(named, indices), setting="data=mine").classes == ("a", "b", "c", "d")


def test_float_targets_are_a_regression():
    told = describe_dataset(Rows((IMAGE, torch.zeros(5))), setting="data=mine")
    assert (told.facts["num_classes"], told.facts["out_features"]) == (None, 5)
    assert describe_dataset(Rows((IMAGE, 0.5)), setting="data=mine").facts["out_features"] == 1


def test_facts_of_dict_rows_are_those_known():
    assert describe_dataset(Rows({"tokens": torch.zeros(7, dtype=torch.int64)}), setting="data=mine").facts[
        "input_shape"
    ] == [7]


class Stream(IterableDataset):
    def __iter__(self):
        return iter([1, 2])


@pytest.mark.parametrize("dataset", [Stream(), Rows(IMAGE, count=0), Rows((IMAGE, None)), Rows(object())])
def test_what_a_dataset_must_be(dataset, messages):
    messages(problems_of(describe_dataset, dataset, setting="data=mine"))


def test_conversion_of_doubles_gives_the_precision():
    batch = collate([({"x": np.ones(2), "n": 1}, 0.5), ({"x": np.ones(2), "n": 2}, 1.5)])
    for dtype in (torch.float32, torch.float64):
        inputs, targets = Conversion(dtype)(batch)
        assert inputs["x"].dtype == targets.dtype == dtype and targets.shape == (2, 1)
        assert inputs["n"].dtype == torch.int64


def test_rows_of_different_lengths_make_no_batch(messages):
    messages(problems_of(collate, [torch.zeros(2), torch.zeros(3)]))


class Ragged(torch.utils.data.Dataset):
    """Rows of several lengths, with a custom collate function."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.full((1 + index % 3,), float(index)), index % 2

    def collate_fn(self, rows):
        longest = max(len(values) for values, _ in rows)
        padded = torch.stack([torch.nn.functional.pad(values, (0, longest - len(values))) for values, _ in rows])
        return {"inputs": padded, "targets": torch.tensor([label for _, label in rows])}


def test_collate_fn_of_dataset_joins_its_splits():
    settings = {"batch_size": 4, "device": torch.device("cpu"), "seed": 0, "shuffle": False, "num_workers": 0}
    rows = Subset(Ragged(), range(1, 9))
    first, second = Streamed(rows, **settings).epoch(0)
    assert first["inputs"].tolist() == [[1, 1, 0], [2, 2, 2], [3, 0, 0], [4, 4, 0]]
    assert second["targets"].tolist() == [1, 0, 1, 0]
    assert describe_dataset(Ragged(), setting="data").facts["input_shape"] == [1]


class Pairs(Dataset):
    """((x, z), y): two inputs and a class."""

    def __len__(self):
        return 4

    def __getitem__(self, row):
        return (torch.ones(3), torch.ones(5)), row % 2


def test_second_of_two_inputs_is_not_a_target():
    told = describe_dataset(Pairs(), setting="data")
    assert told.facts == {"input_shape": [3], "in_features": 3}  # no fact says that the targets are numbers
