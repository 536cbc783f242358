import math

import numpy as np
import pytest

from runner.tracking.journal_records import encode_event, encode_points, scan
from runner.tracking.mlflow_names import Names
from runner.tracking.retry import grouped, send_in_halves, to_metrics


class Shop:
    """Accepts any list of numbers without a refused one."""

    def __init__(self, *refused, breaks_at=None):
        self.refused, self.breaks_at, self.calls, self.taken = set(refused), breaks_at, 0, []

    def take(self, items):
        from mlflow.exceptions import MlflowException

        self.calls += 1
        if self.calls == self.breaks_at:
            raise ConnectionError("cut")
        if bad := self.refused & set(items):
            raise MlflowException.invalid_parameter_value(f"{sorted(bad)[0]} is poison")
        self.taken += items


def test_all_goes_in_one_call_when_nothing_is_refused():
    shop = Shop()
    assert send_in_halves(shop.take, list(range(1000))) == []
    assert shop.calls == 1 and len(shop.taken) == 1000


@pytest.mark.parametrize("refused", [{0}, {999}, {500, 501}, {1, 333, 998}])
def test_poison_is_found_and_the_rest_is_kept(refused):
    shop = Shop(*refused)
    found = send_in_halves(shop.take, list(range(1000)))
    assert {item for item, _ in found} == refused and all("poison" in why for _, why in found)
    assert sorted(shop.taken) == [number for number in range(1000) if number not in refused]
    assert shop.calls <= 1 + 2 * 10 * len(refused)


def test_an_outage_is_no_refusal():
    with pytest.raises(ConnectionError):
        send_in_halves(Shop(breaks_at=1).take, [1, 2])
    with pytest.raises(ConnectionError):
        send_in_halves(Shop(1, breaks_at=3).take, [1, 2, 3, 4])


def records(path, *parts):
    path.write_bytes(b"".join(parts))
    return list(scan(path))


def points(count):
    return encode_points("ab", range(count), range(count), np.zeros((count, 2)))


def test_neighbouring_points_are_grouped_and_events_stand_alone(tmp_path):
    event = encode_event("tags", {})
    found = records(tmp_path / "j", points(200), points(200), points(200), event, points(1), event, event, points(900))
    groups = [[record.num_points or record.kind for record in group] for group in grouped(found, most=1000)]
    assert groups == [[400, 400], [400], ["tags"], [2], ["tags"], ["tags"], [1800]]
    assert [record for group in grouped(found, most=1000) for record in group] == found


def test_metrics_have_their_own_time_and_a_name_that_mlflow_takes(tmp_path):
    (record,) = records(tmp_path / "j", encode_points(("a[0]", "b"), [3], [1234], [[math.nan, math.inf]]))
    first, second = to_metrics([record], Names())
    assert (first.key, first.step, first.timestamp, math.isnan(first.value)) == ("a.0", 3, 1234, True)
    assert (second.key, second.step, second.timestamp, second.value) == ("b", 3, 1234, math.inf)
