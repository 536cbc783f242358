"""The parts of files that are generated from the code: `pytest --update-snapshots tests/test_generated.py` writes them."""

import json
import re

import pytest
from snapshots import TESTS, read

from runner.cli import table
from runner.config import json_schema
from runner.config.compose import CONF
from runner.tasks.metric_names import NAMED
from runner.version import PACKAGES

AGAIN = "write it with: pytest --update-snapshots tests/test_generated.py"


def commands(page):
    return part(page, "commands", table.reference())


def metrics(page):
    rows = [f"| `{name}` | {metric.meaning} | {', '.join(metric.kinds)} |" for name, metric in NAMED.items()]
    return part(page, "metrics", "\n".join(["| `task.metrics=[NAME]` | is | tasks |", "|---|---|---|", *rows]))


def keys(page):
    """One table per group: what every run has is in base.yaml and in the groups without options."""
    docs = {}
    for file in json_schema.conf_files(CONF):
        if file.group in ("", *json_schema.WHOLE):
            docs |= {f"{file.group}.{key}".lstrip("."): each for key, each in file.docs.items()}
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for key, (comment, value) in docs.items():
        if not isinstance(value, dict) and comment and not key.startswith(("hydra.", "defaults")):
            default = "" if value == "???" else f"`{json.dumps(value)}`"
            rows.append(f"| `{key}` | {default} | {comment.replace('|', chr(92) + '|')} |")
    return part(page, "keys", "\n".join(rows))


def part(page, name, text):
    return re.sub(rf"(<!-- {name} -->\n).*?(?=\n<!-- end -->)", lambda begin: begin[1] + text, page, flags=re.DOTALL)


def names(words):
    return " ".join(f"`{word}`" for word in words)


def command_names(page):
    return re.sub(r"(?m)^(All commands: ).+\.$", lambda line: f"{line[1]}{names(table.COMMANDS)}.", page)


def options(page):
    for group in {file.parent for file in CONF.rglob("*.yaml")} - {CONF}:
        name, listed = group.relative_to(CONF), names(sorted(file.stem for file in group.glob("*.yaml")))
        page, count = re.subn(rf"(?m)^(\| `{name}` \| )`\w+`( `\w+`)*", rf"\1{listed}", page)
        assert count == 1, f"conf/README.md needs a row `{name}`"
    return page


@pytest.mark.parametrize(
    ("page", "parts"),
    [
        ("README.md", [command_names]),
        ("conf/README.md", [options, metrics]),
        ("runner/docs/reference.md", [commands]),
        ("runner/docs/configuration.md", [keys]),
    ],
    ids=["README", "conf", "reference", "configuration"],
)
def test_page_lists_what_the_code_has(page, parts, request):
    path = PACKAGES / page
    text = before = path.read_text()
    for update in parts:
        text = update(text)
    if request.config.getoption("--update-snapshots"):
        path.write_text(text)
    else:
        assert before == text, AGAIN


def test_schema_describes_conf(own_folder, request):
    is_updated = request.config.getoption("--update-snapshots")
    file = CONF / json_schema.FILE if is_updated else own_folder / json_schema.FILE
    json_schema.write(file)
    written, committed = (json.loads(each.read_text()) for each in (file, CONF / json_schema.FILE))
    assert written == committed, AGAIN


def test_snapshot_entries_belong_to_tests():
    for path in TESTS.glob("*/messages.txt"):
        for name in read(path):
            file, _, test = name.partition("::")
            function = re.match(r"\w+", test)[0]
            assert f"def {function}(" in (path.parent / file).read_text(), f"{path}: remove {name}"
