import numpy as np
import pytest
import torch
from refused import problems_of
from torch.utils.data import Dataset, IterableDataset, Subset

from runner.data.conversion import Conversion, collate
from runner.data.loading.streamed import Streamed
from runner.data.source import describe_dataset


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
    told = describe_dataset(Rows((IMAGE, 1), classes=["cat", "dog"]), asked="data=mine")
    assert told.facts == {"input_shape": [3, 8, 8], "in_features": 192, "num_classes": 2, "out_features": 2}
    assert told.classes == ("cat", "dog")
    assert told.labels is None


@pytest.mark.parametrize("name", ["targets", "labels"])
@pytest.mark.parametrize("values", [[0, 2, 1, 2], torch.tensor([0, 2, 1, 2]), np.array([0, 2, 1, 2], dtype=np.int16)])
def test_labels_of_a_torchvision_like_set(name, values):
    told = describe_dataset(Rows((IMAGE, 1), **{name: values}), asked="data=mine")
    assert told.labels.tolist() == [0, 2, 1, 2]
    assert told.labels.dtype == torch.int64
    assert told.facts["num_classes"] == 3


@pytest.mark.parametrize(
    "values", [[0, 1], [0.5] * 4, [{"box": 1}] * 4, ["a"] * 4, [[1], [2], [3], [4]], [-1, 0, 1, 2], None]
)
def test_labels_of_another_kind_are_none(values):
    told = describe_dataset(Rows((IMAGE, 1), targets=values), asked="data=mine")
    assert told.labels is None
    assert "num_classes" not in told.facts


@pytest.mark.parametrize("indices", [[2, 0], range(2), torch.tensor([2, 0])])
def test_a_part_tells_what_the_whole_knows(indices):
    """Subsets as random_split() returns them: without labels, nothing could be stratified or drawn by class."""
    whole = Rows((IMAGE, 1), targets=[0, 1, 0, 2])
    told = describe_dataset(Subset(Subset(whole, range(4)), indices), asked="data=mine")
    assert told.labels.tolist() == [whole.targets[index] for index in indices]
    assert told.facts["num_classes"] == told.facts["out_features"] == 3
    named = Rows((IMAGE, 1), targets=[0, 1, 0, 2], classes=["a", "b", "c", "d"])
    assert describe_dataset(Subset(named, indices), asked="data=mine").classes == ("a", "b", "c", "d")


def test_float_targets_are_a_regression():
    told = describe_dataset(Rows((IMAGE, torch.zeros(5))), asked="data=mine")
    assert (told.facts["num_classes"], told.facts["out_features"]) == (None, 5)
    assert describe_dataset(Rows((IMAGE, 0.5)), asked="data=mine").facts["out_features"] == 1


def test_rows_that_are_dicts_tell_what_they_can():
    assert describe_dataset(Rows({"tokens": torch.zeros(7, dtype=torch.int64)}), asked="data=mine").facts[
        "input_shape"
    ] == [7]


class Stream(IterableDataset):
    def __iter__(self):
        return iter([1, 2])


@pytest.mark.parametrize("dataset", [Stream(), Rows(IMAGE, count=0), Rows((IMAGE, None)), Rows(object())])
def test_what_a_dataset_must_be(dataset, messages):
    messages(problems_of(describe_dataset, dataset, asked="data=mine"))


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


def test_a_datasets_own_collate_fn_makes_its_batches_in_its_splits_too():
    settings = {"batch_size": 4, "device": torch.device("cpu"), "seed": 0, "shuffle": False, "num_workers": 0}
    rows = Subset(Ragged(), range(1, 9))
    first, second = Streamed(rows, **settings).epoch(0)
    assert first["inputs"].tolist() == [[1, 1, 0], [2, 2, 2], [3, 0, 0], [4, 4, 0]]
    assert second["targets"].tolist() == [1, 0, 1, 0]
    assert describe_dataset(Ragged(), asked="data").facts["input_shape"] == [1]


class Pairs(Dataset):
    """((x, z), y): two inputs and a class."""

    def __len__(self):
        return 4

    def __getitem__(self, row):
        return (torch.ones(3), torch.ones(5)), row % 2


def test_the_second_of_two_inputs_is_no_target():
    told = describe_dataset(Pairs(), asked="data")
    assert told.facts == {"input_shape": [3], "in_features": 3}  # no fact says that the targets are numbers
