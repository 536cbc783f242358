"""Draws single examples with their predictions: images, reconstructions, generated rows, the plane of two inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.experiment.plots import style
from runner.experiment.plots.predictions import Plane, Results, Shown

COLUMNS = 8
MOST_LABELS = 3


def draw_samples(results: Results, path: Path) -> bool:
    """Images with prediction and truth, those where the model is furthest off first."""
    shown = results.worst
    images = None if shown is None else as_images(shown.inputs)
    if shown is None or images is None:
        return False
    columns = min(COLUMNS, len(images))
    rows = -(-len(images) // columns)
    width, height = max(5.2, 0.3 + 1.32 * columns), style.HEAD + 1.66 * rows
    figure = style.new(width, height, title=results.title, figure_of="Samples, the worst first")
    axes = _whole(figure)
    for number, image in enumerate(images):
        row, column = divmod(number, columns)
        left, top = 0.2 + 1.32 * column, height - style.HEAD - 0.3 - 1.66 * row
        _show(axes, image, left, top, side=1.2)
        text, is_right = _said(results, shown, number)
        color = style.INK if is_right else style.RED
        look: dict[str, Any] = {"ha": "center", "va": "bottom", "fontsize": 7.8, "linespacing": 1.15}
        axes.text(left + 0.6, top + 0.03, text, color=color, **look)
    style.save(figure, path)
    return True


def draw_reconstructions(results: Results, path: Path) -> bool:
    """Inputs above what was made of them: the split's first rows, then the worst. Signals are drawn as lines."""
    groups = [(name, shown) for name, shown in (("first rows", results.first), ("worst rows", results.worst)) if shown]
    if not groups:
        return False
    columns = max(len(shown.inputs) for _, shown in groups)
    width, height = max(5.2, 1.15 + 1.15 * columns), style.HEAD + 2.45 * len(groups)
    figure = style.new(width, height, title=results.title, figure_of="Reconstructions")
    axes = _whole(figure)
    for group, (name, shown) in enumerate(groups):
        made = shown.predictions.reshape(shown.inputs.shape)
        images, copies = as_images(shown.inputs, made), as_images(made, shown.inputs)
        top = height - style.HEAD - 2.45 * group
        for label, at in ((name, top - 0.53), ("made of\nthem", top - 1.68)):
            axes.text(0.85, at, label, ha="right", va="center", fontsize=8.5, color=style.INK)
        for number in range(len(shown.inputs)):
            left = 1.0 + 1.15 * number
            if images is not None and copies is not None:
                _show(axes, images[number], left, top, side=1.06)
                _show(axes, copies[number], left, top - 1.14, side=1.06)
            else:
                _lines(axes, shown.inputs[number].reshape(-1), made[number].reshape(-1), left, top)
    style.save(figure, path)
    return True


def as_images(inputs: NDArray[Any], other: NDArray[Any] | None = None) -> NDArray[np.float64] | None:
    """(K, H, W, 3) or (K, H, W) in 0..1; None for other shapes. Values outside 0..1 are scaled to it together.

    other: images that share the scale.
    """
    if inputs.ndim not in (3, 4) or min(inputs.shape[-2:]) < 4 or (inputs.ndim == 4 and inputs.shape[1] > 4):
        return None
    images = inputs.astype(np.float64)
    scale = images if other is None else np.stack([images, other.astype(np.float64)])
    low, high = np.nanmin(scale), np.nanmax(scale)
    if low < -0.01 or high > 1.01:
        images = (images - low) / max(high - low, 1e-12)
    images = np.clip(images, 0, 1)
    if images.ndim == 4:
        channels = images.shape[1]
        images = images[:, :3].transpose(0, 2, 3, 1) if channels >= 3 else images.mean(1)
    return images


def _whole(figure: Any) -> Any:
    width, height = figure.get_size_inches()
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set(xlim=(0, width), ylim=(0, height), autoscale_on=False)
    return axes


def _show(axes: Any, image: NDArray[np.float64], left: float, top: float, *, side: float) -> None:
    tall, wide = image.shape[:2]
    width, height = side * min(1, wide / tall), side * min(1, tall / wide)
    x, y = left + (side - width) / 2, top - (side + height) / 2
    place = (x, x + width, y, y + height)
    axes.imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="nearest", extent=place, aspect="auto")


def _lines(axes: Any, true: NDArray[Any], made: NDArray[Any], left: float, top: float) -> None:
    low, high = min(true.min(), made.min()), max(true.max(), made.max())
    x = left + np.linspace(0, 1.06, len(true))
    for values, below, color in ((true, 1.06, style.INK), (made, 2.2, style.BLUE)):
        axes.plot(x, top - below + 1.06 * (values - low) / max(high - low, 1e-12), color=color, linewidth=0.9)


def _said(results: Results, shown: Shown, number: int) -> tuple[str, bool]:
    said, true = shown.predictions[number], shown.targets[number]
    if results.kind == "multiclass":
        names = style.names_of(results.classes, len(said))
        best = int(said.argmax())
        text = f"{style.cut(names[best], 14)} {said[best]:.0%}\ntrue {style.cut(names[int(true)], 13)}"
        return text, best == int(true)
    if results.kind == "multilabel":
        names = style.names_of(results.names, len(said))
        return f"{_labels(names, said > 0.5)}\ntrue {_labels(names, true > 0)}", bool(
            ((said > 0.5) == (true > 0)).all()
        )
    return f"{said[0]:.4g}\ntrue {true[0]:.4g}", True


def _labels(names: list[str], are: NDArray[np.bool_]) -> str:
    chosen = [names[number] for number in np.flatnonzero(are)]
    more = f" +{len(chosen) - MOST_LABELS}" if len(chosen) > MOST_LABELS else ""
    return style.cut(", ".join(chosen[:MOST_LABELS]) or "none", 18) + more


MOST_POINTS = 2000


def draw_generated(results: Results, path: Path) -> bool:
    """Of rows of two numbers, in the same frame, which is the real ones'; what is generated outside of it, is counted."""
    generated, real = results.predictions, results.targets
    if real.ndim != 2 or real.shape[1] != 2 or generated.shape != real.shape:
        return False
    low, high = real.min(0), real.max(0)
    room = 0.25 * (high - low)
    outside = ((generated < low - room) | (generated > high + room)).any(1).mean()
    figure = style.new(8.4, 5.1, title=results.title, figure_of="Real and generated rows")
    grid = style.inside(figure, left=0.5, right=0.2, bottom=0.35, top=1.0, gap=0.12)
    panels = figure.subplots(1, 2, sharex=True, sharey=True, gridspec_kw=grid)
    said = f"generated ({outside:.1%} of them outside)" if outside else "generated"
    for axes, rows, color, title in ((panels[0], real, style.BLUE, "real"), (panels[1], generated, style.ORANGE, said)):
        rows = rows[:MOST_POINTS]
        axes.plot(rows[:, 0], rows[:, 1], "o", markersize=2.4, markeredgewidth=0, alpha=0.5, color=color)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_aspect("equal")
        style.plain(axes)
    panels[0].set(xlim=(low[0] - room[0], high[0] + room[0]), ylim=(low[1] - room[1], high[1] + room[1]))
    style.save(figure, path)
    return True


MOST_CLASSES = 10


def draw_boundary(results: Results, path: Path) -> bool:
    """The class's color, paler where the model is less sure; of a regression its first number. Not of over 10 classes."""
    plane = results.plane
    if plane is None or (results.kind == "multiclass" and plane.predictions.shape[2] > MOST_CLASSES):
        return False
    is_number = results.kind == "regression"
    figure = style.new(
        7.4, 5.6, title=results.title, figure_of="Predicted surface" if is_number else "Decision boundary"
    )
    axes = figure.subplots(gridspec_kw=style.inside(figure, left=0.65, right=1.7, bottom=0.55))
    (_draw_numbers if is_number else _draw_classes)(figure, axes, plane, results)
    axes.set(xlabel=style.cut(plane.names[0], 40), ylabel=style.cut(plane.names[1], 40))
    axes.set(xlim=(plane.x[0], plane.x[-1]), ylim=(plane.y[0], plane.y[-1]))
    style.plain(axes, grid=False)
    style.save(figure, path)
    return True


def _draw_classes(figure: Any, axes: Any, plane: Plane, results: Results) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.lines import Line2D

    count = plane.predictions.shape[2]
    colors = np.array([to_rgb(style.color(number, count)) for number in range(count)])
    sure = plane.predictions.max(2, keepdims=True)
    strength = 0.12 + 0.5 * (sure - 1 / count) / (1 - 1 / count)
    filled = 1 - strength * (1 - colors[plane.predictions.argmax(2)])
    axes.imshow(filled, origin="lower", extent=_extent(plane), aspect="auto", interpolation="bilinear")
    best = plane.predictions.argmax(2)
    for number in range(count if count > 2 else 1):
        if 0 < (best == number).sum() < best.size:
            others = np.delete(plane.predictions, number, axis=2).max(2)
            margin = plane.predictions[:, :, number] - others
            axes.contour(plane.x, plane.y, margin, levels=[0], colors=[style.INK], linewidths=0.9)
    for rows, marker, size, edge in ((plane.train, "o", 13, "white"), (plane.rows, "s", 20, style.INK)):
        if rows is not None:
            points, targets = rows
            axes.scatter(
                *points.T, s=size, marker=marker, c=colors[targets.astype(np.int64)], edgecolors=edge, linewidths=0.5
            )
    names = style.names_of(results.classes, count)
    keys = [
        Line2D([], [], marker="o", linestyle="", color=colors[number], label=style.cut(names[number], 16))
        for number in range(count)
    ]
    keys += [
        Line2D([], [], marker="o", linestyle="", color="#aaaaaa", markeredgecolor="white", label="train"),
        Line2D([], [], marker="s", linestyle="", color="#aaaaaa", markeredgecolor=style.INK, label=results.split),
    ]
    axes.legend(handles=keys[: count + 2], loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=8.5)


def _draw_numbers(figure: Any, axes: Any, plane: Plane, results: Results) -> None:
    surface = plane.predictions[:, :, 0]
    shown = [rows[1].reshape(len(rows[1]), -1)[:, 0] for rows in (plane.train, plane.rows) if rows is not None]
    both = np.concatenate([surface.reshape(-1), *shown]).astype(np.float64)
    low, high = np.quantile(both, [0.005, 0.995])
    look: dict[str, Any] = {"cmap": "viridis", "vmin": low, "vmax": high if high > low else low + 1}
    image = axes.imshow(
        surface, origin="lower", extent=_extent(plane), aspect="auto", interpolation="bilinear", alpha=0.85, **look
    )
    for rows, marker, size, edge in ((plane.train, "o", 13, "white"), (plane.rows, "s", 20, style.INK)):
        if rows is not None:
            points, targets = rows
            values = targets.reshape(len(targets), -1)[:, 0]
            label = "train" if rows is plane.train else results.split
            axes.scatter(
                *points.T, s=size, marker=marker, c=values, edgecolors=edge, linewidths=0.5, label=label, **look
            )
    figure.colorbar(image, cax=figure.add_axes((0.8, 0.11, 0.025, 0.6)))
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=8.5)


def _extent(plane: Plane) -> tuple[float, float, float, float]:
    return float(plane.x[0]), float(plane.x[-1]), float(plane.y[0]), float(plane.y[-1])
