"""The values that a user's hooks may return, the values that they see, and the state that they leave unchanged."""

import types

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import nn

from runner.training.hooks import Hooks, sorted_out
from runner.training.parts import Hook


def test_numbers_of_every_kind():
    given = {
        "a": 1,
        "b": 2.5,
        "c": True,
        "d": torch.tensor(3.5),
        "e": np.float32(4),
        "f": np.array(5),
        "g": np.bool_(1),
        "h": torch.tensor([6.5]),
        "i": np.array([7]),
    }
    assert sorted_out(given).numbers == {"a": 1, "b": 2.5, "c": 1, "d": 3.5, "e": 4, "f": 5, "g": 1, "h": 6.5, "i": 7}
    assert sorted_out(None) == sorted_out({})


def pixels(value):
    (image,) = sorted_out({"image": value}).images.values()
    return np.asarray(image)


def test_images_of_every_kind():
    import matplotlib.figure

    gray = torch.tensor([[0.0, 0.5], [1.0, 2.0]])
    assert pixels(gray).tolist() == [[0, 128], [255, 255]]
    assert pixels(torch.tensor([[float("nan"), -1.0]])).tolist() == [[0, 0]]
    assert pixels(gray[None]).tolist() == pixels(gray).tolist()
    color = torch.arange(12, dtype=torch.uint8).reshape(3, 2, 2)
    assert (pixels(color) == color.permute(1, 2, 0).numpy()).all()
    assert (pixels(color.permute(1, 2, 0).numpy()) == color.permute(1, 2, 0).numpy()).all()
    assert pixels(Image.new("RGB", (5, 4), "red")).shape == (4, 5, 3)
    figure = matplotlib.figure.Figure(figsize=(2, 1), dpi=50)
    figure.subplots()
    assert pixels(figure).shape == (50, 100, 4)
    assert pixels(torch.tensor([[0, 7], [255, 300]])).tolist() == [[0, 7], [255, 255]]
    assert pixels(torch.stack([gray[None], gray[None]])).tolist() == [[0, 128, 0, 128], [255, 255, 255, 255]]
    assert pixels(torch.tensor([[0, 1]])).tolist() == pixels(np.array([[False, True]])).tolist() == [[0, 255]]


@pytest.mark.parametrize(
    ("image", "seen"),
    [
        (Image.new("CMYK", (1, 1), (0, 255, 255, 0)), [[[255, 0, 0]]]),
        (Image.new("YCbCr", (1, 1), (0, 128, 128)), [[[0, 0, 0]]]),
        (Image.new("LA", (1, 1), (7, 9)), [[[7, 9]]]),
    ],
    ids=lambda each: getattr(each, "mode", ""),
)
def test_image_of_any_mode_can_be_saved(image, seen, tmp_path):
    """An error in the writing thread would end the run."""
    assert pixels(image).tolist() == seen
    sorted_out({"image": image}).images["image"].save(tmp_path / "image.png")


def test_a_figure_is_let_go():
    import matplotlib
    import matplotlib.pyplot as plt

    matplotlib.use("agg")
    kept = plt.figure()
    assert pixels(plt.figure(figsize=(2, 1), dpi=50)).shape == (50, 100, 4)
    assert plt.get_fignums() == [kept.number]
    plt.close(kept)


@pytest.mark.parametrize(
    "table",
    [
        {"x": torch.tensor([1, 2]), "y": ["a", "b"]},
        [{"x": 1, "y": "a"}, {"x": np.int64(2), "y": "b"}],
        {"x": range(1, 3), "y": ("a", "b")},
        {"x": pd.Series([1, 2]), "y": ["a", "b"]},
        pd.DataFrame({"x": [1, 2], "y": ["a", "b"]}),
    ],
)
def test_tables_of_every_kind(table):
    assert sorted_out({"t": table}).tables == {"t": [{"x": 1, "y": "a"}, {"x": 2, "y": "b"}]}
    single = {"cat": 0.5, "dog": torch.tensor(1.0), "said": "so"}
    assert sorted_out({"t": single, "none": {}}).tables == {"t": [{**single, "dog": 1.0}], "none": []}


def test_table_values_unknown_to_json_become_null():
    nan = float("nan")
    rows = [{"x": nan, "y": [1.0, float("inf"), [nan, "a"]], "z": torch.tensor([0.5, nan]), "w": [np.float32(2)]}]
    plain = [{"x": None, "y": [1.0, None, [None, "a"]], "z": [0.5, None], "w": [2.0]}]
    assert sorted_out({"t": rows}).tables == sorted_out({"t": pd.DataFrame(rows)}).tables == {"t": plain}


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (3, "it returned a int; a hook returns None or"),
        ({"a": "text"}, "a is a str; a hook returns"),
        ({"a": torch.zeros(2, 2, 2, 2, 2)}, r"a is a Tensor of \(2, 2, 2, 2, 2\)"),
        ({"a": torch.zeros(5, 2, 2)}, r"of \(5, 2, 2\)"),
        ({"a": {"x": [1], "y": [1, 2]}}, "is longer than"),
        ({"a": [{"x": 1}, {"x": 2, "step": 7}]}, "column `step` is reserved; use another name"),
        ({"a": {"x": [1, 2], "y": "ab"}}, r"it mixes columns and single values; a table is \{column: values\}, or"),
        ({"a": np.array([[1j, 2j]])}, r"a is a ndarray of \(1, 2\)"),
        ({"a": Image.new("L", (0, 3))}, "a is a Image; a hook"),
        ({"a" * 151: torch.zeros(2, 2)}, r"aaa\.\.\. has 151 bytes"),
        ({"a?": 1}, "not a name for MLflow"),
        ({"../a": torch.zeros(2, 2)}, "not a name for MLflow"),
        ({"/a": torch.zeros(2, 2)}, "not a name for MLflow"),
    ],
)
def test_hook_values_of_other_types_are_refused(returned, said):
    with pytest.raises((TypeError, ValueError), match=said):
        sorted_out(returned)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.frozen = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.train()
        self.frozen.eval()

    def forward(self, inputs):
        return self.inner(inputs)


@pytest.fixture
def called(tmp_path):
    """Call functions as hooks. Returns the delivered values, the log and the model."""
    parts = types.SimpleNamespace(
        device=torch.device("cpu"),
        kept_model=Net(),
        task=None,
        val=types.SimpleNamespace(epoch=lambda _: [1, 2]),
        test=None,
    )
    said = []

    def call(*functions, when="epoch", at=("epoch",), values=(("val/loss", 0.5),), epochs=0):
        hooks = Hooks([Hook(each.__name__, each, at) for each in functions], parts, tmp_path, say=said.append)
        for step in range(epochs):
            hooks.call("epoch", epoch=0, step=step, values={"val/loss": 0.5})
        return ([hooks.call(when, epoch=1, step=step, values=dict(values)) for step in (3, 4)], said, parts.kept_model)

    call.model = parts.kept_model
    return call


def test_hooks_see_training_and_leave_no_trace(called):
    def look(view):
        assert not view.model.training and not view.model.inner.training and not torch.is_grad_enabled()
        torch.rand(2)
        view.model.frozen.train()
        assert view.model.inner.weight.grad is None
        with torch.enable_grad():
            view.model(torch.ones(2, 2)).sum().backward()
        assert list(view.batches()) == [1, 2]
        with pytest.raises(ValueError, match="has the batches of val, not of test"):
            view.batches("test")
        return {"seen": view.values["val/loss"], "step": view.step, "epoch": view.epoch}

    def look_again(view):
        assert view.model.inner.weight.grad is None

    def build_on(view):
        return {"twice": 2 * view.values["seen"]}

    before, kept = torch.get_rng_state(), torch.zeros(2, 2)
    called.model.inner.weight.grad = kept  # as a captured step keeps it
    (first, second), said, model = called(look, look_again, build_on)
    assert first.numbers == {"seen": 0.5, "step": 3, "epoch": 1, "twice": 1.0} and second.numbers["step"] == 4
    assert torch.equal(torch.get_rng_state(), before) and not said
    assert model.inner.weight.grad is kept and not kept.any() and model.inner.bias.grad is None
    assert model.training and model.inner.training and not model.frozen.training and torch.is_grad_enabled()


def test_failing_hook_is_reported_once_others_continue(called, caplog):
    def fails(view):
        raise ZeroDivisionError("of what?")

    def is_taken(view):
        return {"val/loss": 1.0}

    def leaves(view):
        raise SystemExit

    def works(view):
        return {"a": 1}

    (first, second), said, _ = called(fails, is_taken, leaves, works)
    assert first.numbers == second.numbers == {"a": 1.0}
    assert said == [
        "hook:   fails failed at step 3, and is not called any more: ZeroDivisionError: of what?",
        "hook:   is_taken failed at step 3, and is not called any more: ValueError: there is val/loss already",
        "hook:   leaves failed at step 3, and is not called any more: SystemExit: it would end the program, with exit code 0",
    ]
    assert "of what?" in caplog.text and "Traceback" in caplog.text


@pytest.mark.parametrize(
    ("name", "when"), [("train/loss", "epoch"), ("speed/mine", "end"), ("system/mine", "start"), ("test/loss", "epoch")]
)
def test_hook_may_not_replace_builtin_series(called, name, when):
    def takes(view):
        return {name: 99.0}

    found, said, _ = called(takes, when=when, at=(when,))
    assert not found[0].numbers and not found[1].numbers
    begin = name.partition("/")[0]
    assert said[0].endswith(
        f"ValueError: {name} is a reserved name, as are all that begin with {begin}/; use another name"
    )


def test_hook_may_not_replace_validation_series(called):
    def takes(view):
        return {"val/loss": 1e-4} if view.when == "end" else {}

    def own(view):
        return {f"{'test' if view.when == 'end' else 'val'}/own": 1.0}

    assert called(takes, own, at=("epoch", "end"))[0][1].numbers == {"val/own": 1.0}
    found, said, _ = called(takes, own, when="end", at=("end",), values=[("test/loss", 0.5)], epochs=1)
    assert found[0].numbers == {"test/own": 1.0} and "there is val/loss already" in said[0]


def test_hooks_are_called_at_their_times(called):
    def works(view):
        return {view.when: 1}

    assert called(works, when="start")[0][0].numbers == {}
    assert called(works, when="start", at=("start", "end"))[0][0].numbers == {"start": 1.0}
