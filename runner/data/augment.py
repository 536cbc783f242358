"""What a person writes under `data.augment` goes in; a module comes out that changes training images on the device.

    data.augment='{flip: true, crop: 4, cutout: 8}'      or, with the usual strengths,      data.augment='[flip, crop]'

However it is written, the order is that of NAMES below, mixup last. Everything random comes from `draws`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from runner.data import augmentations as change
from runner.data.source import Source
from runner.errors import Fault, RunnerError, nearest


@dataclass(frozen=True)
class Known:
    """One kind of augmentation."""

    num_draws: int
    usual: float  # what `true`, and its bare name in a list, stand for
    valid: str
    check: Callable[[float], bool]


_A_PART = "0 or more and less than 1"


def _is_a_part(value: float) -> bool:
    return 0 <= value < 1


def _is_whole(value: float) -> bool:
    return value >= 0 and value == int(value)


#: in the order in which they are done
NAMES: dict[str, Known] = {
    "flip": Known(1, 0.5, "the probability that left and right are swapped, 0 to 1", lambda value: 0 <= value <= 1),
    "vertical_flip": Known(
        1, 0.5, "the probability that top and bottom are swapped, 0 to 1", lambda value: 0 <= value <= 1
    ),
    "crop": Known(2, 4, "the most pixels that an image is moved by, a whole number", _is_whole),
    "rotate": Known(1, 10, "the most degrees that an image is turned by, 0 to 180", lambda value: 0 <= value <= 180),
    "scale": Known(1, 0.1, f"the most that an image is made larger or smaller by, {_A_PART}", _is_a_part),
    "brightness": Known(1, 0.2, f"the most that the factor differs from 1, {_A_PART}", _is_a_part),
    "contrast": Known(1, 0.2, f"the most that the factor differs from 1, {_A_PART}", _is_a_part),
    "saturation": Known(1, 0.2, f"the most that the factor differs from 1, {_A_PART}", _is_a_part),
    "cutout": Known(2, 8, "the side of the square that is set to 0, in whole pixels", _is_whole),
    "mixup": Known(
        1, 0.2, "the alpha of the Beta distribution of shares, 0 or more, 10 at most", lambda value: 0 <= value <= 10
    ),
}
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
    strengths = _strengths(asked)
    if not strengths:
        return source
    shape = source.facts.get("input_shape") or ()
    faults = _shape_faults(strengths, shape)
    if faults:
        raise RunnerError(*faults)
    return replace(source, finish=Augment(strengths, num_classes=source.facts.get("num_classes")))


def _strengths(asked: Any) -> dict[str, float]:
    """By name. Raises: RunnerError with what is no augmentation."""
    pairs = _pairs(asked)
    faults = []
    for name, value in pairs.items():
        if name not in NAMES:
            hits = nearest(str(name), NAMES) or NAMES
            write = " or ".join(f"data.augment.{hit}" for hit in hits)
            faults.append(
                Fault(
                    f"data.augment.{name}={value}",
                    f"there is no such augmentation; there are {', '.join(NAMES)}",
                    write,
                )
            )
        elif not isinstance(value, bool | int | float) or not (isinstance(value, bool) or NAMES[name].check(value)):
            write = f"data.augment.{name}={NAMES[name].usual:g}"
            faults.append(Fault(f"data.augment.{name}={value}", f"it is {NAMES[name].valid}", write))
    if faults:
        raise RunnerError(*faults)
    return {name: float(NAMES[name].usual if value is True else value) for name, value in pairs.items()}


def _pairs(asked: Any) -> dict[Any, Any]:
    if asked is None:
        return {}
    if isinstance(asked, Mapping):
        return {name: value for name, value in asked.items() if value is not None}
    if isinstance(asked, Sequence) and not isinstance(asked, str):
        pairs: dict[Any, Any] = {}
        for item in asked:
            pairs |= item if isinstance(item, Mapping) else {item: True}
        return pairs
    so = "it is a list of names, or names with their strengths"
    raise RunnerError(
        Fault(f"data.augment={asked}", so, f"data.augment=[{asked}] or data.augment={{flip:true,crop:4}}")
    )


def _shape_faults(strengths: Mapping[str, float], shape: Sequence[int]) -> list[Fault]:
    if len(shape) != 3:
        so = f"the inputs have the shape {tuple(shape)}, and images are (channels, height, width)"
        asked = f"data.augment={{{','.join(strengths)}}}"
        return [Fault(asked, so, "data.augment=null, or inputs that are images")]
    faults = []
    side = min(shape[1:])
    for name in ("crop", "cutout"):
        if strengths.get(name, 0) > side:
            so = f"the images have a side of {side} pixels"
            faults.append(
                Fault(f"data.augment.{name}={strengths[name]:g}", so, f"data.augment.{name}={max(1, side // 4)}")
            )
    if strengths.get("saturation") and shape[0] != 3:
        so = f"the images have {shape[0]} channel{'s' if shape[0] > 1 else ''}, and colours are red, green and blue"
        faults.append(Fault(f"data.augment.saturation={strengths['saturation']:g}", so, "data.augment.saturation=0"))
    return faults


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
