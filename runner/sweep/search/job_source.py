"""Makes jobs of a study's trials, one whenever there is a place for it, and tells the study how each ended.

scheduler.py asks for jobs, in the sweep's process. It keeps which trials run, and how many were good and failed in a row.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from runner.config.identity import key_of
from runner.errors import RunnerError
from runner.experiment.summary import read_summary
from runner.sweep.jobs.ledger import Job, kept
from runner.sweep.jobs.prepare import OF_THE_STORE, Prepared, without
from runner.sweep.scheduler import settle
from runner.sweep.search.ask_tell import Asking, open_study
from runner.sweep.search.objectives import Goals, values_of
from runner.sweep.search.space import Space
from runner.sweep.search.study import FILE, Pruning

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from runner.config.schema import Search as Settings
    from runner.sweep.sweep import Hands

#: trials that fail one after the other before a search is given up: at its start, and later
FAILURES_AT_START, FAILURES_IN_A_ROW = 5, 10


class Suggestions:
    """The trials of a study, each of them a job of the same number.

    The study comes first and the ledger second, both when a trial is asked for and when it ends: a kill between the two
    leaves the study ahead, and _take_up() brings the ledger there.
    """

    def __init__(self, hands: Hands, space: Space, goals: Goals, settings: Settings, pruning: Pruning | None) -> None:
        """Makes the study, or goes on with it. Raises: RunnerError when this study can't be gone on with."""
        self._hands, self._space, self._goals, self._settings = hands, space, goals, settings
        self._metric = goals[0]["metric"] if pruning is not None else None  # None: the jobs report nothing
        self._jobs = hands.sweep.jobs
        jobs = list(self._jobs.values())
        study = open_study(hands.sweep.folder, jobs, space, goals, pruning, is_here=hands.is_here)
        self._study = Asking(study, space, settings)
        self._again: deque[Job] = deque()
        self._running: set[int] = set()
        for trial in self._study.trials():
            self._take_up(trial)
        self._say_changes()
        self._num_good = sum(job.state in ("finished", "pruned") for job in self._jobs.values())
        self._num_failed_in_a_row = 0
        self._is_over = False
        if hands.config.sweep.retry:
            for job in jobs:
                if job.state in ("failed", "killed"):
                    self._study.retry(job)

    def next(self, num_waiting: int) -> Prepared | None:
        """The next trial, made only when there is a place free for it, so that it knows of all that have ended."""
        most = self._hands.num_slots or self._settings.batch
        if self._is_over or num_waiting or len(self._running) >= most:
            return None
        if self._again:
            return self._prepared(self._again.popleft())
        while not self._is_over and self._num_good + len(self._running) < self._settings.n_trials:
            job = self._new_job()
            if job is None:
                break
            try:
                return self._prepared(job)
            except (HydraException, OmegaConfBaseException, RunnerError) as error:
                # two choices that don't go together: each alone was checked before
                job.state, job.error = "failed", " ".join(str(error).split()) or type(error).__name__
                self.ended(job, {})
                self._hands.ledger.note(job)
        return None

    def ended(self, job: Job, summary: dict[str, Any]) -> None:
        """Tells the study. A job that finished without the metric is a failed one from here on."""
        self._running.discard(job.number)
        if job.state == "interrupted":
            return  # it goes on another time, as the same trial
        was_finished = job.state == "finished"
        self._conclude(job, summary)
        if job.state in ("finished", "pruned"):
            self._num_good, self._num_failed_in_a_row = self._num_good + 1, 0
            return
        self._num_failed_in_a_row += 1
        most = FAILURES_IN_A_ROW if self._num_good else FAILURES_AT_START
        has_no_such_metric = was_finished and not self._num_good
        if not self._is_over and (self._num_failed_in_a_row >= most or has_no_such_metric):
            self._is_over = True
            count = self._num_failed_in_a_row
            which = "the first trial" if count == 1 else f"{count} trials in a row"
            self._hands.say(f"search: given up, {which} failed; job {job.number}: {job.error}")

    def _new_job(self) -> Job | None:
        trial = self._study.ask(list(self._jobs.values()))
        if trial is None:
            self._is_over = True
            if self._settings.sampler != "grid":
                self._hands.say("search: every combination has been tried")
            return None
        values = trial.params
        return self._hands.add(
            self._space.overrides(values), self._space.name(values), number=trial.number, trial=values
        )

    def _prepared(self, job: Job) -> Prepared:
        prepared = self._hands.prepare(job)
        if self._metric is not None:
            study = str(self._hands.sweep.folder / FILE)
            prepared.assigned = {"study": study, "trial": job.number, "metric": self._metric}
        self._running.add(job.number)
        return prepared

    def _conclude(self, job: Job, summary: dict[str, Any]) -> None:
        from optuna.trial import TrialState

        values: list[float] | None = None
        if job.state == "finished":
            values, reason = values_of(summary, self._goals)
            if values is None:
                job.state, job.error = "failed", reason
        state = {"finished": TrialState.COMPLETE, "pruned": TrialState.PRUNED}.get(job.state, TrialState.FAIL)
        self._study.tell(job.number, state, values)

    def _take_up(self, trial: FrozenTrial) -> None:
        """Brings a trial and its job together, as a stop or a kill left them; what was in flight is to go on."""
        from optuna.trial import TrialState

        job = self._jobs.get(trial.number)
        if job is None:
            if trial.state == TrialState.RUNNING:  # asked for, and nobody heard the answer
                self._study.tell(trial.number, TrialState.FAIL)
            return
        if job.is_done:
            return
        folder = self._hands.sweep.folder_of(job)
        summary = read_summary(folder)
        if trial.state == TrialState.RUNNING and summary.get("status") not in ("finished", "pruned", "failed"):
            given = dict(zip(kept(self._space.fixed), self._space.fixed, strict=True))  # the ledger keeps no passwords
            store = {key_of(word): word for word in self._space.fixed if key_of(word) in OF_THE_STORE}
            job.overrides = tuple(store.get(key_of(word), given.get(word, word)) for word in job.overrides)
            self._again.append(job)
            return
        settle(job, folder, None, is_stopped=False)
        self._conclude(job, summary)
        self._hands.ledger.note(job)

    def _say_changes(self) -> None:
        """Warns when the line differs from the one before in what all trials have: their values may not compare."""
        words = {dimension.word for dimension in self._space.dimensions.values()}
        if not self._jobs:
            return
        fixed = without(OF_THE_STORE, kept(self._space.fixed))
        before = without(OF_THE_STORE, kept(self._jobs[max(self._jobs)].overrides))
        last = {text for text in before if text.partition("=")[0] not in words}
        gone, come = sorted(last - {*fixed}), sorted({*fixed} - last)
        if gone or come:
            had, have = " ".join(gone) or "nothing of the kind", " ".join(come) or "nothing of the kind"
            self._hands.say(f"note:   trials had {had}, and have {have} from here on: their values may not compare")
