"""report.html: one file with its tables, plots and script in it, that opens from disk without a network."""

from __future__ import annotations

import datetime
import json
from html import escape
from pathlib import Path

from runner.sweep.report import number_format
from runner.sweep.report.bars import draw_devices, draw_importance, draw_seeds
from runner.sweep.report.best_job_images import best_pictures
from runner.sweep.report.figures import Figure, draw_curves, draw_search, job_colors, with_curves
from runner.sweep.report.json_csv import finite
from runner.sweep.report.parallel_coordinates import draw_parallel
from runner.sweep.report.report import Report
from runner.sweep.report.tables import causes_table, devices_table, jobs_table, seeds_table

#: the browser itself refuses what would come over the network
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def draw(report: Report) -> str:
    """The whole page, about 5 MB, of which plotly.js is 4.8; every text of a person's is escaped. A second."""
    from plotly.offline import get_plotlyjs  # heavy

    curves, search, parallel = draw_curves(report), draw_search(report), draw_parallel(report)
    seeds, devices, importance = draw_seeds(report), draw_devices(report), draw_importance(report)
    figures = [*curves, *search, *parallel, *importance, *devices, *seeds]
    own = Path(__file__).parent
    # "<" never stands in it: no text of a person's can end the script it is in
    data = json.dumps(finite([_data(figure) for figure in figures])).replace("<", "\\u003c")
    body = [
        _header(report),
        _cards(report),
        _section("Jobs", jobs_table(report), number=len(report.results)),
        _section("Devices", _figures(devices) + devices_table(report)) if report.devices else "",
        _section("Seeds", _figures(seeds) + seeds_table(report)) if report.seeds else "",
        _section("Search", _figures([*search, *importance, *parallel])) if report.objectives and search else "",
        _section("Keys", _figures(parallel)) if parallel and not search else "",
        _section("Curves", _chips(report) + _figures(curves)) if curves else "",
        _section("Predictions", pictures) if (pictures := best_pictures(report)) else "",
        _section("Failures", causes_table(report.failures), number=len(report.failures)) if report.failures else "",
        _section("Skipped", causes_table(report.skipped), number=len(report.skipped)) if report.skipped else "",
    ]
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(_title(report))}</title>",
            f"<style>\n{(own / 'page.css').read_text()}</style>\n</head>\n<body>\n<main>",
            *filter(None, body),
            "<noscript><p>The plots and the sorting need JavaScript.</p></noscript>\n</main>",
            f'<script type="application/json" id="figures">{data}</script>',
            f"<script>{get_plotlyjs()}</script>" if figures else "",
            f"<script>\n{(own / 'page.js').read_text()}</script>\n</body>\n</html>\n",
        )
    )


def _title(report: Report) -> str:
    return f"sweep {report.folder.resolve().parent.name}/{report.folder.resolve().name}"


def _header(report: Report) -> str:
    began = datetime.datetime.fromtimestamp(report.began_ms / 1000, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return (
        f'<header>\n<p class="eyebrow">{escape(_title(report))} · began {began}</p>\n'
        f'<h1>{escape(number_format.counts(report))}</h1>\n<pre class="command"><code>{escape(report.command)}</code></pre>\n'
        "</header>"
    )


def _cards(report: Report) -> str:
    """What one wants to know first."""
    cards = [_best_card(report)]
    for gain in report.gains[:3]:
        factor = gain.speed_up if gain.speed_up >= 1 else 1 / gain.speed_up
        what = f"{gain.device}, times {'faster' if gain.speed_up >= 1 else 'slower'} than {gain.reference}"
        pairs = "1 pair" if gain.num_pairs == 1 else f"median of {gain.num_pairs} pairs"
        apart = ""
        if gain.difference is not None:
            largest = number_format.difference(gain.difference)
            apart = f"; loss curves {'equal to the bit' if largest == '0' else f'differ by at most {largest}'}"
        cards.append(_card(what, f"{number_format.factor(factor)}×", pairs + apart))
    if report.seeds and report.goals:
        group, goal = report.seeds[0], report.goals[0].metric
        if goal in group.means:
            name = f"{group.name}, n = {group.means[goal].n}"
            cards.append(_card(f"{goal}, best mean ± std over seeds", number_format.mean(group.means[goal]), name))
    return f'<div class="cards">\n{"".join(cards)}</div>'


def _best_card(report: Report) -> str:
    best = report.best
    if best is None:
        return _card("best job", "none", "No job finished with a value.")
    goal = report.goals[0]
    parts = [f"job {best.job}", best.device]
    if best.best is not None and best.best.metric == goal.metric:
        parts += [f"step {best.best.step:,}", f"epoch {best.best.epoch}" if best.best.epoch else None]
        parts.append(f"after {number_format.seconds(best.best.seconds)}" if best.best.seconds is not None else None)
    extra = f'<span class="name">{escape(best.name)}</span>'
    title = "best job" if len(report.goals) < 2 else f"best of {len(report.front)} on the Pareto front"
    number = number_format.value(best.value(goal.metric))
    return _card(f"{title}, {goal.metric}", number, " · ".join(filter(None, parts)), extra, kind="best")


def _card(label: str, number: str, note: str, extra: str = "", kind: str = "") -> str:
    long = " long" if len(number) > 10 else ""
    return (
        f'<div class="card {kind}"><p class="label">{escape(label)}</p><p class="number{long}">{escape(number)}</p>'
        f'<p class="note">{extra}{escape(note)}</p></div>\n'
    )


def _section(title: str, content: str, *, number: int | None = None) -> str:
    count = f' <span class="count">{number}</span>' if number is not None else ""
    return f'<section id="{title.lower()}">\n<h2>{title}{count}</h2>\n{content}\n</section>'


def _figures(figures: list[Figure]) -> str:
    return "\n".join(
        f"<figure><h3>{escape(figure.title)}</h3>"
        + (f'<p class="note">{escape(figure.note)}</p>' if figure.note else "")
        + f'<div class="scroll"><div class="plot" id="plot-{figure.name}" '
        f'style="height:{figure.layout["height"]}px;min-width:{figure.least_width}px"></div></div></figure>'
        for figure in figures
    )


def _chips(report: Report) -> str:
    """The legend of all the curves: a button shows or hides a job's line in every plot."""
    colors = job_colors(report)
    chips = "".join(
        f'<button type="button" class="chip" aria-pressed="true" data-job="{result.job}" title="{escape(result.name)}">'
        f'<i style="background:{colors[result.job]}"></i><b>{result.job}</b> {escape(_cut(result.name))}</button>'
        for result in with_curves(report)
    )
    choices = "".join(
        f'<button type="button" class="choice" data-first="{first}">{title}</button>'
        for title, first in (("all", 1_000_000), ("best 5", 5), ("none", 0))
    )
    return f'<div class="legend"><p>show {choices}</p><div class="chips">{chips}</div></div>'


def _cut(text: str, most: int = 44) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _data(figure: Figure) -> dict[str, object]:
    return {"id": f"plot-{figure.name}", "data": figure.data, "layout": figure.layout}
