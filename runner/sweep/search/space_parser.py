"""Parses the words of a search: what is the same for all trials, and the dimensions in which they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from runner.config import validate
from runner.errors import Fault, RunnerError, refuse
from runner.sweep.jobs.prepare import is_of_the_sweep, parsed_params, refuse_swept_settings
from runner.sweep.search.space import Choices, Dimension, Numbers, Space

if TYPE_CHECKING:
    from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep


def read_space(words: Sequence[str], config_loader: Any, *, more: Mapping[str, Any] | None = None) -> Space:
    """The space that the command line describes, and `hydra.sweeper.params` (more), which the command line wins over.

    Raises: RunnerError with everything that is wrong with it; what Hydra raises for words that it can't read.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create(config_loader=config_loader)
    own = parser.parse_overrides(list(words))
    refuse_swept_settings(own)
    given = {override.key_or_group for override in own}
    from_file = parsed_params(parser, more or {})
    overrides = [override for override in from_file if override.key_or_group not in given] + own
    fixed = [
        str(override.input_line)
        for override in overrides
        if not override.is_sweep_override() and not is_of_the_sweep(override)
    ]
    dimensions: dict[str, Dimension] = {}
    faults: list[Fault] = []
    for override in overrides:
        if not override.is_sweep_override():
            continue
        try:
            dimension = _dimension(override)
        except RunnerError as error:
            faults += error.faults
            continue
        key = dimension.word.lstrip("+~")
        if key in dimensions:
            faults.append(Fault(str(override.input_line), f"{key} stands twice", f"{key}=... once"))
        dimensions[key] = dimension
    if not dimensions and not faults:
        problem = "no word has several values, so there is nothing to search for"
        faults.append(Fault(" ".join(words) or "no words", problem, "'optimizer.lr=tag(log,interval(1e-4,1e-1))'"))
    refuse(faults)
    return Space(tuple(fixed), dimensions)


def _dimension(override: Override) -> Dimension:
    """One override with several values. Raises: RunnerError when no search can be made of it."""
    from hydra.core.override_parser.types import IntervalSweep, RangeSweep

    value: Any = override.value()
    if tags := set(getattr(value, "tags", ())) - {"log"}:
        raise _fault(override, f"there is no tag {min(tags)}", f"{override.key_or_group}=tag(log,interval(1e-4,1e-1))")
    if isinstance(value, IntervalSweep):
        return _interval(override, value)
    if isinstance(value, RangeSweep):
        return _range(override, value)
    return _choices(override, value)


def _interval(override: Override, value: IntervalSweep) -> Numbers:
    low, high, is_log = value.start, value.end, "log" in value.tags
    assert low is not None and high is not None
    key, tag = override.key_or_group, "tag(log,{})" if is_log else "{}"
    if not low < high:
        raise _fault(override, "an interval goes up", f"{key}={tag.format(f'interval({high:g},{low:g})')}")
    if is_log and low <= 0:
        least = 1 if isinstance(low, int) else f"{high / 1000:g}"
        problem = "a logarithmic interval begins above 0"
        raise _fault(override, problem, f"'{key}=tag(log,interval({least},{high:g}))'")
    if isinstance(low, float) and (validate.kind_of(key) or "").startswith("int"):
        problem = f"{key} is a whole number, and an interval is one of floats"
        raise _fault(override, problem, f"'{key}={tag.format(f'int(interval({low:g},{high:g}))')}'")
    step = 1 if isinstance(low, int) else None
    return Numbers(override.get_key_element(), low, high, step, is_log)


def _range(override: Override, value: RangeSweep) -> Numbers:
    is_log, key = "log" in value.tags, override.key_or_group
    if not value.step:
        raise _fault(override, "a step of 0 leads nowhere", f"{key}=range({value.start},{value.stop})")
    found = sorted(value.range())
    if not found:
        problem = "it has no values: a range goes from its start towards its end, which is not part of it"
        assert value.start is not None and value.stop is not None
        first, last = (value.stop, value.start) if value.start != value.stop else (value.start, value.start + 1)
        raise _fault(override, problem, f"{key}=range({first},{last})")
    if is_log and (value.step != 1 or found[0] < 1):
        problem = "a logarithmic range has steps of 1, and begins at 1 or above"
        raise _fault(override, problem, f"'{key}=tag(log,interval({max(found[0], 1):g},{found[-1]:g}))'")
    return Numbers(override.get_key_element(), found[0], found[-1], abs(value.step), is_log)


def _choices(override: Override, value: Any) -> Choices:
    from hydra.core.override_parser.types import ChoiceSweep, Transformer

    if getattr(value, "tags", ()):
        raise _fault(override, "choices have no scale", f"{override.key_or_group}=... without tag(log, ...)")
    if isinstance(value, ChoiceSweep):  # not by sweep_string_iterator(), which would shuffle them if it is told to
        texts = [Transformer.str(element) for element in value.list]
    else:
        texts = list(override.sweep_string_iterator())
    if not texts:
        problem = f"no file in {override.key_or_group} has such a name"
        raise _fault(override, problem, f"'{override.key_or_group}=glob(*)'")
    return Choices(override.get_key_element(), tuple(dict.fromkeys(texts)))


def _fault(override: Override, problem: str, write: str) -> RunnerError:
    return RunnerError(Fault(str(override.input_line), problem, write))
