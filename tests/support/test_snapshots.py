import re

from snapshots import TESTS, read


def test_snapshot_entries_belong_to_tests():
    for path in TESTS.glob("*/messages.txt"):
        for name in read(path):
            file, _, test = name.partition("::")
            function = re.match(r"\w+", test)[0]
            assert f"def {function}(" in (path.parent / file).read_text(), f"{path}: remove {name}"
