"""Report an epoch's value to the search's study, and return whether the trial is pruned.

In the job's process: run_job.py creates it, and training/fit.py calls it at the end of each epoch.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING

from runner.sweep.search.study import NAME, make_pruner, open_storage, patiently, read_pruning

if TYPE_CHECKING:
    from optuna import Study
    from optuna.storages import RDBStorage

log = logging.getLogger("runner")


class StudyTrial:
    """The trial of this job in the search's study."""

    def __init__(self, study: str, number: int, *, metric: str) -> None:
        """study: The path of its database. number: Of the trial. The study is opened at the end of the first epoch."""
        self.metric = metric
        self._path, self._number = Path(study), number
        self._opened: tuple[RDBStorage, Study, int] | None = None
        self._startup_trials = 0
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
            log.warning("the search's study %s can't be asked, the trial goes on: %s", self._path, error)
            return False

    def _judge(self, value: float, epoch: int) -> bool:
        from optuna.trial import TrialState

        storage, study, trial_id = self._open()
        if epoch < max(self._reported, default=0):
            return False  # a resumed run: this epoch was not pruned before
        if epoch not in self._reported:
            storage.set_trial_intermediate_value(trial_id, epoch, value)
            self._reported.add(epoch)
        if math.isnan(value):
            return True  # a run does not recover from NaN, and the median of such values warns
        # call the pruner in any case: halving records the value at each rung
        verdict = study.pruner.prune(study, storage.get_trial(trial_id))
        if not verdict:
            return False
        whole = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        return len(whole) >= self._startup_trials

    def _open(self) -> tuple[RDBStorage, Study, int]:
        if self._opened is None:
            import optuna

            storage = open_storage(self._path, is_new=False)
            study = optuna.load_study(study_name=NAME, storage=storage, sampler=optuna.samplers.RandomSampler())
            pruning = read_pruning(study.user_attrs)
            study.pruner = make_pruner(pruning) if pruning else optuna.pruners.NopPruner()
            self._startup_trials = pruning.startup_trials if pruning else 0
            study_id = storage.get_study_id_from_name(NAME)
            trial_id = storage.get_trial_id_from_study_id_trial_number(study_id, self._number)
            self._reported = {*storage.get_trial(trial_id).intermediate_values}
            self._opened = storage, study, trial_id
        return self._opened
