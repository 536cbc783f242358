"""`python -m runner.tools.plan.worker FILE`: simulate a device and write what the run would do on it. Started by command.py.

It reads a request on stdin. It is a process because the simulation changes torch permanently, and an unsupported call may
abort.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from runner.data.loading.own_loader import OwnLoader
from runner.device.hardware import Speeds
from runner.device.placement import tensors
from runner.errors import CODE_ERRORS, RunnerError
from runner.experiment import rules
from runner.inspection import call_site
from runner.inspection.findings import Finding, merged
from runner.models.preprocessing import Prepared
from runner.tools.plan.dry_run import UNFOLLOWED, SimulatedRun, of_error
from runner.tools.plan.simulator import simulated_device
from runner.tools.plan.simulator.shapes import NotSimulated
from runner.tools.plan.simulator.torch_parts import SimulatedMachine
from runner.training.recompute import recompute, repeated

MAX_ROWS = 2**24
MAX_TRIES = 24
CLOSE = 0.01  # relative precision of the result
#: precisions whose activations have the same size, so that one search is enough
BYTES_PER_NUMBER = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}


class OutOfTime(Exception):
    """The search ended without a result."""


def main() -> None:
    import torch._dynamo  # noqa: F401  # takes seconds, while the request is made

    request = json.loads(sys.stdin.readline())
    warnings.simplefilter("ignore")
    machine = SimulatedMachine(**{**request["machine"], "capability": tuple(request["machine"]["capability"])})
    with simulated_device(request["device"], has_numbers=False, machine=machine) as device:
        cfg = OmegaConf.create(request["yaml"])
        cfg.data.num_workers = 0  # it reads one batch
        answer = look(cfg, device, request)
    Path(sys.argv[1]).write_text(json.dumps(answer))


def look(cfg: Any, device: torch.device, request: dict[str, Any]) -> dict[str, Any]:
    """Return all that is known of the run without its numbers."""
    began = time.monotonic()
    findings: list[Finding] = []
    run: SimulatedRun | None = None
    unknown = ""
    try:
        run = SimulatedRun(cfg, device, speeds=Speeds(**request["speeds"]), **request["processes"])
        run.take_steps()
        run.evaluate()
    except RunnerError as error:
        return {"problems": [asdict(problem) for problem in error.problems]}
    except NotSimulated as error:
        files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
        place = f" at {call_site.line_of_error(error)}" if any(map(call_site.is_own, files)) else ""
        unknown = f"{error}{place}"
    except CODE_ERRORS as error:
        if run is not None and run.unknown:  # it may continue with real values
            unknown = f"{run.unknown}, and with others in their place it ends: {of_error(error)}"
        else:
            findings.append(of_error(error))
    if run is None:
        return {"findings": [asdict(finding) for finding in findings], "unknown": unknown}
    found = merged([*run.findings, *run.slow.findings, *findings])
    unknown = unknown or run.unknown
    is_whole = not findings and not unknown
    placement, step, step_bytes = _placement(run), _step(run), run.costs.peak.num_bytes
    run.drop_batches()
    evaluation_bytes = run.evaluation_bytes() if is_whole else None
    answer: dict[str, Any] = {
        "findings": [asdict(finding) for finding in found],
        "unknown": unknown,
        "is_whole": is_whole,
        "placement": placement,
        "memory": _memory(run, step_bytes, evaluation_bytes),
        "step": step,
        "host_reads": [asdict(read) for read in dict.fromkeys(run.reads)],
        "unfollowed": list(dict.fromkeys(read.line for read in run.reads if read.what in UNFOLLOWED)),
        "num_parameters": run.parts.num_parameters,
        "residency": run.parts.residency,
        "largest_batch_size": {},
        "has_own_loader": isinstance(run.parts.splits.train, OwnLoader) and run.parts.splits.train.is_loader,
    }
    usable_bytes = request["usable_bytes"]
    if not findings and usable_bytes is not None:
        # at least half of the time, even if reading the data took long
        deadline = max(began, time.monotonic() - request["seconds"] / 2) + request["seconds"]
        answer["largest_batch_size"] = _largest(run, request, deadline=deadline)
        if step_bytes > usable_bytes:
            answer["recompute"] = _recomputed(run, usable_bytes)
    return answer


def largest(peak_bytes: Callable[[int], int], usable_bytes: int, *, start: int, deadline: float) -> int:
    """Return the largest batch size whose step takes at most `usable_bytes`, within a percent; 0: not even one row fits.

    Memory grows almost linearly, so each guess is on the line through the last two sizes.

    deadline: By time.monotonic(). Raises: OutOfTime.
    """
    good, bad, guess = 0, MAX_ROWS + 1, start
    known: list[tuple[int, int]] = []
    for _ in range(MAX_TRIES):
        if time.monotonic() > deadline:
            raise OutOfTime
        known.append((guess, peak_bytes(guess)))
        if known[-1][1] <= usable_bytes:
            good = guess
        else:
            bad = guess
        edge = max(1, int(good * CLOSE))
        if bad - good <= edge:
            break
        guess = good * 2 if bad > MAX_ROWS else (good + bad) // 2
        if len(known) > 1 and len(known) % 3:  # every third guess halves, in case memory is not linear
            (few, less), (many, more) = known[-2:]
            slope = (more - less) / (many - few)
            guess = many + int((usable_bytes - more) / slope) if slope > 0 else guess
        guess = min(max(guess, good + edge), bad - 1, MAX_ROWS)
    return good


def _memory(run: SimulatedRun, step_bytes: int, evaluation_bytes: int | None) -> dict[str, Any]:
    peak = run.costs.peak
    return {
        "peak_bytes": peak.num_bytes,
        "peak_phase": peak.phase,
        "step_bytes": step_bytes,
        "evaluation_bytes": evaluation_bytes,
        "parts": dict(sorted(peak.parts.items(), key=lambda item: -item[1])),
    }


def _step(run: SimulatedRun) -> dict[str, Any]:
    costs, moved = run.costs, 0
    if not run.parts.train.device_bytes and run.device.type != "cpu":
        moved = sum(tensor.nbytes for batch in run.group for tensor in tensors(batch))
    return {
        "batch_size": run.parts.train.batch_size,
        "flops": costs.flops.total(),
        "flops_by_phase": dict(costs.flops),
        "num_kernels": costs.num_kernels,
        "touched_bytes": costs.touched_bytes,
        "arithmetic_intensity": costs.flops.total() / costs.touched_bytes if costs.touched_bytes else 0.0,
        "bytes_moved_to_device": moved,
        "compute_seconds": costs.compute_seconds,
        "memory_seconds": costs.memory_seconds,
        "roofline_seconds": costs.roofline_seconds,
    }


def _placement(run: SimulatedRun) -> list[dict[str, Any]]:
    run.names.update()
    return [
        {
            "name": name.path,
            "kind": name.kind,
            "device": str(tensor.device),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "bytes": tensor.nbytes,
        }
        for tensor, name in run.names.all()
    ]


def _recomputed(run: SimulatedRun, usable_bytes: int) -> str | None:
    train, prefix = run.cfg.train, "model." if isinstance(run.parts.model, Prepared) else ""
    pattern = repeated(run.parts.model, prefix=prefix)
    if not pattern or train.recompute or rules.why_not(run.cfg, {"train.recompute": [pattern]}):
        return None
    recompute(run.parts.model, [pattern], device=run.device, prefix=prefix)
    peak = run.peak_bytes(run.rows_trained, precision=train.precision)
    return pattern if peak <= usable_bytes else None


def _largest(run: SimulatedRun, request: dict[str, Any], *, deadline: float) -> dict[str, int | None]:
    """Return the largest batch size for each precision; None: not found in time, or the model accepts only one size."""
    own, by_bytes = run.cfg.train.precision, dict[int, int | None]()
    found: dict[str, int | None] = {}
    others = [] if own == "fp64" else request["precisions"]  # their weights are smaller
    for precision in dict.fromkeys([own, *others]):
        num_bytes = BYTES_PER_NUMBER[precision]
        if num_bytes not in by_bytes:
            peak_bytes = partial(run.peak_bytes, precision=precision)
            try:
                by_bytes[num_bytes] = largest(
                    peak_bytes, request["usable_bytes"], start=run.rows_trained, deadline=deadline
                )
            except Exception as error:
                by_bytes[num_bytes] = None
                sys.stderr.write(f"{precision}: {error}\n")
        found[precision] = by_bytes[num_bytes]
    return found


if __name__ == "__main__":
    main()
