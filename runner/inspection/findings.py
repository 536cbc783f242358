"""Defines a finding about a step: its certainty, the problem, the line and the fix; merges equal findings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

CERTAIN, LIKELY, ESTIMATE = "certain", "likely", "estimate"
GRADES = (CERTAIN, LIKELY, ESTIMATE)


@dataclass(frozen=True)
class Finding:
    """certain: the step would not run. likely: it runs slowly, or may fail. estimate: by a calculation."""

    grade: str
    kind: str  # mixed devices, dtype, no kernel, host read, copy, slow type, wrong values, no fixed order, data-dependent, error, memory
    what: str
    line: str = ""
    module: str = ""
    write: str = ""  # as --json names it
    path: str = ""  # the attribute or batch field with the problem: model.head.scale
    count: int = 1

    @property
    def where(self) -> str:
        """The line and the module, e.g., "net.py:12 in Net.head"; "" without a line."""
        return self.line + (f" in {self.module}" if self.module else "")

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        where = f" at {self.where}" if self.where else ""
        return f"{self.what}{where}{times}" + (f"; help: use {self.write}" if self.write else "")


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Return each finding once with its count, as it was first reported; certain ones first, else in their order."""
    by_key: dict[tuple[str, ...], Finding] = {}
    for finding in findings:
        key = (finding.grade, finding.kind, finding.path or finding.what, finding.line)
        before = by_key.get(key)
        by_key[key] = replace(before, count=before.count + finding.count) if before else finding
    return sorted(by_key.values(), key=lambda finding: GRADES.index(finding.grade))
