from runner.tracking.journal_reader import read_events, read_measured, read_points, read_series


def test_directory_without_journal_has_no_points(folder):
    assert read_points(folder) == {} and read_events(folder) == [] and read_series(folder) == {}


def test_points_and_events_keep_their_order(folder, journal):
    journal.event("start", uid="1")
    journal.points(("a", "b"), [1, 2], [10, 20], [[1, 2], [3, 4]])
    journal.points(("b",), [1], [30], [[5.5]])
    journal.points(("a", "b"), [3], [40], [[6, 7]])
    journal.event("end", status="FINISHED")
    assert read_points(folder) == {"a": [(1, 1.0), (2, 3.0), (3, 6.0)], "b": [(1, 2.0), (2, 4.0), (1, 5.5), (3, 7.0)]}
    assert [event["kind"] for event in read_events(folder)] == ["start", "end"]
    steps, times_ms, values = read_series(folder)["b"]
    assert (steps.tolist(), times_ms.tolist(), values.tolist()) == (
        [1, 2, 1, 3],
        [10, 20, 30, 40],
        [2.0, 4.0, 5.5, 7.0],
    )


def test_read_measured_has_step_and_last_test(folder, journal):
    assert read_measured(folder, 3) == {}
    for step in (3, 6, 9):
        journal.points(("train/loss",), [step], [step * 10], [[step]])
        journal.points(("val/loss", "val/accuracy"), [step], [step * 10], [[step / 10, step / 2]])
    journal.points(("test/loss",), [9], [95], [[0.5]])
    journal.points(("test/loss",), [9], [99], [[0.7]])  # measured again
    measured = {"val/loss": (0.6, 6, 60), "val/accuracy": (3.0, 6, 60), "test/loss": (0.7, 9, 99)}
    assert read_measured(folder, 6) == measured
