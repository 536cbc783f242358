"""report.html: one file with its tables, plots and script in it, that opens from disk without a network."""

from __future__ import annotations

import base64
import datetime
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from runner.sweep.report import figures, number_format, tables
from runner.sweep.report.report import Report
from runner.tasks.metric_names import PLOTS

MOST_PICTURE_BYTES, MOST_PICTURES_BYTES = 400_000, 1_500_000
PNG = b"\x89PNG\r\n\x1a\n"


class Card(NamedTuple):
    """What one wants to know first, large."""

    label: str
    number: str
    note: str
    name: str = ""
    kind: str = ""


def draw(report: Report) -> str:
    """The whole page, about 5 MB, of which plotly.js is 4.8; every text of a person's is escaped. A second."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # heavy, as the next two
    from plotly.offline import get_plotlyjs
    from plotly.utils import PlotlyJSONEncoder

    curves, search, parallel = figures.draw_curves(report), figures.draw_search(report), figures.draw_parallel(report)
    importance = figures.draw_importance(report)
    drawn = [*curves, *search, *parallel, *importance]
    plots = [{"id": f"plot-{each.name}", **each.plot.to_plotly_json()} for each in drawn]
    own = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(own),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("page.html").render(
        report=report,
        title=f"sweep {report.folder.resolve().parent.name}/{report.folder.resolve().name}",
        began=datetime.datetime.fromtimestamp(report.began_ms / 1000, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        cards=[_best_card(report), *_other_cards(report)],
        tables=tables,
        zip=zip,
        number_format=number_format,
        curves=curves,
        search=[*search, *importance, *parallel] if report.objectives and search else [],
        keys=[] if search else parallel,
        with_curves=figures.with_curves(report),
        colors=figures.job_colors(report),
        pictures=pictures(report),
        time=picture_of_time(report),
        # "<" never stands in it: no text of a person's can end the script it is in
        data=json.dumps(plots, cls=PlotlyJSONEncoder).replace("<", "\\u003c"),
        plotly_js=get_plotlyjs() if drawn else "",
        css=(own / "page.css").read_text(),
        js=(own / "page.js").read_text(),
    )


def pictures(report: Report) -> list[tuple[str, str]]:
    """Name and content of the best job's pictures, about 50 KB each, in the order of runner.tasks.metric_names."""
    if report.best is None or not report.best.folder:
        return []
    found, left = [], MOST_PICTURES_BYTES
    for name in dict.fromkeys(name for kind in PLOTS.values() for name in kind):
        path = report.folder / report.best.folder / "plots" / f"{name}.png"
        content = path.read_bytes() if path.is_file() and path.stat().st_size <= min(MOST_PICTURE_BYTES, left) else b""
        if content.startswith(PNG):
            left -= len(content)
            found.append((name, base64.b64encode(content).decode()))
    return found


def picture_of_time(report: Report) -> str:
    """Where the time of all jobs went, as a run's plots/time.png; "" where none has told. Some 0.1 s, and matplotlib."""
    timed = sorted((result for result in report.results if result.time), key=lambda result: result.job)
    if not timed:
        return ""
    from runner.experiment.plots.time_bar import AROUND, COLORS, draw_time  # heavy

    spent: Counter[str] = Counter()
    for result in timed:
        spent.update({name: value for name, value in result.time.items() if name in AROUND or name in COLORS})
    with tempfile.TemporaryDirectory() as folder:
        drawn = draw_time(spent, Path(folder), title="all jobs, as if one after the other", num_runs=len(timed))
        return base64.b64encode(drawn[0].read_bytes()).decode() if drawn else ""


def _best_card(report: Report) -> Card:
    best = report.best
    if best is None:
        return Card("best job", "none", "No job finished with a value.")
    goal = report.goals[0]
    parts = [f"job {best.job}", best.device]
    if best.best is not None and best.best.metric == goal.metric:
        parts += [f"step {best.best.step:,}", f"epoch {best.best.epoch}" if best.best.epoch else None]
        parts.append(f"after {number_format.seconds(best.best.seconds)}" if best.best.seconds is not None else None)
    title = "best job" if len(report.goals) < 2 else f"best of {len(report.front)} on the Pareto front"
    number = number_format.value(best.value(goal.metric))
    return Card(f"{title}, {goal.metric}", number, " · ".join(filter(None, parts)), best.name, "best")


def _other_cards(report: Report) -> list[Card]:
    cards = []
    if report.seeds and report.goals:
        best, goal = report.comparisons[0].a if report.comparisons else "", report.goals[0].metric
        group = next((each for each in report.seeds if each.name == best), report.seeds[0])
        if goal in group.means:
            decided = (
                f", {'better than each other one' if report.winner else 'not decided'}" if report.comparisons else ""
            )
            name = f"{group.name}, n = {group.means[goal].n}{decided}"
            what = "best mean (95 %)" if "folds" in report.over else "best mean ± std"
            cards.append(Card(f"{goal}, {what} over {report.over}", number_format.mean(group.means[goal]), name))
    return cards
