"""Checks `data.augment`, and gives the strength of each augmentation that it names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.errors import Problem, RunnerError, nearest, refuse


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
    return value >= 0 and float(value).is_integer()


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


def strengths_of(asked: Any) -> dict[str, float]:
    """By name. asked: a mapping of names and strengths, a list of names, or None.

    Raises: RunnerError with all that is no augmentation and no strength.
    """
    pairs = _pairs(asked)
    meant = {name: _meant(name, value) for name, value in pairs.items()}
    problems = []
    for name, value in pairs.items():
        if (name, value) in meant[name]:
            continue
        likely = {other: choices[0] for other, choices in meant.items() if choices and other != name}
        ways = [dict([*likely.values(), choice]) for choice in meant[name]] or [dict(likely.values())]
        problem = f"there is no augmentation `{name}`; there are {', '.join(NAMES)}"
        problem = f"`data.augment.{name}` must be {NAMES[name].valid}" if name in NAMES else problem
        problems.append(Problem.suggest(f"data.augment.{name}={value}", problem, map(written, ways)))
    refuse(problems)
    return {name: float(NAMES[name].usual if value is True else value) for name, value in pairs.items()}


def _meant(name: Any, value: Any) -> list[tuple[str, Any]]:
    hits = [name] if name in NAMES else nearest(str(name), NAMES, cutoff=0.5)  # cutmix: mixup or cutout
    return [(hit, value if _takes(hit, value) else NAMES[hit].usual) for hit in hits]


def _takes(name: str, value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, int | float) and NAMES[name].check(value))


def written(strengths: Mapping[str, Any]) -> str:
    """Augmentations as a word of the command line."""
    pairs = [
        f"{name}:{str(value).lower() if isinstance(value, bool) else f'{value:g}'}" for name, value in strengths.items()
    ]
    return f"data.augment={{{','.join(pairs)}}}" if pairs else "data.augment=[flip,crop]"


def _pairs(asked: Any) -> dict[Any, Any]:
    if asked is None:
        return {}
    if isinstance(asked, Mapping):
        return {name: value for name, value in asked.items() if value is not None}
    if isinstance(asked, Sequence) and not isinstance(asked, str):
        pairs: dict[Any, Any] = {}
        for item in asked:
            pairs |= item if isinstance(item, Mapping) else {str(item): True}
        return pairs
    problem = "`data.augment` must be a list of names, or names with strengths"
    ways = [f"data.augment=[{asked if asked in NAMES else 'flip,crop'}]", "data.augment={flip:true,crop:4}"]
    raise RunnerError.suggest(f"data.augment={asked}", problem, ways)


def shape_problems(strengths: Mapping[str, float], shape: Sequence[int]) -> list[Problem]:
    """What images of that shape are too small for, or have no colours for. shape: of a row."""
    if len(shape) != 3:
        problem = f"the inputs have the shape {tuple(shape)}, and images are (channels, height, width)"
        asked = f"data.augment={{{','.join(strengths)}}}"
        return [Problem(asked, problem, "use `data.augment=null`, or images as inputs")]
    problems = []
    side = min(shape[1:])
    for name in ("crop", "cutout"):
        if strengths.get(name, 0) > side:
            problem = f"the images have a side of {side} pixels"
            way = written({**strengths, name: max(1, side // 4)})
            problems.append(Problem.suggest(f"data.augment.{name}={strengths[name]:g}", problem, [way]))
    if strengths.get("saturation") and shape[0] != 3:
        problem = f"the images have {shape[0]} channel{'s' if shape[0] > 1 else ''}, and a saturation needs red, green and blue"
        way = written({**strengths, "saturation": 0})
        problems.append(Problem.suggest(f"data.augment.saturation={strengths['saturation']:g}", problem, [way]))
    return problems
