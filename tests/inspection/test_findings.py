from runner.inspection.findings import CERTAIN, LIKELY, Finding, merged


def test_merged_counts_equal_findings_certain_ones_first():
    read = Finding(LIKELY, "host read", "float(tensor)", "net.py:3", "Net")
    first = Finding(CERTAIN, "mixed devices", "model.a meets x", "net.py:5", path="model.a")
    again = Finding(CERTAIN, "mixed devices", "model.a meets its gradient", "net.py:5", path="model.a")
    elsewhere = Finding(CERTAIN, "mixed devices", "model.a meets y", "net.py:9", path="model.a")
    expected = [("model.a meets x", 2), ("model.a meets y", 1), ("float(tensor)", 2)]
    found = merged([read, first, again, elsewhere, read])
    assert [(finding.what, finding.count) for finding in found] == expected
    assert str(found[-1]) == "float(tensor) at net.py:3 in Net (2 times)"
    assert (
        str(Finding(LIKELY, "copy", "a copy", "net.py:3", write="a buffer")) == "a copy at net.py:3; help: use a buffer"
    )
