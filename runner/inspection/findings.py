"""Defines a finding about a step: how sure it is, what is so, where, and what to write instead; counts equal ones together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

CERTAIN, LIKELY, ESTIMATE = "certain", "likely", "estimate"
GRADES = (CERTAIN, LIKELY, ESTIMATE)


@dataclass(frozen=True)
class Finding:
    """certain: it would not run. likely: it runs, but slowly, or perhaps not. estimate: by what was calculated."""

    grade: str
    kind: str  # mixed devices, dtype, no kernel, host read, copy, slow type, wrong values, no fixed order, data-dependent, error, memory
    what: str
    line: str = ""
    module: str = ""
    write: str = ""  # as --json names it
    path: str = ""  # the attribute or batch field that it is about: model.head.scale
    count: int = 1

    @property
    def where(self) -> str:
        """ "net.py:12 in Net.head", or nothing."""
        return self.line + (f" in {self.module}" if self.module else "")

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        place = f" at {self.where}" if self.where else ""
        return f"{self.what}{place}{times}" + (f"; help: use {self.write}" if self.write else "")


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Each one once, as it was found first, with how many times; the surest first, else in their order."""
    found: dict[tuple[str, ...], Finding] = {}
    for finding in findings:
        key = (finding.grade, finding.kind, finding.path or finding.what, finding.line)
        before = found.get(key)
        found[key] = replace(before, count=before.count + finding.count) if before else finding
    return sorted(found.values(), key=lambda finding: GRADES.index(finding.grade))
