"""Generates the data sets of TensorFlow's Playground: points of the plane in two classes, by shape and noise.

The formulas are those of playground.tensorflow.org (github.com/tensorflow/playground, dataset.ts).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from runner.data.loading.order import ROWS, generator
from runner.data.source import Preprocessing, Source, facts_of
from runner.errors import Problem, RunnerError, nearest, refuse

FEATURES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x1": lambda x1, x2: x1,
    "x2": lambda x1, x2: x2,
    "x1_squared": lambda x1, x2: x1.square(),
    "x2_squared": lambda x1, x2: x2.square(),
    "x1_times_x2": lambda x1, x2: x1 * x2,
    "sin_x1": lambda x1, x2: x1.sin(),
    "sin_x2": lambda x1, x2: x2.sin(),
}


class Features(nn.Module):
    """Compute a column for each name. It is a layer, so that the trained model takes plain points."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = check_features(names, key="features")

    def forward(self, points: Tensor) -> Tensor:  # (B, 2) -> (B, features)
        x1, x2 = points.unbind(1)
        return torch.stack([FEATURES[name](x1, x2) for name in self.names], 1)


def check_features(names: Any, *, key: str) -> list[str]:
    """The names, if all are known. Raises: RunnerError with the nearest."""
    if isinstance(names, str) or not isinstance(names, Sequence) or not names:
        raise RunnerError.suggest(f"{key}={names}", f"`{key}` must be a list of features", [f"{key}=[x1,x2]"])
    for name in names:
        if name not in FEATURES:
            hits = nearest(str(name), FEATURES) or FEATURES
            problem = f"there is no feature `{name}`; there are {', '.join(FEATURES)}"
            fix = f"use {' or '.join(f'`{hit}`' for hit in hits)} instead of `{name}`"
            raise RunnerError.of(f"{key}=[{','.join(map(str, names))}]", problem, fix)
    return list(names)


RADIUS = 5.0
RAW = ["x1", "x2"]


def playground(
    shape: str = "spiral",
    num_rows: int = 1000,
    *,
    noise: float = 0.0,
    features: Sequence[str] = ("x1", "x2"),
    seed: int = 0,
) -> Source:
    """Points (num_rows, 2) within about 6 of the origin, half of them of each class (of xor by chance); the seed decides.

    shape: circle | xor | gauss | spiral | rings. noise: 0 to 0.5, of the points, or of where the border is (circle, xor).
    features: what the model is given of a point, computed by a layer before it: x1, x2, x1_squared, ...
    Raises: RunnerError for another shape, noise, feature, or no rows.
    """
    features = check_features(features, key="data.features")
    problems = []
    if shape not in SHAPES:
        ways = [f"data.shape={one}" for one in nearest(str(shape), SHAPES) or SHAPES]
        problems.append(
            Problem.suggest(f"data.shape={shape}", f"`data.shape` must be one of {', '.join(SHAPES)}", ways)
        )
    if isinstance(noise, bool) or not isinstance(noise, int | float) or not 0 <= noise <= 0.5:
        problems.append(Problem.suggest(f"data.noise={noise}", "`data.noise` must be 0 to 0.5", ["data.noise=0.1"]))
    if type(num_rows) is not int or num_rows < 2:
        problems.append(
            Problem.suggest(f"data.num_rows={num_rows}", "`data.num_rows` must be 2 or more", ["data.num_rows=1000"])
        )
    refuse(problems)
    draw = generator(seed, ROWS)

    def uniform(count: int, low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, generator=draw, dtype=torch.float64)

    points, targets = SHAPES[shape](num_rows, float(noise), uniform, draw)
    points = points.float()
    facts = facts_of(points, targets, num_classes=2)
    return Source(
        f"playground_{shape}",
        (points, targets),
        {**facts, "input_shape": [len(features)], "in_features": len(features)},
        labels=targets,
        origin=f"made up after TensorFlow's Playground, seed {seed}",
        classes=("negative", "positive"),
        around=None if features == RAW else partial(_with_features, features),
    )


def _with_features(features: list[str], train_rows: Any) -> Preprocessing:
    return Preprocessing(before={"_target_": "runner.data.Features", "names": features}, keeps_inputs=False)


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
    for count, start in ((num_rows // 2, 0.0), (num_rows - num_rows // 2, math.pi)):
        along = torch.arange(count, dtype=torch.float64) / count
        angle = 1.75 * 2 * math.pi * along + start
        arms.append(torch.stack([RADIUS * along * angle.sin(), RADIUS * along * angle.cos()], 1))
    return torch.cat(arms) + noise / RADIUS * _square(num_rows, uniform), targets


def _rings(num_rows: int, noise: float, uniform: Uniform, draw: torch.Generator) -> Points:
    """Not the Playground's: two circles around the origin, of radius 5 and 2; each point is normally off by the noise."""
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
