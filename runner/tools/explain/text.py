"""Format what `explain` finds: an operation as plain values, the advice, and the printed lines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from runner.tools.explain.not_finite import NotFiniteOperation, SeenTensor
from runner.tools.explain.rows import NamedRow

#: losses explode if they grow by this factor over the last steps
EXPLODED, LAST_STEPS = 1e3, 20
SOFTMAX = ("softmax", "log_softmax", "safe_softmax")


@dataclass(frozen=True)
class Case:
    """What the advice depends on."""

    origin: NotFiniteOperation
    rows: Sequence[NamedRow]  # that caused the value for sure
    losses: Sequence[float]  # of the steps before, in order
    groups: Sequence[Mapping[str, Any]]  # of the optimizer


def advice(case: Case) -> str:
    """Return what to try; empty if no rule applies."""
    rules = (_bad_row, _optimizer, _exploded, _of_half, _masked, _backward, _division, _domain, _overflow)
    return next(filter(None, (rule(case) for rule in rules)), "")


def _bad_row(case: Case) -> str:
    row = next((one for one in case.rows if one.value is not None), None)
    if row is None:
        return ""
    place = row.place or (f"row {row.in_data:,} of the data" if row.in_data is not None else "that row")
    return f"correct or remove {place}: {row.column} is {row.value:g} there"


def _optimizer(case: Case) -> str:
    if case.origin.phase != "optimizer":
        return ""
    if any(group.get("eps") == 0 for group in case.groups):
        return "optimizer.eps=1e-8: with 0, a gradient that is 0 is divided by 0"
    return ""


def _exploded(case: Case) -> str:
    recent = [loss for loss in case.losses[-LAST_STEPS:] if math.isfinite(loss)]
    if len(recent) < 2 or abs(recent[-1]) < EXPLODED * max(min(map(abs, recent)), 1e-6):
        return ""
    rate = next((float(group["lr"]) for group in case.groups), 0.0)
    return (
        f"a smaller optimizer.lr than {rate:g} (python -m runner lr-find), or train.clip_grad_norm=1: train/loss went "
        f"from {min(recent, key=abs):.3g} to {recent[-1]:.3g} in {len(recent)} steps"
    )


def _of_half(case: Case) -> str:
    output = case.origin.output
    if output.dtype is torch.float16 and output.range.num_inf and all(_is_finite(one) for one in case.origin.inputs):
        return "train.precision=bf16: float16 ends at 65,504"
    return ""


def _masked(case: Case) -> str:
    first = next(iter(case.origin.inputs), None)
    if case.origin.name not in SOFTMAX or first is None or not first.range.num_inf or first.range.num_nan:
        return ""
    return "keep one position of each mask row unmasked, or mask with torch.finfo(x.dtype).min: a softmax over only -inf is NaN"


def _backward(case: Case) -> str:
    origin, node = case.origin, case.origin.node.partition("Backward")[0].lower()  # sqrt of SqrtBackward0
    if origin.phase != "backward":
        return ""
    if origin.is_own_function:
        return f"torch.autograd.gradcheck on {origin.node.removesuffix('Backward')}: its own backward() gives this"
    if node in ("sqrt", "rsqrt", "pow"):
        return f"{node}(x + 1e-12), or clamp_min: at 0 its slope is infinite"
    if node in ("log", "log2", "log10", "div", "reciprocal"):
        return "clamp_min(1e-8) on what goes in: a torch.where after it hides the value, and not its gradient"
    if node in ("norm", "linalgvectornorm", "std", "var"):
        return f"torch.sqrt(x.square().sum() + 1e-12) instead of {node}: it has no gradient at 0"
    if node in ("acos", "asin", "atan2"):
        return f"clamp(-1 + 1e-6, 1 - 1e-6) on what goes into {node}: at its ends the slope is infinite"
    return ""


def _division(case: Case) -> str:
    if case.origin.name not in ("div", "reciprocal", "rsqrt"):
        return ""
    below = next((one for one in reversed(case.origin.inputs) if one.argument in ("other", "self")), None)
    if below is None or not _holds_zero(below) or not all(map(_is_finite, case.origin.inputs)):
        return ""
    made = f" ({below.made[0]} at {below.made[1]})" if below.made[0] else ""
    is_zero = "is 0" if case.origin.output.range.num_nan else "is 0, or next to it,"
    return f"an epsilon below the line: its divisor{made} {is_zero} there, so x / (y + 1e-8), or y.clamp_min(1e-8)"


def _domain(case: Case) -> str:
    origin, first = case.origin, next(iter(case.origin.inputs), None)
    least = first.range.least if first is not None else None
    if first is None or least is None or origin.phase == "backward":
        return ""
    if origin.name == "log1p" and least <= -1:
        return f"x.clamp_min(-1 + 1e-6) before log1p (of {least:.3g} here), which has no value at -1 and below"
    if origin.name in ("log", "log2", "log10") and least <= 0:
        words = f"x.clamp_min(1e-8) before {origin.name} (of {least:.3g} here)"
        return f"{words}, or log_softmax and logsigmoid, which take logits"
    if origin.name in ("sqrt", "rsqrt") and least < 0:
        return f"x.clamp_min(0) before {origin.name}: it is taken of {least:.3g}"
    if origin.name == "pow" and least < 0 and origin.output.range.num_nan and all(map(_is_finite, origin.inputs)):
        return f"x.abs() or x.clamp_min(0) before pow: a fraction's power of {least:.3g} is none"
    if origin.name in ("acos", "asin") and max(abs(least), first.range.size) > 1:
        return f"x.clamp(-1, 1) before {origin.name}: it is taken of {first.range.size:.3g}"
    return ""


def _overflow(case: Case) -> str:
    first = next(iter(case.origin.inputs), None)
    if first is None or case.origin.phase == "backward":
        return ""
    if case.origin.name in ("exp", "exp2", "expm1", "sinh", "cosh") and first.range.size > 80:
        return (
            f"subtract the row's largest before {case.origin.name} (torch.logsumexp and log_softmax do), or x.clamp_max(80): "
            f"it is taken of {first.range.greatest:.3g}"
        )
    if case.origin.name == "pow" and first.argument == "self" and _is_overflow(case.origin, first):
        end = f"{str(first.dtype).removeprefix('torch.')} ends at {torch.finfo(first.dtype).max:.3g}"
        return f"a smaller value before pow, or x.clamp: it is taken of {first.range.size:.3g}, and {end}"
    return ""


def _is_overflow(origin: NotFiniteOperation, base: SeenTensor) -> bool:
    is_infinite = origin.output.range.num_inf > 0 and not origin.output.range.num_nan
    return is_infinite and all(map(_is_finite, origin.inputs)) and base.range.size**4 > torch.finfo(base.dtype).max


def _is_finite(one: SeenTensor) -> bool:
    return not one.range.num_not_finite


def _holds_zero(one: SeenTensor) -> bool:
    least, greatest = one.range.least, one.range.greatest
    return least is not None and greatest is not None and least <= 0 <= greatest


def operation(origin: NotFiniteOperation) -> dict[str, Any]:
    """Return a record as plain values for `--json`."""
    return {
        "name": origin.name,
        "phase": origin.phase,
        "backward_of": origin.node or None,
        "line": origin.line,
        "module": origin.module.removeprefix("Prepared."),
        "inputs": [_seen(one) for one in origin.inputs],
        "output": _seen(origin.output),
    }


def _seen(one: SeenTensor) -> dict[str, Any]:
    made_by, made_at = one.made
    return {
        "argument": one.argument,
        "name": one.name,
        "made_by": made_by,
        "made_at": made_at,
        "shape": list(one.shape),
        "dtype": str(one.dtype).removeprefix("torch."),
        "least": one.range.least,
        "greatest": one.range.greatest,
        "num_nan": one.range.num_nan,
        "num_inf": one.range.num_inf,
        "count": one.range.count,
    }


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the printed lines."""
    for note in found["notes"]:
        yield f"note    {note}"
    yield f"replay  {_replay(found['replay'])}"
    if found["operation"] is None:
        yield from _of_a_spike(found)
        return
    if found["step"] != found["asked_step"]:
        shows = f"it made the weights non-finite, and the loss of step {found['asked_step']:,} shows it"
        first = f"the first whose loss is not finite; the point at step {found['asked_step']:,} is a mean"
        yield f"step    {found['step']:,}: {shows if math.isfinite(found['loss']) else first}"
    one = found["operation"]
    yield f"first   {_what(one)}: {one['line']}{' in ' + one['module'] if one['module'] else ''}, {_phase(one)}"
    for seen in one["inputs"]:
        yield f"  {seen['argument']:<12}{_tensor(seen)}"
    yield f"  {'gives':<12}{_tensor(one['output'])}"
    yield from _rows(found)
    if found["try"]:
        yield f"try     {found['try']}"


def _replay(replay: Mapping[str, Any]) -> str:
    begin = (
        f"from {replay['checkpoint']}, step {replay['from_step']:,}" if replay["checkpoint"] else "from the beginning"
    )
    steps = f"{replay['steps']:,} step{'' if replay['steps'] == 1 else 's'}"
    if not replay["compared"]:
        return f"{begin}, {steps}"
    if (differs := replay["first_difference"]) is None:
        return f"{begin}, {steps}: losses bitwise identical"
    step, then, now = differs
    return f"{begin}, {steps}: losses differ from step {step:,} on ({then:.9g} then, {now:.9g} now)"


def _what(one: Mapping[str, Any]) -> str:
    output = one["output"]
    value = "nan" if output["num_nan"] else "inf"
    number = output["num_nan"] + output["num_inf"]
    of = f" ({number:,} of {output['count']:,})" if output["count"] > 1 else ""
    return f"{one['name']} gives {value}{of}"


def _phase(one: Mapping[str, Any]) -> str:
    if one["phase"] == "backward":
        return f"in the backward pass ({one['backward_of']})"
    return {"forward": "in the forward pass", "loss": "in the loss", "optimizer": "in the optimizer's step"}[
        one["phase"]
    ]


def _tensor(seen: Mapping[str, Any]) -> str:
    shape = " x ".join(map(str, seen["shape"])) or "a number"
    found = [f"{shape} {seen['dtype']}"]
    if seen["least"] is not None:
        least, greatest = f"{seen['least']:.4g}", f"{seen['greatest']:.4g}"
        found.append(least if least == greatest else f"{least} to {greatest}")
    found += [f"{seen[f'num_{kind}']:,} {kind}" for kind in ("nan", "inf") if seen[f"num_{kind}"]]
    if seen["name"]:
        found.append(seen["name"])
    elif seen["made_by"]:
        found.append(f"made by {seen['made_by']} at {seen['made_at']}")
    return ", ".join(found)


def _rows(found: Mapping[str, Any]) -> Iterator[str]:
    if found["of_all_rows"]:
        yield f"rows    every part of the batch's {found['num_rows']:,} rows causes it, not a single row"
        return
    count, sure = found["num_bad_rows"], found["rows_are_sure"]
    if not count or count == found["num_rows"]:
        return
    reason = "without them the step is finite" if sure else "by the operation's output"
    yield f"rows    {count:,} of {found['num_rows']:,} ({reason}); counted from 0, in epoch {found['epoch']}:"
    for row in found["rows"]:
        yield f"  {_row(row)}"
    if (more := count - len(found["rows"])) > 0:
        yield f"  and {more:,} more"


def _row(row: Mapping[str, Any]) -> str:
    parts = [f"row {row['row']:,} of batch {row['batch']:,}"]
    if row["in_data"] is not None:
        parts.append(f"row {row['in_data']:,} of the data" + (f" ({row['place']})" if row["place"] else ""))
    if row["loss"] is not None:
        parts.append(f"loss {row['loss']:.4g}")
    if row["value"] is not None:
        parts.append(f"{row['column']} is {row['value']:.4g}")
    return ", ".join(parts)


def _of_a_spike(found: Mapping[str, Any]) -> Iterator[str]:
    near = [f"{'*' if step == found['step'] else ''}{step:,}: {loss:.4g}" for step, loss in found["losses"].items()]
    yield f"loss    {'  '.join(near)}; all is finite in step {found['step']:,}"
    if found["rows"]:
        yield f"rows    of {found['num_rows']:,}, those with the largest own loss; counted from 0, in epoch {found['epoch']}:"
        for row in found["rows"]:
            yield f"  {_row(row)}"
    norms = [f"{name or 'model'} {norm:.3g}" for name, norm in list(found["gradient_norms"].items())[:5]]
    yield f"grads   {', '.join(norms)}"
    yield "largest " + ", ".join(f"{one['value']:.3g} by {one['name']} at {one['line']}" for one in found["largest"])
