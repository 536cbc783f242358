"""A configuration, a checkpoint or a journal from elsewhere is data: no code in it is called, and no link in it is followed.

Each test tries to create a file called PWNED. The commands refuse with an error message and exit code 2.
"""

import hashlib
import io
import json
import os
import pickle
import shutil
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from runner import cli
from runner.config import origin
from runner.errors import RunnerError
from runner.experiment.summary import Summary
from runner.tracking import recipes
from runner.tracking.ack import Ack, write_ack
from runner.tracking.journal import Journal
from runner.tracking.sync import sync
from runner.training import checkpoint

SMALL = (
    "data=synthetic",
    "data.num_rows=60",
    "data.num_features=3",
    "model=mlp",
    "model.hidden_sizes=[4]",
    "train.num_steps=1",
    "device=cpu",
    "tracking.enabled=false",
    "task.plots=false",
)
MARKER = "PWNED"
CALL = "_target_: os.makedirs, name: PWNED"


def refused(words, capfd, *, says="help:"):
    """The command ends like one with a user error, and creates no file."""
    assert cli.main(list(words)) == 2
    shown = capfd.readouterr()
    assert "Traceback" not in shown.out + shown.err
    assert says in shown.err, shown.err
    assert not [path for path in Path.cwd().rglob("*") if MARKER in path.name]
    assert not {"RUNNER_ALLOW", "LD_PRELOAD", "GIT_EXTERNAL_DIFF"} & os.environ.keys()
    return shown.err


TARGETS = {
    "a call of the system": "{_target_: os.makedirs, name: PWNED}",
    "eval": "{_target_: builtins.eval, _args_: [\"open('PWNED', 'w')\"]}",
    "exec": "{_target_: builtins.exec, _args_: [\"open('PWNED', 'w')\"]}",
    "a process": "{_target_: subprocess.Popen, args: [touch, PWNED]}",
    "torch.load": "{_target_: torch.load, f: evil.pt, weights_only: false}",
    "torch.hub": "{_target_: torch.hub.load, repo_or_dir: ., model: evil, source: local}",
    "an extension": "{_target_: torch.utils.cpp_extension.load_inline, name: evil, cpp_sources: ''}",
    "a way through allowed modules": "{_target_: torch.nn.modules.linear.torch.os.makedirs, name: PWNED}",
    "an import by name": "{_target_: torch.nn.attention._fa4._fa4_import_module, module_path: evil}",
    "a late import by name": "{_target_: torch.nn.utils._deprecation_utils.lazy_deprecated_import, all: [a], old_module: a, new_module: evil}",
    "a function's globals": "{_target_: torch.nn.Linear.forward.__globals__.get, _args_: [torch]}",
    "own code's globals": "{_target_: mine.f.__globals__.__getitem__, _args_: [os]}",
    "what own code imported": "{_target_: mine.makedirs, name: PWNED}",
    "hydra's caller": "{_target_: hydra.utils.call, _args_: [{_target_: os.makedirs, name: PWNED}]}",
    "hydra's finder": "{_target_: hydra.utils.get_method, path: os.makedirs}",
    "functools": "{_target_: functools.partial, _args_: [{_target_: os.makedirs, name: PWNED}]}",
    "a hook": "{_target_: torch.nn.modules.module.register_module_forward_hook, hook: {_target_: os.makedirs, _partial_: true, name: PWNED}}",
    "below a list": "{_target_: torch.nn.Sequential, _args_: [[{deep: {_target_: os.makedirs, name: PWNED}}]]}",
    "a part that is called later": "{_target_: torch.nn.Sequential, _args_: [{_target_: os.makedirs, _partial_: true, name: PWNED}]}",
    "a made node": "{_target_: torch.nn.Sequential, _args_: ['${oc.create:{_target_:os.makedirs,name:PWNED}}']}",
    "a made target": "{_target_: '${oc.decode:os.makedirs}', name: PWNED}",
    "a node that is made late": "{_target_: torch.nn.Sequential, _args_: ['\\${oc.create:{_target_:os.makedirs,name:PWNED}}']}",
    "a resolver that is not there": "{_target_: torch.nn.Linear, in_features: '${eval:1}', out_features: 1}",
    "a Python object": "!!python/object/apply:os.makedirs [PWNED]",
    "what writes token files": "{_target_: runner.data.write_tokens, texts: [owned], path: PWNED.bin}",
    "the runner itself": "{_target_: runner.cli.main, argv: [ui]}",
}


@pytest.fixture
def elsewhere(own_folder):
    """A directory with the files that the hostile parts would use if they were called."""
    (own_folder / "mine.py").write_text("from os import makedirs\nimport os\ndef f(): pass\n")
    (own_folder / "evil.py").write_text(f"open('{MARKER}', 'w')\n")
    (own_folder / "hubconf.py").write_text(f"open('{MARKER}', 'w')\n")
    torch.save(Bomb(), own_folder / "evil.pt")
    return own_folder


class Bomb:
    def __reduce__(self):
        return os.makedirs, (MARKER,)


@pytest.mark.parametrize("node", TARGETS.values(), ids=TARGETS)
def test_target_from_file_reaches_only_allowed_parts(elsewhere, capfd, node):
    (elsewhere / "conf" / "model").mkdir(parents=True)
    file = elsewhere / "conf" / "model" / "hostile.yaml"
    file.write_text(f"_target_: torch.nn.Linear\nx: {node}\n" if node.startswith("!!") else f"{node}\n")
    refused([word for word in SMALL if "model" not in word] + ["model=hostile", "hydra.run.dir=run"], capfd)


@pytest.mark.parametrize("key", ["data", "task", "optimizer", "scheduler"])
def test_hostile_target_is_refused_in_each_group(elsewhere, capfd, key):
    (elsewhere / "conf" / key).mkdir(parents=True)
    for number, node in enumerate([TARGETS["a call of the system"], TARGETS["a node that is made late"]]):
        (elsewhere / "conf" / key / f"hostile{number}.yaml").write_text(f"{node}\n")
        words = [word for word in SMALL if not word.startswith("data")] if key == "data" else SMALL
        refused([*words, f"{key}=hostile{number}", "hydra.run.dir=run"], capfd)


LATE = "now: {class: logging.NullHandler}, late: '${model.${oc.select:hydra.runtime.output_dir,now}}'"
HYDRAS = {
    "a callback": f"callbacks: {{x: {{{CALL}}}}}",
    "a callback by a made node": "callbacks: {x: '${oc.create:{_target_:os.makedirs,name:PWNED}}'}",
    "a callback by a reference": "callbacks: {x: '${model.node}'}",
    "a callback by a name made late": "callbacks: {x: {_target_: '${hydra.job.name}', name: PWNED}}",
    "a launcher": f"launcher: {{{CALL}}}",
    "a sweeper": f"sweeper: {{{CALL}}}",
    "a part of a launcher": f"launcher: {{_target_: runner.sweep.Slots, x: {{{CALL}}}}}",
    "a handler of the job's log": "job_logging: {handlers: {x: {'()': os.makedirs, name: PWNED}}}",
    "a handler's class": "job_logging: {handlers: {file: {class: os.makedirs, filename: PWNED}}}",
    "a filter of the job's log": "job_logging: {filters: {x: {'()': os.makedirs, name: PWNED}}}",
    "a formatter of Hydra's log": "hydra_logging: {formatters: {simple: {'()': os.makedirs, name: PWNED}}}",
    "a log's reference": "job_logging: {handlers: {console: {stream: 'ext://mine.makedirs'}}}",
    "a log's attribute": "job_logging: {handlers: {file: {'.': {namer: 'ext://os.makedirs'}}}}",
    "a server for logs": "job_logging: {filters: {x: {'()': logging.config.listen}}}",
    "a handler by a resolver's made name": r"""job_logging: {handlers: {x: "${oc.${name}:'{\\(\\): os.makedirs, name: PWNED}'}"}}""",
    "a handler that is another one later": "job_logging: {handlers: {x: '${model.${oc.select:hydra.runtime.output_dir,now}}'}}",
    "a handler by a selected name that changes": "job_logging: {handlers: {x: '${oc.select:${model.kind},none}'}}",
    "a handler by way of a value that changes": "job_logging: {handlers: {x: '${model.late}'}}",
    "a variable that is made late": "job: {env_set: '${model.${oc.select:hydra.runtime.output_dir,now}}'}",
    "a library loaded first": "job: {env_set: {LD_PRELOAD: ./evil.problem}}",
    "Python's path": "job: {env_set: {PYTHONPATH: .}}",
    "a file of NCCL's": "job: {env_set: {NCCL_DEBUG_FILE: PWNED}}",
    "git's helper": "job: {env_set: {GIT_EXTERNAL_DIFF: touch PWNED}}",
    "more allowed parts": "job: {env_set: {RUNNER_ALLOW: os}}",
}


@pytest.mark.parametrize(("number", "hydra"), list(enumerate(HYDRAS.values())), ids=HYDRAS)
def test_hydra_settings_from_file_call_nothing(elsewhere, capfd, number, hydra):
    """By a run, a sweep or a plan: each checks them in the same place."""
    conf = elsewhere / "conf"
    (conf / "experiment").mkdir(parents=True)
    (conf / "experiment" / "hostile.yaml").write_text(
        f"# @package _global_\nname: decode\nmodel: {{node: {{{CALL}}}, {LATE}}}\nhydra: {{{hydra}}}\n"
    )
    command = (
        [*SMALL, "experiment=hostile", "hydra.run.dir=run"],
        ["-m", *SMALL, "experiment=hostile", "seed=1,2", "hydra.sweep.dir=sweep"],
        ["plan", *SMALL, "experiment=hostile"],
    )[number % 3]
    refused(command, capfd, says="hydra.")


def test_sweep_over_hostile_file_calls_nothing(elsewhere, capfd):
    (elsewhere / "conf" / "experiment").mkdir(parents=True)
    hydra = HYDRAS["a handler of the job's log"]
    (elsewhere / "conf" / "experiment" / "hostile.yaml").write_text(f"# @package _global_\nhydra: {{{hydra}}}\n")
    refused(["-m", *SMALL, "experiment=digits_mlp,hostile", "hydra.sweep.dir=sweep"], capfd, says="hydra.job_logging")


def test_named_config_directory_is_checked_too(elsewhere, capfd):
    (elsewhere / "theirs").mkdir()
    (elsewhere / "theirs" / "part.yaml").write_text(f"{CALL.replace(', ', chr(10))}\n")
    (elsewhere / "theirs" / "job.yaml").write_text("defaults: [config, part@hydra.callbacks.x, _self_]\n")
    refused(["-cd", "theirs", "-cn", "job", *SMALL, "hydra.run.dir=run"], capfd, says="hydra.callbacks.x")


def test_settings_that_call_nothing_are_taken(elsewhere):
    (elsewhere / "my_callbacks.py").write_text(
        "from hydra.experimental.callback import Callback\n"
        "class Mine(Callback):\n    def on_run_end(self, **more):\n        open('called', 'w').close()\n"
    )
    given = [
        "+hydra.callbacks.mine._target_=my_callbacks.Mine",
        "+hydra.job.env_set.OMP_NUM_THREADS=${oc.env:NOWHERE,1}",
    ]
    assert cli.main([*SMALL, *given, "hydra.job_logging.root.level=WARNING", "hydra.run.dir=run"]) == 0
    assert Path("called").exists()


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    """A run that stopped at its first step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("a_run"))
        assert cli.main([*SMALL, "train.num_steps=1", "hydra.run.dir=run"]) == 0
        return Path("run").absolute()


@pytest.fixture
def run_folder(elsewhere, a_run):
    """A copy of that run, treated as if it came from elsewhere."""
    return Path(shutil.copytree(a_run, "outputs/a/run"))


RERUNS = {
    "hydra's settings": (f"hydra: {{callbacks: {{x: {{{CALL}}}}}}}\n", "no settings of Hydra's"),
    "a search path": ("hydra: {searchpath: ['pkg://evil']}\n", "no settings of Hydra's"),
    "a path behind a class": (
        f"hydra: {{callbacks: {{x: {{{CALL}}}}}}}\nwhere: !!python/object/apply:pathlib.PosixPath [a]\n",
        "no settings of Hydra's",
    ),
    "a package": ("# @package hydra\n", "is not a part of another one"),
    "a Python object": ("where: !!python/object/apply:os.makedirs [PWNED]\n", "YAML can't be read"),
}


@pytest.mark.parametrize(("more", "says"), RERUNS.values(), ids=RERUNS)
def test_run_configuration_has_only_written_keys(run_folder, capfd, more, says):
    with (run_folder / "rerun.yaml").open("a") as file:
        file.write(more)
    refused(["-cd", str(run_folder), "-cn", "rerun", "hydra.run.dir=again"], capfd, says=says)
    refused(["-cd", str(run_folder), "-cn", "rerun.yaml", "hydra.run.dir=again"], capfd, says=says)
    refused(["resume", str(run_folder), "train.num_steps=2"], capfd, says=says)
    refused(["plan", "-cd", str(run_folder), "-cn", "rerun"], capfd, says=says)


@pytest.mark.parametrize(
    "defaults",
    [
        "[schema, base, part@hydra.callbacks.x, _self_]",
        "[schema, base, override hydra/launcher: part, _self_]",
        "[_self_]",
        "schema",
        "",
    ],
)
def test_run_configuration_keeps_builtin_defaults(run_folder, capfd, defaults):
    (run_folder / "part.yaml").write_text(f"{CALL.replace(', ', chr(10))}\n")
    own = (run_folder / "rerun.yaml").read_text().splitlines()
    (run_folder / "rerun.yaml").write_text("\n".join([f"defaults: {defaults}", *own[1:]]))
    refused(["-cd", str(run_folder), "-cn", "rerun", "hydra.run.dir=again"], capfd, says="the defaults are")
    refused(["resume", str(run_folder), "train.num_steps=2"], capfd, says="the defaults are")


@pytest.mark.parametrize("name", ["schema", "base"])
def test_neighboring_file_does_not_replace_builtin_one(run_folder, capfd, name):
    (run_folder / f"{name}.yaml").write_text(f"# @package _global_\nhydra: {{callbacks: {{x: {{{CALL}}}}}}}\n")
    refused(["-cd", str(run_folder), "-cn", "rerun", "hydra.run.dir=again"], capfd, says=f"the runner's own {name}")


def signed(content):
    """Add a valid checksum: it detects torn files, but does not prove who wrote them."""
    body = content.removesuffix(checkpoint.NO_COMMENT)
    return body + checkpoint._comment(hashlib.sha256(body + checkpoint.NO_COMMENT).hexdigest())


def saved(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


def script():
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(nn.Linear(1, 1), torch.zeros(1, 1)), file)
    return file.getvalue()


def archive(**members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"archive/{name.replace('_', '.')}", content)
    return file.getvalue()


def huge():
    """Return a tensor that claims to have 2**50 numbers, in a file of a few hundred bytes."""
    whole = zipfile.ZipFile(io.BytesIO(saved({"step": torch.zeros(3)})))
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in whole.namelist():
            content = whole.read(name)
            archive.writestr(
                name, content.replace(b"K\x03", b"\x8a\x07\0\0\0\0\0\0\x04") if "data.pkl" in name else content
            )
    return file.getvalue()


CHECKPOINTS = {
    "a pickle": lambda: pickle.dumps(Bomb()),
    "a pickle, signed": lambda: signed(pickle.dumps(Bomb()) + b"\0\0"),
    "a pickle in torch's archive": lambda: signed(saved({"model": Bomb()})),
    "the older form of torch's files": lambda: signed(legacy({"model": Bomb()}) + b"\0\0"),
    "a torn pickle in an archive": lambda: signed(archive(data_pkl=pickle.dumps(Bomb())[:9], version="3")),
    "a script": lambda: signed(script()),
    "a whole module": lambda: signed(saved(nn.Linear(1, 1))),
    "a huge tensor": lambda: signed(huge()),
    "nothing": lambda: b"",
    "a list": lambda: signed(saved([1, 2])),
    "no keys": lambda: signed(saved({})),
}


def legacy(thing):
    file = io.BytesIO()
    torch.save(thing, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


@pytest.mark.parametrize("make", CHECKPOINTS.values(), ids=CHECKPOINTS)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_a_checkpoint_is_tensors_and_plain_values(run_folder, capfd, make):
    for file in (run_folder / "checkpoints").glob("last*.pt"):
        file.write_bytes(make())
    refused(["resume", str(run_folder), "train.num_steps=2"], capfd, says="checkpoint")


STATES = {
    "of another shape": lambda state: state["model"].update({next(iter(state["model"])): torch.zeros(99)}),
    "of other names": lambda state: state.update(model={"x": torch.zeros(1)}),
    "of other types": lambda state: state.update(model="weights"),
    "of another optimizer": lambda state: state["optimizer"].update(param_groups=[]),
    "with a word for its step": lambda state: state.update(step="PWNED"),
    "with a step below zero": lambda state: state.update(step=-1),
    "without generators": lambda state: state.update(generators={}),
    "with other rows": lambda state: state.update(rows=3),
}


@pytest.mark.parametrize("change", STATES.values(), ids=STATES)
def test_checkpoint_of_another_model_is_explained(run_folder, capfd, change):
    path = run_folder / "checkpoints" / "last.pt"
    state = checkpoint.load(path)
    change(state)
    checkpoint.save(state, path)
    refused(["resume", str(run_folder), "train.num_steps=2"], capfd, says="--> the folder's checkpoint")


LINKS = ["checkpoints/last.pt", "checkpoints/last.writing", "summary.json", "journal/ack.writing", "environment.txt"]
LINKED_FOLDERS = ["checkpoints", "plots"]
READERS = {
    "resume": ["train.num_steps=2"],
    "reproduce": [],
    "evaluate": [],
    "predict": ["--input", "rows.csv", "--output", "answers.csv"],
    "export": ["--format", "safetensors"],
    "serve": [],
    "register": ["--name", "mine"],
}


def linked(folder, name, outside):
    """Replace a file or directory in the run directory by a link to one outside."""
    path = folder / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(outside.absolute())


def refused_by_each_reader(folder, capfd, *, says):
    Path("rows.csv").write_text("a,b,c\n1,2,3\n")
    for verb, words in READERS.items():
        refused([verb, str(folder), *words], capfd, says=says)
    assert cli.main(["sync", str(folder), "tracking.uri=sqlite:///runs.db"]) == 1
    assert says in capfd.readouterr().out and not Path("runs.db").exists()


@pytest.mark.parametrize("name", LINKS)
def test_link_out_of_run_folder_is_refused(run_folder, capfd, name):
    outside = Path("outside.txt")
    outside.write_text("mine")
    linked(run_folder, name, outside)
    refused(["resume", str(run_folder), "train.num_steps=2"], capfd, says="leads out of the run's folder")
    assert outside.read_text() == "mine"


@pytest.mark.parametrize("name", LINKED_FOLDERS)
def test_linked_folder_in_run_folder_is_refused(run_folder, capfd, name):
    outside = Path("outside")
    outside.mkdir()
    linked(run_folder, name, outside)
    refused_by_each_reader(run_folder, capfd, says="leads out of the run's folder")
    assert not any(outside.iterdir())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["summary.json", "rerun.yaml", "journal/journal.bin", "journal/ack.json"])
def test_pipe_in_run_folder_blocks_no_command(run_folder, capfd, name):
    linked(run_folder, name, Path("nothing"))
    (run_folder / name).unlink()
    os.mkfifo(run_folder / name)
    refused_by_each_reader(run_folder, capfd, says="neither a file nor a folder")


def test_a_report_reads_no_sweep_with_strays(own_folder, capfd):
    Path("multirun/a/b/0").mkdir(parents=True)
    Path("multirun/a/b/ledger.jsonl").write_text('{"kind": "sweep"}\n')
    Path("multirun/a/b/0/plots").symlink_to(own_folder)
    for words in (["report"], ["report", "multirun/a/b"]):
        refused(words, capfd, says="leads out of")


NINE = [f"l0: &l0 [{', '.join('x' * 9)}]", *(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 10))]
BOMBS = {
    "aliases of aliases": ("\n".join(NINE), "aliases"),
    "one in itself": ("a: &a [*a]\n", "aliases"),
    "many bytes": (f"# {'x' * 2**20}\n", "bytes"),
    "many levels": ("a: " + "[" * 2000 + "]" * 2000 + "\n", "levels deep"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("more", "says"), BOMBS.values(), ids=BOMBS)
def test_growing_configuration_is_refused_before_it_grows(run_folder, capfd, more, says):
    with (run_folder / "rerun.yaml").open("a") as file:
        file.write(more)
    for words in (["-cd", str(run_folder), "-cn", "rerun", "hydra.run.dir=again"], ["evaluate", str(run_folder)]):
        refused(words, capfd, says=says)


def test_deeply_nested_summary_is_not_a_summary(own_folder):
    Path("summary.json").write_text("[" * 100_000)
    assert Summary.read(own_folder) == Summary()


def test_run_folder_may_be_link_with_links(run_folder):
    shutil.copytree(run_folder, "moved/run")
    (Path("moved/run/checkpoints") / "newest.pt").symlink_to("last.pt")
    Path("linked").symlink_to(Path("moved/run").absolute())
    assert cli.main(["resume", "linked", "train.num_steps=2"]) == 0


SECRET = "s3cret-of-this-account"


@pytest.fixture
def requests(monkeypatch):
    """The requests to a host that another user's directory names, with the environment variables that it tries to read."""
    asked = []

    class Host(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.path, dict(self.headers)))
            self.send_error(500)

        do_POST = do_GET

        def log_message(self, *words):
            pass

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", SECRET)
    with ThreadingHTTPServer(("127.0.0.1", 0), Host) as host:
        thread = threading.Thread(target=host.serve_forever)
        thread.start()
        asked.append(f"http://127.0.0.1:{host.server_address[1]}")
        yield asked
        host.shutdown()
        thread.join()


def rewritten(folder, **changes):
    """Change values in rerun.yaml, as the sender of a directory could."""
    node = OmegaConf.load(folder / "rerun.yaml")
    for key, value in changes.items():
        OmegaConf.update(node, key.replace("__", "."), value)
    (folder / "rerun.yaml").write_text(OmegaConf.to_yaml(node))
    return folder


@pytest.mark.slow
def test_untrusted_folder_gets_no_secrets_or_run(run_folder, requests, capfd, warm_programs, empty_store):
    (address,) = requests
    uri = f"{address}/p/${{oc.env:AWS_SECRET_ACCESS_KEY}}"
    rewritten(run_folder, tracking__uri=uri, tracking__enabled=True)
    again = ["-cd", str(run_folder), "-cn", "rerun", "hydra.run.dir=again"]
    for words in (["resume", str(run_folder), "train.num_steps=2"], again, ["reproduce", str(run_folder)]):
        said = refused(words, capfd, says="was not made here by you")
        assert "use `tracking.uri=sqlite:///mlflow.db`" in said and "--trust" in said
    for words in (["sync", str(run_folder)], ["ui"], ["register", str(run_folder), "--name", "mine"]):
        refused(words, capfd, says="was not made here by you")
    assert not Path("again").exists() and not list(Path().glob("*.db"))
    shutil.copy(empty_store, "mlflow.db")
    assert cli.main(["resume", str(run_folder), "train.num_steps=2", "tracking.uri=sqlite:///mlflow.db"]) == 0
    assert requests == [address] and Path("mlflow.db").is_file()
    assert SECRET not in "".join(capfd.readouterr())
    assert not [file for file in Path().rglob("*") if file.is_file() and SECRET.encode() in file.read_bytes()]
    assert cli.main(["resume", str(run_folder), "train.num_steps=2"]) == 0  # the directory is now the user's


@pytest.mark.parametrize(
    "change",
    [{"name": "${oc.env:AWS_SECRET_ACCESS_KEY}"}, {"data__name": "a ${oc.env:HOME} b"}, {"model___target_": "mine.f"}],
)
def test_untrusted_folder_reads_no_environment_or_code(run_folder, capfd, change):
    rewritten(run_folder, **change)
    for words in (["resume", str(run_folder)], ["-cd", str(run_folder), "-cn", "rerun"], ["evaluate", str(run_folder)]):
        refused(words, capfd, says="`--trust` when you have looked at")


def test_untrusted_model_reads_no_environment(run_folder, capfd):
    card = run_folder / "model.json"
    card.write_text(card.read_text().replace('"synthetic"', '"<oc.env:HOME>"'))
    refused(["export", str(run_folder), "--format", "safetensors"], capfd, says="may not read values from outside it")


THEIRS = {"node": {"_target_": "mine.Net"}, "weights": "checkpoints/best.pt", "example": "journal/example.pt"}
HISTORIES = {
    "a model of the folder's code": ("model", THEIRS, "model._target_=mine.Net"),
    "a model with the environment": (
        "model",
        {"node": {"_target_": "torch.nn.Linear", "x": "<oc.env:HOME>"}},
        "model.x=<oc.env",
    ),
    "a run without an id": ("start", {"experiment": "theirs"}, "has no `uid`"),
    "no event": ("start", {"uid": "../x"}, "has no `uid`"),
}


@pytest.mark.parametrize(("kind", "fields", "says"), HISTORIES.values(), ids=HISTORIES)
def test_untrusted_journal_is_read_before_trusted(run_folder, capfd, kind, fields, says):
    with Journal(run_folder) as journal:
        journal.event(kind, **fields)
    (run_folder / origin.FILE).unlink()
    before = (run_folder / "journal/journal.bin").read_bytes()
    said = refused(["resume", str(run_folder), "train.num_steps=2"], capfd, says=says)
    assert "`--trust` when you have looked at" in said or "as the run wrote it" in said
    assert (run_folder / "journal/journal.bin").read_bytes() == before and not origin.is_own(run_folder)


def test_untrusted_deferred_interpolation_is_checked_too(run_folder, capfd):
    write_ack(run_folder, Ack(postponed=({"kind": "model", **THEIRS},)))
    refused(["resume", str(run_folder), "train.num_steps=2"], capfd, says="model._target_=mine.Net")
    assert cli.main(["resume", str(run_folder), "train.num_steps=2", "--trust"]) == 0  # the user has looked at it


def test_trusted_folder_builds_only_its_signed_model(elsewhere):
    Path("own.py").write_text("from torch import nn\nclass Net(nn.Linear): pass\n")
    mine = {"_target_": "own.Net", "in_features": 1, "out_features": 1}
    folder = Path("run")
    (folder / "journal").mkdir(parents=True)
    (folder / "model.json").write_text(json.dumps({"model": mine}))
    origin.sign(folder, "")
    build = recipes.build_of(folder)
    assert type(build(mine)).__name__ == "Net"
    for node in ({**mine, "out_features": 2}, {**mine, "bias": "<oc.env:HOME>"}):
        with pytest.raises(RunnerError, match="not a part that a configuration may name here"):
            build(node)
    (folder / "rerun.yaml").write_text("changed: true\n")
    with pytest.raises(RunnerError, match="not a part that a configuration may name here"):
        recipes.build_of(folder)(mine)


def test_folder_after_review_is_trusted(run_folder, capfd, monkeypatch):
    monkeypatch.setenv("NAME", "of-the-environment")
    rewritten(run_folder, name="${oc.env:NAME}")
    words = ["-cd", str(run_folder), "-cn", "rerun", "hydra.run.dir=again"]
    refused(words, capfd, says="--trust")
    assert cli.main([*words, "--trust"]) == 0
    assert cli.main(["-cd", "again", "-cn", "rerun", "hydra.run.dir=and_again"]) == 0  # this user's run wrote it


ARTIFACTS = {
    "a way up": {"path": "../secret.txt"},
    "a way up and down": {"path": "plots/../../secret.txt"},
    "from the root": {"path": str(Path("/etc/passwd"))},
    "a link": {"path": "linked.txt"},
    "a folder with a link": {"path": "pictures"},
    "a folder that is a link": {"path": "elsewhere"},
    "the folder above": {"path": ".."},
    "a name with a zero": {"path": "a\0b"},
    "no name": {"path": None},
    "another place in the store": {"path": "fine.txt", "to": "../../taken"},
}


@pytest.mark.slow
def test_untrusted_journal_sends_only_its_folders_files(own_folder, capfd, empty_store):
    from mlflow import MlflowClient

    (own_folder / "secret.txt").write_text("secret")
    folder = own_folder / "run"
    (folder / "pictures").mkdir(parents=True)
    (folder / "fine.txt").write_text("fine")
    for link in (folder / "linked.txt", folder / "pictures" / "plot.txt"):
        link.symlink_to(own_folder / "secret.txt")
    (folder / "elsewhere").symlink_to(own_folder)
    with Journal(folder) as journal:
        journal.event("start", uid="1" * 32, experiment="theirs", run_name="theirs", start_ms=1, params={}, tags={})
        for event in ARTIFACTS.values():
            journal.event("artifact", **{"to": "", **event})
        journal.event("model", node={"_target_": "os.makedirs", "name": MARKER}, weights="../w.pt", example="../e.pt")
        journal.event("artifact", path="fine.txt", to="")
        journal.event("end", status="FINISHED", end_ms=2)
    shutil.copy(empty_store, "runs.db")
    uri = f"sqlite:///{own_folder}/runs.db"
    ack = sync(folder, uri)
    assert ack.is_complete, ack
    assert len(ack.warnings) == len(ARTIFACTS) + 1, ack.warnings
    assert [item.path for item in MlflowClient(uri).list_artifacts(ack.run_id)] == ["fine.txt"]
    sent = [path.name for path in (own_folder / "mlartifacts").rglob("*") if path.is_file()]
    assert sent == ["fine.txt"]
    assert not Path(MARKER).exists()
    assert cli.main(["sync", "run", f"tracking.uri={uri}"]) == 1
    assert "leads out of the run's folder" in capfd.readouterr().out


FILES = {
    "objects.npy": lambda path: np.save(path, np.array([Bomb()], dtype=object), allow_pickle=True),
    "objects.npz": lambda path: np.savez(path, x=np.array([Bomb()], dtype=object), y=np.zeros(1)),
    "pickle.npy": lambda path: path.write_bytes(pickle.dumps(Bomb())),
    "pickle.npz": lambda path: path.write_bytes(pickle.dumps(Bomb())),
    "pickle.safetensors": lambda path: path.write_bytes(pickle.dumps(Bomb())),
    "pickle.pkl": lambda path: path.write_bytes(pickle.dumps(Bomb())),
    "pickle.pt": lambda path: torch.save(Bomb(), path),
    "header.npy": lambda path: path.write_bytes(
        b"\x93NUMPY\x01\x00\x40\x00" + b"__import__('os').makedirs('PWNED')".ljust(64)
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_data_file_holds_only_number_arrays(own_folder, capfd, name):
    FILES[name](own_folder / name)
    words = [word for word in SMALL if not word.startswith("data")]
    refused([*words, "data=arrays", f"data.path={name}", "hydra.run.dir=run"], capfd)
