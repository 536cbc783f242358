"""The arguments of the commands: errors with their help, runs with `=` in their names."""

import json
import shlex
from pathlib import Path

import pytest
from refused import problems_in, problems_of

from runner import cli
from runner.cli.arguments import parse
from runner.cli.table import COMMANDS

RUN = "outputs/digits/run"
FILES = "--input train.csv --output out.csv"

#: one command per line
MISTAKES = """
predict RUN --input --output out.csv
evaluate ''
export RUN --format safetensors --output train.csv/m.safetensors
predict outputs/digit/run FILES
predict RUN --input train.csv --output train.csv
predict RUN --input train.csv --output out.cvs
predict RUN --input train.csv --output no/out.csv
predict RUN --input my_rows.py --output out.csv
predict RUN FILES 'device=['
predict RUN FILES backends.cpu.num_threadz=4
export RUN --format onxx
export RUN --format torchscript
export RUN --format pt2 --output model.onnx
export RUN --format mlflow --output outputs
export RUN --format safetensors --predictions
export outputs/raw/run --format pt2 --predictions
serve RUN --port 99999
register RUN
register RUN --name a/b:c --alias v1
evaluate RUN train.num_epochs=3
evaluate RUN data.limit=3
evaluate RUN data=iris data.val_fraction=0.5
evaluate RUN data=arrays data.path=nothing.npz
evaluate RUN data.num_row=3
lr-find --from 1 --to 0.1
lr-find train.num_epoch=3
evaluate RUN hydra.mode=MULTIRUN
resume RUN --cfg job train.num_epochs=4
evalute
predict RUN RUN --inptu train.csv --output out.csv --batch-size none seed=1
predict nowhere --input trian.csv --output /proc/out.csv device=cud
"""


@pytest.fixture
def refused(at_home, run):
    """Return the errors of a command in the directory that has the runs."""

    def of(words):
        words = words.replace(" RUN", f" {RUN}").replace("FILES", FILES)
        code, out, _ = run(*shlex.split(words), "--json")
        assert code == 2
        return problems_in(out)

    return of


@pytest.mark.parametrize("words", MISTAKES.strip().split("\n"))
def test_wrong_arguments_get_help(words, refused, messages):
    before = set(Path().rglob("*"))
    messages(refused(words))
    assert {path for path in set(Path().rglob("*")) - before if "__pycache__" not in path.parts} == set()


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (
            "predict nowhere --input no.csv --output out.cvs device=cud train.precision=fp8",
            ("--input no.csv", "--output out.cvs", "predict nowhere", "device=cud", "train.precision=fp8"),
        ),
        (
            f"predict {RUN} --inptu x.csv -m seed=1 --batch-size 0 --output out.csv",
            ("--inptu x.csv", "--batch-size 0", "predict -m", "seed=1"),
        ),
        ("evaluate nowhere device=cud", ("evaluate nowhere", "device=cud")),
        ("explain nowhere device=cud", ("explain nowhere", "device=cud")),
        (f"explain {RUN} --time --stp 3", ("--stp 3",)),
        ("export nowhere --format onxx", ("export --format onxx", "export nowhere")),
        (f"export {RUN} --format onnx --predictions=1", ("--predictions 1",)),
        (f"serve {RUN} --port 0 --keep", ("--port 0", "--keep")),
        ("register nowhere --name a/b --alias v1", ("--name a/b", "--alias v1", "register nowhere")),
        ("lr-find --steps 3 --from x --to 0", ("--steps 3", "--from x", "--to 0")),
    ],
)
def test_every_wrong_argument_is_reported_at_once(words, asked, refused):
    assert tuple(problem.source for problem in refused(words)) == asked


def test_flags_and_overrides_may_be_anywhere(own_folder):
    words = ["device=cpu", "--output=o.csv", "outputs/a", "--input", "i.csv", "train.precision=bf16"]
    found = parse(COMMANDS["predict"], words)
    assert (found.run, found.overrides, found.flags) == ("outputs/a", ["device=cpu", "train.precision=bf16"], [])
    assert (found["--output"], found["--input"], found["--batch-size"]) == ("o.csv", "i.csv", 1024)
    assert parse(COMMANDS["export"], ["--predictions", "outputs/a", "--format", "onnx"])["--predictions"] is True
    assert parse(COMMANDS["evaluate"], []).run == "last"
    found = parse(COMMANDS["lr-find"], ["model=mlp", "-cn", "config", "--steps=20", "seed=2"])
    assert (found.flags, found.overrides, found["--steps"]) == (["-cn", "config"], ["model=mlp", "seed=2"], 20)


def test_path_with_equals_sign_is_a_run(own_folder):
    (checkpoint := own_folder / "seed=1" / "checkpoints" / "best.pt").parent.mkdir(parents=True)
    checkpoint.write_text("")
    long = f"data.drop=[{','.join(['a_column'] * 40)}]"  # longer than the maximum length of a file name
    for word in ("seed=1", "seed=1/checkpoints/best.pt"):
        found = parse(COMMANDS["evaluate"], [word, long, "device=cpu"])
        assert (found.run, found.overrides) == (word, [long, "device=cpu"])


def test_quotes_that_no_shell_removed_are_removed():
    arguments = parse(COMMANDS["train"], ["'model.hidden_sizes=[64]'", '"seed=1"'])
    assert arguments.overrides == arguments.words == ["model.hidden_sizes=[64]", "seed=1"]


@pytest.mark.parametrize(
    ("words", "sources"),
    [
        (["--bugdet", "3", "train.num_epohcs=3"], ["--bugdet 3", "train.num_epohcs=3"]),
        (["--data", "playground", "data.shape=xor"], ["--data playground"]),  # chooses what the other belongs to
    ],
)
def test_unknown_flag_hides_no_other_error(words, sources):
    assert [problem.source for problem in problems_of(parse, COMMANDS["train"], words)] == sources


def test_failed_run_has_its_exit_code_in_json(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    words = ["model=mlp", "data=digits", "data.limit=100", "optimizer=sgd", "optimizer.lr=1e9", "train.num_epochs=9"]
    assert cli.main([*words, "tracking.enabled=false", "device=cpu", "--json"]) == 1
    summary = json.loads(capfd.readouterr().out)
    assert (summary["status"], summary["exit_code"]) == ("failed", 1)
