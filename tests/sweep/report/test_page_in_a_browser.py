"""The page as a real browser renders it, without a network."""

import os
import re
import shutil
import signal
import subprocess

import pytest

from runner.sweep.report import build

pytestmark = pytest.mark.slow
SECONDS, TRIES = 40, 3  # a headless chromium sometimes hangs at its start, for any page


@pytest.fixture(scope="module")
def browser():
    found = [path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))]
    if not found:
        say = pytest.fail if os.environ.get("CI") == "true" else pytest.skip  # there .ci/run installs one
        say("no chromium, chromium-browser or google-chrome on this machine")
    return found[0]


def look(command):
    """Run the browser. Returns its output as (out, err)."""
    for _ in range(TRIES):
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, **streams, start_new_session=True)
        try:
            out, err = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            continue
        assert process.returncode == 0, err
        return out, err
    raise AssertionError(f"the browser hung {TRIES} times")


@pytest.fixture(scope="module")
def render(browser, tmp_path_factory):
    """Return a function that renders a page's file, runs the user's actions as JavaScript, and returns the document without scripts."""

    def rendered(file, deeds=""):
        text = file.read_text()
        ending = "</body>\n</html>\n"
        assert text.endswith(ending)
        folder = tmp_path_factory.mktemp("rendered")
        page = folder / "page.html"
        page.write_text(text.removesuffix(ending) + f"<script>{deeds}</script>" + ending)
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
        flags += ["--enable-logging=stderr", "--host-resolver-rules=MAP * ~NOTFOUND"]
        flags += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=15000", "--window-size=1280,1000"]
        out, err = look([browser, *flags, "--dump-dom", page.as_uri()])
        assert "CONSOLE" not in err, err  # an error, or a resource that the page's policy refused
        document = re.sub(r"<script\b.*?</script>", "", out, flags=re.DOTALL)
        assert "data-errors" not in document[:2000], document[:2000]
        return document

    return rendered


def plot(document, name):
    """Return the HTML of one plot."""
    return document.partition(f'id="plot-{name}"')[2].partition("</figure>")[0]


def noted(name, value):
    """Return JavaScript that stores a value in the document, for the test to read."""
    return f"document.documentElement.dataset.{name} = {value};"


def note(document, name):
    return re.search(rf'data-{name}="([^"]*)"', document)[1]


SORT = "document.querySelectorAll('table.sortable th button').forEach(b => { if (b.textContent === 'samples/s') b.click(); });"
ORDER = "[...document.querySelectorAll('tr[data-job]')].map(row => row.dataset.job).join(' ')"
LINES = "['curve-0', 'curve-1'].map(id => document.querySelectorAll(`#plot-${id} .js-line`).length).join(' ')"


def test_page_is_drawn_without_a_network(render, grid_folder):
    results = build.write(grid_folder).results
    loaded = "performance.getEntriesByType('resource').map(e => e.name).join(' ') || 'nothing'"
    none = "document.querySelector('.choice[data-first=\"0\"]').click();"
    one = "document.querySelector('.chip[data-job=\"7\"]').click();"
    best = "document.querySelector('.choice[data-first=\"5\"]').click();"
    deeds = [noted("loaded", loaded), noted("lines", LINES), noted("order", ORDER), SORT, noted("once", ORDER), SORT]
    document = render(grid_folder / "report.html", "".join([*deeds, none, one, noted("one", LINES), best]))
    assert note(document, "loaded") == "nothing"
    assert 'data-drawn="3"' in document and "0.9775 ± 0.0033</td>" in document
    assert plot(document, "keys").count('<path class="point"') == 3 * 12
    assert re.search(r'<tr data-job="4" class="best">', document)
    # the columns are sorted in both directions; jobs without a value stay last
    assert [int(number) for number in note(document, "order").split()] == [result.job for result in results]
    known = [result for result in results if result.samples_per_second]
    by_speed = [result.job for result in sorted(known, key=lambda result: result.samples_per_second)]
    once = [int(number) for number in note(document, "once").split()]
    twice = [int(number) for number in re.findall(r'<tr data-job="(\d+)"', document)]
    assert once[:12] == by_speed and twice[:12] == by_speed[::-1]
    assert set(once[12:]) == set(twice[12:]) == {12, 13, 14, 15}
    # the legend shows and hides lines, and the medians of their seeds
    assert note(document, "lines") == "16 16" and note(document, "one") == "2 2"
    assert plot(document, "curve-0").count('class="js-line"') == 5 + 2
    assert len(re.findall(r'<button[^>]*aria-pressed="false"', document)) == 7
