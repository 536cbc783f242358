"""Generates MNIST-1D: signals of 40 numbers in ten classes, stretched, shifted and noisy, from sizes and a seed.

The procedure and its settings are those of Greydanus and Kobak, "Scaling down deep learning with MNIST-1D" (arXiv
2011.14439), the draws are our own: other rows of the same distribution, so that their table of accuracies is the measure.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from runner.data.loading.order import ROWS, generator
from runner.data.source import Source, facts_of
from runner.errors import Problem, refuse

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
WIDTH = 72  # points while it is made: those of a template and the most padding
LEAST_PADDING, MOST_PADDING = 36, 60  # points behind the template; the more, the narrower it is in the end
SCALE = 0.4  # of the random factor, from 0.8 to 1.2
MOST_SHIFT = 48  # points, less than that, around the end
CORRELATED_NOISE, BLUR = 0.25, 2.0  # before it is blurred, and the blur's spread in points; where the template is not
NOISE = 0.02  # of each point
SHEAR = 0.75  # of the random slope, from -0.375 to 0.375 over a signal
NUM_CLASSES = len(TEMPLATES)


def mnist1d(num_rows: int = 4000, num_test_rows: int = 1000, *, seed: int = 0) -> Source:
    """Signals (num_rows, 1, 40) of 10 classes, and a test split that comes with them; the seed alone decides.

    The classes are of equal size over both splits. The training rows' mean becomes 0 and their spread 1.
    Raises: RunnerError for sizes that are none.
    """
    problems = [
        Problem.suggest(
            f"data.{name}={count}",
            f"`data.{name}` must be 10 or more, one of each class",
            [f"data.{name}={usual}"],
        )
        for name, count, usual in (("num_rows", num_rows, 4000), ("num_test_rows", num_test_rows, 1000))
        if count < NUM_CLASSES
    ]
    refuse(problems)
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
        origin=f"made up after arXiv 2011.14439, seed {seed}",
        classes=tuple(map(str, range(NUM_CLASSES))),
    )


def make_signals(classes: Tensor, draw: torch.Generator) -> Tensor:  # (N,) int64 -> (N, 40) float64
    """A signal of each class, every draw from `draw`."""
    num_rows = len(classes)

    def uniform() -> Tensor:  # (N, 1)
        return torch.rand(num_rows, 1, generator=draw, dtype=torch.float64) - 0.5

    def normal() -> Tensor:  # (N, 72)
        return torch.randn(num_rows, WIDTH, generator=draw, dtype=torch.float64)

    padding = torch.randint(LEAST_PADDING, MOST_PADDING + 1, (num_rows, 1), generator=draw)
    shapes, is_template = _stretched(_templates()[classes], padding)
    shapes = shapes * (1 + SCALE * uniform())
    shift = torch.randint(MOST_SHIFT, (num_rows, 1), generator=draw)
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
    padded = F.pad(shapes, (0, MOST_PADDING))
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
