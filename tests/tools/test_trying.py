"""The rounds of a try: the jobs for missing values, and the end. The runs are simulated."""

from types import SimpleNamespace

import pytest

from runner.sweep.jobs.ledger import Job
from runner.sweep.report.results import BestOfJob, Goal, JobResult
from runner.tools import tries
from runner.tools.tries import Side, measure

LOSS = Goal("val/loss", "min")
SEEDS = range(48)
MAX_ROUNDS = 60


@pytest.fixture
def tried(monkeypatch):
    """Return a function for the decision and the seeds of the reference's jobs. state: Of its jobs, by seed."""

    def run(state, known=()):
        own = Side("try 1", [], ["optimizer.lr=0.1"], LOSS, {})
        other = Side("a run", [], ["optimizer.lr=0.2"], LOSS, {}, values=dict.fromkeys(known, 1.0))

        def result(job):
            seed, is_own = int(job.overrides[-1].partition("=")[2]), job.overrides[0] in own.words
            found = "finished" if is_own else state(seed)
            value = (0.9 + 0.3 * (seed % 2) if is_own else 1.0) if found == "finished" else None
            return JobResult(job.number, "", (), {}, found, "", seed, best=BestOfJob("val/loss", "min", value, 1))

        def add(hands, jobs, swept):
            hands.sweep.jobs |= {
                number: Job(number, words, "") for number, words in enumerate(jobs, len(hands.sweep.jobs))
            }
            return jobs

        def run_sweep(plan, context, config):
            sweep = SimpleNamespace(jobs={number: Job(number, *each) for number, each in enumerate(plan.jobs)})
            more = plan.source(SimpleNamespace(sweep=sweep, prepared=[]))._more
            assert sum(1 for _ in zip(iter(more, []), range(MAX_ROUNDS), strict=False)) < MAX_ROUNDS, "it never ends"
            seeds.extend(int(job.overrides[-1][5:]) for job in sweep.jobs.values() if job.overrides[0] in other.words)
            return sweep

        def look(is_over):
            return tries.look(LOSS, SEEDS, own.values, other.values, lost=own.lost | other.lost, is_over=is_over)

        seeds = []
        monkeypatch.setattr(tries, "read_results", lambda sweep: list(map(result, sweep.jobs.values())))
        monkeypatch.setattr(tries, "add_jobs", add)
        monkeypatch.setattr(tries, "run_sweep", run_sweep)
        return measure([own, other], look, None, None), seeds

    return run


def test_seed_with_failed_reference_is_skipped(tried):
    found, seeds = tried(lambda seed: "failed" if seed == 5 else "finished", known=set(range(12)) - {5})
    assert seeds == [5, 12] and list(found.values) == [*range(5), *range(6, 13)]
    assert found.why == "no better, over 12 seeds"


def test_it_ends_where_the_reference_always_fails(tried):
    found, seeds = tried(lambda seed: "failed")
    assert (found.verdict, found.values, seeds) == ("undecided", {}, [*SEEDS])


def test_try_ends_when_queue_time_is_over(tried):
    found, seeds = tried(lambda seed: "finished" if seed < 3 else "interrupted")
    assert (found.why.partition(";")[0], seeds) == ("the time was up after 3 seeds of both", [0, 1, 2, 3, 3])
