"""Plots of a model's predictions: which plots are drawn, with few and many classes, and the effect of a failing plot."""

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from runner.experiment.figures import draw_results
from runner.experiment.plots import style
from runner.experiment.plots.draw import as_images, rates
from runner.experiment.plots.predictions import Plane, Results, Shown
from runner.tasks.metric_names import PLOTS

DRAW = np.random.default_rng(0)


def classified(count, rows=300, names=(), **more):
    targets = DRAW.integers(count, size=rows)
    logits = DRAW.normal(size=(rows, count)) + 2 * np.eye(count)[targets]
    sure = (np.exp(logits) / np.exp(logits).sum(1, keepdims=True)).astype(np.float32)
    shown = Shown(DRAW.random((16, 1, 8, 8), dtype=np.float32), sure[:16], targets[:16])
    return Results("multiclass", sure, targets, classes=names, of="MLP on rows, cpu", worst=shown, **more)


def plane(width):
    grid = np.linspace(-1, 1, 20, dtype=np.float32)
    said = DRAW.random((20, 20, width), dtype=np.float32)
    points, targets = DRAW.random((9, 2), dtype=np.float32), np.arange(9) % max(2, width)
    return Plane(grid, grid, said / said.sum(2, keepdims=True), points, targets)


def numbers(width):
    true = DRAW.normal(size=(50, width)).astype(np.float32)
    shown = Shown(DRAW.random((3, 3, 9, 7), dtype=np.float32), true[:3] + 1, true[:3])
    return Results("regression", true + 0.1, true, worst=shown)


def rebuilt(shape):
    inputs = DRAW.random((4, *shape), dtype=np.float32)
    shown = Shown(inputs, inputs.reshape(4, -1) * 0.5, inputs.reshape(4, -1))
    return Results("autoencoding", shown.predictions, shown.targets, worst=shown)


def labelled():
    true = DRAW.integers(2, size=(60, 3))
    said = DRAW.random((60, 3), dtype=np.float32)
    return Results(
        "multilabel", said, true, names=("sun", "rain", "$x^2"), worst=Shown(DRAW.random((3, 8, 8)), said[:3], true[:3])
    )


CASES = {
    "2 classes": (lambda: classified(2, plane=plane(2)), ["confusion", "roc", "samples", "boundary"]),
    "3 classes": (lambda: classified(3, names=("a", "b", "a very long name of a class")), ["confusion", "roc", "samples"]),
    "100 classes": (lambda: classified(100), ["confusion", "samples"]),
    "labels": (labelled, ["roc", "samples"]),
    "a number": (lambda: numbers(1), ["residuals", "samples"]),
    "8 numbers": (lambda: numbers(8), ["residuals", "samples"]),
    "images": (lambda: rebuilt((3, 8, 8)), ["reconstructions"]),
    "signals": (lambda: rebuilt((1, 30)), ["reconstructions"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_makes_sense_is_drawn(case, tmp_path, ink):
    make, expected = CASES[case]
    results, told = make(), []
    drawn = draw_results(results, tmp_path / "plots", wanted=PLOTS[results.kind], say=told.append)
    assert [path.stem for path in drawn] == expected
    assert told == []
    for path in drawn:
        with Image.open(path) as image:
            assert image.convert("L").getextrema()[0] < 80  # some pixels are dark
            assert path.stat().st_size < 400_000


def test_split_with_missing_classes_is_drawn(tmp_path):
    one = Results("multiclass", np.full((5, 3), 1 / 3, dtype=np.float32), np.zeros(5, dtype=np.int64))
    names = [path.stem for path in draw_results(one, tmp_path, wanted=PLOTS["multiclass"], say=pytest.fail)]
    assert names == ["confusion"]
    flat = Results("regression", np.ones((5, 1), dtype=np.float32), np.ones((5, 1), dtype=np.float32))
    assert draw_results(flat, tmp_path, wanted=PLOTS["regression"], say=pytest.fail)


def test_plot_texts_do_not_overlap(tmp_path, monkeypatch):
    """The tick labels of the matrix and its title lines, with names of all lengths."""
    seen = []
    monkeypatch.setattr(style, "save", lambda figure, path: seen.append(figure) or path)
    for count, length in ((2, 3), (3, 60), (20, 60), (100, 60)):
        names = tuple(f"{number} {'w' * length}" for number in range(count))
        results = classified(count, names=names, num_rows=25_000)
        draw_results(results, tmp_path, wanted=["confusion"], say=pytest.fail)
    assert len(seen) == 4
    for figure in seen:
        assert not overlaps(figure)


def overlaps(figure: Figure):
    axes, inside = figure.axes[0], figure.bbox
    figure.draw_without_rendering()
    groups = (
        axes.get_xticklabels(),
        axes.get_yticklabels(),
        figure.texts,
        [*figure.texts, axes.title, axes.yaxis.label],
    )
    found = []
    for group in groups:
        boxes = [text.get_window_extent() for text in group if text.get_text()]
        found += [(a, b) for number, a in enumerate(boxes) for b in boxes[:number] if a.overlaps(b)]
        found += [box for box in boxes if box.x0 < 0 or box.y0 < 0 or box.x1 > inside.x1 or box.y1 > inside.y1]
    return found


def test_plot_title_names_model_data_and_rows():
    results = classified(3, num_rows=25_000, split="val")
    assert results.title == "MLP on rows, cpu, val split, 300 of 25,000 rows"


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((2, 1, 8, 8), (2, 8, 8)), ((2, 3, 8, 8), (2, 8, 8, 3)), ((2, 8, 8), (2, 8, 8)), ((2, 2, 8, 8), (2, 8, 8)),
     ((2, 30), None), ((2, 9, 8, 8), None), ((2, 1, 30), None)],
)  # fmt: skip
def test_what_an_image_is(shape, expected):
    images = as_images(DRAW.normal(size=shape))
    assert (
        (images is None) if expected is None else (images.shape == expected and 0 <= images.min() <= images.max() <= 1)
    )


@pytest.mark.parametrize("levels", [2, 7, 10_000])
@pytest.mark.parametrize("share", [0.02, 0.5, 0.97])
def test_curves_and_areas_equal_sklearns(levels, share):
    from sklearn import metrics

    draw = np.random.default_rng(0)
    truth = draw.random(3000) < share
    scores = ((draw.random(3000) + truth) * levels).round().astype(np.float32) / levels
    false, hit, precision = rates(truth, scores)
    theirs = metrics.roc_curve(truth, scores, drop_intermediate=False)
    assert np.allclose(false, theirs[0]) and np.allclose(hit, theirs[1])
    area = (np.diff(false) * (hit[1:] + hit[:-1])).sum() / 2
    assert area == pytest.approx(metrics.roc_auc_score(truth, scores))
    area = (np.diff(hit) * precision[1:]).sum()
    assert area == pytest.approx(metrics.average_precision_score(truth, scores))
    theirs, recall, _ = metrics.precision_recall_curve(truth, scores)
    assert np.allclose(precision[::-1], theirs) and np.allclose(hit[::-1], recall)
