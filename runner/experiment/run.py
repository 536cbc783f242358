"""One run, from its configuration to its closed tracker: the main path, called by every command that makes a run.

Jobs of a sweep that are trained together take sweep/jobs/run_together.py instead.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from omegaconf import DictConfig

from runner.experiment import claim, processes
from runner.experiment.check import check_here
from runner.experiment.context import Checked, RunContext
from runner.experiment.session import Session, check_directory
from runner.experiment.summary import Summary
from runner.training.fit import fit


def run(cfg: DictConfig, directory: Path, *, context: RunContext = RunContext()) -> Summary:
    """Run one experiment, or continue the one in its directory, as the caller has made sure (RunDirectory.begin, runs.find.check).

    Returns:
        What is in summary.json. A training that fails is a `status` there, not an exception.

    Raises: RunnerError with every error in the configuration or the data, before anything is tracked.
    """
    check_directory(directory, cfg)
    checked = context.checked or check_here(cfg, choice=context.device)  # every error at once; else the device, and why
    rank = processes.find_rank(cfg)
    if rank is not None and rank.rank:
        return processes.follow(cfg, rank, replace(context, checked=checked))
    choices = processes.choose_devices(cfg, checked, rank, context)
    with nullcontext() if context.is_launched else claim.RunDirectory(directory, wait_seconds=10.0):
        if len(choices) > 1:
            if context.publisher is not None:
                context.publisher.close()  # the first of the processes starts its own
            return processes.run_in_processes(cfg, directory, choices, context)
        ranks = processes.join(rank, choices[0])  # one process, or the first of several
        processes.share_directory(ranks, directory, is_launched=context.is_launched)
        device, machine = torch.device(choices[0].here), Checked(checked.hardware, choices[0])
        with Session.open(cfg, directory, machine=machine, context=context) as session:
            settings = session.settings  # training sees no cfg
            parts = processes.prepare_in_turn(cfg, ranks, device, directory=directory, rank=rank)
            session.begin(cfg, parts)
            result = fit(parts, settings, directory, observer=session.reporter, stop=session.stop, ranks=ranks)
            if settings.train.compile:
                torch.compiler.reset()  # it keeps each run's functions, and refuses the ninth of a process
            session.end(result, ranks)
        return session.summary
