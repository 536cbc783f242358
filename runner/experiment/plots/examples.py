"""Draws single examples with their predictions: images, reconstructions, generated rows, the plane of two inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from runner.experiment.plots import style
from runner.experiment.plots.predictions import Plane, Results, Shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 8
MAX_LABELS = 3
MAX_POINTS = 2000  # of generated rows


def draw_samples(results: Results) -> Figure | None:
    """Draw images with prediction and truth, the worst first."""
    shown = results.worst
    images = None if shown is None else as_images(shown.inputs)
    if shown is None or images is None:
        return None
    columns = min(COLUMNS, len(images))
    size = max(5.2, 0.3 + 1.32 * columns), style.HEAD + 1.66 * -(-len(images) // columns)
    figure, axes = _canvas(results, "Samples, the worst first", size)
    for number, image in enumerate(images):
        row, column = divmod(number, columns)
        left, top = 0.2 + 1.32 * column, size[1] - style.HEAD - 0.3 - 1.66 * row
        _show(axes, image, left, top, side=1.2)
        text, is_right = _caption(results, shown, number)
        look: dict[str, Any] = {"ha": "center", "va": "bottom", "fontsize": 7.8, "linespacing": 1.15}
        axes.text(left + 0.6, top + 0.03, text, color=style.INK if is_right else style.RED, **look)
    return figure


def draw_reconstructions(results: Results) -> Figure | None:
    """Draw inputs above their reconstructions, the worst first. Signals are drawn as lines."""
    shown = results.worst
    if shown is None:
        return None
    columns = min(COLUMNS, len(shown.inputs))
    size = max(5.2, 1.15 + 1.15 * columns), style.HEAD + 2.45
    figure, axes = _canvas(results, "Reconstructions, the worst first", size)
    made = shown.predictions.reshape(shown.inputs.shape)
    images, copies = as_images(shown.inputs, made), as_images(made, shown.inputs)
    for label, at in (("inputs", 1.92), ("made of\nthem", 0.77)):
        axes.text(0.85, at, label, ha="right", va="center", fontsize=8.5, color=style.INK)
    for number in range(columns):
        left = 1.0 + 1.15 * number
        if images is not None and copies is not None:
            _show(axes, images[number], left, 2.45, side=1.06)
            _show(axes, copies[number], left, 1.31, side=1.06)
        else:
            _lines(axes, shown.inputs[number].reshape(-1), made[number].reshape(-1), left, 2.45)
    return figure


def as_images(inputs: NDArray[Any], other: NDArray[Any] | None = None) -> NDArray[np.float64] | None:
    """Return images (K, H, W, 3) or (K, H, W) in 0..1, or None for other shapes. Values outside 0..1 are scaled together.

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
        images = images[:, :3].transpose(0, 2, 3, 1) if images.shape[1] >= 3 else images.mean(1)
    return images


def _canvas(results: Results, heading: str, size: tuple[float, float]) -> tuple[Figure, Any]:
    """Return a figure and one axes over all of it, in inches."""
    figure, (axes,) = style.panels(results.title, heading, size, margins=(0, 0, 0, 0), has_grid=False)
    axes.set_axis_off()
    axes.set(xlim=(0, size[0]), ylim=(0, size[1]), autoscale_on=False)
    return figure, axes


def _show(axes: Any, image: NDArray[np.float64], left: float, top: float, *, side: float) -> None:
    tall, wide = image.shape[:2]
    width, height = side * min(1, wide / tall), side * min(1, tall / wide)
    x, y = left + (side - width) / 2, top - (side + height) / 2
    place = (x, x + width, y, y + height)
    axes.imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="nearest", extent=place, aspect="auto")


def _lines(axes: Any, true: NDArray[Any], made: NDArray[Any], left: float, top: float) -> None:
    low, high = min(true.min(), made.min()), max(true.max(), made.max())
    x = left + np.linspace(0, 1.06, len(true))
    for values, bottom, color in ((true, top - 1.06, style.INK), (made, top - 2.2, style.BLUE)):
        axes.plot(x, bottom + 1.06 * (values - low) / max(high - low, 1e-12), color=color, linewidth=0.9)


def _caption(results: Results, shown: Shown, number: int) -> tuple[str, bool]:
    predicted, true = shown.predictions[number], shown.targets[number]
    if results.kind == "multiclass":
        names = style.names_of(results.classes, len(predicted))
        best = int(predicted.argmax())
        text = f"{style.cut(names[best], 14)} {predicted[best]:.0%}\ntrue {style.cut(names[int(true)], 13)}"
        return text, best == int(true)
    if results.kind == "multilabel":
        names, chosen = style.names_of(results.names, len(predicted)), predicted > 0.5
        return f"{_labels(names, chosen)}\ntrue {_labels(names, true > 0)}", bool((chosen == (true > 0)).all())
    return f"{predicted[0]:.4g}\ntrue {true[0]:.4g}", True


def _labels(names: list[str], is_label: NDArray[np.bool_]) -> str:
    chosen = [names[number] for number in np.flatnonzero(is_label)]
    more = f" +{len(chosen) - MAX_LABELS}" if len(chosen) > MAX_LABELS else ""
    return style.cut(", ".join(chosen[:MAX_LABELS]) or "none", 18) + more


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
    """Draw the prediction all over the plane of two inputs: the class, paler where the model is less sure, or the number."""
    plane = results.plane
    if plane is None or (results.kind != "regression" and plane.predictions.shape[2] > len(style.COLORS)):
        return None
    heading = "Predicted surface" if results.kind == "regression" else "Decision boundary"
    margins = (0.65, 1.7, 0.55, style.HEAD)
    figure, (axes,) = style.panels(results.title, heading, (7.4, 5.6), margins=margins, has_grid=False)
    extent = tuple(float(each) for each in (plane.x[0], plane.x[-1], plane.y[0], plane.y[-1]))
    look: dict[str, Any] = {"origin": "lower", "extent": extent, "aspect": "auto", "interpolation": "bilinear"}
    dots: dict[str, Any] = {"s": 20, "edgecolors": style.INK, "linewidths": 0.5}
    values = plane.targets.reshape(len(plane.targets), -1)[:, 0]
    if results.kind == "regression":
        surface = plane.predictions[:, :, 0]
        low, high = np.quantile(np.append(surface, values).astype(np.float64), [0.005, 0.995])
        scale: dict[str, Any] = {"cmap": "viridis", "vmin": low, "vmax": high if high > low else low + 1}
        image = axes.imshow(surface, alpha=0.85, **look, **scale)
        figure.colorbar(image, cax=figure.add_axes((0.8, 0.11, 0.025, 0.6)))
        axes.scatter(*plane.rows.T, c=values, **dots, **scale)
    else:
        _draw_classes(axes, plane, look)
        for number, name in enumerate(style.names_of(results.classes, plane.predictions.shape[2])):
            rows = plane.rows[values == number]
            axes.scatter(*rows.T, color=style.COLORS[number], label=style.cut(name, 16), **dots)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=8.5)
    axes.set(xlabel="first input", ylabel="second input", xlim=extent[:2], ylim=extent[2:])
    return figure


def _draw_classes(axes: Any, plane: Plane, look: dict[str, Any]) -> None:
    from matplotlib.colors import to_rgb

    count, best = plane.predictions.shape[2], plane.predictions.argmax(2)
    colors = np.array([to_rgb(color) for color in style.COLORS])
    strength = 0.12 + 0.5 * (plane.predictions.max(2, keepdims=True) - 1 / count) / (1 - 1 / count)
    axes.imshow(1 - strength * (1 - colors[best]), **look)
    for number in np.unique(best)[1:]:
        margin = plane.predictions[:, :, number] - np.delete(plane.predictions, number, axis=2).max(2)
        axes.contour(plane.x, plane.y, margin, levels=[0], colors=[style.INK], linewidths=0.9)
