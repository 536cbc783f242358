"""Draws what a model says all over the plane of its two inputs: a filled map, with the rows on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from runner.experiment.plots import style
from runner.experiment.plots.predictions import Plane, Results

MOST_CLASSES = 10


def draw(results: Results, path: Path) -> bool:
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
