import numpy as np
import pandas as pd
import pytest
import torch
from refused import problems_of
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from runner.data.conversion import STANDARD, Called, Conversion
from runner.data.loading.loaders import Loading, load
from runner.data.source import Source, as_source, from_arrays

X, Y = np.arange(24.0).reshape(6, 4), np.array([0, 1, 2, 0, 1, 2])


class Rows(Dataset):
    classes = ("a", "b")

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.zeros(2), index % 2


def problems(found):
    told = problems_of(as_source, found, name="mine")
    assert all(problem.source == "data=mine" for problem in told)
    return told


@pytest.mark.parametrize(
    "found",
    [(X, Y), [X, Y], (X.tolist(), Y.tolist()), (torch.tensor(X), torch.tensor(Y)), (pd.DataFrame(X), pd.Series(Y))],
    ids=["arrays", "a list of two", "lists", "tensors", "pandas"],
)
def test_inputs_and_targets(found):
    source = as_source(found, name="mine")
    inputs, targets = source.rows
    assert source.name == "mine"
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)
    assert inputs.tolist() == X.tolist()
    assert targets.tolist() == source.labels.tolist() == Y.tolist()
    assert source.facts == {"input_shape": [4], "in_features": 4, "num_classes": 3, "out_features": 3}
    assert source.classes == ("0", "1", "2")


def test_a_regression_has_no_classes():
    source = as_source((np.zeros((6, 1, 2, 2)), np.ones((6, 3))), name="mine")
    assert source.facts == {"input_shape": [1, 2, 2], "in_features": 4, "num_classes": None, "out_features": 3}
    assert source.labels is None
    assert source.classes == ()


def test_tensor_dataset_of_three_stays_a_dataset():
    three = TensorDataset(torch.tensor(X), torch.ones(6, 1), torch.tensor(Y))
    source = as_source({"train": three, "val": three}, name="mine")
    assert source.rows is three and source.given["val"] is three


def test_a_dataset_stays_one():
    rows = Rows()
    source = as_source(rows, name="mine")
    assert source.rows is rows
    assert source.facts["out_features"] == 2
    assert source.origin == "Rows"


def test_a_source_gets_the_name():
    source = Source("code", (torch.ones(2, 1), torch.ones(2, 1)), {})
    assert as_source(source, name="mine").name == "mine"


def test_ready_splits_have_the_classes_of_train():
    found = {"train": (X, ["c", "a", "b", "c", "a", "b"]), "val": (X[:2], ["b", "b"]), "test": (X[:1], ["c"])}
    source = as_source(found, name="mine")
    assert source.rows[1].tolist() == [2, 0, 1, 2, 0, 1]
    assert {name: rows[1].tolist() for name, rows in source.given.items()} == {"val": [1, 1], "test": [2]}


def test_ready_split_is_a_regression_like_train():
    source = as_source({"train": (X, Y / 2), "test": (X[:2], [2, 0])}, name="mine")
    assert source.given["test"][1].tolist() == [[2.0], [0.0]]


def test_given_splits_may_be_datasets():
    source = as_source(
        {"train": Rows(), "val": Rows(), "test": TensorDataset(torch.zeros(2, 2), torch.tensor([0, 1]))}, name="mine"
    )
    assert isinstance(source.given["val"], Rows)
    assert len(source.given["test"]) == 2


class Three(Dataset):
    """Has classes 0 to 2, according to its targets."""

    targets = [0, 1, 2] * 2

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.zeros(4), index % 3


class Named(Three):
    classes = ("a", "b", "c")


class Silent(Three):
    targets = None


class Fewer(Three):
    """Like torchvision's ImageFolder of a directory without class a."""

    classes = ("b", "c")


class Numbers(Silent):
    def __getitem__(self, index):
        return torch.zeros(4), torch.ones(1)


X4, ONES = X[:3], [1, 2, 1]


@pytest.mark.parametrize("train", [Three(), Named(), Silent(), DataLoader(Three(), 2)])
def test_split_next_to_a_dataset_is_one(train, messages):
    val = TensorDataset(torch.tensor(X4), torch.tensor(ONES))
    assert as_source({"train": train, "val": val}, name="mine").given["val"] is val
    if isinstance(train, Named):
        messages(problems({"train": train, "val": (X4, ONES)}))


@pytest.mark.parametrize(
    ("train", "val"),
    [
        (Named(), Named()),
        (Named(), Three()),
        (Three(), Named()),
        ((X, Y), Named()),
        ((X, list("abcabc")), Named()),
        ((X, Y / 2), Numbers()),
        (Named(), Source("s", (torch.ones(2, 4), torch.tensor([0, 1])), {}, classes=("a", "b"))),
    ],
)
def test_dataset_with_equal_classes_is_kept(train, val):
    given = as_source({"train": train, "val": val}, name="mine").given["val"]
    assert given is val or given is val.rows


@pytest.mark.parametrize(
    ("train", "val"),
    [
        (Named(), Fewer()),
        (DataLoader(Named(), 2), DataLoader(Fewer(), 2)),
        ((X, Y + 1), Three()),
        ((X, Y + 1), Silent()),
        ((X, list("abcabc")), Three()),
        (Three(), TensorDataset(torch.tensor(X4), torch.tensor([1, 2, 3]))),
    ],
)
def test_other_numbers_of_classes_are_refused(train, val, messages):
    messages(problems({"train": train, "val": val}))


@pytest.mark.parametrize(
    "found",
    [
        None,
        X,
        (X, Y, Y),
        {"inputs": X},
        (TensorDataset(torch.ones(3, 1)), TensorDataset(torch.ones(3, 1))),
        (X, Y[:-1]),
        {"train": (X, Y), "valid": (X, Y)},
        {"val": (X, Y)},
        {"train": (X, Y), "test": (X[:, :2], Y)},
        {"train": (X, Y / 2), "test": (X, np.ones((6, 2)))},
        {"train": (X, Y), "test": (X[:1], [7])},
        Source("s", (torch.ones(3, 1), torch.ones(2)), {}),
        Source("s", (), {}),
        Source("s", torch.ones(3), {}, labels=torch.zeros(2)),
        Source("s", torch.ones(3), {}, given={"dev": torch.ones(1)}),
    ],
)
def test_other_values_are_refused(found, messages):
    messages(problems(found))


def test_errors_of_inputs_and_targets_come_together(messages):
    bad = X.copy()
    bad[0, 0] = np.nan
    messages(problems((bad, [None] * 6)))


def test_error_names_the_data(messages):
    called = [Called("data.path=f.npz", f"array {name} of f.npz") for name in "xy"]
    messages(problems_of(from_arrays, X, Y[:2], name="mine", called=called))


def test_integers_may_stay_in_every_split():
    source = from_arrays(Y[:, None], Y, name="mine", conversion=Conversion(keeps_integers=True))
    assert source.rows[0].dtype == torch.int64
    assert from_arrays(Y[:, None], Y, name="mine").rows[0].dtype == torch.float32


AS_THEY_ARE = Conversion(has_columns=False)


class Pairs(Dataset):
    def __init__(self, *parts):
        self.parts = parts

    def __len__(self):
        return len(self.parts[0])

    def __getitem__(self, index):
        return tuple(part[index] for part in self.parts)


CONTAINERS = {
    "tensors": lambda *parts: parts,
    "TensorDataset": TensorDataset,
    "Dataset": Pairs,
    "DataLoader": lambda *parts: DataLoader(TensorDataset(*parts), 4),
    "IterableDataset": lambda *parts: OfRows(zip(*parts, strict=True)),
    "list of tuples": lambda *parts: list(zip(*parts, strict=True)),
    "arrays": lambda *parts: [part.numpy() for part in parts],
}


class OfRows(IterableDataset):
    def __init__(self, rows):
        self.rows = list(rows)

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        return iter(self.rows)


def batches(source, conversion):
    loading = Loading(num_workers=0, conversion=conversion)
    loader, _ = load(source.rows, loading, batch_size=4, device=torch.device("cpu"), seed=0, shuffle=False)
    return list(loader.epoch(0))


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize(
    ("inputs", "targets"),
    [
        (torch.rand(8, 4), torch.rand(8)),
        (torch.rand(8), torch.rand(8, 1, 4, 4)),
        (torch.arange(8), torch.arange(8) % 3),
        (torch.rand(8, 1, 4, 4, dtype=torch.float64), torch.ones(8, 2, dtype=torch.bool)),
        (torch.ones(8, 3, dtype=torch.uint8), torch.arange(8, dtype=torch.int32)),
    ],
    ids=["targets of one number", "images as targets", "indices", "float64", "small integers"],
)
def test_custom_task_gets_tensors_as_they_are(container, inputs, targets):
    source = as_source(CONTAINERS[container](inputs, targets), name="mine", conversion=AS_THEY_ARE)
    wanted = [part.float() if part.dtype == torch.float64 else part for part in (inputs, targets)]
    for got, whole in zip(zip(*batches(source, AS_THEY_ARE), strict=True), wanted, strict=True):
        assert torch.equal(torch.cat(got), whole) and got[0].dtype == whole.dtype
    told = "the inputs, (N, 1, 4, 4) float64, are given as (N, 1, 4, 4) float32"
    assert (told in source.notes) == (inputs.dtype == torch.float64)
    assert source.facts["input_shape"] == list(inputs.shape[1:])


@pytest.mark.parametrize("container", [name for name in CONTAINERS if name != "arrays"])
@pytest.mark.parametrize("inputs", [torch.rand(8, 4), torch.rand(8), torch.arange(8), torch.arange(16).reshape(8, 2)])
@pytest.mark.parametrize(
    "targets", [torch.rand(8), torch.rand(8, 1, 2, 2), torch.rand(8, dtype=torch.float64), torch.arange(8) % 3]
)
def test_batches_do_not_depend_on_the_container(container, inputs, targets):
    first, other = (as_source(CONTAINERS[each](inputs, targets), name="mine") for each in ("tensors", container))
    for ours, theirs in zip(batches(first, STANDARD), batches(other, STANDARD), strict=True):
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(ours, theirs, strict=True))
    assert set(first.notes) <= set(other.notes)


def test_conversions_of_a_task_are_notes():
    notes = as_source((X[:, 0], Y[::-1] * 2.0), name="mine").notes
    assert notes == (
        "the inputs, (N,) float64, are given as (N, 1) float32",
        "the targets, (N,) float64, are given as (N, 1) float32",
    )
    assert as_source((X.astype("f4"), list("bbcaab")), name="mine").notes == (
        "the classes a, b, c are numbered from 0",
    )
    assert as_source((X.astype("f4"), Y), name="mine").notes == ()


def test_float64_keeps_all_digits_in_fp64():
    double = Conversion(torch.float64)
    for found in ((X / 3, Y / 3), (torch.tensor(X / 3), torch.tensor(Y / 3))):
        source = as_source({"train": found, "val": found}, name="mine", conversion=double)
        for inputs, targets in (source.rows, source.given["val"]):
            assert inputs.tolist() == (X / 3).tolist() and targets.tolist() == (Y[:, None] / 3).tolist()
        assert not any("float32" in note for note in source.notes)
    single = Source("s", (torch.ones(2, 1), torch.arange(2)), {}, given={"val": (torch.ones(1, 1), torch.arange(1))})
    widened = as_source(single, name="mine", conversion=double)
    assert widened.rows[0].dtype == widened.given["val"][0].dtype == torch.float64
    assert widened.rows[1].dtype == torch.int64


def test_nested_tensors_are_data_as_they_are():
    parts = {"a": torch.zeros(6, 2), "b": (torch.arange(6), np.ones((6, 1, 1), "f4"))}
    source = as_source({"train": parts, "val": parts}, name="mine", conversion=AS_THEY_ARE)
    assert source.rows["a"].data_ptr() == parts["a"].data_ptr() and source.rows["b"][0].dtype == torch.int64
    assert source.given["val"]["b"][1].shape == (6, 1, 1)
    texts = as_source({"train": (X, list("abcabc")), "val": (X[:2], ["c", "b"])}, name="mine", conversion=AS_THEY_ARE)
    assert texts.classes == ("a", "b", "c") and texts.given["val"][1].tolist() == [2, 1]


@pytest.mark.parametrize("found", [None, (X, Y[:-1]), (X, [None] * 6), {}])
def test_custom_task_refuses_no_tensors(found, messages):
    messages(problems_of(as_source, found, name="mine", conversion=AS_THEY_ARE))


@pytest.mark.parametrize("conversion", [STANDARD, AS_THEY_ARE])
def test_list_of_dicts_is_data(conversion):
    rows = [{"x": torch.full((2,), float(index)), "words": "a"} for index in range(6)]
    source = as_source({"train": rows, "val": rows[:2]}, name="mine", conversion=conversion)
    first = batches(source, conversion)[0]
    assert first["x"].tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]] and first["words"] == ["a"] * 4
    assert (len(source.rows), len(source.given["val"])) == (6, 2)
