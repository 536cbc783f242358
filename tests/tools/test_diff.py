"""`python -m runner diff`: known differences by name, the step where curves diverge, several runs, a store, and the first operation."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from trained_runs import NO_PICTURES, QUIET

from runner import cli
from runner.runs.reproduce.compare import compare
from runner.runs.reproduce.recorded import RecordedRun
from runner.tools import diff
from runner.tracking.journal import Journal
from runner.tracking.journal_reader import read_events

#: in differing_nets.py, a name that no other test imports: a run's module stays imported in this process
MODEL = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self, width=8):
        super().__init__(nn.Flatten(), nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))
"""
WORDS = [
    "data=arrays",
    "data.path=mine.npz",
    "device=cpu",
    "train.num_epochs=2",
    "train.batch_size=32",
    NO_PICTURES,
    QUIET,
]


def write_rows(changed=0.0):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(90, 4))
    x[7, 2] += changed
    np.savez("mine.npz", x=x, y=np.arange(90) % 3)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("kept") / "outputs"


@pytest.fixture
def base(own_folder, kept):
    """outputs/a/run, with a custom model in a directory outside a Git repository; it is trained once."""
    write_rows()
    Path("differing_nets.py").write_text(MODEL)
    Path("conf/model").mkdir(parents=True)
    Path("conf/model/net.yaml").write_text("_target_: differing_nets.Net\n")
    if not kept.exists():
        train("a")
        shutil.copytree("outputs", kept)
    else:
        shutil.copytree(kept, "outputs")
    return own_folder


def train(name, *words):
    assert cli.main(["model=net", *WORDS, *words, f"hydra.run.dir=outputs/{name}/run"]) == 0


def differences(capfd, *names):
    """Return the command's JSON, and the differences by their names."""
    capfd.readouterr()
    assert cli.main(["diff", *(f"outputs/{name}/run" for name in names), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    return found, {each["what"]: each["values"] for each in (*found["configuration"], *found["made_with"])}


def test_diff_names_overrides_by_key(base, capfd):
    words = ["seed=1", "optimizer.lr=0.01", "train.batch_size=16", "train.precision=bf16", "backends.cpu.num_threads=2"]
    train("b", *words)
    found, by_name = differences(capfd, "a", "b")
    assert by_name == {
        "seed": ["0", "1"],
        "optimizer.lr": ["0.001", "0.01"],
        "train.batch_size": ["32", "16"],
        "train.precision": ["fp32", "bf16"],
        "backends.cpu.num_threads": ["null", "2"],
        "threads": ["1", "2"],
    }
    assert found["runs"][1]["changed"].startswith("data=arrays model=net device=cpu seed=1 data.path=mine.npz ")
    assert found["sentence"].startswith("train/loss parts at step 1, by ")
    assert cli.main(["diff", "outputs/a/run", "outputs/b/run"]) == 0
    said = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert ["optimizer.lr", "0.001", "0.01"] in said and ["train.precision", "fp32", "bf16"] in said


def test_diff_of_untracked_code_and_data(base, capfd, monkeypatch):
    write_rows(changed=1e-3)
    Path("differing_nets.py").write_text(MODEL.replace("ReLU", "GELU"))
    monkeypatch.delitem(sys.modules, "differing_nets", raising=False)
    train("b")
    _, by_name = differences(capfd, "a", "b")
    assert by_name.keys() == {"differing_nets.py", "data"}
    then, now = by_name["data"]
    assert then != now and then.startswith("arrays, 90 rows, fingerprint ")


def test_two_changes_that_were_not_committed(base, capfd):
    for name, line in (("b", "lr = 1"), ("c", "lr = 2")):
        shutil.copytree("outputs/a", f"outputs/{name}")
        folder = Path(f"outputs/{name}/run")
        (folder / "git.diff").write_text(
            f"diff --git a/x.py b/x.py\n--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-lr = 0\n+{line}\n"
        )
        change_start(folder, git_commit="0123456789abcdef", git_dirty="true")
    _, by_name = differences(capfd, "b", "c")
    assert by_name == {
        "code": ["0123456789ab with changes", "0123456789ab with changes, other ones"],
        "x.py": ["+ lr = 1", "+ lr = 2"],
    }
    _, by_name = differences(capfd, "a", "b")
    assert by_name["code"] == ["in no git repository", "0123456789ab with changes"]
    assert by_name["x.py"] == ["as committed", "+ lr = 1 (and 1 more lines)"]


def change_start(folder, **tags):
    with Journal(folder) as journal:
        (start,) = [event for event in read_events(folder) if event.pop("kind") == "start" or "tags" in event][-1:]
        journal.event("start", **(start | {"tags": start["tags"] | tags}))


def test_versions_machine_and_device(base, capfd):
    shutil.copytree("outputs/a", "outputs/b")
    folder = Path("outputs/b/run")
    change_start(folder, device="cuda:0", device_name="NVIDIA H200", runner_version="0.0.1")
    lines = (folder / "environment.txt").read_text().splitlines()
    new = {
        "torch==": "torch==1.2.3",
        "numpy==": "numpy==1.0",
        "# machine": "# machine: M7, 3 cores",
        "# Linux": "# Other",
    }
    lines = [next((to for begin, to in new.items() if line.startswith(begin)), line) for line in lines]
    (folder / "environment.txt").write_text("\n".join([*lines, "a_package==7"]) + "\n")
    found, by_name = differences(capfd, "a", "b")
    assert by_name.keys() == {"runner", "torch", "numpy", "packages", "platform", "machine", "device"}
    assert by_name["torch"][1] == "1.2.3" and by_name["packages"] == ["a-package none", "a-package 7"]
    assert by_name["device"][1] == "cuda:0 (NVIDIA H200)"
    assert found["sentence"].startswith("their curves are bitwise identical (")
    (folder / "environment.txt").unlink()  # former runs did not record the machine and threads
    found, by_name = differences(capfd, "a", "b")
    assert by_name["versions"][1] == "not known" and found["not_known"] == [
        "versions",
        "platform",
        "machine",
        "threads",
    ]


def test_several_show_only_what_differs(base, capfd):
    for name, words in {"b": ["seed=1"], "c": ["seed=2", "optimizer.lr=0.1"]}.items():
        train(name, *words)
    found, by_name = differences(capfd, "a", "b", "c")
    assert by_name == {"seed": ["0", "1", "2"], "optimizer.lr": ["0.001", "0.001", "0.1"]}
    assert [each["metrics"]["train/loss"]["parted_step"] for each in found["curves"]] == [1, 1]
    words = [f"outputs/{name}/run" for name in "abcab"]
    for number in (3, 4):
        words[number] = shutil.copytree(words[number], f"outputs/more{number}/run")
    assert cli.main(["diff", *words]) == 0
    said = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert ["configuration", "seed", "optimizer.lr"] in said and ["C", "2", "0.1"] in said
    assert ["D", "nowhere"] in [line[:2] for line in said] and ["C", "step", "1"] in [line[:3] for line in said]


def original(folder, series):
    return RecordedRun("a", None, folder, None, "finished", {}, {}, None, series)


def test_diff_finds_first_bit_and_rounding_difference():
    steps, values = np.arange(1, 5), np.array([1.0, 1.0, 1.0, 1.0])
    found = compare(
        "train/loss", (steps, values), (steps, values + np.array([0, 1e-9, 1e-9, 0.5])), may_end_elsewhere=True
    )
    assert (found.parted_step, found.first_step) == (2, 4)
    assert found.parted_by == pytest.approx(1e-9, rel=1e-6)


def test_diff_separates_names_that_collide_on_store(tmp_path):
    one = (np.array([1]), np.array([1.0]))
    series = {"train/p>1": one, "train/p<1": one, "train/loss": one}
    of_folder = original(tmp_path, series)
    assert list(diff._spelled(of_folder, as_stored=False)) == list(series)
    stored = list(diff._spelled(of_folder, as_stored=True))
    assert stored[::2] == ["train/p_1", "train/loss"] and stored[1].startswith("train/p_1_")
    of_store = original(tmp_path, dict.fromkeys(sorted(stored), one))
    assert set(diff._spelled(of_store, as_stored=True)) == set(stored)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "`diff` takes two runs or more"),
        (["outputs/a/run", "outputs/a/run"], "both names mean the same run"),
        (["outputs/a/run", "nowhere"], "there is no directory `nowhere`"),
        (["outputs/a/run", "outputs/b/run", "--op"], "`diff` does not take `--op`"),
        (["outputs/a/run", "0" * 32, "tracking.uri=sqlite:///nowhere.db"], "and the store sqlite:"),
    ],
)
def test_mistakes(a_few, capfd, words, problem):
    assert cli.main(["diff", *words]) == 2
    assert problem in capfd.readouterr().err and not Path("nowhere.db").exists()


@pytest.mark.parametrize("command", ["diff", "compare"])
def test_diff_warns_of_unused_store(a_few, command, capfd):
    assert cli.main([command, "outputs/a/run", "outputs/b/run", "tracking.uri=http://nowhere"]) == 0
    assert capfd.readouterr().out.startswith("note: tracking.uri=http://nowhere has no effect: all runs")


@pytest.fixture
def a_few(at_home, monkeypatch, tmp_path):
    for name in "abc":
        shutil.copytree("outputs/digits/run", tmp_path / f"outputs/{name}/run")
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_diff_folder_and_store(base, capfd, warm_programs, empty_store):
    shutil.copy(empty_store, "runs.db")
    uri = f"tracking.uri=sqlite:///{base}/runs.db"
    train("b", "tracking.enabled=true", "tracking.log_model=false", uri, "seed=1")
    run_id = json.loads(Path("outputs/b/run/summary.json").read_text())["run_id"]
    shutil.rmtree("outputs/b")
    capfd.readouterr()
    assert cli.main(["diff", "outputs/a/run", run_id, uri, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert [each["what"] for each in found["configuration"]] == ["seed"] and not found["made_with"]
    assert found["sentence"].startswith("train/loss parts at step 1")
