"""`explain`: replays a run to the step that spoilt it, and says which operation, line and rows did it."""

from __future__ import annotations

from typing import Any


def explain(wanted: str, overrides: list[str], *, step: int | None) -> dict[str, Any]:
    raise NotImplementedError
