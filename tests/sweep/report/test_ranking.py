import pytest

from runner.sweep.report.results import BestOfJob, Goal, JobResult, best_first, find_front, find_goals

LOSS, ACCURACY = Goal("val/loss", "min"), Goal("val/accuracy", "max")


def make(job, state="finished", **metrics):
    return JobResult(
        job, f"job {job}", (), {}, state, str(job), metrics={f"val/{name}": value for name, value in metrics.items()}
    )


def order(results, *goals):
    return [result.job for result in best_first(results, goals)]


@pytest.mark.parametrize(
    ("goal", "values", "expected"),
    [
        (LOSS, [3.0, 1.0, 2.0], [1, 2, 0]),
        (ACCURACY, [3.0, 1.0, 2.0], [0, 2, 1]),
        (LOSS, [None, 1.0, float("nan"), float("inf"), 2.0], [1, 4, 3, 0, 2]),
        (ACCURACY, [1.0, 1.0, 2.0], [2, 0, 1]),
        (ACCURACY, [0.5, float("inf"), 0.9, float("-inf")], [2, 0, 1, 3]),
    ],
)
def test_the_best_value_stands_first_and_none_last(goal, values, expected):
    name = goal.metric.removeprefix("val/")
    results = [make(job, **({} if value is None else {name: value})) for job, value in enumerate(values)]
    assert order(results, goal) == expected


def test_states_stand_in_groups_and_the_value_decides_within_them():
    states = ["failed", "skipped", "planned", "pruned", "finished", "killed", "running", "finished", "pruned", "odd"]
    results = [make(job, state, loss=10.0 - job) for job, state in enumerate(states)]
    assert order(results, LOSS) == [7, 4, 8, 3, 9, 6, 2, 1, 5, 0]


def test_without_a_goal_the_number_decides():
    assert order([make(2), make(0), make(1)]) == [0, 1, 2]


def test_a_grid_follows_the_metric_that_most_jobs_kept():
    results = [make(job) for job in range(3)]
    for result, metric in zip(results, ("val/loss", "val/accuracy", "val/accuracy"), strict=True):
        result.best = BestOfJob(metric, "max" if "acc" in metric else "min", 0.5, 1, None, None)
    assert find_goals((), results) == (ACCURACY,)
    assert find_goals((), [make(0)]) == ()


def test_a_search_follows_its_objectives():
    objectives = ({"metric": "val/loss", "direction": "minimize"}, {"metric": "val/accuracy", "direction": "maximize"})
    assert find_goals(objectives, []) == (LOSS, ACCURACY)


def test_the_front_holds_what_no_other_job_beats():
    results = [make(0, loss=1.0, accuracy=0.5), make(1, loss=2.0, accuracy=0.9), make(2, loss=2.0, accuracy=0.8)]
    results += [make(3, loss=1.0, accuracy=0.5), make(4, loss=0.5), make(5, "pruned", loss=0.1, accuracy=1.0)]
    assert find_front(results, (LOSS, ACCURACY)) == {0, 1, 3}
    assert order(results, LOSS, ACCURACY) == [0, 3, 1, 2, 4, 5]
    assert find_front(results, (LOSS,)) == set()
