"""tracking.tensorboard=true: what TensorBoard reads from a run's directory equals the journal."""

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from waiting import wait_for

from runner import cli
from runner.tracking.ack import read_ack
from runner.tracking.journal import Journal
from runner.tracking.journal_reader import read_points
from runner.tracking.sync import sync

NAME = "tensorboard"


def read(folder):
    """Read all files of a run as TensorBoard does."""
    events = EventAccumulator(str(folder / NAME), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    return events.Reload()


def scalars(folder):
    events = read(folder)
    return {name: [(each.step, each.value) for each in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_run_is_written_and_resumed_as_one(own_folder):
    words = ["model=mlp", "data=iris", "device=cpu", "train.num_epochs=2", "hydra.run.dir=out"]
    assert cli.main([*words, "tracking.tensorboard=true"]) == 0
    assert cli.main(["resume", "out", "train.num_epochs=3"]) == 0
    out = own_folder / "out"
    wait_for(lambda: read_ack(out, NAME).is_complete)
    written = scalars(out)
    for name, points in read_points(out).items():
        assert written[name] == pytest.approx(np.array(points)), name
    assert {"loss", "confusion"} <= set(read(out).Tags()["images"])
    text = read(out).Tensors("parameters/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "model.hidden_sizes" in text or "train.num_epochs" in text


def test_points_of_killed_run_are_sent_by_sync(folder, write, uri):
    with Journal(folder) as journal:
        write.start(journal, uid="u1", trackers=[NAME])
        write.rows(journal, 1, 10)
    sync(folder, uri, tracker=NAME)
    assert [step for step, _ in scalars(folder)["train/loss"]] == list(range(1, 11))
    assert sync(folder, uri, tracker=NAME).is_complete and len(scalars(folder)["train/loss"]) == 10


def test_missing_package_is_reported_before_the_run(own_folder, monkeypatch, capsys):
    monkeypatch.setattr("runner.config.validate.find_spec", lambda name: None)
    assert cli.main(["tracking.tensorboard=true", "hydra.run.dir=out", "model.dropout=2"]) == 2
    said = capsys.readouterr().err
    assert '"-e' not in said and "[tensorboard]" in said and "model.dropout" in said
    assert not (own_folder / "out").exists()
