"""One run, from its configuration to its closed tracker: the main path, called by every command that makes a run.

Jobs of a sweep that are trained together take sweep/jobs/run_together.py instead.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import torch
from omegaconf import DictConfig

from runner.distributed.environment import rank_here
from runner.experiment import processes
from runner.experiment.check import check_here
from runner.experiment.context import RunContext
from runner.experiment.directory import RunDirectory
from runner.experiment.session import Session, check_directory
from runner.experiment.summary import Summary
from runner.training.fit import fit


def run(cfg: DictConfig, directory: Path, *, context: RunContext = RunContext()) -> Summary:
    """Run one experiment, or resume the one in its directory; the caller has checked which (directory.begin, runs.find.check).

    Returns:
        The contents of summary.json. A training that fails is a `status` there, not an exception.

    Raises:
        RunnerError: With every error in the configuration or the data, before anything is tracked.
    """
    check_directory(directory, cfg)
    checked = context.checked or check_here(cfg, context=context)  # every error at once; else the devices, and why
    rank = rank_here(os.environ)
    if rank is not None and rank.rank:
        return processes.follow(cfg, rank, checked.choice)
    with nullcontext() if context.is_launched else RunDirectory(directory, wait_seconds=10.0):
        if len(checked.devices) > 1:
            if context.publisher is not None:
                context.publisher.close()  # the first of the processes starts its own
            return processes.run_in_processes(cfg, directory, checked.devices, context)
        device = torch.device(checked.choice.here)
        ranks = processes.join(rank, checked.choice)  # one process, or the first of several
        processes.share_directory(ranks, directory, is_launched=context.is_launched)
        with Session.open(cfg, directory, machine=checked, context=context) as session:
            settings = session.settings  # training sees no cfg
            parts = processes.prepare_in_turn(cfg, ranks, device, directory=directory, rank=rank)
            session.begin(cfg, parts)
            result = fit(parts, settings, directory, observer=session.reporter, stop=session.stop, ranks=ranks)
            if settings.train.compile:
                torch.compiler.reset()  # it keeps each run's functions, and refuses the ninth of a process
            session.end(result, ranks)
        return session.summary
