"""Draws single examples with their predictions: images, reconstructions, generated rows, the plane of two inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from runner.experiment.plots import style
from runner.experiment.plots.predictions import Results, Shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 8
MAX_POINTS = 2000  # of generated rows


def draw_samples(results: Results) -> Figure | None:
    """Draw images with prediction and truth, the worst first."""
    shown = results.worst
    images = None if shown is None else as_images(shown.inputs)
    if shown is None or images is None:
        return None
    figure, panels = _grid(results, "Samples, the worst first", images)
    for number, axes in enumerate(panels[: len(images)]):
        text, is_right = _caption(results, shown, number)
        axes.set_title(text, color=style.INK if is_right else style.RED, fontsize=7.8, linespacing=1.15, pad=2)
    return figure


def draw_reconstructions(results: Results) -> Figure | None:
    """Draw inputs above their reconstructions, the worst first. Signals are drawn as lines."""
    shown = results.worst
    if shown is None:
        return None
    inputs, made = shown.inputs[:COLUMNS], shown.predictions[:COLUMNS].reshape(shown.inputs[:COLUMNS].shape)
    both = np.concatenate([inputs, made])  # of one scale
    images = as_images(both)
    drawn = both.reshape(len(both), -1) if images is None else images
    return _grid(results, "Inputs and their reconstructions, the worst first", drawn, num_columns=len(inputs))[0]


def _grid(results: Results, heading: str, examples: NDArray[Any], *, num_columns: int = COLUMNS) -> tuple[Figure, Any]:
    """Return a figure with a panel for each example: an image, or a line for a row of numbers."""
    columns = min(num_columns, len(examples))
    rows = -(-len(examples) // columns)
    size = max(5.2, 0.3 + 1.32 * columns), style.HEAD + 1.66 * rows + 0.3
    figure, panels = style.panels(
        results.title, heading, size, shape=(rows, columns), margins=(0.2, 0.1, 0.1, style.HEAD + 0.3), has_grid=False
    )
    for axes in panels:
        axes.set_axis_off()
    for axes, example in zip(panels, examples, strict=False):
        if example.ndim == 1:
            axes.plot(example, color=style.INK, linewidth=0.9)
        else:
            axes.imshow(example, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    return figure, panels


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
