"""The arguments of the commands: errors with their help, runs with `=` in their names."""

import re
import shlex
from pathlib import Path

import pytest

from runner.cli.arguments import parse
from runner.cli.table import COMMANDS

RUN = "outputs/digits/run"
FILES = "--input train.csv --output out.csv"

MISTAKES = [
    (f"predict {RUN} --output out.csv", "--input FILE"),
    (f"predict {RUN} --input train.csv", "--output FILE"),
    (f"predict {RUN} --input --output out.csv", "it needs a value"),
    (f"predict {RUN} --input '' --output out.csv", "--> --input"),
    (f"predict {RUN} --input= --output out.csv", "it needs a value"),
    ("evaluate ''", "help: run evaluate last, or python -m runner evaluate [RUN]"),
    ("lr-find ''", "an argument is empty"),
    (f"export {RUN} --format safetensors --output train.csv/m.safetensors", "help: use --output m.safetensors"),
    (f"export {RUN} --format safetensors --output train.csv/in/m.safetensors", "train.csv/in: Not a directory"),
    (
        f"export {RUN} --format safetensors --output /proc/m.safetensors",
        "can't write in /proc: No such file",
    ),
    (f"predict {RUN} --inptu train.csv --output out.csv", "help: use --input train.csv"),
    (f"predict {RUN} --inptu= --output out.csv", "help: use --input FILE"),
    (f"predict outputs/digit/run {FILES}", "help: run predict outputs/digits/run"),
    (f"predict ./outputs/digits/rum {FILES}", "help: run predict outputs/digits/run"),
    (f"predict {RUN} {FILES} seed=1", "predict takes the run as it was"),
    (f"predict {RUN} {FILES} --batch-size none", "--batch-size 1024"),
    (f"predict {RUN} {RUN} {FILES}", "one run at a time"),
    (f"predict nowhere {FILES}", "there is no directory nowhere"),
    (f"predict {RUN} --input trian.csv --output out.csv", "--input train.csv"),
    (f"predict {RUN} --input no/train.csv --output out.csv", "there is no directory no"),
    (f"predict {RUN} --input train.csv --output train.csv", "would overwrite the input"),
    (f"predict {RUN} --input train.csv --output ./train.csv", "would overwrite the input"),
    (f"predict {RUN} --input train.csv --output out.cvs", "--output out.csv"),
    (f"predict {RUN} --input train.csv --output no/out.csv", "mkdir -p no"),
    (f"predict {RUN} --input train.csv --output /proc/out.csv", "help: use --output out.csv"),
    (f"predict {RUN} --input my_rows.py --output out.csv", "has no reader"),
    (f"predict {RUN} {FILES} device=cud", "device=cuda"),
    (f"predict {RUN} {FILES} 'device=['", "can't be read"),
    (f"predict {RUN} {FILES} ++device=cud", "device=cuda"),
    (f"predict {RUN} {FILES} ~device", "predict takes the run as it was"),
    (f"predict {RUN} {FILES} +train.precision=fp8", "train.precision=bf16"),
    (f"predict {RUN} {FILES} backends.cpu.num_threadz=4", "backends.cpu.num_threads"),
    (f"predict {RUN} {FILES} backends.cpu.num_threads=0", "backends.cpu.num_threads"),
    (f"evaluate {RUN} ++device=cud", "device=cuda"),
    (f"predict {RUN} {FILES} train.precision=fp8", "train.precision=bf16"),
    (f"export {RUN}", "--format FORMAT"),
    (f"export {RUN} --format onxx", "--format onnx"),
    (f"export {RUN} --format torchscript", "--format pt2"),
    (f"export {RUN} --format pt2 --output model.onnx", "--output model.pt2"),
    (f"export {RUN} --format mlflow --output outputs", "is not an exported model"),
    (f"export {RUN} --format safetensors --predictions", "remove --predictions"),
    ("export outputs/raw/run --format pt2 --predictions", "defines no predictions"),
    (f"serve {RUN} --port 99999", "1 to 65535"),
    (f"register {RUN}", "--name NAME"),
    (f"register {RUN} --name a/b:c", "help: use --name a-b-c"),
    (f"register {RUN} --name a --alias v1", "--alias champion"),
    (f"evaluate {RUN} train.num_epochs=3", "evaluate takes the run as it was"),
    (f"evaluate {RUN} data.limit=3", "remove data.limit"),
    (f"evaluate {RUN} data=iris data.val_fraction=0.5", "measured completely"),
    (f"evaluate {RUN} data=digit", "data=digits"),
    (f"evaluate {RUN} data=arrays data.path=nothing.npz", "there is no file nothing.npz"),
    (f"evaluate {RUN} data.num_row=3", "there is no key data.num_row"),
    ("lr-find --from 1 --to 0.1", "--from must be below --to"),
    ("lr-find --steps 3", "10 or more"),
    ("lr-find --from x", "a number above 0"),
    ("lr-find train.num_epoch=3", "train.num_epochs=3"),
    ("lr-find --stps 3", "help: use --steps 3"),
    ("lr-find --cfg job", "help: lr-find without --cfg; to see the configuration: python -m runner ... --cfg job"),
    ("lr-find -m", "lr-find does not take -m: it is of one run at a time"),
    ("lr-find --info", "lr-find without --info"),
    ("tune --cfg job --resolve", "tune without --resolve"),
    ("tune --run", "tune without --run"),
    ("plan --info", "plan without --info"),
    (f"evaluate {RUN} hydra.mode=MULTIRUN", "evaluate does not take -m"),
    (f"resume {RUN} --cfg job train.num_epochs=4", f"python -m runner -cd {RUN} -cn rerun --cfg job"),
    (f"resume {RUN} -m train.num_epochs=4", f"help: resume {RUN} without -m"),
    (f"resume {RUN} -cn config train.num_epochs=4", "it takes the run's own configuration"),
    (f"resume {RUN} --info train.num_epochs=4", f"resume {RUN} without --info"),
    ("lrfind", "lr-find"),
    ("evalute", "evaluate"),
]


@pytest.mark.parametrize(("words", "said"), MISTAKES)
def test_a_mistake_says_what_to_write(words, said, at_home, run):
    before = set(Path().rglob("*"))
    code, _, err = run(*shlex.split(words))
    assert code == 2
    assert said.replace("`", "") in err.replace("`", "")
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
            ("predict --inptu x.csv", "--batch-size 0", f"predict {RUN} -m", "seed=1"),
        ),
        ("evaluate nowhere device=cud", ("evaluate nowhere", "device=cud")),
        ("explain nowhere device=cud", ("explain nowhere", "device=cud")),
        (f"explain {RUN} --time --stp 3", ("explain --stp 3",)),
        ("export nowhere --format onxx", ("export --format onxx", "export nowhere")),
        (f"serve {RUN} --port 0 --keep", ("--port 0", "serve --keep")),
        ("register nowhere --name a/b --alias v1", ("--name a/b", "--alias v1", "register nowhere")),
        ("lr-find --steps 3 --from x --to 0", ("--steps 3", "--from x", "--to 0")),
    ],
)
def test_all_mistakes_are_told_at_once(words, asked, at_home, run):
    code, _, err = run(*words.split())
    assert code == 2
    assert tuple(re.findall("--> (.+)", err)) == asked


def test_flags_and_overrides_may_be_anywhere(own_folder):
    words = ["device=cpu", "--output=o.csv", "outputs/a", "--keep", "--input", "i.csv", "train.precision=bf16"]
    found = parse(COMMANDS["predict"], words)
    assert (found.run, found.overrides, found.flags) == ("outputs/a", ["device=cpu", "train.precision=bf16"], [])
    assert (found["--output"], found["--keep"], found["--input"], found["--batch-size"]) == (
        "o.csv",
        True,
        "i.csv",
        1024,
    )
    assert parse(COMMANDS["evaluate"], []).run == "last"
    found = parse(COMMANDS["lr-find"], ["model=mlp", "-cn", "config", "--steps=20", "seed=2"])
    assert (found.flags, found.overrides, found["--steps"]) == (["-cn", "config"], ["model=mlp", "seed=2"], 20)


def test_path_with_equals_sign_is_a_run(own_folder):
    (checkpoint := own_folder / "seed=1" / "checkpoints" / "best.pt").parent.mkdir(parents=True)
    checkpoint.write_text("")
    long = f"data.drop=[{','.join(['a_column'] * 40)}]"  # longer than the name of a file may be
    for word in ("seed=1", "seed=1/checkpoints/best.pt"):
        found = parse(COMMANDS["evaluate"], [word, long, "device=cpu"])
        assert (found.run, found.overrides) == (word, [long, "device=cpu"])
