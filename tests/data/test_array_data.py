import numpy as np
import pytest
import torch
from refused import problems_of

from runner.config.instantiate import build
from runner.data.array_files import arrays
from runner.experiment.build import with_preprocessing
from runner.models import Recurrent

X, Y = np.arange(24.0).reshape(6, 4), np.array([5, 7, 5, 7, 9, 9])


@pytest.fixture(autouse=True)
def folder(own_folder):
    np.savez("good.npz", x=X, y=Y, labels=Y, inputs=X)
    np.save("x.npy", X.astype(np.float32))
    np.save("y.npy", Y)
    return own_folder


def problems(*args, **settings):
    return problems_of(arrays, *args, **settings)


def test_an_npz_file():
    source = arrays("good.npz")
    assert source.rows[0].tolist() == X.tolist()
    assert source.rows[1].tolist() == [0, 1, 0, 1, 2, 2]
    assert source.classes == ("5", "7", "9")
    assert (source.name, source.origin) == ("good", "good.npz")
    assert source.facts["num_classes"] == 3
    assert not source.given


def test_a_regression_on_integers():
    source = arrays("good.npz", kind="regression")
    assert source.rows[1].tolist() == [[5.0], [7.0], [5.0], [7.0], [9.0], [9.0]]
    assert source.facts["num_classes"] is None


def test_integers_may_stay():
    np.savez("tokens.npz", x=np.arange(6).reshape(3, 2), y=[0, 1, 0])
    assert arrays("tokens.npz").rows[0].dtype == torch.float32
    assert arrays("tokens.npz", float_inputs=False).rows[0].dtype == torch.int64


def test_byte_images_are_normalized_before_the_model():
    bytes_of = np.random.default_rng(0).integers(0, 256, (40, 3, 8, 8), dtype=np.uint8)
    np.savez("images.npz", x_train=bytes_of // 2, y_train=np.arange(40) % 2, x_val=bytes_of, y_val=np.arange(40) % 2)
    source = arrays("images.npz", float_inputs=False, augment=["flip"])
    assert source.rows[0].dtype == source.given["val"][0].dtype == torch.uint8
    around = source.around(source.rows)
    found = build(
        with_preprocessing({"_target_": "runner.models.CNN", "input_shape": [3, 8, 8], "out_features": 2}, around)
    )
    images = found.before(source.rows[0])
    assert images.mean().item() == pytest.approx(0, abs=1e-4) and images.std().item() == pytest.approx(1, abs=1e-3)
    assert found(source.rows[0]).shape == (40, 2) and around.keeps_inputs
    assert arrays("images.npz").around is None and arrays("good.npz", float_inputs=False).around is None


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.int16])
def test_small_integers_become_int32_for_embeddings(kind):
    tokens, classes = np.arange(24, dtype=kind).reshape(6, 4), np.arange(6) % 2
    np.savez("tokens.npz", x_train=tokens, y_train=classes, x_test=tokens, y_test=classes)
    source = arrays("tokens.npz", float_inputs=False)
    read = build(source.reader, key="reader")
    np.save("rows.npy", tokens)
    gru = Recurrent([4], 2, vocab_size=24)
    for rows in (source.rows[0], source.given["test"][0], next(iter(read("rows.npy")))):
        assert rows.tolist() == tokens.tolist() and gru(rows).shape == (6, 2)


def test_splits_in_one_file():
    np.savez("s.npz", x_train=X, y_train=Y, x_val=X[:1], y_val=Y[:1], x_test=X[4:], y_test=Y[4:])
    source = arrays("s.npz")
    assert len(source.rows[0]) == 6
    assert {name: rows[1].tolist() for name, rows in source.given.items()} == {"val": [0], "test": [2, 2]}


def test_splits_under_other_names():
    np.savez("s.npz", image_train=X, label_train=Y, image_test=X, label_test=Y)
    assert set(arrays("s.npz", "image", targets="label").given) == {"test"}


def test_whole_arrays_win_over_splits():
    np.savez("s.npz", x=X, y=Y, x_train=X[:2], y_train=Y[:2])
    assert len(arrays("s.npz").rows[0]) == 6


def test_safetensors():
    pytest.importorskip("safetensors.numpy").save_file({"x": X.astype(np.float16), "y": Y}, "s.safetensors")
    source = arrays("s.safetensors")
    assert source.rows[0].tolist() == X.tolist()
    assert source.classes == ("5", "7", "9")


def test_two_npy_files():
    source = arrays("x.npy", targets_path="y.npy")
    assert source.rows[0].tolist() == X.tolist()
    assert source.classes == ("5", "7", "9")


def test_targets_from_another_kind_of_file():
    assert arrays("x.npy", targets_path="good.npz", targets="labels").classes == ("5", "7", "9")


@pytest.mark.parametrize(
    "settings",
    [
        {"inputs": "input"},
        {"targets": "label"},
        {"targets": "zzzz"},
        {"kind": "classes"},
        {"path": "god.npz"},
        {"targets_path": "z.npy"},
        {"path": "x.npy", "targets_path": "good.npz", "targets": "l"},
        {"path": "y.npy"},
    ],
    ids=str,
)
def test_missing_arrays_are_refused(settings, messages):
    messages(problems(**{"path": "good.npz", **settings}))


def test_both_missing_arrays_are_reported():
    assert [problem.source for problem in problems("good.npz", "X1", targets="Y1")] == [
        "data.inputs=X1",
        "data.targets=Y1",
    ]


def test_a_split_that_lacks_its_targets(messages):
    np.savez("s.npz", x_train=X, label_train=Y)
    messages(problems("s.npz"))
    np.savez("s.npz", x_train=X, y_train=Y, x_test=X)
    messages(problems("s.npz"))


@pytest.mark.parametrize(
    "arrays_of",
    [
        {"x": np.where(X > 20, np.nan, X), "y": Y},
        {"x": X, "y": np.full(6, np.inf)},
        {"x": X, "y": Y[:5]},
        {"x": X[:0], "y": Y[:0]},
        {"x": np.array(["a"] * 6), "y": Y},
    ],
)
def test_invalid_values_are_refused(arrays_of, messages):
    np.savez("bad.npz", **arrays_of)
    messages(problems("bad.npz"))


def test_reader_reads_only_the_inputs(monkeypatch, messages):
    """The reader of a run on a file reads another file's array of the same name, in chunks."""
    from runner.data import array_files as module

    monkeypatch.setattr(module, "ROWS_A_CHUNK", 4)
    source = arrays("good.npz", "inputs", targets="labels")
    np.savez("new.npz", inputs=X + 1, other=X)
    np.savez("single.npz", whatever=X)
    read = build(source.reader, key="reader")
    assert [chunk.tolist() for chunk in read("new.npz")] == [(X[:4] + 1).tolist(), (X[4:] + 1).tolist()]
    assert torch.cat(list(read("single.npz"))).tolist() == X.tolist()
    assert torch.cat(list(read("x.npy"))).dtype == torch.float32
    np.savez("other.npz", a=X, b=X)
    messages(problems_of(lambda: list(read("other.npz"))))
    integers = build(arrays("good.npz", float_inputs=False).reader, key="reader")
    np.save("whole.npy", np.arange(6).reshape(3, 2))
    assert next(iter(integers("whole.npy"))).dtype == torch.int64
