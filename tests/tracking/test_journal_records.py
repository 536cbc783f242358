import numpy as np
import pytest

from runner.tracking.journal_records import (
    MAGIC,
    begins_record,
    count_points,
    encode_event,
    encode_points,
    has_records,
    scan,
    survey,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.bin"


def test_points_are_read_bitwise(path):
    values = np.array([[0.1, np.nan], [np.inf, -np.inf], [np.float32(1e-45), 2.0**60]])
    path.write_bytes(encode_points(("a", "größe"), [1, 2, 2**40], [1_700_000_000_000, 1, 2], values))
    (record,) = scan(path)
    assert record.kind == "points" and record.num_points == 6 and record.end == path.stat().st_size
    assert record.data.names == ("a", "größe")
    assert record.data.steps.tolist() == [1, 2, 2**40] and record.data.times_ms.tolist() == [1_700_000_000_000, 1, 2]
    assert record.data.values.tobytes() == values.tobytes()


def test_field_json_does_not_support_raises():
    with pytest.raises(TypeError, match="not JSON serializable"):
        encode_event("start", {"path": object()})


def test_names_without_columns_raise():
    with pytest.raises(ValueError, match="3 names for 2 columns"):
        encode_points("abc", [1], [1], [[1.0, 2.0]])


def test_scan_continues_at_an_offset(path):
    path.write_bytes(encode_event("a", {}) + encode_event("b", {}))
    first, second = scan(path)
    assert list(scan(path, first.end)) == [second]
    assert list(scan(path, second.end)) == []
    with pytest.raises(ValueError, match=f"has {second.end} bytes"):
        list(scan(path, second.end + 1))


def test_cut_file_has_records_before_cut(path):
    whole = [encode_event("a", {"x": 1}), encode_points("ab", [1, 2], [3, 4], [[1, 2], [3, 4]]), encode_event("b", {})]
    ends = np.cumsum([len(record) for record in whole])
    data = b"".join(whole)
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        expected = int((ends <= cut).sum())
        assert len(list(scan(path))) == expected
        assert survey(path).end == (ends[expected - 1] if expected else 0)
        assert count_points(path) == (4 if expected >= 2 else 0)


def test_every_changed_byte_is_detected(path):
    first, second = encode_event("a", {"x": 1}), encode_points("a", [1], [2], [[3.0]])
    for position in range(len(second)):
        damaged = bytearray(second)
        damaged[position] ^= 0x40
        path.write_bytes(first + bytes(damaged))
        assert [record.kind for record in scan(path)] == ["a"], position


def test_length_beyond_the_file_is_ignored(path):
    path.write_bytes(MAGIC + b"\1\0\0\0" + b"\xff\xff\xff\xff" + b"\0" * 8)  # claims 4 GiB
    assert list(scan(path)) == [] and count_points(path) == 0


def test_points_are_counted_from_an_offset(path):
    first = encode_points("ab", [1, 2], [3, 4], [[1, 2], [3, 4]])
    path.write_bytes(first + encode_event("e", {}) + encode_points("a", [1], [2], [[3.0]]))
    assert count_points(path) == 5
    assert count_points(path, len(first)) == 1
    assert count_points(path, 10**6) == 0
    assert count_points(path.with_name("none")) == 0


def test_begins_record_knows_each_offset(path):
    assert begins_record(path, 0) and not begins_record(path, 1)
    first = encode_event("a", {})
    path.write_bytes(first + encode_event("b", {}))
    size = path.stat().st_size
    assert [offset for offset in range(size + 2) if begins_record(path, offset)] == [0, len(first), size]


def test_has_records_ignores_an_incomplete_one(path):
    assert not has_records(path)
    path.write_bytes(encode_event("a", {})[:-1])
    assert not has_records(path)
    path.write_bytes(encode_event("a", {}))
    assert has_records(path)


def test_survey_detects_a_foreign_file(path):
    path.write_bytes(b"PK\3\4 something else")
    assert survey(path).is_foreign
    path.write_bytes(b"\0" * 100)  # what a power failure may leave of the first record
    assert not survey(path).is_foreign and survey(path).end == 0
