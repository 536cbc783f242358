"""README and the pages next to the code: their files are written, their commands are composed or run, and the paths they name exist."""

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import numpy as np
import pytest

from runner import cli
from runner.cli import commands
from runner.cli.answer import report
from runner.cli.arguments import parse
from runner.cli.table import COMMANDS, MULTIRUN
from runner.command import ANY_KEY
from runner.config.compose import CheckedLoader, composed_with, composer
from runner.device import Driver, Gpu, Hardware
from runner.device.hardware import GIB
from runner.errors import RunnerError
from runner.experiment.check import check
from runner.sweep.search.space import read_space
from runner.version import PACKAGES

README = (PACKAGES / "README.md").read_text()
BENCH = PACKAGES / "tests/bench/README.md"
#: by the page's path in this repository
PAGES = {
    str(page.relative_to(PACKAGES)): page.read_text()
    for folder in ("conf", "runner", "tests")
    for page in (PACKAGES / folder).rglob("*.md")
    if page.name != "CHANGELOG.md"
} | {"README.md": README}
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
SHORT = ["train.num_steps=3", "train.batch_size=4", "train.eval_batch_size=16", "tracking.enabled=false"]
#: by an override in a command: overrides that make its run smaller
SMALLER = {
    "model=gpt": ["model.width=32", "model.depth=2"],
    "model=resnet": ["model.width=8"],
    "data=synthetic": ["data.num_rows=500"],
}
#: replacements for the placeholders in a command
PLACEHOLDERS = {
    "[--output FILE]": "",
    "[--output x.csv|x.parquet]": "--output x.csv",
    "[KEY=VALUE ...]": "",
    "[--step N]": "--step 3",
    "[--against RUN] [--budget SECONDS]": "--against last --budget 60",
    "KEY=A,B [...]": "seed=1,2",
    "KEY=A,B": "model=linear,mlp",
    "KEY=VALUE ...": "seed=1",
    "DIRECTORY": "last",
    "SECONDS": "60",
    "A B": "last last",
    "GROUP=OPTION": "model=mlp",
    "RUN": "last",
    "FORMAT": "onnx",
    "FILE": "rows.csv",
    "NAME": "buyers",
    " [SWEEP]": "",
    " [DIR]": "",
}
#: a machine with the devices that the commands name
MACHINE = Hardware(
    torch_version="2.13.0+cu130",
    cuda_build="13.0",
    arch_list=("sm_80",),
    driver=Driver(cuda=13000, init_code=0),
    cuda=(Gpu("A100", 80 * GIB, 79 * GIB, (8, 0)),) * 2,
    mps_built=True,
    mps=Gpu("M2 GPU", 12 * GIB, 9 * GIB),
)
TOP_LEVEL = {"conf", "runner", "tests", "pyproject.toml", "README.md", "LICENSE"}


def section(page, title):
    return PAGES[page].partition(f"## {title}\n")[2].partition("\n## ")[0]


def files_in(text):
    """Return, by path, the content of each block whose first line is a path."""
    blocks = [body for language, body in BLOCK.findall(text) if language in ("python", "yaml")]
    return {body.splitlines()[0].removeprefix("# "): body for body in blocks if body.startswith("# ")}


def commands_in(text):
    """Return the arguments of each command in the text's bash and console blocks and in its `code`, without the generated table."""
    text = re.sub(r"<!-- commands -->.*?<!-- end -->", "", text, flags=re.DOTALL)
    blocks = "".join(body for language, body in BLOCK.findall(text) if language in ("bash", "console"))
    lines = blocks.replace("\\\n", " ").splitlines()
    spans = re.findall(r"`([^`\n]+)`", BLOCK.sub("", text))
    found = [re.match(r"(?:\$ |.*&& )?python -m runner(?: (.*))?$", line) for line in [*lines, *spans]]
    return [shlex.split(_filled(match[1] or ""), comments=True) for match in found if match]


def _filled(words):
    for placeholder, text in PLACEHOLDERS.items():
        words = re.sub(rf"(?<!\w){re.escape(placeholder)}(?!\w)", text, words)
    return words


#: those of tutorials are run by tests/cli/test_docs.py
EVERY_COMMAND = sorted(
    {tuple(words) for page, text in PAGES.items() if "tutorials" not in page for words in commands_in(text)}
)


def composes(flags, overrides):
    """Compose and check a command, and raise its errors; for a sweep, check the first and the last job."""
    is_sweep = bool(MULTIRUN & set(flags))
    flags = [flag for flag in flags if flag not in MULTIRUN]
    compose = composer(flags)
    jobs = [tuple(overrides)]
    if is_sweep:
        master = composer(flags, mode=commands.RunMode.MULTIRUN)(overrides)
        if "Search" in master.hydra.sweeper["_target_"]:
            assert read_space(overrides, CheckedLoader()).dimensions
            return
        found = [words for words, _ in commands.planned_jobs(overrides, master)]
        jobs = [found[0], found[-1]]
    for job in jobs:
        check(composed_with(compose, job), MACHINE)


def write_guides(folder):
    """Write the files of README's guide. Returns their paths."""
    files = files_in(section("README.md", "Custom model, data and loss"))
    for name, body in files.items():
        assert body.count("\n") <= 20, f"{name} is no short guide"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(body)
    return set(files)


@pytest.fixture
def a_run(own_folder):
    """A run in the directory that the pages use in their commands, next to the files of the guides."""
    write_guides(own_folder)
    shutil.copy(PACKAGES / "tests/whole_runs/programs.py", own_folder)
    assert cli.main(["hydra.run.dir=outputs/DATE/TIME", "model=linear", "task.plots=false", *SHORT]) == 0
    (own_folder / "mlflow.db").touch()


def test_every_command_is_one(a_run, own_folder, monkeypatch):
    done = []
    for place, answer in (
        ("runner.cli.devices.show", {}),
        ("runner.runs.sync.replay", []),
        ("runner.sweep.report.build.rewrite", own_folder),
        ("runner.cli.commands._become", 0),
    ):
        monkeypatch.setattr(place, lambda *words, answer=answer, **settings: done.append(words) or answer)
    monkeypatch.setattr("runner.tracking.stores.of_last", lambda *words, **settings: "sqlite:///mlflow.db")
    assert len(EVERY_COMMAND) > 50
    for typed in EVERY_COMMAND:
        named = [word for word in typed if word != "--json"]
        verb, *words = named if named and named[0] in COMMANDS else ("train", *named)
        if verb in ("history", "schema", "watch"):
            assert cli.main([verb, *words]) == 0, words
        elif verb in ("devices", "report", "sync", "ui"):
            assert cli.main([verb, *words]) == 0, words
            assert done.pop() is not None
        elif verb == "train":
            given = parse(COMMANDS[verb], words)
            composes(given.flags, given.overrides)
        else:
            given = parse(COMMANDS[verb], words)
            if COMMANDS[verb].keys == ANY_KEY:
                composes(given.flags, given.overrides)
    assert not done


def test_the_guides_to_what_is_ones_own(own_folder, monkeypatch):
    monkeypatch.syspath_prepend(str(own_folder))
    text = section("README.md", "Custom model, data and loss")
    assert write_guides(own_folder) == {"my_models.py", "my_parts.py", "conf/model/net.yaml"}
    commands = commands_in(text)
    assert len(commands) == 2
    for words in commands:
        assert cli.main([*words, *SHORT]) == 0, words


@pytest.mark.slow
def test_pairs_cover_every_kind_of_data(own_folder, monkeypatch):
    import pandas as pd
    from PIL import Image

    draw = np.random.default_rng(0)
    columns = {"age": draw.integers(18, 80, 200), "city": draw.choice(["Rome", "Lyon"], 200)}
    people = pd.DataFrame({**columns, "buys": draw.choice(["yes", "no"], 200)})
    people.to_csv("people.csv", index=False)
    people.to_csv("other.csv", index=False)
    people.drop(columns="buys").to_csv("new.csv", index=False)
    for name in ("cat", "dog"):
        (own_folder / "pictures" / name).mkdir(parents=True)
        for number in range(20):
            pixels = draw.integers(0, 256, (70, 80, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(own_folder / "pictures" / name / f"{number}.png")
    (own_folder / "book.txt").write_text("It was a day like any other day. " * 100)
    *others, of_the_table = reversed(commands_in(section("conf/README.md", "Data")))
    for words in [*others, of_the_table]:
        smaller = [more for word in words for more in SMALLER.get(word, ())]
        assert cli.main([*words, *smaller, *SHORT]) == 0, words
    after = commands_in(BLOCK.search(PAGES["runner/runs/README.md"])[0])
    ran = [words for words in after if words[0] in ("evaluate", "predict", "export")]
    assert len(ran) == 3
    for words in ran:
        assert cli.main(words) == 0, words
    answers = pd.read_csv("answers.csv")
    assert list(answers) == ["label", "probability", "p_no", "p_yes"]
    assert len(answers) == 200


def test_readme_refused_device_output_is_as_written(own_folder, capsys):
    block = next(body for _, body in BLOCK.findall(section("README.md", "Choosing a device")))
    first, _, told = block.partition("\n")
    (words,) = commands_in(f"```console\n{first}\n```")
    one = Hardware(torch_version="2.13.0+cu130", cuda_build="13.0", driver=MACHINE.driver, cuda=MACHINE.cuda[:1])
    with pytest.raises(RunnerError) as raised:
        check(composed_with(composer([]), words), one)
    assert report(raised.value) == 2
    assert capsys.readouterr().err.strip() == told.strip()


@pytest.mark.slow
def test_the_plan_says_what_its_page_says(own_folder, warm_programs, capfd, monkeypatch):
    block = next(body for _, body in BLOCK.findall(PAGES["runner/tools/README.md"]))
    first, *told = block.splitlines()
    (words,) = commands_in(f"```console\n{first}\n```")
    monkeypatch.setattr("runner.tools.plan.command.SECONDS_TO_SEARCH", 120.0)  # the machine may be busy
    assert cli.main(words) == 1
    said = capfd.readouterr().out.splitlines()
    assert said[2:] == told[2:]  # the first two lines depend on the machine


def test_every_package_has_its_row():
    rows = re.findall(r"^\| `runner/(\w+)` \|", section("runner/README.md", "Packages"), re.MULTILINE)
    assert sorted(rows) == sorted(path.parent.name for path in (PACKAGES / "runner").glob("*/__init__.py"))


def test_every_extra_is_named():
    extras = tomllib.loads((PACKAGES / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.search(r"Extras, as .*: ([\w ]+)\.", README)[1].split()) == set(extras) - {"test"}


def test_what_the_pages_name_is_there():
    own = set(files_in(README))
    for name, text in PAGES.items():
        here = PACKAGES / Path(name).parent
        missing = [link for link in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", text) if not (here / link).exists()]
        prose = BLOCK.sub("", text)
        paths = (
            set(re.findall(r"(?<![\w/.-])(?:runner|tests|conf|\.ci|\.github)/[\w./-]*\w", text))
            - own
            - set(files_in(text))
        )
        paths -= set(re.findall(r"^written +(.+\w),", text, re.MULTILINE))  # files that a command in the page writes
        missing += [path for path in paths if not (PACKAGES / path).exists()]
        modules = re.findall(r"`([\w/]+\.py)`", prose)
        missing += [path for path in modules if not ((here / path).is_file() or (PACKAGES / path).is_file())]
        assert not missing, f"{name} names {missing}"


def test_readme_heading_links_lead_to_headings():
    for name, text in PAGES.items():
        for link, anchor in re.findall(r"\]\(([^)#:]*)#([\w-]+)\)", text):
            there = (PACKAGES / Path(name).parent / link).read_text() if link else text
            headings = re.findall(r"^#+ (.+)$", there, re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_readme_is_short():
    assert len(README.splitlines()) <= 160
    assert re.search(r"<!-- test -->\n```bash\n(.+ && \.ci/check)\n```", README)  # .ci/run reads the command from here


def test_the_top_level_holds_nothing_else():
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=PACKAGES, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("no git repository")
    names = {line.partition("/")[0] for line in listed.stdout.splitlines()}
    assert {name for name in names if not name.startswith(".")} == TOP_LEVEL


def test_readme_speed_table_matches_full_one():
    """One run of tests/bench/table.py --write writes both tables."""
    part = re.compile(r"<!-- (table\.py (?:readme|mlp [a-z_,]*ours_all[a-z_,]*)) -->\n(.*?)<!-- end -->", re.DOTALL)
    (short,) = [body for _, body in part.findall(README)]
    (long,) = [body for _, body in part.findall(BENCH.read_text())]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in long.splitlines() if line.startswith("|")
    ]
    figures = {(row[0], row[1]): [f"{row[2]} ({row[3]})", row[5]] for row in cells}
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in short.splitlines() if line.startswith("|")
    ]
    assert len(rows) == 2 + 6
    for name, *figures_of_name in rows[2:]:
        assert figures_of_name == figures[name, "every step"] + figures[name, "every 50 steps"], name
    assert short.partition(";")[0] == long.partition("\n")[0].rstrip(":")


def test_every_table_says_by_which_command():
    parts = re.findall(r"<!-- (\w+\.py)([^>]*) -->\n(.*?)<!-- end -->", BENCH.read_text(), re.DOTALL)
    assert len(parts) == 15
    for script, _, body in parts:
        command = re.match(rf"By `python tests/bench/{script}([^`]*)`, \d{{4}}-\d\d-\d\d, commit \w{{7}}", body)
        assert command, f"{script}: {body[:100]}"
        own = (BENCH.parent / script).read_text()
        source = own + (BENCH.parent / "harness.py").read_text()
        assert all(f'"{flag}"' in source for flag in re.findall(r"--[\w-]+", command[1])), command[0]
        assert " section(" in own and "write=given.write" in own, f"{script} writes nothing"
