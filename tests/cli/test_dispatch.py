"""Valid and invalid command lines. The table of mistakes: each exits with 2 and suggests a fix."""

import json
import os
import shutil
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from refused import problems_in

import runner
from runner import cli
from runner.cli import commands, train
from runner.cli.table import COMMANDS
from runner.version import DISTRIBUTION, PACKAGES

REPOSITORY = PACKAGES
OFF = "tracking.enabled=false"

#: one command per line
MISTAKES = r"""
train.num_epoch=3
+model.hiden_sizes=[3] model=mlp
~optimizer ~train.num_epochs
train.num_processes=2 train.on_oom=split device=cpu
data.fold=0 data.num_folds=1
data.fold=0/1800
data.sampler={0:1,ten:1}
data=diabetes task=regression data.sampler=balanced
data.val_fraction=0.5 data.test_fraction=0.5
model._target_=my_models.Nett
model=mlp model._target_=my_models.Broken
model=mlp model.activation=rellu
model=mlp model.in_features=${facts.in_feature}
data=arrays
data=arrays data.path=good.npz
data.augment={cutmix:1} train.batch_size=0
+experiment=digits_mlp experiment=3
data=synthetic data.num_rows=0 placement.guard=on
predct a/run --input x.csv --keep
-m seed=1,2 --cfg job
--info searchpath --multirun
ui --prt 80 tracking.url=x
sync conff nowhere
report multirun/frist
-cn nothing
-cn confg
-cd -cn mine
-m hydra.sweeper.params={optimizer.lrr:'1,2'}
-m sweep.zip={seed:[1,2]} seed=3
-m sweep.zip={seed:[1,2]} hydra/sweeper=optuna optimizer.lr=interval(0.1,0.2)
hydra.run.dir=good.txt/below
hydra.run.dir=below/${nowhere}
-m seed=1,2 hydra.sweep.dir=/dev/null/below
-m seed=1,2 hydra.sweep.dir=s3://lab/1
model._target_=torch.nn.Linear +model.out_features=1
hydra.job.chdir=true
-m seed=1,2 hydra.mode=RUN
schema --output x/y/schema.json
tracking.enabled=2 train.compile=0.5 backends.cpu.onednn=-1
ui tracking.uri=sqlite:///mlflow-2.db
data=table data.target=y data.path=ü\"x\
train.num_epochs=three train.precision=fp8 data.sampler=[0,0.0]
seed=-1 tracking.uri=ftp://there data.num_folds=3 model.weights=gs://lab/w.pt
+model=mlp ~train.ema_decay größe=3 ++backends.cuda.memory=1 data.fold=0/1
model.nonsense=1 train.num_epochs=0 data.fold=3 data.num_folds=3
train=5 model=null experiment=nothing seed=1,2 optimizer.lr=interval(0.1,0.2)
train.cuda_graph=true train.precision=tf32 device=cpu
data=table data.path=s3://lab/a.csv data.val_path=/dev/zero hydra.run.dir=s3://lab/1
-m modle=mlp,cnn seed=1,x model=mlp,cn +hydra.sweeper.params.seed=1,2
data=table data.target=y data.path=[größe.csv,b.csv] train.num_epochs=[3
seed 3 device evaluate --allow
--multi-run seed=1,2 --config-nam mine --resolve --config-path=conf -cd ./conff
compare a b metrc=val/loss here=3 --bnch
"""
#: commands whose messages name this machine's devices, and the text of their help
DEVICES = {
    "device=cud": "device=cuda",
    "device=cuda:-1": "device=cuda:0",
    "device=CUDA:0": "device=cuda:0",
    "device=gpu": "device=cuda",
    "device=": "device=auto",
    "device=null": "device=auto",
    "device=3": "device=cuda:3",
    "device=cuda:0,1": "-m device=cuda:0,cuda:1",
    "device='cuda:0,1'": "device=[cuda:0,cuda:1]",
    "device=[]": "device=auto",
    "device=cuda:97": "device=cpu",
}


@pytest.fixture
def refused(capfd, monkeypatch):
    """Return the errors of a command that starts nothing."""
    monkeypatch.setattr(commands, "_become", lambda *_: pytest.fail("it starts a server"))

    def of(words):
        capfd.readouterr()
        assert cli.main([*words, "--json"]) == 2
        out, err = capfd.readouterr()
        assert "Traceback" not in err and "HYDRA_FULL_ERROR" not in err
        found = problems_in(out)
        assert err.count("help: ") == len(found)
        return found

    return of


@pytest.fixture
def folder(own_folder):
    """A user's directory with valid and broken modules and files."""
    (own_folder / "my_models.py").write_text(
        "from torch import nn\n\nclass Net(nn.Linear):\n    pass\n\nclass Broken(nn.Module):\n"
        "    def __init__(self, **sizes): raise ValueError('no')\n"
    )
    x, y = np.random.default_rng(0).normal(size=(40, 5)), np.arange(40) % 3
    np.savez(own_folder / "good.npz", x=x, y=y)
    (own_folder / "good.txt").write_text("1 2 3")
    (own_folder / "conf").mkdir()
    (own_folder / "multirun/first").mkdir(parents=True)
    (own_folder / "multirun/first/ledger.jsonl").touch()
    return own_folder


@pytest.mark.parametrize("words", MISTAKES.strip("\n").split("\n"))
def test_wrong_command_exits_with_2_and_help(words, folder, refused, messages):
    before = {*folder.rglob("*")}
    command = words.split(" ")
    # these errors are found after the start of a run; each word costs another composition
    if words.startswith(("data", "model")):
        command.append(OFF)
    messages(refused(command))
    assert {path for path in {*folder.rglob("*")} - before if "__pycache__" not in path.parts} == set()


@pytest.mark.parametrize("words", DEVICES)
def test_wrong_device_gets_help(words, own_folder, refused):
    assert any(DEVICES[words] in problem.help for problem in refused([words]))


def test_unreadable_arguments_get_help(own_folder, refused):
    assert [problem.suggestions for problem in refused([f"name={'x' * 300}"])] == [("name=baseline",)]
    assert [problem.suggestions for problem in refused(["resum", "a b"])] == [("python -m runner resume 'a b'",)]
    assert [problem.suggestions for problem in refused(["history", "a", "--ouput", "b c.csv"])] == [
        ("--output 'b c.csv'",)
    ]


def test_override_without_effect_is_noted(own_folder, capfd):
    words = ["data=digits", "~model.dropout", "data=iris", "+model.dropout=1", "seed=1", "seed=1", "--cfg", "job"]
    assert cli.main(words) == 0
    notes = [line for line in capfd.readouterr().err.splitlines() if line.startswith("note:")]
    assert notes == ["note: data=digits has no effect: data=iris follows"]


def test_version_is_this_programs(capfd):
    assert cli.main(["--version"]) == 0
    assert capfd.readouterr().out.startswith(f"runner {runner.__version__} (Hydra ")


def test_broken_file_is_named_with_its_line(folder, refused, messages):
    (folder / "conf" / "model").mkdir(parents=True)
    (folder / "conf" / "model" / "net.yaml").write_text("_target_: my_models.Net\n  hidden: [1\n")
    messages(refused(["model=net", OFF]))


#: in one process, which needs no heavy package
LOOKS = [["--cfg", "job"], ["--info", "searchpath"], ["--version"], ["-sc", "query=bash"]]
LOOKS += [[name, "--help"] for name in COMMANDS]
HEAVY = {"torch", "mlflow", "sklearn", "matplotlib", "optuna", "ray", "pandas", "numpy"}


@pytest.mark.parametrize(
    ("words", "heavy"),
    [
        (["-m", "runner", "--help"], {*HEAVY, "hydra", "omegaconf", "rich"}),
        (["-c", f"from runner import cli; exit(any(map(cli.main, {LOOKS})))"], HEAVY),
    ],
    ids=["--help", "others"],
)
def test_looking_imports_nothing_heavy(words, heavy, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "COMP_LINE": "runner mod", "COMP_POINT": "10"}
    command = [sys.executable, "-X", "importtime", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "runner.cli.table" in imported and not imported & heavy
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", ["--help", "--cfg job", "devices", "devices --json", "plan model=mlp"])
def test_who_has_read_enough_gets_no_error(words, warm, tmp_path):
    start = subprocess.Popen if words == "--help" else warm.program
    reading, writing = os.pipe()
    os.close(reading)  # as `| head` does
    try:
        process = start(
            [sys.executable, "-m", "runner", *words.split()],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        _, told = process.communicate()
    finally:
        os.close(writing)
    assert process.returncode == 0 and (told == "" or "--json" in words), told


def test_failure_code_stays_when_pipe_closes(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    failing = "import sys; from runner import cli; from runner.cli import Command; from runner.cli.table import COMMANDS; COMMANDS['ui'] = Command('ui', 'Track', 'Say so', lambda given: print('so') or 1); sys.exit(cli.main(['ui']))"
    try:
        environment = {**os.environ, "PYTHONUNBUFFERED": ""}  # the output fails only at the end
        done = subprocess.run(
            [sys.executable, "-c", failing], stdout=writing, cwd=tmp_path, env=environment, check=False
        )
    finally:
        os.close(writing)
    assert done.returncode == 1


def test_users_file_wins_over_builtin(folder, capfd):
    (folder / "conf" / "model").mkdir(parents=True)
    (folder / "conf" / "model" / "mlp.yaml").write_text(
        "_target_: my_models.Net\nin_features: ${facts.in_features}\nout_features: ${facts.out_features}\n"
    )
    assert (
        cli.main(["model=mlp", "data=arrays", "data.path=good.npz", "train.num_epochs=1", OFF, "hydra.run.dir=run"])
        == 0
    )
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["num_parameters"] == 5 * 3 + 3
    assert summary["peak_memory_bytes"] > 10_000_000 and summary["peak_memory_of"] == "process, at most"


def test_failing_training_exits_1_and_keeps_points(folder, capfd):
    data = ["data=synthetic", "data.num_rows=500", "data.num_classes=null", "task=regression", "model=linear"]
    words = [*data, "optimizer=sgd", "optimizer.lr=1e10", OFF, "hydra.run.dir=run"]
    assert cli.main(words) == 1
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "at step" in summary["error"]
    assert "optimizer.lr" in summary["error"]
    assert summary["host_reads"]["points"] > 0


@pytest.mark.slow
def test_wheel_runs_custom_parts_in_empty_folder(own_folder, empty_store):
    """Built and unpacked like an installer would; its dependencies are already installed."""
    (own_folder / "dist").mkdir()
    build = f"from hatchling.build import build_wheel; build_wheel({str(own_folder / 'dist')!r})"
    subprocess.run([sys.executable, "-c", build], cwd=REPOSITORY, check=True, capture_output=True)
    (wheel,) = (own_folder / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(own_folder / "site")
    assert wheel.name.startswith(f"{DISTRIBUTION.replace('-', '_')}-")
    assert "runner/conf/config.yaml" in names
    assert not any(name.startswith(("tests/", "conf/")) for name in names)
    work = own_folder / "empty"
    (work / "conf" / "model").mkdir(parents=True)
    shutil.copy(empty_store, work / "mlflow.db")
    (work / "my_models.py").write_text(
        "from torch import nn\n\nclass Net(nn.Sequential):\n    def __init__(self, inputs: int, outputs: int):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, outputs))\n"
    )
    (work / "conf" / "model" / "net.yaml").write_text(
        "_target_: my_models.Net\ninputs: ${facts.in_features}\noutputs: ${facts.out_features}\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(own_folder / "site")}
    told = [sys.executable, "-P", "-c", "from runner.config.packages import install; print(install('search'))"]
    told = subprocess.run(told, cwd=work, env=environment, capture_output=True, text=True, check=True)
    # from the wheel's metadata, where the packages are sorted
    assert told.stdout == 'pip install cmaes "optuna>=4.9"\n'
    small = ["train.num_steps=3", "task.plots=false", "tracking.log_model=false"]
    command = [sys.executable, "-m", "runner", "model=net", *small, "hydra.run.dir=run"]
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((work / "run" / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["tracker"]["points_pending"] == 0


@pytest.mark.parametrize("tasks", ["language,classification", "classification,language"])
def test_key_of_other_sweep_options_is_named(own_folder, refused, tasks):
    (problem,) = refused(["-m", f"task={tasks}", "task.plots=false", "seed=1,2"])
    assert (problem.code, problem.source) == ("bad-argument", "task.plots=false")


def test_directory_with_equals_sign_is_a_run(own_folder, refused):
    (own_folder / "seed=1").mkdir()
    for words in (["resume", "seed=1"], ["report", "seed=1"]):
        assert not {problem.code for problem in refused(words)} & {"unknown-key", "unknown-flag"}


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        (["device=cuda:99"], ["started", "checked", "closed"]),
        (["device=cuda:99", "tracking.enabled=false"], ["checked"]),
        (["device=cuda:99", "train.num_processes=2"], ["checked"]),
        (["device=cuda:99", "train.check=true"], ["checked"]),
        (["device=cuda:99", "+hydra.job.env_set.MLFLOW_TRACKING_TOKEN=mine"], ["checked"]),
        (["tracking.uri=${nothing}"], ["checked"]),
        (["tracking.enabled=maybe"], ["checked"]),
    ],
)
def test_uploader_starts_before_check_ends_with_refusal(words, seen, own_folder, monkeypatch):
    order = []

    class Seen(train.Ahead):
        def __init__(self, uri):
            order.append("started")
            super().__init__(uri)

        def close(self):
            order.append("closed")
            super().close()

    check = train.check
    monkeypatch.setattr(train, "Ahead", Seen)
    monkeypatch.setattr(train, "check", lambda cfg: order.append("checked") or check(cfg))
    assert cli.main(words) == 2
    assert order == seen
