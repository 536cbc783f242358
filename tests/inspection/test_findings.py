from runner.inspection.findings import CERTAIN, LIKELY, Finding, merged


def test_findings_are_told_once_with_their_number_the_surest_first():
    read = Finding(LIKELY, "host read", "float(tensor)", "net.py:3", "Net")
    first = Finding(CERTAIN, "mixed devices", "model.a meets x", "net.py:5", path="model.a")
    again = Finding(CERTAIN, "mixed devices", "model.a meets its gradient", "net.py:5", path="model.a")
    elsewhere = Finding(CERTAIN, "mixed devices", "model.a meets y", "net.py:9", path="model.a")
    found = merged([read, first, again, elsewhere, read])
    assert [(finding.what, finding.count) for finding in found] == [
        ("model.a meets x", 2),
        ("model.a meets y", 1),
        ("float(tensor)", 2),
    ]


def test_a_finding_reads_as_a_sentence():
    finding = Finding(LIKELY, "copy", "a copy", "net.py:3", "Net.head", "a buffer", count=4)
    assert str(finding) == "a copy at net.py:3 in Net.head (4 times); help: use a buffer"
