import pytest
import torch
from refused import problems_of
from torch.utils.data import Dataset

from runner.data import split as room
from runner.data.builtin.scikit import digits
from runner.data.source import Source, as_source
from runner.data.split import fingerprint, folds, indices, split


def numbered(count, classes=None, **settings):
    """Return rows that contain their number, with the given classes."""
    labels = None if classes is None else torch.tensor(classes)
    return Source("mine", (torch.arange(float(count))[:, None], torch.arange(count)), {}, labels=labels, **settings)


def cut(source, val=0.1, test=0.1, limit=None, seed=0, fold=None):
    return split(source, val_fraction=val, test_fraction=test, limit=limit, seed=seed, fold=fold)


def numbers(rows):
    return None if rows is None else rows[1].tolist()


def problems(source, **settings):
    return problems_of(cut, source, **settings)


def test_every_row_is_in_one_split():
    splits = cut(numbered(100))
    assert splits.sizes == {"train": 80, "val": 10, "test": 10}
    assert sorted(numbers(splits.train) + numbers(splits.val) + numbers(splits.test)) == list(range(100))
    assert all(numbers(rows) == sorted(numbers(rows)) for rows in (splits.train, splits.val, splits.test))
    assert splits.train[0][:, 0].tolist() == numbers(splits.train), "inputs and targets stay together"


@pytest.mark.parametrize("how", [{}, {"limit": 50}, {"fold": (1, 4)}])
def test_indices_give_the_rows_of_splits(how):
    source, shares = numbered(100, [0, 1] * 50), {"val_fraction": 0.1, "test_fraction": 0.2, "seed": 3}
    splits = split(source, **shares, **{"limit": None, **how})
    found = indices(source, **shares, **{"limit": None, **how})
    assert {name: rows.tolist() for name, rows in found.items()} == {
        name: numbers(getattr(splits, name)) for name in ("train", "val", "test")
    }


def test_cut_depends_only_on_the_seed():
    torch.manual_seed(1)
    first = cut(numbered(100), seed=5)
    torch.manual_seed(2)
    assert numbers(cut(numbered(100), seed=5).test) == numbers(first.test)
    tests = {tuple(numbers(cut(numbered(100), seed=seed).test)) for seed in (*range(20), 2**32)}
    assert len(tests) == 21


def test_cut_is_fixed_by_the_seed():
    """A change here changes every existing run."""
    assert numbers(cut(numbered(20, [0, 1] * 10)).test) == [0, 11]
    assert numbers(cut(numbered(20)).test) == [11, 17]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("sizes", [[50, 50], [90, 7, 3], [178, 182, 177, 183, 181, 182, 181, 179, 174, 180], [11] * 40])
def test_classes_keep_their_proportions(sizes, seed):
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))]
    splits = cut(numbered(len(labels), labels.tolist()), val=0.15, test=0.2, seed=seed)
    left = torch.tensor(sizes)
    for rows in (splits.test, splits.val):
        counts = labels[numbers(rows)].bincount(minlength=len(sizes))
        exact = left * len(rows[1]) / left.sum()
        assert (counts - exact).abs().max() < 1
        left = left - counts
    assert left.min() >= 1


def test_the_sizes_are_rounded_to_the_nearest():
    assert cut(as_source(digits(), name="digits")).sizes == {"train": 1437, "val": 180, "test": 180}


def test_small_classes_are_taken_at_random():
    labels = torch.arange(200) // 2
    found = [labels[numbers(cut(numbered(200, labels.tolist()), val=0, seed=seed).test)].unique() for seed in range(4)]
    assert all(len(classes) == 20 for classes in found)
    assert len({tuple(classes.tolist()) for classes in found}) == 4


def test_only_row_of_class_is_trained_on():
    for seed in range(20):
        splits = cut(numbered(42, [0] * 40 + [1, 2]), val=0, test=0.36, seed=seed)
        assert splits.sizes["test"] == 15, "of the big class 14.3 rows, of the small ones 0.36 each"
        assert {40, 41} <= set(numbers(splits.train))


def test_no_split_where_the_fraction_is_zero():
    source = numbered(50)
    splits = cut(source, val=0, test=0)
    assert (splits.val, splits.test) == (None, None)
    assert splits.sizes == {"train": 50}
    assert splits.train is source.rows, "nothing was cut, nothing is copied"


def test_a_given_split_is_not_cut_again():
    given = (torch.ones(7, 1), torch.ones(7))
    splits = cut(numbered(50, given={"test": given}), val=0.2, test=0.5)
    assert splits.test is given
    assert splits.sizes == {"train": 40, "val": 10, "test": 7}


@pytest.mark.parametrize(
    ("given", "fraction", "size"), [("val", None, 50), ("val", 0.1, 45), ("test", None, 50), ("", None, 45)]
)
def test_given_validation_split_leaves_all_training_rows(given, fraction, size):
    rows = (torch.ones(7, 1), torch.ones(7))
    splits = cut(numbered(50, given={given: rows} if given else {}), val=0, test=fraction)
    assert splits.sizes["train"] == size


def test_limit_keeps_proportions_before_the_cut():
    labels = [0] * 600 + [1] * 300 + [2] * 100
    splits = cut(numbered(1000, labels), limit=100)
    assert splits.sizes == {"train": 80, "val": 10, "test": 10}
    kept = torch.tensor(labels)[numbers(splits.train) + numbers(splits.val) + numbers(splits.test)]
    assert kept.bincount().tolist() == [60, 30, 10]
    assert cut(numbered(50), limit=50).sizes == cut(numbered(50), limit=5000).sizes == cut(numbered(50)).sizes


class Rows(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return index


def test_dataset_is_cut_by_indices():
    splits = cut(Source("mine", Rows(), {}, labels=torch.arange(40) % 2))
    assert splits.sizes == {"train": 32, "val": 4, "test": 4}
    assert sorted([*splits.train, *splits.val, *splits.test]) == list(range(40))
    assert sum(index % 2 for index in splits.test) == 2
    assert cut(Source("mine", rows := Rows(), {}), val=0, test=0).train is rows


@pytest.mark.parametrize(
    ("count", "settings"),
    [
        (3, {"test": 0}),
        (1000, {"val": 0, "limit": 4}),
        (10, {"val": 0.5, "test": 0.5}),
        (2, {"val": 0.6, "test": 0.39}),
    ],
    ids=str,
)
def test_splits_that_would_be_empty(count, settings, messages):
    messages(problems(numbered(count), **settings))


def test_both_empty_splits_at_once():
    assert [problem.source for problem in problems(numbered(3))] == ["data.test_fraction=0.1", "data.val_fraction=0.1"]


def test_ordered_rows_are_cut_into_blocks():
    for seed in range(3):
        splits = cut(numbered(50, [0, 1] * 25, in_order=True), val=0.2, test=0.1, limit=40, seed=seed)
        assert numbers(splits.train) == list(range(28))
        assert numbers(splits.val) == list(range(28, 36))
        assert numbers(splits.test) == list(range(36, 40))
    splits = cut(Source("mine", Rows(), {}, in_order=True))
    assert list(splits.train) == list(range(32))
    assert splits.test.indices == range(36, 40), "a range: a list of a big set's numbers would fill the memory"
    assert cut(numbered(50, in_order=True), val=0, test=0).sizes == {"train": 50}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("classes", [None, [0] * 61 + [1] * 30 + [2] * 8 + [3]])
def test_folds_partition_all_but_the_test_split(classes, seed):
    source = numbered(100, classes)
    found = [cut(source, val=0.9, fold=(which, 7), limit=95, seed=seed) for which in range(7)]
    assert len({tuple(numbers(each.test)) for each in found}) == 1
    rest = sorted(numbers(found[0].train) + numbers(found[0].val))
    assert len(rest) == 85 and not set(rest) & set(numbers(found[0].test))
    assert sorted(row for each in found for row in numbers(each.val)) == rest
    for each in found:
        assert sorted(numbers(each.train) + numbers(each.val)) == rest
        assert numbers(each.val) == sorted(numbers(each.val)) and numbers(each.train) == sorted(numbers(each.train))
        assert each.sizes["val"] in (12, 13)
        assert classes is None or each.labels.tolist() == [classes[row] for row in numbers(each.train)]


def test_folds_have_each_class_within_a_row():
    labels = torch.tensor([0] * 61 + [1] * 30 + [2] * 8 + [3])[torch.randperm(100)]
    indices = torch.arange(0, 100, 2)
    found = folds(indices, 7, labels=labels, generator=torch.Generator().manual_seed(0))
    counts = torch.stack([labels[indices[found == which]].bincount(minlength=4) for which in range(7)])
    assert counts.sum(0).tolist() == labels[indices].bincount(minlength=4).tolist()
    assert (counts.amax(0) - counts.amin(0)).max() == 1 == counts.sum(1).max() - counts.sum(1).min()


def test_folds_depend_only_on_the_seed():
    """A change in the second line changes every existing run with folds."""
    found = {seed: tuple(numbers(cut(numbered(60), fold=(0, 5), seed=seed).val)) for seed in range(20)}
    assert len(set(found.values())) == 20 and found[3] == tuple(numbers(cut(numbered(60), fold=(0, 5), seed=3).val))
    assert numbers(cut(numbered(20, [0, 1] * 10), fold=(1, 5)).val) == [6, 10, 13, 17]


@pytest.mark.parametrize(
    ("source", "fold"),
    [
        (numbered(50, given={"val": (torch.ones(7, 1), torch.ones(7))}), (0, 5)),
        (numbered(50, in_order=True), (0, 5)),
        (numbered(50), (0, 46)),
    ],
)
def test_what_has_no_folds(source, fold, messages):
    messages(problems(source, fold=fold))


def test_fingerprint_counts_buffers_of_batch_transform():
    def source(*tokens):
        finish = torch.nn.Module()
        finish.register_buffer("tokens", torch.tensor(tokens))
        return Source("a", torch.arange(2), {}, finish=finish)

    assert fingerprint(source(1, 2)) == fingerprint(source(1, 2))
    assert fingerprint(source(1, 2)) != fingerprint(source(2, 1))


def test_a_fingerprint_is_of_the_content():
    def source(**changes):
        return Source("a", changes.pop("rows", (torch.arange(6.0), torch.arange(6))), {}, **changes)

    first = fingerprint(source())
    assert len(first) == 64
    assert fingerprint(source(origin="elsewhere")) == first
    changed = [
        source(rows=(torch.arange(6.0), torch.arange(6).flip(0))),
        source(rows=(torch.arange(6.0).reshape(3, 2), torch.arange(6))),
        source(rows=(torch.arange(6.0).double(), torch.arange(6))),
        source(given={"test": (torch.ones(1), torch.ones(1))}),
        source(given={"val": (torch.ones(1), torch.ones(1))}),
        source(classes=("a", "b")),
        source(rows=Rows()),
    ]
    assert len({first, *map(fingerprint, changed)}) == len(changed) + 1
    assert cut(numbered(50), seed=1).fingerprint == cut(numbered(50), seed=2, limit=20).fingerprint


def test_fingerprint_of_large_set_reads_a_part(monkeypatch):
    monkeypatch.setattr(room, "FINGERPRINT_BYTES", 4096)
    monkeypatch.setattr(room, "FINGERPRINT_BLOCKS", 4)
    rows = torch.zeros(100_000)
    blocks = room._blocks(rows)
    assert [len(block) for block in blocks] == [1024] * 4
    assert blocks[-1].data_ptr() + 1024 > rows.data_ptr() + 4 * 100_000 - 8, "the last block ends with the data"
    first = fingerprint(Source("a", rows, {}))
    rows[-100] = 1
    assert fingerprint(Source("a", rows, {})) != first
    rows[-100], rows[5000] = 0, 1
    assert fingerprint(Source("a", rows, {})) == first, "between two blocks nothing is read"
    assert fingerprint(Source("a", torch.zeros(100_001), {})) != first
