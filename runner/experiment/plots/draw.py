"""Draws predictions: how good they are, and single examples of them. A plot NAME is the function draw_NAME.

Not by scikit-learn's displays: importing sklearn.metrics takes longer than drawing all plots of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from runner.experiment.plots import style
from runner.experiment.plots.predictions import Results, Shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_CLASSES = 20  # with numbers in the cells, and with lines that are distinguishable
MAX_TICKS = 34
MAX_TARGETS = 4
COLUMNS = 8
CELL_WIDTH, CELL_HEIGHT, SIDE = 1.32, 1.66, 1.15  # inches, of an example's cell and of its image
MAX_POINTS = 2000  # of generated rows


def draw_confusion(results: Results) -> Figure | None:
    """Draw the confusion matrix: a row for each true class, shaded by its shares."""
    if results.predictions.ndim != 2 or results.targets.ndim != 1:
        return None
    count = results.predictions.shape[1]
    predicted, true = results.predictions.argmax(1), results.targets.astype(np.int64)
    matrix = np.bincount(true * count + predicted, minlength=count * count).reshape(count, count)
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    names = [style.cut(name, 18) for name in style.names_of(results.classes, count)]
    longest = max(map(len, names))
    left, side = 0.7 + 0.09 * longest, min(8.2, max(2.7, 0.52 * count))
    width = max(left + side + 0.35, 5.2)
    figure, (axes,) = style.panels(
        results.title,
        f"Confusion matrix, accuracy {np.trace(matrix) / max(1, matrix.sum()):.4f}",
        (width, style.HEAD + side + left),
        margins=(left, width - left - side, left, style.HEAD),
        has_grid=False,
    )
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    at = np.arange(0, count, -(-count // MAX_TICKS))
    axes.set_xticks(at, [names[number] for number in at], rotation=90 if longest > 3 else 0)
    axes.set_yticks(at, [names[number] for number in at])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set(xlabel="predicted", ylabel="true")
    for row, column in zip(*np.nonzero(matrix), strict=True) if count <= MAX_CLASSES else ():
        ink = "white" if shares[row, column] > 0.55 else style.INK
        axes.text(column, row, str(matrix[row, column]), ha="center", va="center", color=ink, fontsize=8)
    return figure


def draw_roc(results: Results) -> Figure | None:
    """Draw ROC and precision-recall curves: each class against the others, of two the second."""
    questions = _questions(results)
    if not questions:
        return None
    topic = questions[0][0] if len(questions) == 1 else "each label" if results.kind == "multilabel" else "each class"
    figure, (left, right) = style.panels(
        results.title,
        f"ROC and precision-recall of {topic}",
        (10.6, 4.75),
        shape=(1, 2),
        margins=(0.6, 2.75, 0.55, 1.05),
        gridspec_kw={"wspace": 0.22},
    )
    colors = style.COLORS * 2  # the second ten are dashed
    for number, (name, scores, truth) in enumerate(questions):
        false, hit, precision = rates(truth, scores)
        area = (np.diff(false) * (hit[1:] + hit[:-1])).sum() / 2
        average = (np.diff(hit) * precision[1:]).sum()
        look = {"color": colors[number], "linestyle": "-" if number < 10 else "--", "linewidth": 1.2}
        left.plot(false, hit, label=f"{style.cut(name, 20)}  {area:.3f} · {average:.3f}", **look)
        right.plot(hit, precision, drawstyle="steps-pre", **look)
    left.plot([0, 1], [0, 1], color=style.MUTED, linewidth=0.8, linestyle=":")
    left.set(xlabel="false positive rate", ylabel="true positive rate", title="ROC")
    right.set(xlabel="recall", ylabel="precision", title="Precision and recall", ylim=(-0.02, 1.02))
    position: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.02, 1.04)}
    key = right.legend(*left.get_legend_handles_labels(), frameon=False, fontsize=7.5, labelspacing=0.35, **position)
    key.set_title("area · average precision", prop={"size": 8})
    return figure


def rates(truth: NDArray[np.bool_], scores: NDArray[np.float32]) -> tuple[NDArray[np.float64], ...]:
    """Return the false positive rate, the true positive rate (recall) and the precision for ever lower thresholds, (K,) each.

    From above all scores to the lowest; equal scores share a threshold, as in sklearn.metrics.

    Raises: ValueError for scores that are not finite.
    """
    if not np.isfinite(scores).all():
        raise ValueError("scores that are not finite have no order")
    order = np.argsort(-scores, kind="stable")
    last_of_equals = np.flatnonzero(np.append(np.diff(scores[order]) != 0, True))
    taken = last_of_equals + 1.0
    hits = np.cumsum(truth[order])[last_of_equals]
    false, hit = (taken - hits) / (~truth).sum(), hits / truth.sum()
    return np.append(0.0, false), np.append(0.0, hit), np.append(1.0, hits / taken)


def _questions(results: Results) -> list[tuple[str, NDArray[np.float32], NDArray[np.bool_]]]:
    scores, is_multilabel = results.predictions, results.kind == "multilabel"
    if scores.ndim != 2 or scores.shape[1] > MAX_CLASSES:
        return []
    count = scores.shape[1]
    names = style.names_of(results.names if is_multilabel else results.classes, count)
    truth = np.asarray(results.targets == 1 if is_multilabel else results.targets[:, None] == np.arange(count))
    chosen = range(count) if is_multilabel or count != 2 else [1]
    return [(names[each], scores[:, each], truth[:, each]) for each in chosen if 0 < truth[:, each].mean() < 1]


def draw_residuals(results: Results) -> Figure | None:
    """Draw predicted against true, and below the residuals (predicted - true) against predicted, of up to four targets."""
    predictions, targets = results.predictions.astype(np.float64), results.targets.astype(np.float64)
    if predictions.ndim != 2 or predictions.shape != targets.shape:
        return None
    total = predictions.shape[1]
    count = min(MAX_TARGETS, total)
    names = style.names_of(results.names, total, prefix="target ") if total > 1 or results.names else [""]
    figure, panels = style.panels(
        results.title,
        "Predicted against true" + (f", {count} of {total} targets" if total > count else ""),
        (max(5.6, 0.9 + 3.8 * count), 6.6),
        shape=(2, count),
        margins=(0.85, 0.25, 0.6, 1.25),
        gridspec_kw={"height_ratios": (2.1, 1), "wspace": 0.3, "hspace": 0.36},
    )
    for number in range(count):
        predicted, true = predictions[:, number], targets[:, number]
        _draw_target(panels[number], panels[count + number], predicted, true)
        title = f"{f'{style.cut(names[number], 24)}: ' if names[number] else ''}{_errors(predicted, true)}"
        panels[number].set_title(title, loc="left", fontsize=9)
    return figure


def _errors(predicted: NDArray[np.float64], true: NDArray[np.float64]) -> str:
    residuals, spread = predicted - true, ((true - true.mean()) ** 2).sum()
    fit = f"R² {1 - (residuals**2).sum() / spread:.3f}, " if spread > 0 else ""
    return f"{fit}RMSE {np.sqrt((residuals**2).mean()):.3g}, MAE {np.abs(residuals).mean():.3g}"


def _draw_target(above: Any, below: Any, predicted: NDArray[np.float64], true: NDArray[np.float64]) -> None:
    low, high = min(predicted.min(), true.min()), max(predicted.max(), true.max())
    room = 0.04 * (high - low) or 1.0
    ends = low - room, high + room
    alpha = 0.75 if len(true) < 300 else 0.45 if len(true) < 3000 else 0.15
    for axes, x, y in ((above, true, predicted), (below, predicted, predicted - true)):
        axes.plot(x, y, "o", markersize=3, markeredgewidth=0, alpha=alpha, color=style.BLUE)
        axes.locator_params(nbins=6)
    above.plot(ends, ends, color=style.INK, linewidth=1, linestyle=":")
    above.set(xlim=ends, ylim=ends, xlabel="true", ylabel="predicted")
    below.axhline(0, color=style.INK, linewidth=1, linestyle=":")
    below.set(xlabel="predicted", ylabel="predicted - true")


def draw_samples(results: Results) -> Figure | None:
    """Draw images with prediction and truth, the worst first."""
    shown = results.worst
    images = None if shown is None else as_images(shown.inputs)
    if shown is None or images is None:
        return None
    captions = [_caption(results, shown, number) for number in range(len(images))]
    return _draw_grid(results, "Samples, the worst first", images, captions=captions)


def draw_reconstructions(results: Results) -> Figure | None:
    """Draw inputs above their reconstructions, the worst first. Signals are drawn as lines."""
    shown = results.worst
    if shown is None:
        return None
    inputs, made = shown.inputs[:COLUMNS], shown.predictions[:COLUMNS].reshape(shown.inputs[:COLUMNS].shape)
    both = np.concatenate([inputs, made])  # of one scale
    images = as_images(both)
    examples = both.reshape(len(both), -1) if images is None else images
    heading = "Inputs and their reconstructions, the worst first"
    return _draw_grid(results, heading, examples, num_columns=len(inputs))


def _draw_grid(
    results: Results,
    heading: str,
    examples: NDArray[Any],
    *,
    captions: Sequence[tuple[str, bool]] = (),
    num_columns: int = COLUMNS,
) -> Figure:
    """Return a figure with a cell for each example: an image, or a line for a row of numbers.

    All are in one pair of axes, in inches: axes for each take four times as long.

    Args:
        captions: For each example a text, and whether the prediction is right.
    """
    columns = min(num_columns, len(examples))
    width = max(5.2, 0.3 + CELL_WIDTH * columns)
    height = CELL_HEIGHT if captions else CELL_WIDTH
    top = height * -(-len(examples) // columns) + 0.1
    size = width, top + style.HEAD
    figure, (axes,) = style.panels(results.title, heading, size, margins=(0, 0, 0, 0), has_grid=False)
    axes.set_axis_off()
    for number, example in enumerate(examples):
        row, column = divmod(number, columns)
        left, bottom = 0.2 + CELL_WIDTH * column, top - height * (row + 1) + 0.1
        if example.ndim == 1:
            low, high = np.nanmin(example), np.nanmax(example)
            heights = (example - low) / max(high - low, 1e-12)
            axes.plot(
                np.linspace(left, left + SIDE, len(example)), bottom + SIDE * heights, color=style.INK, linewidth=0.9
            )
        else:
            scale = SIDE / max(example.shape[:2])
            high, wide = scale * example.shape[0], scale * example.shape[1]
            begin = left + (SIDE - wide) / 2
            extent = (begin, begin + wide, bottom, bottom + high)
            axes.imshow(example, cmap="gray", vmin=0, vmax=1, interpolation="nearest", extent=extent, aspect="auto")
        if captions:
            text, is_right = captions[number]
            look: dict[str, Any] = {"ha": "center", "va": "bottom", "fontsize": 7.8, "linespacing": 1.15}
            axes.text(left + SIDE / 2, bottom + SIDE + 0.03, text, color=style.INK if is_right else style.RED, **look)
    axes.set(xlim=(0, size[0]), ylim=(0, size[1]))
    return figure


def as_images(inputs: NDArray[Any]) -> NDArray[np.float64] | None:
    """Return images (K, H, W, 3) or (K, H, W) in 0..1, or None for other shapes. Values outside 0..1 are scaled together."""
    if inputs.ndim not in (3, 4) or min(inputs.shape[-2:]) < 4 or (inputs.ndim == 4 and inputs.shape[1] > 4):
        return None
    images = inputs.astype(np.float64)
    low, high = np.nanmin(images), np.nanmax(images)
    if low < -0.01 or high > 1.01:
        images = (images - low) / max(high - low, 1e-12)
    images = np.clip(images, 0, 1)
    if images.ndim == 4:
        images = images[:, :3].transpose(0, 2, 3, 1) if images.shape[1] >= 3 else images.mean(1)
    return images


def _caption(results: Results, shown: Shown, number: int) -> tuple[str, bool]:
    predicted, true = shown.predictions[number], shown.targets[number]
    if results.kind == "multiclass":
        names = style.names_of(results.classes, len(predicted))
        best = int(predicted.argmax())
        text = f"{style.cut(names[best], 14)} {predicted[best]:.0%}\ntrue {style.cut(names[int(true)], 13)}"
        return text, best == int(true)
    if results.kind == "multilabel":
        labels = np.array(style.names_of(results.names, len(predicted)))
        chosen, labels = labels[predicted > 0.5], labels[true > 0]
        text = f"{style.cut(', '.join(chosen) or 'none', 18)}\ntrue {style.cut(', '.join(labels) or 'none', 18)}"
        return text, chosen.tolist() == labels.tolist()
    return f"{predicted[0]:.4g}\ntrue {true[0]:.4g}", True


def draw_generated(results: Results) -> Figure | None:
    """Draw real and generated rows of two numbers in the frame of the real ones, and count those outside of it."""
    generated, real = results.predictions, results.targets
    if real.ndim != 2 or real.shape[1] != 2 or generated.shape != real.shape:
        return None
    low, high = real.min(0), real.max(0)
    room = 0.25 * (high - low)
    outside = ((generated < low - room) | (generated > high + room)).any(1).mean()
    margins, heading = (0.5, 0.2, 0.35, 1.0), "Real and generated rows"
    figure, panels = style.panels(results.title, heading, (8.4, 5.1), shape=(1, 2), margins=margins)
    shown = ((real, style.BLUE, "real"), (generated, style.ORANGE, f"generated ({outside:.1%} of them outside)"))
    for axes, (rows, color, name) in zip(panels, shown, strict=True):
        axes.plot(*rows[:MAX_POINTS].T, "o", markersize=2.4, markeredgewidth=0, alpha=0.5, color=color)
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_aspect("equal")
        axes.set(xlim=(low[0] - room[0], high[0] + room[0]), ylim=(low[1] - room[1], high[1] + room[1]))
    return figure


def draw_boundary(results: Results) -> Figure | None:
    """Draw the predicted class all over the plane of two inputs, paler where the model is less sure."""
    from matplotlib.colors import to_rgb

    plane = results.plane
    if plane is None or (count := plane.predictions.shape[2]) > len(style.COLORS):
        return None
    figure, (axes,) = style.panels(
        results.title, "Decision boundary", (7.4, 5.6), margins=(0.65, 1.7, 0.55, style.HEAD), has_grid=False
    )
    extent = tuple(float(each) for each in (plane.x[0], plane.x[-1], plane.y[0], plane.y[-1]))
    colors = np.array([to_rgb(color) for color in style.COLORS])
    strength = 0.12 + 0.5 * (plane.predictions.max(2, keepdims=True) - 1 / count) / (1 - 1 / count)
    surface = 1 - strength * (1 - colors[plane.predictions.argmax(2)])
    axes.imshow(surface, origin="lower", extent=extent, aspect="auto", interpolation="bilinear")
    for number, name in enumerate(style.names_of(results.classes, count)):
        x, y = plane.rows[plane.targets == number].T
        axes.scatter(x, y, s=20, color=colors[number], edgecolors=style.INK, linewidths=0.5, label=style.cut(name, 16))
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=8.5)
    axes.set(xlabel="first input", ylabel="second input", xlim=extent[:2], ylim=extent[2:])
    return figure
