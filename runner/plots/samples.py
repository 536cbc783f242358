"""Some images with what was said of them go in; a sheet of them comes out, the worst first; and of reconstructions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.plots import paper
from runner.plots.results import Results, Shown

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
    figure = paper.new(
        max(4.6, 0.3 + 1.32 * columns), 0.7 + 1.72 * rows, title=results.title, figure_of="Samples, the worst first"
    )
    grid = paper.inside(figure, left=0.15, right=0.15, bottom=0.08, top=1.12, gap=0.1, row_gap=0.42)
    panels = figure.subplots(rows, columns, squeeze=False, gridspec_kw=grid).reshape(-1)
    for number, axes in enumerate(panels):
        axes.set_axis_off()
        if number < len(images):
            _show(axes, images[number])
            text, is_right = _said(results, shown, number)
            axes.set_title(text, fontsize=7.8, color=paper.INK if is_right else paper.RED, pad=3, linespacing=1.15)
    paper.save(figure, path)
    return True


def draw_reconstructions(results: Results, path: Path) -> bool:
    """Inputs above what was made of them: the split's first rows, then the worst. Signals are drawn as lines."""
    groups = [(name, shown) for name, shown in (("first rows", results.first), ("worst rows", results.worst)) if shown]
    if not groups:
        return False
    columns = max(len(shown.inputs) for _, shown in groups)
    figure = paper.new(
        max(4.6, 0.85 + 1.15 * columns), 0.85 + 2.6 * len(groups), title=results.title, figure_of="Reconstructions"
    )
    grid = paper.inside(figure, left=0.75, right=0.15, bottom=0.12, top=0.85, gap=0.08, row_gap=0.12)
    panels = figure.subplots(2 * len(groups), columns, squeeze=False, gridspec_kw=grid)
    for panel in panels.reshape(-1):
        panel.set(xticks=[], yticks=[])
        panel.set_frame_on(False)
    for group, (name, shown) in enumerate(groups):
        made = shown.predictions.reshape(shown.inputs.shape)
        images, copies = as_images(shown.inputs, made), as_images(made, shown.inputs)
        for row, label in ((0, f"{name}\n"), (1, "made of\nthem")):
            panels[2 * group + row, 0].set_ylabel(
                label, rotation=0, ha="right", va="center", fontsize=8, color=paper.INK
            )
        for number in range(len(shown.inputs)):
            above, below = panels[2 * group, number], panels[2 * group + 1, number]
            if images is not None and copies is not None:
                _show(above, images[number])
                _show(below, copies[number])
            else:
                _line(above, below, shown.inputs[number].reshape(-1), made[number].reshape(-1))
    paper.save(figure, path)
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


def _show(axes: Any, image: NDArray[np.float64]) -> None:
    axes.imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="nearest")


def _line(above: Any, below: Any, true: NDArray[Any], made: NDArray[Any]) -> None:
    for axes, values, color in ((above, true, paper.INK), (below, made, paper.BLUE)):
        axes.plot(values, color=color, linewidth=0.9)
        axes.set_ylim(min(true.min(), made.min()) - 1e-9, max(true.max(), made.max()) + 1e-9)


def _said(results: Results, shown: Shown, number: int) -> tuple[str, bool]:
    """What stands above an image, and whether the model was right."""
    said, true = shown.predictions[number], shown.targets[number]
    if results.kind == "multiclass":
        names = paper.names_of(results.classes, len(said))
        best = int(said.argmax())
        text = f"{paper.cut(names[best], 14)} {said[best]:.0%}\ntrue {paper.cut(names[int(true)], 13)}"
        return text, best == int(true)
    if results.kind == "multilabel":
        names = paper.names_of(results.names, len(said))
        return f"{_labels(names, said > 0.5)}\ntrue {_labels(names, true > 0)}", bool(
            ((said > 0.5) == (true > 0)).all()
        )
    return f"{said[0]:.4g}\ntrue {true[0]:.4g}", True


def _labels(names: list[str], are: NDArray[np.bool_]) -> str:
    chosen = [names[number] for number in np.flatnonzero(are)]
    more = f" +{len(chosen) - MOST_LABELS}" if len(chosen) > MOST_LABELS else ""
    return paper.cut(", ".join(chosen[:MOST_LABELS]) or "none", 18) + more
