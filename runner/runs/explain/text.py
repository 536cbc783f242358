"""Shows what `explain` found: an operation as plain values, and the lines that a person reads of all of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from runner.inspection.not_finite import Record, Seen


def operation(origin: Record) -> dict[str, Any]:
    """A record, as --json gives it."""
    return {
        "name": origin.name,
        "phase": origin.phase,
        "backward_of": origin.node or None,
        "line": origin.line,
        "module": origin.module.removeprefix("Prepared."),
        "inputs": [_seen(one) for one in origin.inputs],
        "output": _seen(origin.output),
    }


def _seen(one: Seen) -> dict[str, Any]:
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
    """What was found, for a person."""
    for note in found["notes"]:
        yield f"note    {note}"
    yield f"replay  {_replay(found['replay'])}"
    if found["operation"] is None:
        yield from _of_a_spike(found)
        return
    if found["step"] != found["asked_step"]:
        shows = f"it spoilt the weights, and the loss of step {found['asked_step']:,} shows it"
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
        return f"{begin}, {steps}: the same losses to the bit"
    step, then, now = differs
    return f"{begin}, {steps}: other losses from step {step:,} on ({then:.9g} then, {now:.9g} now)"


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
        yield f"rows    each part of the batch's {found['num_rows']:,} rows does it: no single row is to blame"
        return
    count, sure = found["num_bad_rows"], found["rows_are_sure"]
    if not count or count == found["num_rows"]:
        return
    words = "without them the step is finite" if sure else "by what it gives"
    yield f"rows    {count:,} of {found['num_rows']:,} ({words}); counted from 0, in epoch {found['epoch']}:"
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
        yield f"rows    of {found['num_rows']:,} those with the largest loss by themselves; counted from 0, in epoch {found['epoch']}:"
        for row in found["rows"]:
            yield f"  {_row(row)}"
    norms = [f"{name or 'model'} {norm:.3g}" for name, norm in list(found["gradient_norms"].items())[:5]]
    yield f"grads   {', '.join(norms)}"
    yield "largest " + ", ".join(f"{one['value']:.3g} by {one['name']} at {one['line']}" for one in found["largest"])
