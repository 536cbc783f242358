"""Draws sheets of images with what was said of them, the worst first; and of inputs with their reconstructions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.experiment.plots import style
from runner.experiment.plots.predictions import Results, Shown

COLUMNS = 8
MOST_LABELS = 3


def draw(results: Results, path: Path) -> bool:
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


def as_images(inputs: NDArray[Any], beside: NDArray[Any] | None = None) -> NDArray[np.float64] | None:
    """(K, H, W, 3) or (K, H, W) in 0..1; None for what is no image. Those not in 0..1 are stretched to it, together.

    beside: other images on the same scale.
    """
    if inputs.ndim not in (3, 4) or min(inputs.shape[-2:]) < 4 or (inputs.ndim == 4 and inputs.shape[1] > 4):
        return None
    images = inputs.astype(np.float64)
    scale = images if beside is None else np.stack([images, beside.astype(np.float64)])
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
