"""Looks, before a run, whether each batch leaves batch normalisation two rows in each process, and says which size does."""

from __future__ import annotations

import copy
import itertools

import torch
from torch import nn

from runner.data.loading.loaders import Batches
from runner.device import backends
from runner.device.placement import in_batches, place
from runner.errors import OF_CODE, Problem, RunnerError
from runner.tasks.task import Task

BATCH_NORMS = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm


def check_last_batch(model: nn.Module, task: Task, batches: Batches, device: torch.device, num_ranks: int = 1) -> None:
    """Raises: RunnerError where an epoch ends with a batch of which a process has one row or none, which it computes with
    somebody else's, and a layer takes a mean over the rows that it sees.
    """
    rows, size = batches.num_rows, batches.batch_size
    is_synced = num_ranks > 1 and any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    if _all_have_two(rows, size, num_ranks) or size == num_ranks == 1 or is_synced:  # a synced one waits for the others
        return
    if not any(isinstance(module, BATCH_NORMS) for module in model.modules()):
        return
    one = next(in_batches(next(iter(batches.epoch(0))), 1))
    states = backends.generator_states(device)
    try:
        probe_model, probe_task = copy.deepcopy((model, task))
        if isinstance(probe_task, nn.Module):
            probe_task = place(probe_task, device)
        if len({weight.device for weight in model.parameters()}) == 1:  # one in parts is not there yet
            probe_model = place(probe_model, device)
        probe_model.train()
        with torch.no_grad():
            probe_task(probe_model, one)
    except OF_CODE as error:  # all else comes up in the run, too, or is no matter: some models can't be copied
        if "more than 1 value per channel" in str(error):
            raise RunnerError(_last_batch_problem(rows, size, num_ranks)) from None
    finally:
        backends.set_generator_states(states, device)


def _all_have_two(rows: int, size: int, num_ranks: int) -> bool:
    return (rows % size or size) >= 2 * num_ranks


def _last_batch_problem(rows: int, size: int, num_ranks: int) -> Problem:
    least = 2 * num_ranks
    problem = f"of {rows:,} rows the last batch of an epoch has one, and batch normalisation needs two"
    if num_ranks > 1:
        last = rows % size or size
        problem = f"of {rows:,} rows the last batch of an epoch has {last}, {last / num_ranks:.2g} for each of {num_ranks} processes"
        problem += ", and batch normalisation needs two rows in each"
    if rows < least:
        fix = f"train.num_processes={max(1, rows // 2)}" if num_ranks > 1 else "data with more rows"
        return Problem(f"train.batch_size={size}", problem, fix)
    others = itertools.chain(range(size - 1, least - 1, -1), itertools.count(max(size + 1, least)))
    fits = next(other for other in others if _all_have_two(rows, other, num_ranks))
    return Problem(f"train.batch_size={size}", problem, f"train.batch_size={fits}")
