"""Optuna's study in a search's directory: its sampler, its pruner and its trials. Imports Optuna.

job_source.py uses Trials in the sweep's process. StudyTrial reports epochs in a job's process.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from runner.sweep.jobs.ledger import Job

if TYPE_CHECKING:
    from optuna import Study
    from optuna.samplers import BaseSampler
    from optuna.storages import RDBStorage
    from optuna.trial import FrozenTrial, Trial, TrialState

    from runner.config.schema import SearchKeys
    from runner.sweep.search.space import Space

FILE = "optuna.db"  # in a sweep directory
NAME = "search"  # of the study in it
PRUNING = "pruning"  # attribute of the study with the pruner's settings, for the jobs
RETRY = "retry_of"  # attribute of a trial with a failed trial's values
MAX_REPEATS = 10  # repeated suggestions in a row
#: a job writes a line per epoch, the sweep some per trial; each takes milliseconds
WAIT_SECONDS = 60.0
TRIES = 5
Value = TypeVar("Value")
log = logging.getLogger("runner")


@dataclass(frozen=True)
class Pruning:
    """Settings of the median pruner; plain values, as the jobs read them from the study."""

    warmup_epochs: int
    startup_trials: int


def open_storage(path: Path, *, is_new: bool, may_share_memory: bool = True) -> RDBStorage:
    """Open the study's database, for any number of processes.

    is_new: Create it. may_share_memory: All processes run on this machine, so writers need not wait for readers.
    """
    from optuna import logging
    from optuna.storages import RDBStorage

    logging.set_verbosity(logging.ERROR)  # else it logs every trial on stderr
    # characters with a meaning in URLs, and braces, which Optuna reads as a template
    url = str(path).translate({ord(char): f"%{ord(char):02x}" for char in "%?#"}).replace("{", "{{").replace("}", "}}")
    storage = RDBStorage(
        f"sqlite:///{url}",
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
            text = f"{error} {error.__cause__}"
            if "database or disk is full" in text:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), FILE) from error
            if attempt == TRIES - 1 or "locked" not in text:
                raise
            time.sleep(0.1 * 2**attempt)
    raise AssertionError("unreachable")


class Trials:
    """A study's trials with these dimensions. `ask()` and `tell()` are on disk when they return, about 10 ms each."""

    def __init__(self, study: Study, space: Space, settings: SearchKeys) -> None:
        self._study, self._space = study, space
        self._is_grid = settings.sampler == "grid"
        self._distributions = {key: dimension.distribution for key, dimension in space.dimensions.items()}
        self._values = [dimension.listed() for dimension in space.dimensions.values()]
        self._study.sampler = make_sampler(settings, num_trials=len(self.all()))

    def ask(self, jobs: Sequence[Job]) -> Trial | None:
        """Return a new trial, or None if every combination was tried. jobs: The jobs so far.

        A job with the same values would be bitwise identical, and is not run again, although samplers repeat values if
        there are few choices.
        """
        return patiently(lambda: self._ask({self._combination(job.trial or {}) for job in jobs}))

    def tell(self, number: int, state: TrialState, values: list[float] | None = None) -> None:
        """Report how a trial ended, unless that was done before a kill of the sweep."""
        patiently(lambda: self._study.tell(number, values, state=state, skip_if_finished=True))

    def all(self) -> list[FrozenTrial]:
        """Return all trials by number."""
        return patiently(lambda: self._study.get_trials(deepcopy=False))

    def retry(self, job: Job) -> None:
        """Queue a trial with a failed trial's values, once."""
        values = job.trial
        if values and job.number not in {trial.user_attrs.get(RETRY) for trial in self.all()}:
            patiently(lambda: self._study.enqueue_trial(values, user_attrs={RETRY: job.number}))

    def _ask(self, seen: set[tuple[Any, ...]]) -> Trial | None:
        from optuna.trial import TrialState

        for _ in range(MAX_REPEATS):
            is_queued = any(trial.state == TrialState.WAITING for trial in self.all())
            if self._is_grid and not is_queued and not self._queue_unseen(seen):
                return None
            trial = self._study.ask(self._distributions)
            if RETRY in trial.user_attrs or self._combination(trial.params) not in seen:
                return trial
            self.tell(trial.number, TrialState.FAIL)
        if None not in self._values and not self._queue_unseen(seen):
            return None
        return self._study.ask(self._distributions)

    def _queue_unseen(self, seen: set[tuple[Any, ...]]) -> bool:
        every = product(*(values or [] for values in self._values))
        unseen = next((each for each in every if each not in seen), None)
        if unseen is not None:
            self._study.enqueue_trial(dict(zip(self._space.dimensions, unseen, strict=True)))
        return unseen is not None

    def _combination(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(values.get(key) for key in self._space.dimensions)


class StudyTrial:
    """The trial of this job in the search's study. training/fit.py calls it at the end of each epoch."""

    def __init__(self, study: str, number: int, *, metric: str) -> None:
        """study: The path of its database. number: Of the trial. The study is opened at the end of the first epoch."""
        self.metric = metric
        self._path, self._number = Path(study), number
        self._opened: tuple[RDBStorage, Study, int] | None = None
        self._reported: set[int] = set()  # epochs

    def gives_up(self, value: float, epoch: int) -> bool:
        """Report the metric's value at the end of an epoch (some ms), and return whether the trial is pruned.

        If the study can't be opened, the trial continues, and the log has the reason.
        """
        from optuna.exceptions import OptunaError
        from sqlalchemy.exc import SQLAlchemyError

        try:
            return patiently(lambda: self._judge(value, epoch))
        except (OptunaError, SQLAlchemyError, OSError, KeyError) as error:
            log.warning("the search's study %s can't be used, the trial continues: %s", self._path, error)
            return False

    def _judge(self, value: float, epoch: int) -> bool:
        storage, study, trial_id = self._open()
        if epoch < max(self._reported, default=0):
            return False  # a resumed run: this epoch was not pruned before
        if epoch not in self._reported:
            storage.set_trial_intermediate_value(trial_id, epoch, value)
            self._reported.add(epoch)
        if math.isnan(value):
            return True  # a run does not recover from NaN, and the median of such values warns
        return bool(study.pruner.prune(study, storage.get_trial(trial_id)))

    def _open(self) -> tuple[RDBStorage, Study, int]:
        if self._opened is None:
            import optuna

            storage = open_storage(self._path, is_new=False)
            study = optuna.load_study(study_name=NAME, storage=storage, sampler=optuna.samplers.RandomSampler())
            settings, pruners = study.user_attrs.get(PRUNING), optuna.pruners
            study.pruner = (
                pruners.MedianPruner(settings["startup_trials"], settings["warmup_epochs"])
                if settings
                else pruners.NopPruner()
            )
            study_id = storage.get_study_id_from_name(NAME)
            trial_id = storage.get_trial_id_from_study_id_trial_number(study_id, self._number)
            self._reported = {*storage.get_trial(trial_id).intermediate_values}
            self._opened = storage, study, trial_id
        return self._opened
