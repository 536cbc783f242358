"""Checks `data.augment`, and returns the strength of each augmentation that it names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.errors import Problem, RunnerError, nearest, refuse


@dataclass(frozen=True)
class Augmentation:
    num_draws: int
    usual: float  # the strength of `true`, and of a name without one
    valid: str
    check: Callable[[float], bool]


def _is_probability(value: float) -> bool:
    return 0 <= value <= 1


def _is_fraction(value: float) -> bool:
    return 0 <= value < 1


def _is_whole(value: float) -> bool:
    return value >= 0 and float(value).is_integer()


FACTOR = "the largest difference of the factor from 1, 0 or more and less than 1"
#: in the order in which they are done
NAMES: dict[str, Augmentation] = {
    "flip": Augmentation(1, 0.5, "the probability that left and right are swapped, 0 to 1", _is_probability),
    "vertical_flip": Augmentation(1, 0.5, "the probability that top and bottom are swapped, 0 to 1", _is_probability),
    "crop": Augmentation(2, 4, "the maximum shift of an image, in whole pixels", _is_whole),
    "rotate": Augmentation(1, 10, "the maximum angle in degrees, 0 to 180", lambda value: 0 <= value <= 180),
    "scale": Augmentation(1, 0.1, FACTOR, _is_fraction),
    "brightness": Augmentation(1, 0.2, FACTOR, _is_fraction),
    "contrast": Augmentation(1, 0.2, FACTOR, _is_fraction),
    "saturation": Augmentation(1, 0.2, FACTOR, _is_fraction),
    "cutout": Augmentation(2, 8, "the side of the square that is set to 0, in whole pixels", _is_whole),
    "mixup": Augmentation(1, 0.2, "the alpha of a Beta distribution, 0 to 10", lambda value: 0 <= value <= 10),
}


def strengths_of(setting: Any) -> dict[str, float]:
    """Return the strengths by name. Raises: RunnerError with all names and strengths that are not valid."""
    pairs, problems = _pairs(setting), []
    valid = {name: value for name, value in pairs.items() if name in NAMES and _is_valid(name, value)}
    for name, value in pairs.items():
        if name in valid:
            continue
        hits = [name] if name in NAMES else nearest(str(name), NAMES, cutoff=0.5)  # cutmix: mixup or cutout
        ways = [written({**valid, hit: NAMES[hit].usual}) for hit in hits] or [written(valid)]
        problem = f"there is no augmentation `{name}`; there are {', '.join(NAMES)}"
        problem = f"`data.augment.{name}` must be {NAMES[name].valid}" if name in NAMES else problem
        problems.append(Problem.suggest(f"data.augment.{name}={value}", problem, ways))
    refuse(problems)
    return {name: float(NAMES[name].usual if value is True else value) for name, value in valid.items()}


def _is_valid(name: str, value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, int | float) and NAMES[name].check(value))


def written(strengths: Mapping[str, Any]) -> str:
    """Return augmentations as an override."""
    pairs = [f"{name}:{value if isinstance(value, bool) else f'{value:g}'}" for name, value in strengths.items()]
    return f"data.augment={{{','.join(pairs).lower()}}}" if pairs else "data.augment=[flip,crop]"


def _pairs(setting: Any) -> dict[Any, Any]:
    if isinstance(setting, Mapping | None):
        return {name: value for name, value in (setting or {}).items() if value is not None}
    if isinstance(setting, Sequence) and not isinstance(setting, str):
        pairs: dict[Any, Any] = {}
        for item in setting:
            pairs |= item if isinstance(item, Mapping) else {str(item): True}
        return pairs
    problem = "`data.augment` must be a list of names, or names with strengths"
    ways = [f"data.augment=[{setting if setting in NAMES else 'flip,crop'}]", "data.augment={flip:true,crop:4}"]
    raise RunnerError.suggest(f"data.augment={setting}", problem, ways)


def shape_problems(strengths: Mapping[str, float], shape: Sequence[int]) -> list[Problem]:
    """Return why images of this shape, (C, H, W), can't be augmented so."""
    if len(shape) != 3:
        problem = f"the inputs have the shape {tuple(shape)}, and images are (channels, height, width)"
        setting = f"data.augment={{{','.join(strengths)}}}"
        return [Problem(setting, problem, "use `data.augment=null`, or images as inputs")]
    channels, side = shape[0], min(shape[1:])
    most = {"crop": side, "cutout": side, "saturation": 1 if channels == 3 else 0}
    reasons = dict.fromkeys(most, f"the images have a side of {side} pixels")
    reasons["saturation"] = f"a saturation needs red, green and blue, and the channels of the images are {channels}"
    return [
        Problem.suggest(
            f"data.augment.{name}={strengths[name]:g}",
            reasons[name],
            [written({**strengths, name: min(limit, max(1, limit // 4))})],
        )
        for name, limit in most.items()
        if strengths.get(name, 0) > limit
    ]
