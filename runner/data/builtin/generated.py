"""Generates data sets from sizes and a seed: MNIST-1D, TensorFlow's Playground, and random ones of any size.

MNIST-1D are signals of 40 numbers in ten classes, stretched, shifted and noisy. The procedure and its settings are those of
Greydanus and Kobak, "Scaling down deep learning with MNIST-1D" (arXiv 2011.14439). The draws are other ones of the same
distribution, so that accuracies can be compared with their table. The formulas of the Playground are those of
playground.tensorflow.org (github.com/tensorflow/playground, dataset.ts).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F

from runner.config.checks import WIDTHS, Check, Count, at_least, one_of
from runner.data.loading.order import ROWS, generator
from runner.data.source import Source, facts_of
from runner.data.vision.augment import Augmentations, augmented
from runner.errors import RunnerError

#: the shape of each digit, 12 points
TEMPLATES = (
    (5, 6, 6.5, 6.75, 7, 7, 7, 7, 6.75, 6.5, 6, 5),
    (5, 3, 3, 3.4, 3.8, 4.2, 4.6, 5, 5.4, 5.8, 5, 5),
    (5, 6, 6.5, 6.5, 6, 5.25, 4.75, 4, 3.5, 3.5, 4, 5),
    (5, 6, 6.5, 6.5, 6, 5, 5, 6, 6.5, 6.5, 6, 5),
    (5, 4.4, 3.8, 3.2, 2.6, 2.6, 5, 5, 5, 5, 5, 5),
    (5, 3, 3, 3, 3, 5, 6, 6.5, 6.5, 6, 4.5, 5),
    (5, 4, 3.5, 3.25, 3, 3, 3, 3, 3.25, 3.5, 4, 5),
    (5, 7, 7, 6.6, 6.2, 5.8, 5.4, 5, 4.6, 4.2, 5, 5),
    (5, 4, 3.5, 3.5, 4, 5, 5, 4, 3.5, 3.5, 4, 5),
    (5, 4, 3.5, 3.5, 4, 5, 5, 5, 5, 4.7, 4.3, 5),
)
LENGTH = 40  # of a signal
WIDTH = 72  # points of a template and the largest padding
MIN_PADDING, MAX_PADDING = 36, 60  # points after the template; the more, the narrower it is in the end
SCALE = 0.4  # of the random factor, from 0.8 to 1.2
MAX_SHIFT = 48  # in points, exclusive; around the end
CORRELATED_NOISE, BLUR = 0.25, 2.0  # before the blur, and its standard deviation in points; outside of the template
NOISE = 0.02  # of each point
SHEAR = 0.75  # of the random slope, from -0.375 to 0.375 over a signal
NUM_CLASSES = len(TEMPLATES)


def mnist1d(
    num_rows: Annotated[int, at_least(10)] = 4000, num_test_rows: Annotated[int, at_least(10)] = 1000, *, seed: int = 0
) -> Source:
    """Return signals (num_rows, 1, 40) of 10 classes, and a test split.

    The classes are of equal size over both splits. The training rows have a mean of 0 and a standard deviation of 1.
    """
    draw = generator(seed, ROWS)
    classes = torch.randperm(num_rows + num_test_rows, generator=draw) % NUM_CLASSES
    signals = make_signals(classes, draw)
    signals = ((signals - signals[:num_rows].mean()) / signals[:num_rows].std()).float()[:, None]
    train, test = ((signals[part], classes[part]) for part in (slice(num_rows), slice(num_rows, None)))
    return Source(
        "mnist1d",
        train,
        facts_of(*train, num_classes=NUM_CLASSES),
        labels=train[1],
        given={"test": test},
        origin=f"generated after arXiv 2011.14439, seed {seed}",
        classes=tuple(map(str, range(NUM_CLASSES))),
    )


def make_signals(classes: Tensor, draw: torch.Generator) -> Tensor:  # (N,) int64 -> (N, 40) float64
    num_rows = len(classes)

    def uniform() -> Tensor:  # (N, 1)
        return torch.rand(num_rows, 1, generator=draw, dtype=torch.float64) - 0.5

    def normal() -> Tensor:  # (N, 72)
        return torch.randn(num_rows, WIDTH, generator=draw, dtype=torch.float64)

    padding = torch.randint(MIN_PADDING, MAX_PADDING + 1, (num_rows, 1), generator=draw)
    shapes, is_template = _stretched(_templates()[classes], padding)
    shapes = shapes * (1 + SCALE * uniform())
    shift = torch.randint(MAX_SHIFT, (num_rows, 1), generator=draw)
    shifted = (torch.arange(WIDTH) - shift) % WIDTH
    shapes, is_template = shapes.gather(1, shifted), is_template.gather(1, shifted)
    signals = torch.where(is_template, shapes, _blurred(CORRELATED_NOISE * normal()))
    signals = signals + NOISE * normal()
    signals = signals - SHEAR * uniform() * torch.linspace(-0.5, 0.5, WIDTH, dtype=torch.float64)
    return _sampled(signals, torch.linspace(0, WIDTH - 1, LENGTH, dtype=torch.float64).expand(num_rows, -1))


def _templates() -> Tensor:  # (10, 12) float64
    shapes = torch.tensor(TEMPLATES, dtype=torch.float64)
    shapes = (shapes - shapes.mean(1, keepdim=True)) / shapes.std(1, keepdim=True, correction=0)
    return (shapes - shapes[:, :1]) / 6


def _stretched(shapes: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:  # (N, 12), (N, 1) -> (N, 72) each
    padded = F.pad(shapes, (0, MAX_PADDING))
    last = shapes.shape[1] - 1 + padding  # the place of the last point
    places = torch.linspace(0, 1, WIDTH, dtype=torch.float64) * last
    return _sampled(padded, places), places < shapes.shape[1]


def _sampled(signals: Tensor, places: Tensor) -> Tensor:  # (N, L), (N, K) -> (N, K)
    left = places.floor().clamp(max=signals.shape[1] - 2).long()
    return torch.lerp(signals.gather(1, left), signals.gather(1, left + 1), places - left)


def _blurred(signals: Tensor) -> Tensor:  # (N, L) -> (N, L)
    reach = round(4 * BLUR)
    weights = torch.exp(-0.5 * (torch.arange(-reach, reach + 1, dtype=torch.float64) / BLUR) ** 2)
    mirrored = torch.cat([signals[:, :reach].flip(1), signals, signals[:, -reach:].flip(1)], 1)
    blurred: Tensor = F.conv1d(mirrored[:, None], (weights / weights.sum())[None, None])[:, 0]
    return blurred


RADIUS = 5.0


NOISE_SHARE = Check(
    lambda value: isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 0.5,
    "0 to 0.5",
    "0.1",
    lambda value: ["0.1"],
)


def playground(
    shape: Annotated[str, one_of(("circle", "xor", "gauss", "spiral", "rings"))] = "spiral",
    num_rows: Annotated[int, at_least(2)] = 1000,
    *,
    noise: Annotated[float, NOISE_SHARE] = 0.0,
    seed: int = 0,
) -> Source:
    """Return points (num_rows, 2) within about 6 of the origin in two classes of equal size (of xor: by chance).

    noise: 0 to 0.5, of the points, or of the border (circle, xor).
    """
    draw = generator(seed, ROWS)

    def uniform(count: int, low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, generator=draw, dtype=torch.float64)

    points, targets = SHAPES[shape](num_rows, float(noise), uniform, draw)
    points = points.float()
    return Source(
        f"playground_{shape}",
        (points, targets),
        facts_of(points, targets, num_classes=2),
        labels=targets,
        origin=f"generated after TensorFlow's Playground, seed {seed}",
        classes=("negative", "positive"),
    )


Uniform = Callable[[int, float, float], Tensor]
Points = tuple[Tensor, Tensor]  # (N, 2) float64, (N,) int64


def _circle(num_rows: int, noise: float, uniform: Uniform, draw: torch.Generator) -> Points:
    inside = num_rows // 2
    outside = num_rows - inside
    radii = torch.cat([uniform(inside, 0, RADIUS / 2), uniform(outside, 0.7 * RADIUS, RADIUS)])
    angles = uniform(num_rows, 0, 2 * math.pi)
    points = torch.stack([radii * angles.sin(), radii * angles.cos()], 1)
    judged = points + noise * _square(num_rows, uniform)
    return points, (judged.norm(dim=1) < RADIUS / 2).long()


def _xor(num_rows: int, noise: float, uniform: Uniform, draw: torch.Generator) -> Points:
    points = _square(num_rows, uniform)
    points = points + torch.where(points > 0, 0.3, -0.3)
    judged = points + noise * _square(num_rows, uniform)
    return points, (judged.prod(1) >= 0).long()


def _gauss(num_rows: int, noise: float, uniform: Uniform, draw: torch.Generator) -> Points:
    targets = (torch.arange(num_rows) < num_rows // 2).long()
    spread = math.sqrt(0.5 + noise / 0.5 * 3.5)
    points = spread * torch.randn(num_rows, 2, generator=draw, dtype=torch.float64)
    return points + (4.0 * targets - 2)[:, None], targets


def _spiral(num_rows: int, noise: float, uniform: Uniform, draw: torch.Generator) -> Points:
    targets = (torch.arange(num_rows) < num_rows // 2).long()
    arms = []
    for half, start in ((num_rows // 2, 0.0), (num_rows - num_rows // 2, math.pi)):
        along = torch.arange(half, dtype=torch.float64) / half
        angle = 1.75 * 2 * math.pi * along + start
        arms.append(torch.stack([RADIUS * along * angle.sin(), RADIUS * along * angle.cos()], 1))
    return torch.cat(arms) + noise / RADIUS * _square(num_rows, uniform), targets


def _rings(num_rows: int, noise: float, uniform: Uniform, draw: torch.Generator) -> Points:
    """Two circles around the origin, of radius 5 and 2, with normal noise. The Playground doesn't have them."""
    targets = (torch.arange(num_rows) < num_rows // 2).long()
    radii, angles = torch.where(targets > 0, 2.0, RADIUS), uniform(num_rows, 0, 2 * math.pi)
    points = torch.stack([radii * angles.sin(), radii * angles.cos()], 1)
    return points + noise * torch.randn(num_rows, 2, generator=draw, dtype=torch.float64), targets


def _square(num_rows: int, uniform: Uniform) -> Tensor:
    return torch.stack([uniform(num_rows, -RADIUS, RADIUS), uniform(num_rows, -RADIUS, RADIUS)], 1)


SHAPES: dict[str, Callable[[int, float, Uniform, torch.Generator], Points]] = {
    "circle": _circle,
    "xor": _xor,
    "gauss": _gauss,
    "spiral": _spiral,
    "rings": _rings,
}


#: noise of the answers, as a part of their standard deviation
ANSWER_NOISE = 0.1


SIZES = Check(lambda shape: bool(shape) and WIDTHS.accepts(shape), "a list of sizes, 1 or more each", "[1,8,8]")


def synthetic(
    num_rows: Count = 60_000,
    num_features: Count | None = None,
    *,
    shape: Annotated[Sequence[int], SIZES] | None = (1, 8, 8),
    num_classes: Annotated[int, at_least(2)] | None = 10,
    seed: int = 0,
    augment: Augmentations = None,
) -> Source:
    """Return normal inputs, (num_rows, *shape), and the answers of a random linear teacher, with a little noise.

    num_features: the length of a row, instead of `shape`. num_classes: None for a regression on the answer itself.
    """
    size = [num_features] if num_features is not None else list(shape or ())
    if not size:
        problem = "`data.shape` and `data.num_features` are null, so that rows have no numbers"
        raise RunnerError.suggest("data.shape=null", problem, ["data.shape=[1,8,8]", "data.num_features=64"])
    draw = generator(seed, ROWS)
    inputs = torch.randn(num_rows, *size, generator=draw)
    width = math.prod(size)
    teacher = torch.randn(width, num_classes or 1, generator=draw) / math.sqrt(width)
    answers = inputs.flatten(1) @ teacher  # (N, C)
    answers += ANSWER_NOISE * torch.randn(answers.shape, generator=draw)
    targets = answers if num_classes is None else answers.argmax(1)
    source = Source(
        "synthetic",
        (inputs, targets),
        facts_of(inputs, targets, num_classes=num_classes),
        labels=None if num_classes is None else targets,
        origin=f"generated, seed {seed}",
        classes=tuple(map(str, range(num_classes or 0))),
    )
    return augmented(source, augment)
