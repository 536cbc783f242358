"""The documentation: its command, its site, and the tutorials, whose files are written and whose commands run in an empty directory."""

import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from runner import cli
from runner.cli.docs import topics
from runner.version import HERE, PACKAGES

BLOCK = re.compile(r"```(python|yaml|bash)\n(.*?)```", re.DOTALL)
TUTORIALS = sorted((HERE / "docs/tutorials").glob("*.md"))


def test_docs_lists_topics_and_prints_page(capsys):
    assert cli.main(["docs", "--json"]) == 0
    titles = json.loads(capsys.readouterr().out)["topics"]
    assert titles["agents"] == "For agents and scripts" and {"sweep", "options", "first-run", "changelog"} <= set(
        titles
    )
    assert cli.main(["docs", "agents"]) == 0
    assert capsys.readouterr().out == topics()["agents"].read_text()


def test_docs_unknown_topic_suggests_nearest(capsys):
    assert cli.main(["docs", "agent", "--json"]) == 2
    (problem,) = json.loads(capsys.readouterr().out)["faults"]
    assert problem["suggestions"] == ["python -m runner docs agents"]


@pytest.mark.slow
def test_site_builds_without_dead_link(tmp_path):
    config, build = HERE / "docs/mkdocs.yml", [sys.executable, "-m", "mkdocs", "build", "--strict", "-q"]
    built = subprocess.run([*build, "-f", config, "-d", tmp_path], capture_output=True, text=True, cwd=PACKAGES)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {page.resolve() for page in topics().values()} | {PACKAGES / "README.md"}
    built_from = {page for page in pages if (tmp_path / _address(page)).is_file()}
    assert pages == built_from and list(tmp_path.glob("assets/stylesheets/*.css"))


def _address(page):
    folder = page.relative_to(PACKAGES)
    return folder.parent / "index.html" if folder.name == "README.md" else folder.with_suffix("") / "index.html"


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
@pytest.mark.usefixtures("warm_jobs", "warm_programs")
def test_tutorial_runs_as_written(page, own_folder, empty_store, warm):
    if page.stem != "first-run":
        shutil.copy(empty_store, "mlflow.db")
    cells = []
    for language, body in BLOCK.findall(page.read_text()):
        first, _, rest = body.partition("\n")
        if language == "bash":
            for line in body.splitlines():
                _run(shlex.split(line), warm)
        elif first.startswith("# "):
            file = own_folder / first.removeprefix("# ")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(rest)
        else:
            cells.append(body)
    if cells:
        (own_folder / "cells.py").write_text("\n".join(cells))
        _run(["python", "cells.py"], warm)


def _run(words, warm):
    if words[:3] == ["python", "-m", "runner"]:
        assert "ui" in words or cli.main(words[3:]) == 0, words  # `ui` serves until Ctrl-C
    else:
        with warm.program([sys.executable, *words[1:]]) as process:
            assert process.wait() == 0, words
