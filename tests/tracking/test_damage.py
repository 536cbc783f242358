"""A journal whose bytes were changed or lost: undamaged records are read unchanged, the rest is reported, and nothing is invented."""

import json
import random
import shutil

import pytest

from runner import cli
from runner.errors import RunnerError
from runner.experiment.console import Screen
from runner.experiment.reporter import Reporter
from runner.tracking import ack as acks
from runner.tracking import journal_records
from runner.tracking.ack import Ack, read_ack, write_ack
from runner.tracking.journal import Journal, find_damage, read_points
from runner.tracking.journal_reader import read_events
from runner.tracking.journal_records import (
    FILE,
    HEADER,
    Points,
    count_points,
    encode_event,
    encode_points,
    has_records,
    scan,
    survey,
)

NUM_DAMAGES = 240


def content(records):
    """Return a journal's content, independent of its position in the file."""
    found = []
    for record in records:
        if isinstance(record.data, Points):
            rows = record.data
            values = (rows.steps.tolist(), rows.times_ms.tolist(), rows.values.tobytes())
            found.append(("points", rows.names, *values))
        else:
            found.append((record.kind, json.dumps(record.data)))
    return found


@pytest.fixture
def whole(folder, journal, write):
    """Write a journal like that of a run that was resumed once; return its bytes and its records."""
    write.start(journal, uid="u1", tags={"mlflow.note.content": "**digits**\n" * 20})
    journal.event("dataset", name="digits", digest="0" * 32, source="sklearn", schema=json.dumps({"facts": {}}))
    journal.event("artifact", path="rerun.yaml", to="")
    for first in range(1, 81, 10):
        if first == 41:
            write.start(journal, uid="u1")
        write.rows(journal, first, 10)
        journal.points(("speed/steps_per_second",), [first + 9], [1_700_000_000_000], [[1234.5]])
        if first % 20 == 1:
            journal.points(("val/loss", "val/accuracy"), [first + 9], [1_700_000_000_001], [[0.25, 0.5]])
    journal.event("model", node={"_target_": "models.Net"}, weights="checkpoints/best.pt", example="journal/example.pt")
    write.end(journal)
    journal.close()
    return journal.path.read_bytes(), list(scan(journal.path))


def flip(data, draw):
    """Change some bytes in place. Returns the damaged file, and the begin and end of the damage."""
    begin = draw.randrange(len(data))
    end = min(len(data), begin + draw.choice((1, 1, 4, 100, 1000)))
    noise = bytes(byte ^ draw.randrange(1, 256) for byte in data[begin:end])
    return data[:begin] + noise + data[end:], begin, end


def zeros(data, draw):
    begin = draw.randrange(len(data))
    end = min(len(data), begin + draw.choice((8, 64, 512)))
    return data[:begin] + bytes(end - begin) + data[end:], begin, end


def cut(data, draw):
    begin = draw.randrange(len(data))
    return data[:begin], begin, len(data)


def lose(data, draw):
    """Remove some bytes, so that the following ones are at other positions."""
    begin = draw.randrange(len(data))
    end = min(len(data), begin + draw.choice((1, 13, 300)))
    return data[:begin] + data[end:], begin, end


def expected_of(records, data, damaged, begin, end):
    """Return the records without a changed byte."""
    return [
        record
        for record in records
        if record.end <= begin
        or record.offset >= end
        or data[record.offset : record.end] == damaged[record.offset : record.end]
    ]


def check_reading(folder, expected):
    assert content(scan(folder / FILE)) == content(expected)
    series = {}
    for record in expected:
        if isinstance(record.data, Points):
            for name, values in zip(record.data.names, record.data.values.T, strict=True):
                series.setdefault(name, []).extend(zip(record.data.steps.tolist(), values.tolist(), strict=True))
    assert read_points(folder) == series
    assert [event["kind"] for event in read_events(folder)] == [r.kind for r in expected if r.kind != "points"]
    assert count_points(folder / FILE) == sum(map(len, series.values()))
    assert has_records(folder / FILE) == bool(expected)


def check_going_on(folder, damaged, expected):
    """The writer continues after the undamaged records, or refuses; removed bytes are stored next to the journal."""
    try:
        with Journal(folder) as journal:
            journal.event("added")
    except RunnerError as error:
        assert "mv " in str(error) or "another run directory" in str(error)
        assert (folder / FILE).read_bytes() == damaged
        return False
    assert content(scan(folder / FILE)) == [*content(expected), ("added", "{}")]
    kept = (folder / FILE).read_bytes()[: -len(encode_event("added", {}))]
    torn = b"".join(path.read_bytes() for path in (folder / "journal").glob("torn-*.bin"))
    assert kept + torn == damaged
    return True


@pytest.mark.parametrize("how", [flip, zeros, cut, lose])
def test_damaged_journal_reads_rest_and_reports_loss(how, folder, whole, monkeypatch, caplog):
    data, records = whole
    monkeypatch.setattr("runner.tracking.journal._sync", lambda fd: None)
    screen = Screen()
    draw, num_refused, num_behind = random.Random(how.__name__), 0, 0
    for _ in range(NUM_DAMAGES // 4):
        damaged, begin, end = how(data, draw)
        (folder / FILE).write_bytes(damaged)
        expected = expected_of(records, data, damaged, begin, end)
        num_behind += any(record.offset >= end for record in expected)
        check_reading(folder, expected)
        is_clean_cut = damaged == b"".join(data[record.offset : record.end] for record in expected)
        told = find_damage(folder)
        assert bool(told) != is_clean_cut
        starts = [record for record in expected if record.kind == "start"]
        assert (Reporter(folder, None, screen).uid == "u1") == bool(starts)
        caplog.clear()
        goes_on = check_going_on(folder, damaged, expected)
        num_refused += not goes_on
        if goes_on:
            assert all(sentence in caplog.text for sentence in told)
            assert find_damage(folder) == [sentence for sentence in told if "the journal is damaged" in sentence]
        for path in (folder / "journal").glob("torn-*.bin"):
            path.unlink()
    assert num_refused < 10 and (num_behind > 20 or how is cut)


def test_missing_part_of_record_reports_bytes(folder, whole):
    data, records = whole
    lost = records[7]
    (folder / FILE).write_bytes(data[: lost.end - 1] + b"?" + data[lost.end :])
    assert find_damage(folder) == [
        f"the journal is damaged ({lost.end - lost.offset:,} bytes from byte {lost.offset:,} on): "
        "these records are lost, those after them are not"
    ]
    (folder / FILE).write_bytes(data[:-1])
    assert find_damage(folder) == [
        "the journal's last record is incomplete or damaged, and lost "
        f"({records[-1].end - records[-1].offset - 1:,} bytes from byte {records[-1].offset:,} on)"
    ]


def test_record_being_written_is_not_damage(folder, monkeypatch):
    """A reader that finds half a record, and then the complete next one, reads both."""
    first, second = encode_points(("a",), [1], [1], [[1.0]]), encode_points(("a",), [2], [2], [[2.0]])
    path = folder / FILE
    path.parent.mkdir()
    path.write_bytes(first[:-3])
    search = journal_records._behind_damage

    def write_first(file, offset):
        path.write_bytes(first + second)
        return search(file, offset)

    monkeypatch.setattr(journal_records, "_behind_damage", write_first)
    assert [record.data.steps.tolist() for record in scan(path)] == [[1], [2]]


def test_long_damage_is_searched_completely(folder, monkeypatch):
    monkeypatch.setattr(journal_records, "SEARCHED_BYTES", 16)
    path = folder / FILE
    path.parent.mkdir()
    for length in range(1, 60):
        path.write_bytes(encode_event("a", {}) + b"RJ1" * length + encode_event("b", {}))
        assert [record.kind for record in scan(path)] == ["a", "b"], length


def test_second_torn_tail_keeps_the_first(folder):
    with Journal(folder) as journal:
        journal.event("a")
    for tail in (b"one", b"two"):
        with (folder / FILE).open("ab") as file:
            file.write(tail)
        Journal(folder).close()
    assert {path.read_bytes() for path in (folder / "journal").glob("torn-*.bin")} == {b"one", b"two"}


def test_ack_of_lost_records_is_discarded(folder, whole, caplog):
    data, records = whole
    write_ack(folder, Ack(offset=len(data), run_id="r", uid="u1"))
    (folder / FILE).write_bytes(data[: records[-3].offset])
    said = f"MLflow has {len(data):,} bytes of it, and {records[-3].offset:,}"
    assert said in find_damage(folder)[0]
    with Journal(folder):
        assert said in caplog.text and read_ack(folder).offset == 0


def test_damaged_ack_is_unchanged_or_empty(folder, whole):
    before = Ack(
        offset=len(whole[0]) - 100, points_written=170, uri="sqlite:////mlflow.db", uid="u1", run_id="0" * 32,
        experiment_id="1", ended=True, postponed=({"kind": "artifact", "path": "p"},), warnings=("w",),
    )  # fmt: skip
    write_ack(folder, before)
    path, data = folder / acks.FILE, (folder / acks.FILE).read_bytes()
    none = Ack(points_pending=count_points(folder / FILE))
    draw, num_none = random.Random(0), 0
    for number in range(NUM_DAMAGES):
        damaged, *_ = (flip, cut, lose, digit)[number % 4](data, draw)
        path.write_bytes(damaged)
        found = read_ack(folder)
        assert found in (before, none)
        num_none += found == none
    assert num_none > NUM_DAMAGES * 0.9


def digit(data, draw):
    """Replace one digit by another: the text is still JSON."""
    places = [place for place, byte in enumerate(data) if chr(byte).isdigit()]
    place = draw.choice(places)
    other = draw.choice([byte for byte in b"0123456789" if byte != data[place]])
    return data[:place] + bytes([other]) + data[place + 1 :], place, place + 1


@pytest.fixture
def trained(own_folder, capfd):
    """A run of 2 epochs without a tracker. Returns its directory; `resume` trains a third epoch."""
    words = ["model=mlp", "model.hidden_sizes=[8]", "train.num_epochs=2", "device=cpu", "metrics.pull_every=5"]
    assert cli.main([*words, "tracking.enabled=false", "scheduler=constant", "hydra.run.dir=outputs/a/run"]) == 0
    capfd.readouterr()
    return own_folder / "outputs" / "a" / "run"


def damage(folder, number):
    """Change a byte in the payload of one record. Returns the record."""
    record = list(scan(folder / FILE))[number]
    data = bytearray((folder / FILE).read_bytes())
    data[record.offset + HEADER.size + 3] ^= 0x11
    (folder / FILE).write_bytes(data)
    return record


RESUME = ["resume", "outputs/a/run", "train.num_epochs=3", "tracking.enabled=false"]


def test_sync_and_resume_skip_and_report_damage(trained, uri, client, write, capfd, caplog):
    all_points = read_points(trained)
    number = [record.kind for record in scan(trained / FILE)].index("points")
    lost = damage(trained, number)
    left = read_points(trained)
    assert len(all_points["train/loss"]) - len(left["train/loss"]) == len(lost.data.steps)
    assert cli.main(["sync", "outputs", f"tracking.uri={uri}"]) == 0
    said = f"the journal is damaged ({lost.end - lost.offset:,} bytes from byte {lost.offset:,} on): these records are lost"
    out, err = capfd.readouterr()
    assert said in out and "1 of 1 runs are complete" in out and "Traceback" not in out + err
    ack = read_ack(trained)
    assert any(said in warning for warning in ack.warnings)
    assert cli.main(RESUME) == 0
    out, err = capfd.readouterr()
    assert said in out + err + caplog.text and "Traceback" not in out + err
    assert len(read_points(trained)["train/loss"]) == len(left["train/loss"]) + len(all_points["train/loss"]) // 2
    assert cli.main(["sync", "outputs", f"tracking.uri={uri}"]) == 0
    again = read_ack(trained)
    assert again.run_id == ack.run_id and client.get_run(ack.run_id).info.status == "FINISHED"
    for name, points in read_points(trained).items():
        assert [(step, value) for step, _, value in write.history(client, ack.run_id, name)] == sorted(points)


def test_resume_without_start_record_is_refused(trained, capfd):
    damage(trained, 0)
    before = (trained / FILE).read_bytes()
    assert cli.main(RESUME) == 2
    err = capfd.readouterr().err
    assert (
        "first record, which identifies the run, is damaged" in err
        and "Traceback" not in err
        and (trained / FILE).read_bytes() == before
    )
    mend = err.partition("mv ")[2].partition(",")[0].split()
    shutil.move(*mend)
    assert cli.main(RESUME) == 0
    steps = [step for step, _ in read_points(trained)["train/loss"]]
    assert steps == list(range(steps[0], steps[0] + len(steps))) and steps[0] > 1


def test_sync_without_first_record_sends_rest(trained, uri, client, capfd, monkeypatch):
    """The start record of a resumed run also identifies the run; without any, the journal can't be sent."""
    from runner.tracking import sync as module

    monkeypatch.setattr(module.Backoff, "silent_seconds", lambda self, **_: 1e9)  # one attempt
    assert cli.main(RESUME) == 0
    damage(trained, 0)
    assert cli.main(["sync", "outputs", f"tracking.uri={uri}"]) == 0
    run = client.get_run(read_ack(trained).run_id)
    assert run.info.status == "FINISHED" and run.data.params["train.num_epochs"] == "3"
    number = [record.kind for record in scan(trained / FILE)].index("start")
    damage(trained, number)
    (trained / acks.FILE).unlink()
    capfd.readouterr()
    assert cli.main(["sync", "outputs", f"tracking.uri={uri}"]) == 1
    out, err = capfd.readouterr()
    assert (
        "does not begin with the start of a run" in out
        and "0 of 1 runs are complete" in out
        and "Traceback" not in out + err
    )


@pytest.mark.parametrize("data", [b"", b"\0" * 500, b"somebody's data"])
def test_sync_of_foreign_file_has_no_traceback(data, own_folder, uri, capfd):
    path = own_folder / "outputs" / "a" / FILE
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    assert cli.main(["sync", f"tracking.uri={uri}"]) == 1
    out, err = capfd.readouterr()
    assert "0 of 1 runs are complete" in out and "Traceback" not in out + err
    assert not data or ": the journal's last record is incomplete" in out or "is not the journal of a run" in out
    assert survey(path).num_frames == 0
