"""`explain`: replays a run to the step that spoilt it, and says which operation, line and rows of the data did it.

Called by cli/after_training.py. Its steps: wanted.py, replay.py, look.py, blame.py, rows.py, advice.py, text.py. It only reads
the run's folder.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig

from runner.device import probe
from runner.device.placement import num_rows
from runner.errors import Fault, RunnerError, at_once
from runner.experiment.check import check
from runner.experiment.compose_run import of_run
from runner.experiment.provenance import versions
from runner.experiment.summary import read_summary
from runner.experiment.terminal import say, short
from runner.runs import find
from runner.runs.explain import text
from runner.runs.explain.advice import Case, advice
from runner.runs.explain.blame import Blame, blame, losses
from runner.runs.explain.look import Look, look
from runner.runs.explain.replay import Moment, Start, replay, start_before
from runner.runs.explain.rows import MOST_ROWS, placed
from runner.runs.explain.wanted import Wanted, asked_for
from runner.runs.load import computing
from runner.tracking.journal_reader import read_events

#: seconds that a replay takes
WORTH_A_WORD = 5.0
#: replays at most: to the step that was asked for, and to the one that turns out to have begun it
MOST_REPLAYS = 6


def explain(wanted: str, overrides: list[str], *, step: int | None) -> dict[str, Any]:
    """Says it, and returns what it says as plain values.

    Raises: RunnerError for a run that has no such step, and none whose loss is not finite where no step is named.
    """
    at_once(partial(find.find, wanted, verb="explain"), partial(computing, overrides))
    folder = find.find(wanted, verb="explain").absolute()
    cfg = of_run(folder, overrides)
    asked = asked_for(wanted, cfg, folder, step)
    was_compiled = bool(cfg.train.compile or cfg.train.cuda_graph)
    cfg.train.cuda_graph = False  # they are replayed as they are written, wherever
    choice = check(cfg, probe())
    say(f"run     {short(folder)}: {asked.in_words}")
    start, moment, seen = _replayed(asked, cfg, torch.device(choice.here))
    found = _found(asked, cfg, start, moment, seen)
    found["notes"] = _notes(asked, choice.device, moment, was_compiled=was_compiled)
    if found["replay"]["first_difference"] and not found["notes"]:
        found["notes"].append("other threads round otherwise, and so do jobs of a sweep that were trained as one")
    for line in text.lines(found):
        say(line)
    return found


def _notes(asked: Wanted, device: str, moment: Moment, *, was_compiled: bool) -> list[str]:
    summary, found = read_summary(asked.folder), []
    if (num := summary.get("num_processes") or 1) > 1:
        found.append(f"{num} processes trained it, and one replays it: sums are rounded otherwise")
    if was_compiled:
        found.append("its steps were compiled, and are replayed as they are written: they are rounded otherwise")
    if (then := summary.get("device")) not in (None, device):
        found.append(f"it ran on {then}, and is replayed on {device}")
    if (then := (summary.get("versions") or {}).get("torch")) not in (None, now := versions()["torch"]):
        found.append(f"it ran with torch {then}, and this is {now}")
    told = [event["digest"] for event in read_events(asked.folder) if event["kind"] == "dataset"]
    if told and not moment.parts.splits.fingerprint.startswith(told[-1]):
        found.append("the data is not what it was: its fingerprint is another one")
    return found


def _replayed(asked: Wanted, cfg: DictConfig, device: torch.device) -> tuple[Start, Moment, Look]:
    start, until = start_before(asked.folder, asked.step - asked.every + 1), asked.step
    _say_how_long(asked, start)
    for _ in range(MOST_REPLAYS):
        moment = replay(cfg, device, start, until=until)
        if moment is None:
            break
        if moment.reached.take is not None:
            seen = look(moment)
            if seen.origin is not None or not asked.is_failure:
                return start, moment, seen
            if until != asked.step:
                break
            until = max(asked.by_step) + 1  # it comes out otherwise here: perhaps in a later step
        elif moment.reached.step <= start.step:  # what the checkpoint holds is spoilt
            start = start_before(asked.folder, start.step)
        else:
            until = moment.reached.step
    problem = "replayed, it stays finite: what made it is not in its configuration, its data and its last checkpoint"
    fix = "the same code, data, torch and device as the run's"
    raise RunnerError(Fault(f"explain {short(asked.folder)}", problem, fix))


def _say_how_long(asked: Wanted, start: Start) -> None:
    rate = read_summary(asked.folder).get("steps_per_second") or math.inf
    if (seconds := (asked.step - start.step) / rate) > WORTH_A_WORD:
        say(f"replay  {asked.step - start.step:,} steps, some {seconds:,.0f} s at least")


def _found(asked: Wanted, cfg: DictConfig, start: Start, moment: Moment, seen: Look) -> dict[str, Any]:
    origin, parts = seen.origin, moment.parts
    blamed = blame(moment, origin, seen.generators, loss=seen.loss) if origin is not None else Blame(())
    picked = losses(moment) if origin is None else [(blamed.batch, row, None) for row in blamed.rows]
    rows = placed(moment, cfg, picked[:MOST_ROWS])
    known = {**asked.by_step, **moment.losses}
    recent = [known[number] for number in sorted(known) if number < moment.reached.step]
    sure = rows if blamed.is_sure else []
    return {
        "run": short(asked.folder),
        "asked_step": asked.step,
        "step": moment.reached.step,
        "epoch": moment.place[0] + 1,
        "loss": seen.loss,
        "is_finite": origin is None,
        "replay": _comparison(asked, start, moment, seen.loss),
        "losses": {number: asked.by_step[number] for number in asked.around(moment.reached.step)},
        "operation": None if origin is None else text.operation(origin),
        "rows": [asdict(row) for row in rows],
        "num_bad_rows": len(blamed.rows),
        "num_rows": sum(num_rows(batch) for batch in moment.reached.batches),
        "rows_are_sure": blamed.is_sure,
        "of_all_rows": blamed.of_all,
        "gradient_norms": dict(seen.norms),
        "largest": [one._asdict() for one in seen.largest],
        "try": "" if origin is None else advice(Case(origin, sure, recent, parts.optimizer.param_groups)),
    }


def _comparison(asked: Wanted, start: Start, moment: Moment, loss: float) -> dict[str, Any]:
    now = {**moment.losses, moment.reached.step: loss}
    both = [(step, asked.by_step[step], now[step]) for step in sorted(now.keys() & asked.by_step.keys())]
    differing = [(step, then, here) for step, then, here in both if not _same(then, here)]
    return {
        "checkpoint": None if start.file is None else f"checkpoints/{start.file.name}",
        "from_step": start.step,
        "steps": moment.reached.step - start.step - 1,
        "compared": len(both) if asked.every == 1 else 0,
        "first_difference": differing[0] if differing and asked.every == 1 else None,
    }


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))
