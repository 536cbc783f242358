"""The page's pictures of what the best job predicts, as HTML with the images in it."""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path

from runner.sweep.report.report import Report
from runner.tasks.metric_names import PLOTS

MOST_BYTES, MOST_BYTES_OF_ALL = 400_000, 1_500_000
SIGNATURE = b"\x89PNG\r\n\x1a\n"
SHEET = "display:grid;grid-template-columns:repeat(auto-fit,minmax(min(480px,100%),1fr));gap:14px;margin-top:12px"
IMAGE = "max-width:100%;max-height:620px;background:#fff;border-radius:8px"  # they are drawn on white


def best_pictures(report: Report) -> str:
    """The pictures in the best job's folder, about 50 KB each, in the order of runner.tasks.metric_names; "" without any."""
    best = report.best
    if best is None or not best.folder:
        return ""
    names = dict.fromkeys(name for kind in PLOTS.values() for name in kind)
    parts, left = [], MOST_BYTES_OF_ALL
    for name in names:
        content = _png(report.folder / best.folder / "plots" / f"{name}.png", most=min(MOST_BYTES, left))
        if content is None:
            continue
        left -= len(content)
        source = f"data:image/png;base64,{base64.b64encode(content).decode()}"
        parts.append(f'<figure><img src="{source}" alt="{name}" style="{IMAGE}"></figure>')
    head = f'<p class="note">What the best weights of job {best.job} say, {escape(best.name)}.</p>'
    return "\n".join([head, f'<div style="{SHEET}">', *parts, "</div>"]) if parts else ""


def _png(path: Path, *, most: int) -> bytes | None:
    """None for what is not there, is no PNG file or is too big."""
    try:
        content = path.read_bytes() if path.stat().st_size <= most else b""
    except OSError:
        return None
    return content if content.startswith(SIGNATURE) else None
