"""`python -m runner.plan.worker`: simulates a device, and says what the run would do on it. Started by command.py.

It reads a request on stdin and writes a file. A process of its own: the simulation changes torch for good, and where
torch has a hole in it, it ends the process.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn

from runner.data.own_loader import OwnLoader
from runner.device.placement import move, place, tensors
from runner.errors import OF_CODE, RunnerError
from runner.inspection import call_site
from runner.inspection.costs import Moment, Speeds
from runner.inspection.findings import Finding, merged
from runner.inspection.tensor_names import Names
from runner.models.with_preprocessing import Prepared
from runner.plan.dry_run import UNFOLLOWED, Trial, build, of_error
from runner.plan.simulator import simulated_device
from runner.plan.simulator.shapes import NotSimulated
from runner.plan.simulator.torch_parts import Machine
from runner.training.recompute import recompute, repeated

MOST_ROWS = 2**24
MOST_TRIES = 12
CLOSE = 0.01  # of the answer: steps between are not tried


class OutOfTime(Exception):
    """The search was ended before it knew."""


def largest(peak_bytes: Callable[[int], int], usable_bytes: int, *, start: int, deadline: float) -> int:
    """The largest batch size whose step takes at most `usable_bytes`, within a percent; 0 where not even one row fits.

    Memory grows with a batch nearly in a straight line, so each guess is drawn through the two sizes next to the limit.
    deadline: by time.monotonic(). Raises: OutOfTime.
    """
    known: dict[int, int] = {}

    def fits(size: int) -> bool:
        if time.monotonic() > deadline:
            raise OutOfTime
        if size not in known:
            known[size] = peak_bytes(size)
        return known[size] <= usable_bytes

    good, bad = (start, 0) if fits(start) else (0, start)
    while bad == 0:
        if good >= MOST_ROWS:
            return good
        # where the line has led to the limit, only the step behind it is missing
        edge = good + max(1, int(good * CLOSE))
        following = min(MOST_ROWS, max(edge, _through(known, usable_bytes)) if len(known) > 1 else good * 2)
        good, bad = (following, 0) if fits(following) else (good, following)
    if good == 0 and bad > 1:
        if not fits(1):
            return 0
        good = 1
    for _ in range(MOST_TRIES):
        if bad - good <= max(1, int(good * CLOSE)):
            break
        guess = _through({good: known[good], bad: known[bad]}, usable_bytes) if good in known else (good + bad) // 2
        edge = max(1, (bad - good) // 50)
        guess = min(max(guess, good + edge), bad - edge)
        good, bad = (guess, bad) if fits(guess) else (good, guess)
    return good


def _through(known: dict[int, int], usable_bytes: int) -> int:
    if len(known) < 2:
        return 0
    (less, few), (more, many) = sorted(known.items())[-2:]
    if many <= few:
        return more * 8
    return less + int((usable_bytes - few) * (more - less) / (many - few))


#: precisions whose activations take the same memory: a search for one tells the other
SIZE_OF_A_NUMBER = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
MOST_MOMENTS = 400  # of the memory's course that are kept


def main() -> None:
    answer_file = Path(sys.argv[1])
    request = json.loads(sys.stdin.readline())
    warnings.simplefilter("ignore")
    about = {**request["machine"], "capability": tuple(request["machine"]["capability"])}
    with simulated_device(request["device"], has_numbers=False, machine=Machine(**about)) as device:
        _try(device)
        answer_file.with_suffix(".ready").touch()
        cfg = OmegaConf.create(request["yaml"])
        cfg.data.num_workers = 0  # of its data it reads one batch
        answer = look(cfg, device, request)
    answer_file.write_text(json.dumps(answer))


def look(cfg: Any, device: torch.device, request: dict[str, Any]) -> dict[str, Any]:
    """Everything that can be told of the run without its numbers."""
    began = time.monotonic()
    findings: list[Finding] = []
    trial: Trial | None = None
    unknown = ""
    try:
        trial = build(cfg, device, speeds=Speeds(**request["speeds"]), **request["processes"])
        if request["is_brief"]:
            trial.take_steps(2)
        else:
            trial.take_steps()
            trial.evaluate_once()
    except RunnerError as error:
        return {"problems": [asdict(problem) for problem in error.problems]}
    except NotSimulated as error:
        files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
        place = f" at {call_site.line_of_error(error)}" if any(map(call_site.is_own, files)) else ""
        unknown = f"{error}{place}"
    except OF_CODE as error:
        if trial is not None and trial.unknown:  # with the device's own values it may well go on
            unknown = f"{trial.unknown}, and with others in their place it ends: {of_error(error)}"
        else:
            findings.append(of_error(error))
    if trial is None:
        return {"findings": [asdict(finding) for finding in findings], "unknown": unknown}
    found = merged([*trial.findings, *trial.slow.findings, *findings])
    unknown = unknown or trial.unknown
    is_whole = not findings and not unknown
    placement, step, step_bytes = _placement(trial.names, trial), _step(trial), trial.costs.peak.num_bytes
    trial.let_go()
    evaluation_bytes = trial.count_evaluation() if is_whole and not request["is_brief"] else None
    answer: dict[str, Any] = {
        "findings": [asdict(finding) for finding in found],
        "unknown": unknown,
        "is_whole": is_whole,
        "placement": placement,
        "memory": _memory(trial, step_bytes, evaluation_bytes),
        "step": step,
        "host_reads": [asdict(read) for read in dict.fromkeys(trial.reads)],
        "unfollowed": list(dict.fromkeys(read.line for read in trial.reads if read.what in UNFOLLOWED)),
        "num_parameters": trial.parts.num_parameters,
        "residency": trial.parts.residency,
        "largest_batch_size": {},
        "own_loaders": [name for name in ("train", "val", "test") if _is_own(getattr(trial.parts.splits, name))],
    }
    if not findings and request["usable_bytes"] is not None:
        # where the data took long to read, there is still half of the time to search
        deadline = max(began, time.monotonic() - request["seconds"] / 2) + request["seconds"]
        if (evaluation_bytes or 0) > request["usable_bytes"]:
            answer["largest_eval_batch_size"] = _largest_evaluated(trial, request, deadline=deadline)
        answer["largest_batch_size"] = _largest(trial, request, deadline=deadline)
        if step_bytes > request["usable_bytes"]:
            answer["recompute"] = _recomputed(trial, request["usable_bytes"])
    return answer


def _is_own(rows: Any) -> bool:
    return isinstance(rows, OwnLoader) and rows.is_loader


def _try(device: torch.device) -> None:
    """A forward and a backward pass: where torch does not allow it, it ends here, before anything is said."""
    model = place(nn.Linear(2, 2), device)
    loss = model(move(torch.ones(1, 2), device)).sum()
    loss.backward()


def _memory(trial: Trial, step_bytes: int, evaluation_bytes: int | None) -> dict[str, Any]:
    peak = trial.costs.peak
    return {
        "peak_bytes": peak.num_bytes,
        "peak_phase": peak.phase,
        "step_bytes": step_bytes,
        "evaluation_bytes": evaluation_bytes,
        "parts": _sorted(peak.parts),
        "timeline": [
            {"phase": moment.phase, "parts": moment.parts} for moment in _thinned(trial.costs.timeline, MOST_MOMENTS)
        ],
    }


def _sorted(parts: dict[str, int]) -> dict[str, int]:
    return dict(sorted(parts.items(), key=lambda item: -item[1]))


def _thinned(moments: list[Moment], most: int) -> list[Moment]:
    """Of neighbours the highest, so that no peak is lost."""
    if len(moments) <= most:
        return moments
    bounds = [round(index * len(moments) / most) for index in range(most + 1)]
    return [max(moments[start:stop], key=lambda moment: moment.num_bytes) for start, stop in pairwise(bounds)]


def _step(trial: Trial) -> dict[str, Any]:
    costs, moved = trial.costs, 0
    if not trial.parts.train.device_bytes and trial.device.type != "cpu":
        moved = sum(tensor.numel() * tensor.element_size() for batch in trial.group for tensor in tensors(batch))
    return {
        "batch_size": trial.parts.train.batch_size,
        "flops": costs.flops.total(),
        "flops_by_phase": dict(costs.flops),
        "recurrent_flops": costs.recurrent_flops,
        "num_kernels": costs.num_kernels,
        "touched_bytes": costs.touched_bytes,
        "arithmetic_intensity": costs.flops.total() / costs.touched_bytes if costs.touched_bytes else 0.0,
        "bytes_moved_to_device": moved,
        "compute_seconds": costs.compute_seconds,
        "memory_seconds": costs.memory_seconds,
        "roofline_seconds": costs.roofline_seconds,
    }


def _placement(names: Names, trial: Trial) -> list[dict[str, Any]]:
    names.look_again()
    return [
        {
            "name": name.path,
            "kind": name.kind,
            "device": str(tensor.device),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "bytes": tensor.numel() * tensor.element_size(),
        }
        for tensor, name in names.all()
    ]


def _recomputed(trial: Trial, usable_bytes: int) -> str | None:
    train, prefix = trial.cfg.train, "model." if isinstance(trial.parts.model, Prepared) else ""
    pattern = repeated(trial.parts.model, prefix=prefix)
    if not pattern or train.recompute or train.compile or train.cuda_graph:
        return None
    recompute(trial.parts.model, [pattern], device=trial.device, prefix=prefix)
    peak = trial.peak_bytes(trial.rows_trained, precision=train.precision)
    return pattern if peak <= usable_bytes else None


def _largest(trial: Trial, request: dict[str, Any], *, deadline: float) -> dict[str, int | None]:
    own = trial.cfg.train.precision
    order = [own, *(name for name in request["precisions"] if name != own)]
    found: dict[str, int | None] = {}
    for precision in order:
        alike = next((name for name in found if SIZE_OF_A_NUMBER[name] == SIZE_OF_A_NUMBER[precision]), None)
        if alike is not None:
            found[precision] = found[alike]
            continue
        try:
            found[precision] = largest(
                lambda size, precision=precision: trial.peak_bytes(size, precision=precision),  # type: ignore[misc]
                request["usable_bytes"],
                start=trial.rows_trained,
                deadline=deadline,
            )
        except (OutOfTime, NotSimulated):
            found[precision] = None
        except Exception as error:  # a model that takes batches of one size only
            found[precision] = None
            sys.stderr.write(f"{precision}: {error}\n")
    return found


def _largest_evaluated(trial: Trial, request: dict[str, Any], *, deadline: float) -> int | None:
    usable_bytes, start = request["usable_bytes"], trial.rows_evaluated
    try:
        return largest(trial.evaluation_bytes, usable_bytes, start=start, deadline=deadline)
    except Exception as error:  # likewise
        sys.stderr.write(f"evaluation: {error}\n")
        return None


if __name__ == "__main__":
    main()
