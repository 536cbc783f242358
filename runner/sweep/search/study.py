"""Create and open Optuna's study in a search's directory, with its sampler and its pruner. Imports Optuna.

job_source.py uses its database in the sweep's process, and pruning.py in a job's.
"""

from __future__ import annotations

import errno
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from optuna import Study
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.storages import RDBStorage

    from runner.config.schema import SearchKeys

FILE = "optuna.db"  # in a sweep directory
NAME = "search"  # of the study in it
PRUNING = "pruning"  # attribute of the study with the pruner's settings, for the jobs
#: a job writes a line per epoch, the sweep some per trial; each takes milliseconds
WAIT_SECONDS = 60.0
TRIES = 5
Value = TypeVar("Value")


@dataclass(frozen=True)
class Pruning:
    """Settings of the pruner; plain values, as the jobs read them from the study."""

    kind: str  # median | hyperband | halving
    warmup_epochs: int
    startup_trials: int
    num_epochs: int | None  # None: unknown; hyperband then uses the longest trial


def open_storage(path: Path, *, is_new: bool, may_share_memory: bool = True) -> RDBStorage:
    """Open the study's database, for any number of processes.

    is_new: Create it. may_share_memory: All processes run on this machine, so writers need not wait for readers.
    """
    from optuna import logging
    from optuna.storages import RDBStorage

    logging.set_verbosity(logging.ERROR)  # else it logs every trial on stderr
    storage = RDBStorage(
        f"sqlite:///{_as_url(path)}",
        engine_kwargs={"connect_args": {"timeout": WAIT_SECONDS}},
        skip_compatibility_check=not is_new,
        skip_table_creation=not is_new,
    )
    # a closed connection would merge the write-ahead log into the file at each use
    weakref.finalize(storage, storage.engine.dispose)
    if is_new and may_share_memory:
        with storage.engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode=WAL")
    return storage


def make_study(storage: RDBStorage, directions: Sequence[str], pruning: Pruning | None) -> Study:
    """Create or load the study, with the pruner's settings for the jobs."""
    import optuna

    study = optuna.create_study(
        study_name=NAME,
        storage=storage,
        directions=[optuna.study.StudyDirection[name.upper()] for name in directions],
        sampler=optuna.samplers.RandomSampler(seed=0),  # until the number of trials is known
        load_if_exists=True,
    )
    study.set_user_attr(PRUNING, asdict(pruning) if pruning else None)
    return study


def make_sampler(settings: SearchKeys, *, num_trials: int) -> BaseSampler:
    """Return the sampler. num_trials: Of the study so far; the seed depends on it, so that suggestions don't repeat."""
    from optuna import samplers

    seed = settings.seed + num_trials
    if settings.sampler == "tpe":
        return samplers.TPESampler(seed=seed, constant_liar=True)  # running trials count as poor, so others differ
    if settings.sampler == "cmaes":
        return samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False)
    if settings.sampler == "nsga2":
        # Optuna's default of 50 per generation exceeds a small search, and the first generation is random
        return samplers.NSGAIISampler(seed=seed, population_size=max(4, min(50, settings.n_trials // 5)))
    return samplers.RandomSampler(seed=seed)


def make_pruner(pruning: Pruning) -> BasePruner:
    """Return the pruner; epochs count from 1."""
    from optuna import pruners

    least = max(1, pruning.warmup_epochs)
    if pruning.kind == "hyperband":
        most = max(pruning.num_epochs, least) if pruning.num_epochs else "auto"
        return pruners.HyperbandPruner(min_resource=least, max_resource=most)
    if pruning.kind == "halving":
        return pruners.SuccessiveHalvingPruner(min_resource=least, reduction_factor=3)
    return pruners.MedianPruner(n_startup_trials=pruning.startup_trials, n_warmup_steps=pruning.warmup_epochs)


def read_pruning(attributes: Mapping[str, Any]) -> Pruning | None:
    """Return the settings that make_study() stored in the study."""
    found = attributes.get(PRUNING)
    return Pruning(**found) if found else None


def patiently(action: Callable[[], Value]) -> Value:
    """Return `action()`, repeated while another process locks the database.

    Raises: the last error, after some minutes; OSError for a full disk.
    """
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import OperationalError

    for attempt in range(TRIES):
        try:
            return action()
        except (StorageInternalError, OperationalError) as error:
            said = f"{error} {error.__cause__}"
            if "database or disk is full" in said:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), FILE) from error
            if attempt == TRIES - 1 or "locked" not in said:
                raise
            time.sleep(0.1 * 2**attempt)
    raise AssertionError("unreachable")


def _as_url(path: Path) -> str:
    # characters with a meaning in URLs, and braces, which Optuna reads as a template
    return str(path).translate({ord(char): f"%{ord(char):02x}" for char in "%?#"}).replace("{", "{{").replace("}", "}}")
