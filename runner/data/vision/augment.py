"""Builds the module that augments training images on the device, from `data.augment`.

    data.augment='{flip: true, crop: 4, cutout: 8}'      or, with the usual strengths,      data.augment='[flip, crop]'

However it is written, the order is that of runner.data.vision.augment_settings.NAMES, mixup last. Everything random comes from `draws`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from runner.data.source import Source
from runner.data.vision import augmentations as change
from runner.data.vision.augment_settings import NAMES, shape_faults, strengths_of
from runner.errors import refuse

RECOLOURING = {"brightness": change.brightened, "contrast": change.contrasted, "saturation": change.saturated}
#: those that need floats
BLENDING = ("rotate", "scale", *RECOLOURING, "mixup")
#: the quantiles of a row's share in a mixture: between two of them it is a straight line
NUM_QUANTILES = 1024
#: steps of the sum that gives them
FINE = 2**18


class Augment(nn.Module):
    """finish(batch, draws) -> batch, on pairs of images (B, C, H, W), bytes or floats, and targets.

    In eval mode it hands back what it got. Bytes come out as bytes, rounded where values were blended, so that a model
    meets one type of images. mixup makes classes (B,) into shares (B, num_classes), each row's own class the strongest.
    """

    quantiles: Tensor

    def __init__(self, strengths: Mapping[str, float], *, num_classes: int | None) -> None:
        super().__init__()
        self.strengths = {name: strengths[name] for name in NAMES if strengths.get(name)}  # 0 is as good as absent
        self.num_draws = sum(NAMES[name].num_draws for name in self.strengths)
        self.num_classes = num_classes
        if "mixup" in self.strengths:
            # no buffer: what lies in a finish's buffers is data, and counts in its fingerprint
            self.quantiles = nn.Parameter(_quantiles(self.strengths["mixup"]), requires_grad=False)

    def forward(self, batch: Any, draws: Tensor) -> Any:  # draws (B, num_draws)
        if not self.training or not self.strengths:
            return batch
        images, targets, *others = batch
        draw = self._by_name(draws)
        changed = self._recoloured(self._moved(images, draw, dtype=images.dtype), draw)
        if "cutout" in draw:
            changed = change.cut_out(changed, *draw["cutout"], side=int(self.strengths["cutout"]))
        if "mixup" in draw:
            share = self._share(*draw["mixup"])
            changed = change.mixed_with_neighbour(changed, share)
            targets = change.mixed_with_neighbour(self._shares(targets), share)
        return (change.restored(changed, images.dtype), targets, *others)

    def _by_name(self, draws: Tensor) -> dict[str, list[Tensor]]:
        columns = iter(draws.unbind(1))
        return {name: [next(columns) for _ in range(NAMES[name].num_draws)] for name in self.strengths}

    def _moved(self, images: Tensor, draw: Mapping[str, list[Tensor]], *, dtype: torch.dtype) -> Tensor:
        """Floats where something that follows blends values, else what they were."""
        strength = self.strengths
        for name, axis in (("flip", 3), ("vertical_flip", 2)):
            if name in draw:
                images = change.flipped(images, *draw[name], probability=strength[name], axis=axis)
        if "crop" in draw:
            images = change.shifted(images, *draw["crop"], most=int(strength["crop"]))
        if any(name in draw for name in BLENDING) and not dtype.is_floating_point:
            images = images.float()
        if "rotate" in draw or "scale" in draw:
            middle = [torch.full_like(next(iter(draw.values()))[0], 0.5)]  # neither turned nor scaled
            degrees, scale = strength.get("rotate", 0.0), strength.get("scale", 0.0)
            angle, zoom = draw.get("rotate", middle)[0], draw.get("scale", middle)[0]
            images = change.turned(images, angle, zoom, degrees=degrees, scale=scale)
        return images

    def _recoloured(self, images: Tensor, draw: Mapping[str, list[Tensor]]) -> Tensor:
        for name, recolour in RECOLOURING.items():
            if name in draw:
                images = recolour(images, *draw[name], most=self.strengths[name])
        return images

    def _share(self, draw: Tensor) -> Tensor:  # (B,) -> (B,) in 0.5..1
        place = draw * NUM_QUANTILES
        index = place.long()
        low, high = self.quantiles[index], self.quantiles[index + 1]
        return torch.lerp(low, high, place - index)

    def _shares(self, targets: Tensor) -> Tensor:
        if targets.is_floating_point() or self.num_classes is None:
            return targets.float()
        # not one_hot, which reads the device
        return (targets[:, None] == torch.arange(self.num_classes, device=targets.device)).float()


def augmented(source: Source, asked: Any) -> Source:
    """The source with `data.augment` as its finish; the same object where nothing is asked for.

    asked: a mapping of names and strengths, a list of names, or None.
    Raises: RunnerError for names and strengths that are none, all at once, and for inputs that are no images.
    """
    strengths = strengths_of(asked)
    if not strengths:
        return source
    shape = source.facts.get("input_shape") or ()
    faults = shape_faults(strengths, shape)
    refuse(faults)
    return replace(source, finish=Augment(strengths, num_classes=source.facts.get("num_classes")))


def _quantiles(alpha: float) -> Tensor:
    """(NUM_QUANTILES + 1,) float32: of the larger share of a mixture, where shares are Beta(alpha, alpha).

    Beta's density is infinite at 1 for an alpha below 1; over (1 - share) ** alpha it is not, and a plain sum is enough.
    """
    place = torch.linspace(0.5**alpha, 0, FINE, dtype=torch.float64)
    share = 1 - place ** (1 / alpha)  # 0.5 .. 1
    density = share ** (alpha - 1)
    below = torch.cat([torch.zeros(1, dtype=torch.float64), (density[1:] + density[:-1]).cumsum(0)])
    wanted = torch.linspace(0, 1, NUM_QUANTILES + 1, dtype=torch.float64) * below[-1]
    return share[torch.searchsorted(below, wanted).clamp(max=FINE - 1)].float()
