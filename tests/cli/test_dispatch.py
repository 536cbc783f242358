"""What a person types, right and wrong. The table of mistakes: each exits with 2 and says what to write instead."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

import runner
from runner import cli
from runner.cli import commands, train
from runner.cli.arguments import _has_several
from runner.cli.table import COMMANDS
from runner.errors import RunnerError
from runner.version import DISTRIBUTION, PACKAGES

REPOSITORY = PACKAGES
OFF = "tracking.enabled=false"

#: words on the command line, and what the message must offer
MISTAKES = [
    # keys that are not there
    ("train.num_epoch=3", "train.num_epochs=3"),
    ("trian.num_epochs=3", "train.num_epochs=3"),
    ("model.nonsense=1", "help: leave it out; `--cfg` job prints the keys of model"),
    ("+x=1", "there is no key x"),
    ("größe=3", "there is no key größe"),
    ("++train.x=1", "there is no key train.x"),
    ("++train.early_stopping.patienc=1", "train.early_stopping.patience=1"),
    ("++backends.cuda.memory=1", "backends.cuda.memory_fraction=1"),
    ("+backends.tpu.cores=8", "there is no key backends.tpu"),
    ("+model.hiden_sizes=[3] model=mlp", "model.hidden_sizes=[3]"),
    ("+data.pth=x.npz", "digits takes no argument pth"),
    ("~optimizer", "optimizer"),
    ("~train.num_epochs", "train.num_epochs=..."),
    ("~train.ema_decay", "train.ema_decay=null"),
    ("+model=mlp", "model=mlp"),
    # values of the wrong kind or out of range
    ("train.num_epochs=three", "train.num_epochs=10"),
    ("train.num_epochs=1.5", "a whole number"),
    ("train.num_epochs=0", "train.num_epochs=1"),
    ("train.batch_size=-4", "train.batch_size=1"),
    ("train.precision=fp8", "train.precision=fp16"),
    ("train.compile=maybe", "true or false"),
    ("train.ema_decay=1", "train.ema_decay=0.999"),
    ("train.early_stopping.mode=down", "train.early_stopping.mode=min"),
    ("train.num_processes=0", "train.num_processes=auto"),
    ("train.num_processes=2 train.on_oom=split device=cpu", "train.num_processes=1"),
    ("train.max_restarts=-1", "train.max_restarts=1"),
    ("train.cuda_graph=true device=cpu", "train.cuda_graph=false, or device=cuda"),
    ("train.batch_size=null", "train.batch_size"),
    ("train=5", "train=default"),
    ("metrics.every=0", "metrics.every=1"),
    ("data.val_fraction=1.5", "data.val_fraction=0.1"),
    ("data.fold=x", "data.fold=0"),
    ("data.fold=-1", "data.fold=0"),
    ("data.fold=true", "data.fold=0"),
    ("data.fold=5", "help: use `data.fold=4/5`, or all of them: `-m 'data.fold=range(5)'`"),
    ("data.fold=3 data.num_folds=3", "the last of 3 is 2"),
    ("data.fold=0/1", "help: use `data.fold=0/5`"),
    ("data.fold=0 data.num_folds=1", "data.num_folds=2"),
    ("data.fold=0/5 data.num_folds=3", "help: use `data.fold=0/5` without data.num_folds"),
    ("data.num_folds=3", "help: add `-m 'data.fold=range(3)'`"),
    ("data.fold=0/1800", "1,617 rows are too few for 1,800 folds"),
    ("data.sampler=balance", "data.sampler=balanced"),
    ("data.sampler=[1,-1]", "weights of 0 or more"),
    ("data.sampler=[0,0.0]", "not all of them 0"),
    ("data.sampler={a:true}", "data.sampler=balanced"),
    ("data.sampler=[1,2]", "a weight for each class, in this order"),
    ("data.sampler={0:1,ten:1}", "no weight for 1, 2, 3"),
    ("data=diabetes task=regression data.sampler=balanced", "help: use `data.sampler=null`"),
    ("data.val_fraction=0.5 data.test_fraction=0.5", "data.val_fraction=0.1 data.test_fraction=0.1"),
    ("data.residency=gpu", "data.residency=device"),
    ("data.limit=few", "data.limit=10"),
    ("seed=-1", "seed=0"),
    (f"name={'x' * 300}", "name=baseline"),
    ("seed=a", "seed=10"),
    ("placement.guard=on", "placement.guard=first_step or"),
    # options that are not there
    ("data=digit", "data=digits"),
    ("optimizer=adam2", "optimizer=adam"),
    ("experiment=nothing", "experiment"),
    ("model=null", "model=cnn"),
    # devices
    ("device=cud", "device=cuda"),
    ("device=cuda:-1", "device=cuda:0"),
    ("device=CUDA:0", "device=cuda:0"),
    ("device=gpu", "device=cuda"),
    ("device=", "device=auto"),
    ("device=null", "device=auto"),
    ("device=3", "device=cuda:3"),
    ("device=cuda:0,1", "-m device=cuda:0,cuda:1"),
    ("device='cuda:0,1'", "device=[cuda:0,cuda:1]"),
    ("device=[]", "device=auto"),
    ("device=cuda:97", "device=cpu"),
    ("train.precision=tf32 device=cpu", "train.precision=fp32"),
    # targets
    ("model._target_=my_models.Nett", "my_models.Net"),
    ("model=mlp model._target_=my_models.Broken", "my_models.py:7"),
    ("model._target_=my_broken.Net", "my_broken.py:1"),
    ("model._target_=os.system", "--allow os"),
    ("model._target_=distutils.spawn.spawn", "--allow distutils"),
    ("data._target_=subprocess.run", "--allow subprocess"),
    ("model=mlp model.activation=rellu", "model.activation=relu"),
    ("model=mlp model.in_features=${facts.in_feature}", "${facts.in_features}"),
    # data
    ("data=arrays", "data.path=..."),
    ("data=arrays data.path=good.npy", "good.npz"),
    ("data=arrays data.path=broken.npz", "a complete file"),
    ("data=arrays data.path=pickled.npz", "Python objects"),
    ("data=arrays data.path=good.txt", ".npz, .npy or .safetensors"),
    ("data=arrays data.path=good.npz data.inputs=X2", "data.inputs=x"),
    ("data=arrays data.path=good.npz data.targets=z", "data.targets="),
    ("data=arrays data.path=nan.npz", "NaN or infinite"),
    ("data=arrays data.path=short.npz", "as many targets as inputs"),
    ("data=arrays data.path=good.npz", "model=mlp"),  # rows of numbers are no images
    ("data=synthetic data.num_rows=0", "data.num_rows=10"),
    (
        "data.augment={cutmix:1} train.batch_size=0",
        "help: use `'data.augment={mixup:1}'` or `'data.augment={cutout:1}'`\n",
    ),
    # tracking
    ("tracking.uri=./mlruns", "tracking.uri=sqlite:///mlflow.db"),
    ("tracking.uri=file:///tmp/mlruns", "tracking.uri=sqlite:///mlflow.db"),
    ("tracking.uri=ftp://there", "tracking.uri=http://127.0.0.1:5000"),
    ("tracking.uri=sqlite:/a/b.db", "help: use `tracking.uri=sqlite:////a/b.db`\n"),
    ("tracking.uri=sqlite://b.db", "help: use `tracking.uri=sqlite:///b.db`\n"),
    ("tracking.uri=sqlite:b.db", "help: use `tracking.uri=sqlite:///b.db`\n"),
    # the command line itself
    ("predct a/run --input x.csv --keep", "help: run `python -m runner predict a/run --input x.csv --keep`\n"),
    ("seed 3", "seed=3"),
    ("model=mlp evaluate", "help: run `python -m runner evaluate ...`"),
    ("device", "python -m runner devices"),
    ("train.num_epochs", "train.num_epochs=10"),
    ("--multi-run seed=1,2", "--multirun"),
    ("--allow", "--allow timm"),
    ("--resolve", "--cfg job --resolve"),
    ("-m seed=1,2 --cfg job", "-m or --cfg"),
    ("hydra.mode=MULTIRUN --cfg job", "-m or --cfg"),
    ("--info searchpath --multirun", "--multirun or --info"),
    ("seed=1,2", "help: use `-m seed=1,2`\n"),
    ("data.fold=range(5)", "help: use `-m 'data.fold=range(5)'`\n"),
    ("plan experiment=glob(*)", "glob(...) makes several runs, and that takes -m\n"),
    ("optimizer.lr=interval(0.1,0.2)", "help: use `-m 'optimizer.lr=interval(0.1,0.2)'`\n"),
    ("-m modle=mlp,cnn", "help: use `model=mlp,cnn`\n"),
    ("devices --jsn", "help: use `--json`\n"),
    ("devices --bnch", "help: use `--bench`\n"),
    ("devices here", "help: run `python -m runner devices [--bench]`\n"),
    ("history a --ouput b.csv", "help: use `--output b.csv`\n"),
    ("ui --prt 80 tracking.url=x", "help: use `--port 80`\n\nerror: ui does not take tracking.url\n"),
    ("ui tracking.url=x", "help: use `tracking.uri=x`\n"),
    ("compare a b metrc=val/loss", "help: use `metric=val/loss`\n"),
    ("reproduce a --anywy", "help: use `--anyway`\n"),
    ("sync conff", "help: run `sync conf`\n"),
    ("report multirun/frist", "help: name a sweep's directory: multirun/first\n"),
    ("-cn nothing", "-cd FOLDER"),
    ("-cn confg", "help: use `-cn` config\n"),
    ("-cd ./conff", "help: use `-cd` conf\n"),
    ("--config-nam mine", "help: use `--config-name mine` or "),
    ("-cn", "error: it needs a value\n  --> -cn\nhelp: use `-cn NAME`"),
    ("plan -cn ", "it needs a value"),
    ("--info searchpath -cn=", "it needs a value"),
    ("-cd -cn mine", "--> -cd\n"),
    ("-cp conf -cn mine", "help: use `-cd` conf\n"),
    ("--config-path=conf", "help: use `-cd` conf\n"),
    ("-cd nonsuch", "error: there is no such folder"),
    ("--json --cfg jobs", "error: --cfg is job, hydra or all\n  --> --cfg jobs\nhelp: use `--cfg job`"),
    ("-m seed=1,x", "seed=10"),
    ("-m model=mlp,cn", "model=cnn"),
    ("zip(seed,name)=(1,a),(2,b)", "-m 'sweep.zip={seed:[1,2],name:[a,b]}'"),
    ("-m zip(seed,name)=(1,a),(2)", "'zip(model.width,optimizer.lr)=(64,1e-3),(128,3e-4)'"),
    ("-m zip(seed,name)=(range(2),a)", "range(2) is several values"),
    ("-m zip(seed,seed)=(1,2)", "each key is named once"),
    ("-m zip(seed,name)=(1,a) zip(name,model.dropout)=(b,0.1)", "set name in only one place"),
    (
        "-m zip(seed,optimizer.lrr)=(1,2),(2,3)",
        "there is no key `optimizer.lrr`\n  --> optimizer.lrr=2\nhelp: use `optimizer.lr=2`",
    ),
    ("plan -m zip(seed,model.hiden)=(1,2),(2,3)", "--> model.hiden=2"),
    ("-m hydra.sweeper.params={optimizer.lrr:'1,2'}", "help: use `optimizer.lr=1`"),
    ("-m sweep.zip={seed:[1,2]} seed=3", "set seed in only one place"),
    ("-m sweep.zip={seed:[1,2]} hydra/sweeper=optuna optimizer.lr=interval(0.1,0.2)", "hydra/sweeper=grid"),
    ("train.num_epochs=[3", "quotes"),
    ("sync nowhere", "sync outputs"),
    # Hydra's own settings
    ("hydra.run.dir=good.txt/below", "hydra.run.dir=FOLDER"),
    ("hydra.run.dir=below/${nowhere}", "hydra.run.dir=FOLDER"),
    ("-m seed=1,2 hydra.sweep.dir=below/${nowhere}", "hydra.sweep.dir=FOLDER"),
    ("-m seed=1,2 hydra.sweep.dir=/dev/null/below", "hydra.sweep.dir=FOLDER"),
    (
        "hydra.run.dir=s3://lab/1 model.weights=gs://lab/w.pt",
        "gcloud storage cp gs://lab/w.pt ., then model.weights=w.pt",
    ),
    ("data=table data.path=s3://lab/a.csv data.val_path=/dev/zero", "help: use `data.val_path=FILE`"),
    ("-m seed=1,2 hydra.sweep.dir=s3://lab/1", "hydra.sweep.dir=PATH on this machine"),
    ("-m +hydra.sweeper.params.seed=1,2", "help: use `'++hydra.sweeper.params.seed=\"1,2\"'`"),
    ("model._target_=torch.nn.Linear +model.out_features=1", "help: use `model.out_features=1`"),
    ("hydra.job.chdir=true", "hydra.job.chdir=false"),
    ("name=\udcc3\udca9t\udcc3\udca9", "PYTHONUTF8=1"),
    ("-m seed=1,2 hydra.mode=RUN", "one of them"),
    # what would be written or started
    ("data=table data.path=nofile.csv", "nofile.csv"),
    ("schema --output x/y/schema.json", "mkdir -p x/y"),
    ("ui tracking.uri=sqlite:///mlflow-2.db", "the file mlflow-2.db does not exist"),
]


@pytest.fixture
def folder(own_folder):
    """A person's folder with modules and files, sound ones and broken ones."""
    (own_folder / "my_models.py").write_text(
        "from torch import nn\n\nclass Net(nn.Linear):\n    pass\n\nclass Broken(nn.Module):\n"
        "    def __init__(self, **sizes): raise ValueError('no')\n"
    )
    (own_folder / "my_broken.py").write_text("import something_that_is_not_there\n")
    x, y = np.random.default_rng(0).normal(size=(40, 5)), np.arange(40) % 3
    np.savez(own_folder / "good.npz", x=x, y=y)
    np.savez(own_folder / "nan.npz", x=np.where(x > 1, np.nan, x), y=y)
    np.savez(own_folder / "short.npz", x=x, y=y[:-1])
    np.savez(own_folder / "pickled.npz", x=np.array([{}, 1], dtype=object), y=y)
    (own_folder / "broken.npz").write_bytes((own_folder / "good.npz").read_bytes()[:200])
    (own_folder / "good.txt").write_text("1 2 3")
    (own_folder / "conf").mkdir()
    (own_folder / "multirun/first").mkdir(parents=True)
    (own_folder / "multirun/first/ledger.jsonl").touch()
    return own_folder


@pytest.mark.parametrize(("words", "mend"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake_exits_with_2_and_says_what_to_write(words, mend, folder, capfd, monkeypatch):
    command = words.split(" ")
    monkeypatch.setattr(commands, "_become", lambda *_: pytest.fail("it starts a server"))
    before = {*folder.rglob("*")}
    if words.startswith(("data", "model")):  # a run begins before these are found; each word takes a composition more
        command.append(OFF)
    code = cli.main(command)
    output = capfd.readouterr()
    assert code == 2, output.out + output.err
    text = output.err[output.err.index("error: ") :]
    assert "Traceback" not in output.err + output.out
    assert "HYDRA_FULL_ERROR" not in output.err
    for part in ("-->", "error:", "help:"):
        assert part in text
    assert mend.replace("`", "") in text.replace("`", "")
    assert {path for path in {*folder.rglob("*")} - before if "__pycache__" not in path.parts} == set()


def test_override_without_effect_is_noted(own_folder, capfd):
    words = ["data=digits", "~model.dropout", "data=iris", "+model.dropout=1", "seed=1", "seed=1", "--cfg", "job"]
    assert cli.main(words) == 0
    notes = [line for line in capfd.readouterr().err.splitlines() if line.startswith("note:")]
    assert notes == ["note: data=digits has no effect: data=iris follows"]


def test_version_is_this_programs(capfd):
    assert cli.main(["--version"]) == 0
    assert capfd.readouterr().out.startswith(f"runner {runner.__version__} (Hydra ")


def test_a_word_with_a_space_is_offered_in_quotes(own_folder, capfd):
    assert cli.main(["resum", "a b"]) == cli.main(["history", "a", "--ouput", "b c.csv"]) == 2
    text = capfd.readouterr().err
    assert "help: run `python -m runner resume 'a b'`\n" in text and "help: use `--output 'b c.csv'`\n" in text


@pytest.mark.parametrize(
    ("word", "mend"),
    [
        ("data.path=größe.csv", """'data.path="größe.csv"'"""),
        ("data.path=it's.csv", """'data.path="it'"'"'s.csv"'"""),
        ("data.path=a#b&c;d.csv", """'data.path="a#b&c;d.csv"'"""),
        ('data.path=ü\\"x\\', r"""'data.path="ü\\\"x\\"'"""),
        ("data.path=[größe.csv,b.csv]", """'data.path=["größe.csv",b.csv]'"""),
        ("data.path=${seed}ü", """'data.path="${seed}ü"'"""),
    ],
)
def test_letters_that_hydra_reads_in_quotes_only_are_told_once(word, mend, own_folder, capfd):
    assert cli.main(["data=table", "data.target=y", word, OFF]) == 2
    text = capfd.readouterr().err
    assert text.count("help:") == 1 and f"help: put quotes around it: `{mend}`\n" in text
    (quoted,) = shlex.split(mend)
    (override,) = OverridesParser.create().parse_overrides([quoted])
    value = word.partition("=")[2]
    assert override.value() == (value if "[" not in value else ["größe.csv", "b.csv"])


@pytest.mark.parametrize(
    ("word", "has_one"),
    [
        (r"name=a\,b", False),
        (r"name='it\'s, ok'", False),
        (r"name=a\\,b", True),
        (r"name='a\\','b'", True),
        (r"name=a\'b,c", True),
    ],
)
def test_a_comma_behind_a_backslash_is_no_sweep(word, has_one):
    assert _has_several(word) is has_one


def test_a_broken_file_of_the_persons_is_told_with_its_line(folder, capfd):
    (folder / "conf" / "model").mkdir(parents=True)
    (folder / "conf" / "model" / "net.yaml").write_text("_target_: my_models.Net\n  hidden: [1\n")
    assert cli.main(["model=net", OFF]) == 2
    text = capfd.readouterr().err
    assert "net.yaml" in text
    assert "line 2" in text


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


def test_what_failed_has_failed_though_nobody_reads_on(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    failing = "import sys; from runner import cli; from runner.cli.table import COMMANDS, Command; COMMANDS['ui'] = Command('ui', 'Track', 'Say so', lambda given: print('so') or 1); sys.exit(cli.main(['ui']))"
    try:
        environment = {**os.environ, "PYTHONUNBUFFERED": ""}  # what is printed is met at the end
        done = subprocess.run(
            [sys.executable, "-c", failing], stdout=writing, cwd=tmp_path, env=environment, check=False
        )
    finally:
        os.close(writing)
    assert done.returncode == 1


def test_the_persons_file_wins_over_ours(folder, capfd):
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


def test_a_run_can_be_run_again_from_its_folder(folder):
    small = ["data=synthetic", "data.num_rows=200", "model=linear", "train.num_epochs=1", "task.plots=false", OFF]
    assert cli.main([*small, "hydra.run.dir=first", "seed=3"]) == 0
    assert cli.main(["-cd", "first", "-cn", "rerun", "hydra.run.dir=again"]) == 0
    first, again = (json.loads((folder / name / "summary.json").read_text()) for name in ("first", "again"))
    assert first["metrics"]["train/loss"] == again["metrics"]["train/loss"]
    assert cli.main(["-cd", "first", "-cn", "rerun", "train.epochz=1"]) == 2


def test_from_python(folder):
    summary = runner.run(
        ["data=synthetic", "data.num_rows=200", "model=linear", "train.num_epochs=1", "task.plots=false", OFF],
        folder=folder / "run",
    )
    assert summary["status"] == "finished"
    kept = json.loads((folder / "run" / "summary.json").read_text())
    assert summary == kept | {"folder": str(folder / "run")}
    with pytest.raises(RunnerError, match=r"train\.num_epochs"):
        runner.run(["train.epochz=1"])


def test_a_training_that_fails_exits_with_1_and_keeps_its_points(folder, capfd):
    data = ["data=synthetic", "data.num_rows=500", "data.num_classes=null", "task=regression", "model=linear"]
    words = [*data, "optimizer=sgd", "optimizer.lr=1e10", OFF, "hydra.run.dir=run"]
    assert cli.main(words) == 1
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "at step" in summary["error"]
    assert "optimizer.lr" in summary["error"]
    assert summary["host_reads"]["points"] > 0


@pytest.mark.slow
def test_a_wheel_runs_from_an_empty_folder_with_the_persons_own_parts(own_folder, empty_store):
    """Built and unpacked as an installer would; what it needs is there already."""
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
    assert told.stdout == 'pip install cmaes "optuna>=4.9"\n'  # of the wheel's metadata, in which they are sorted
    small = ["train.num_steps=3", "task.plots=false", "tracking.log_model=false"]
    command = [sys.executable, "-m", "runner", "model=net", *small, "hydra.run.dir=run"]
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((work / "run" / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["tracker"]["points_pending"] == 0


@pytest.mark.parametrize("tasks", ["language,classification", "classification,language"])
def test_a_key_that_a_sweeps_other_options_have_not_is_told_by_its_name(own_folder, capfd, tasks):
    assert cli.main(["-m", f"task={tasks}", "task.plots=false", "seed=1,2"]) == 2
    text = capfd.readouterr().err
    assert "there is no key `task.plots` here: it belongs to other options\n  --> task.plots=false" in text


def test_directory_with_equals_sign_is_a_run(own_folder, capfd):
    (own_folder / "seed=1").mkdir()
    for words in (["resume", "seed=1"], ["report", "seed=1"]):
        assert cli.main(words) == 2
        text = capfd.readouterr().err
        assert "seed=1" in text and "there is no key" not in text and "does not take" not in text


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
def test_the_publishing_process_starts_before_the_check_and_ends_with_a_refusal(words, seen, own_folder, monkeypatch):
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
