"""One run, from its configuration to its closed tracker: the main path, called by every command that makes a run.

Jobs of a sweep that are trained together go through together.py instead.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from runner.config.secrets import mask_folder
from runner.config.settings import Settings
from runner.config.trust import check_folder
from runner.experiment import claim, processes
from runner.experiment.check import check_here
from runner.experiment.given import Checked, Given
from runner.experiment.other_ranks import follow
from runner.experiment.session import Session
from runner.tracking import recipes
from runner.training.fit import fit


def run(cfg: DictConfig, folder: Path, *, given: Given | None = None) -> dict[str, Any]:
    """Runs one experiment. A folder that holds a part of it is gone on with: that it is a part of this one, the caller has
    seen to (claim.begin, runs.find.check, the sweep's ledger).

    given: what the caller knows of it already (None: nothing).
    Returns what summary.json holds; a training that fails is a `status` there, not an exception.
    Raises: RunnerError for what is wrong with the configuration or the data, before anything is tracked.
    """
    given = given or Given()
    check_folder(folder)
    mask_folder(folder, cfg)
    recipes.check(folder)
    # every mistake at once; else the device, and why it is the one
    checked = given.checked or check_here(cfg, choice=given.choice)
    place = processes.place_here(cfg)
    if place is not None and place.rank:
        return follow(cfg, place, choice=given.choice)
    choices = processes.devices_here(cfg, checked, place, given=given)
    with nullcontext() if given.is_launched else claim.taken(folder):
        if len(choices) > 1:
            if given.publisher is not None:
                given.publisher.close()  # the first of them has its own
            return processes.run_in_several(cfg, folder, choices, given=given)
        machine = Checked(checked.hardware, choices[0])
        ranks = processes.joined(place, choices[0])  # alone, or the first of several
        processes.give_folder(ranks, folder, is_launched=given.is_launched)
        settings = Settings.of(cfg)  # frozen and typed: whoever trains sees no cfg
        with Session.open(cfg, folder, settings=settings, machine=machine, given=given) as session:
            device = torch.device(choices[0].here)
            parts = processes.prepare_in_turn(cfg, ranks, device, folder=folder, place=place)
            session.begin(cfg, parts)
            result = fit(parts, settings, folder, observer=session, stop=session.stop, ranks=ranks)
            if settings.train.compile:
                torch.compiler.reset()  # it keeps each run's functions, and refuses the ninth of a process
            session.end(result, ranks)
        return session.summary
