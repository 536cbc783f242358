import base64
import json
import math
import re

import numpy as np
import pytest

from runner.sweep.report import build

EVIL = '</script><script>document.title="taken"</script><img src=x onerror=alert(1)>"\'&'


def without_scripts(text):
    return re.sub(r"<script\b.*?</script>", "", text, flags=re.DOTALL)


def figures(text):
    """Return the figures of the page, by name."""
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.DOTALL)
    assert "<" not in found[1]  # no text in it can end the script
    return {figure["id"].removeprefix("plot-"): figure for figure in json.loads(found[1])}


def array(found):
    """Return the values of an array as plotly encodes it."""
    return np.frombuffer(base64.b64decode(found["bdata"]), found["dtype"]).tolist()


@pytest.fixture(scope="module")
def grid_page(grid_folder):
    return build.draw(build.read_report(grid_folder))


@pytest.fixture(scope="module")
def search_page(search_folder):
    return build.draw(build.read_report(search_folder))


def test_grid_page_shows_curves_seeds_and_keys(grid_page):
    drawn = figures(grid_page)
    assert list(drawn) == ["keys", "curve-0", "curve-1"]
    for name in ("curve-0", "curve-1"):
        assert sum("job" in trace.get("meta", {}) for trace in drawn[name]["data"]) == 12
    assert [len(trace["x"]) for trace in drawn["keys"]["data"]] == [12, 12, 12]  # device, model, seed
    assert 'id="seeds"' in without_scripts(grid_page)


def test_curves_over_seeds_have_bands(grid_folder, grid_page):
    report, drawn = build.read_report(grid_folder), figures(grid_page)
    (metric,) = [goal.metric for goal in report.goals]
    bands = [trace for trace in drawn["curve-1"]["data"] if "job" not in trace.get("meta", {})]
    assert len(bands) == 2 * len(report.seeds) == 8
    for group, area, line in zip(report.seeds, bands[::2], bands[1::2], strict=True):
        curves = [each.curves[metric] for each in report.results if each.job in group.jobs]
        values = np.array([curve.values for curve in curves])
        assert array(line["x"]) == curves[0].steps.tolist() and line["name"] == f"{group.name}, 3 seeds"
        assert array(line["y"]) == pytest.approx(np.median(values, axis=0).tolist(), rel=1e-5)
        low, high = np.quantile(values, (0.25, 0.75), axis=0)
        assert array(area["y"]) == pytest.approx([*high, *low[::-1]], rel=1e-5) and area["fill"] == "toself"


def test_search_page_shows_pruned_jobs(search_page):
    drawn = figures(search_page)
    assert list(drawn) == ["history", "keys", "curve-0", "curve-1"]
    line, whole, pruned = drawn["history"]["data"]
    assert len(whole["x"]) == 36 and pruned["x"] == [3, 15, 23, 27]
    assert line["y"] == sorted(line["y"]) and line["y"][-1] == max(whole["y"])
    axes = [drawn["keys"]["layout"][name]["type"] for name in ("xaxis", "xaxis2", "xaxis3")]
    assert axes == ["log", "linear", "category"] and len(drawn["keys"]["data"][0]["x"]) == 40


def test_nothing_comes_over_the_network(grid_page):
    rest = without_scripts(grid_page)
    assert not re.search(r"""(?:src|href)\s*=\s*["']?\s*(?:https?:)?//|@import|url\(""", rest)
    assert not re.search(r"<(?:link|iframe|object|embed)\b|<script[^>]*\bsrc", grid_page.partition("plotly.js v")[0])
    assert "default-src 'none'" in rest and grid_page.count("plotly.js v") == 1


def test_page_escapes_texts_of_users(tmp_path, write):
    sweep = write.folder(tmp_path, words=(EVIL,), objectives=({"metric": "val/accuracy", "direction": "maximize"},))
    for seed in (1, 2, 3):
        for device in ("cpu", "cuda:0"):
            overrides = (f"device={device}", f"model={EVIL}", f"seed={seed}")
            write.train(sweep, overrides, seed=seed, device=device, name=EVIL + str(seed))
    sweep.job((f"model={EVIL}2",), "failed", name=EVIL, error=EVIL, summary={})
    sweep.job((f"model={EVIL}3",), "skipped", name=EVIL, error=EVIL)
    text = build.draw(build.read_report(sweep.close()))
    rest = without_scripts(text)
    assert "<img" not in rest and "<script" not in rest and "&lt;img src=x onerror=alert(1)&gt;" in rest
    assert text.count("<script") - text.partition("plotly.js v")[2].partition("</script>")[0].count("<script") == 3
    drawn = json.dumps(figures(text), ensure_ascii=False)
    assert "<img" not in drawn and "<script" not in drawn  # plotly interprets a few tags in its texts


def test_page_of_hundred_jobs_stays_small(tmp_path, write):
    empty = build.draw(build.read_report(write.folder(tmp_path / "none").close()))
    assert len(empty) < 30_000 and "0 jobs" in empty  # without plotly
    sweep = write.folder(tmp_path / "hundred")
    for number in range(100):
        overrides = (f"optimizer.lr={number}", f"model.width={number % 7}")
        write.train(sweep, overrides, seed=number, num_steps=10_000, num_windows=1)
    text = build.draw(build.read_report(sweep.close()))
    assert len(text.encode()) < 6_000_000
    assert len(figures(text)["curve-0"]["data"]) == 100


@pytest.mark.parametrize(
    ("values", "states"),
    [
        ([math.nan, math.inf], ["finished", "finished"]),
        ([None, None], ["finished", "pruned"]),
        ([0.5, 0.5], ["finished", "finished"]),
        ([0.5, math.inf], ["finished", "pruned"]),
    ],
)
def test_odd_values_make_a_page(tmp_path, write, values, states):
    objectives = ({"metric": "val/loss", "direction": "minimize"},)
    sweep = write.folder(tmp_path, objectives=objectives)
    for number, (value, state) in enumerate(zip(values, states, strict=True)):
        best = {"metric": "val/loss", "mode": "min", "value": value, "step": 1}
        sweep.job((f"lr={number}", f"seed={number}"), state, summary={"best": best, "num_steps": 1})
    assert "</html>" in build.draw(build.read_report(sweep.close()))
