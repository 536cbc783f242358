"""A password or a token of a run is not in any file that it writes, on any page of MLflow or on the screen."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from runner import cli
from runner.config import secrets
from runner.config.validate import problems
from runner.errors import SECRETS, RunnerError, path_problems
from runner.tracking import stores
from runner.tracking.journal import Journal
from runner.tracking.journal_reader import read_events

SECRET = "s3cr3t-W0rd"
SMALL = (
    "model=mlp",
    "model.hidden_sizes=[4]",
    "train.num_steps=2",
    "data.limit=60",
    "device=cpu",
    "hydra.run.dir=run",
    "task.plots=false",
)
STORE = f"http://me:{SECRET}@127.0.0.1:9"  # no server listens on port 9
STORES = {
    "command line": STORE,
    "environment": f"postgresql://127.0.0.1:9/runs?user=me&password={SECRET}",
    "file": f"http://{SECRET}@127.0.0.1:9",
}


def files_with(secret, root):
    """Return every file below `root` that contains the secret, including binary files."""
    found = [path for path in root.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    return [str(path.relative_to(root)) for path in found if path.suffix not in (".py", ".pyc")]


def shown_nowhere(capfd, root, *own):
    shown = capfd.readouterr()
    assert SECRET not in shown.out + shown.err
    assert [file for file in files_with(SECRET, root) if file not in own] == []


@pytest.fixture
def ended(warm_programs):
    """End the processes that keep trying a store that does not answer."""
    import psutil

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    for child in psutil.Process().children(recursive=True):
        if child.pid not in before:
            child.send_signal(signal.SIGTERM)
            child.wait(20)


@pytest.mark.parametrize("place", STORES)
def test_credentials_of_the_store_are_nowhere(own_folder, capfd, ended, monkeypatch, place):
    words = [*SMALL, "tracking.grace_seconds=0", "experiment=mine"]
    file = own_folder / "conf/experiment/mine.yaml"
    file.parent.mkdir(parents=True)
    text = f"tracking: {{uri: '{STORES[place]}'}}" if place == "file" else "seed: 1"
    file.write_text(f"# @package _global_\n{text}\n")
    if place == "environment":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", STORES[place])
    assert cli.main([*words, f"tracking.uri={STORE}"] if place == "command line" else words) == 0
    shown_nowhere(capfd, own_folder, "conf/experiment/mine.yaml")
    assert "127.0.0.1:9" in Path("run/summary.json").read_text()
    assert "127.0.0.1:9" in Path("run/.hydra/config.yaml").read_text() or place == "environment"


FROM_THE_ENVIRONMENT = "http://${oc.env:TOKEN}@127.0.0.1:9/${oc.env:TOKEN}"


def test_store_uri_from_environment_is_hidden(own_folder, capfd, ended, monkeypatch):
    monkeypatch.setenv("TOKEN", SECRET)
    words = [*SMALL, f"tracking.uri='{FROM_THE_ENVIRONMENT}'", "tracking.grace_seconds=0", "tracking.log_model=false"]
    assert cli.main(words) == 0
    assert "sync     python -m runner sync run\n" in capfd.readouterr().out  # the command finds the store automatically
    assert files_with(SECRET, own_folder) == []
    for name in ("summary", "journal/ack"):
        assert "http://<oc.env:TOKEN>@127.0.0.1:9/<oc.env:TOKEN>" in Path(f"run/{name}.json").read_text()
    assert FROM_THE_ENVIRONMENT in Path("run/rerun.yaml").read_text()
    assert cli.main([*SMALL, "tracking.uri='htp://host/${oc.env:TOKEN}'"]) == 2
    shown_nowhere(capfd, own_folder)
    monkeypatch.setenv(SECRETS, "")  # like another process, without the secrets in its environment
    real = f"http://{SECRET}@127.0.0.1:9/{SECRET}"
    assert stores.of_run(Path("run"), asked="sync run") == real
    assert "<oc.env:TOKEN>" in str(RunnerError(*problems(OmegaConf.create({"tracking": {"uri": f"ftp:{real}"}}))))
    monkeypatch.delenv("TOKEN")
    with pytest.raises(RunnerError, match=r"help: set `TOKEN`, or run `sync run tracking\.uri=URI`"):
        stores.of_run(Path("run"), asked="sync run")


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("http://${oc.env:HOST}:80/${oc.env:TOKEN}", "http://there:80/<oc.env:TOKEN>"),
        ("https://me:${oc.env:TOKEN}@${oc.env:HOST}", "https://me:<oc.env:TOKEN>@there"),
        ("http://there?key=${oc.env:TOKEN}", "http://there?key=<oc.env:TOKEN>"),
        ("${oc.env:BASE}/${oc.env:TOKEN}", "http://there/<oc.env:TOKEN>"),
        ("${oc.env:BASE}", "http://there"),
        ("sqlite:///${oc.env:TOKEN}.db", "sqlite:///s3cr3t W0rd.db"),
        ("http://there/${oc.env:SHORT}", "http://there/v1"),
        ("${known}/${oc.env:NOT_THERE,x}", "http://there/<oc.env:TOKEN>/x"),
    ],
)
def test_store_uri_secret_parts_are_hidden(monkeypatch, uri, shown):
    for name, value in {"TOKEN": "s3cr3t W0rd", "HOST": "there", "BASE": "http://there", "SHORT": "v1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(SECRETS, "")
    cfg = OmegaConf.create({"tracking": {"uri": uri}, "known": "http://there/${oc.env:TOKEN}"})
    secrets.note_secrets(secrets.shown_uri(cfg))
    assert secrets.without_password(cfg.tracking.uri) == shown
    assert secrets.without_password(cfg.tracking.uri.replace(" ", "%20")).replace("%20", " ") == shown


def test_error_next_to_password_omits_password(own_folder, capfd):
    assert cli.main([*SMALL, f"tracking.uri={STORE}", "modle=mlp"]) == 2
    assert cli.main([*SMALL, f"tracking.urii={STORE}"]) == 2
    assert cli.main([*SMALL, f"model.x={STORE}"]) == 2
    assert cli.main([*SMALL, f"--uri={STORE}"]) == 2
    assert cli.main([*SMALL, STORE]) == 2
    assert cli.main([*SMALL, f"tracking.uri={STORES['environment']}=x"]) == 2
    shown_nowhere(capfd, own_folder)


def test_rerun_works_when_password_is_set_again(own_folder, capfd, ended, monkeypatch):
    words = [word.replace("run.dir=run", "run.dir=outputs/a/run") for word in SMALL]
    assert cli.main([*words, f"tracking.uri={STORE}", "tracking.grace_seconds=0"]) == 0
    again = ["-cd", "outputs/a/run", "-cn", "rerun", "hydra.run.dir=again"]
    for command in (again, ["resume", "last", "train.num_steps=3"]):
        capfd.readouterr()
        assert cli.main(command) == 2
        assert "export MLFLOW_TRACKING_URI" in (told := capfd.readouterr().err)
        assert "tracking.uri=http://me:PASSWORD@127.0.0.1:9" in told
    assert cli.main(["resume", "last", "train.num_steps=3", f"tracking.uri={STORE}"]) == 0
    monkeypatch.setenv("MLFLOW_TRACKING_URI", STORE)
    assert cli.main(["resume", "last", "train.num_steps=4"]) == 0
    assert cli.main(again) == 0
    shown_nowhere(capfd, own_folder)
    assert json.loads(Path("again/summary.json").read_text())["status"] == "finished"


@pytest.mark.slow
def test_environment_values_stay_in_environment(own_folder, capfd, monkeypatch, warm_programs, empty_store):
    shutil.copy(empty_store, "runs.db")
    for name in ("TOKEN", "MLFLOW_TRACKING_PASSWORD", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("WIDTH", "4")
    (own_folder / "mine.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Sequential):\n"
        "    def __init__(self, inputs, outputs, width, token, url, known):\n"
        f"        assert token == known['token'] == {SECRET[::-1]!r}[::-1] and token in url and width == 4\n"
        "        super().__init__(nn.Flatten(), nn.Linear(inputs, outputs))\n"
    )
    (own_folder / "conf/model").mkdir(parents=True)
    (own_folder / "conf/model/mine.yaml").write_text(
        "_target_: mine.Net\ninputs: ${facts.in_features}\noutputs: 10\ntoken: ${oc.env:TOKEN}\nurl: 'https://me:${oc.env:TOKEN}@there'\n"
        "known: {token: '${model.token}'}\nwidth: ${oc.decode:${oc.env:WIDTH}}\n"
    )
    words = [word for word in SMALL if "model" not in word]
    assert cli.main([*words, "model=mine", "tracking.uri=sqlite:///runs.db", "data.name=digits"]) == 0
    shown_nowhere(capfd, own_folder)
    kept = OmegaConf.load("run/rerun.yaml").model
    assert OmegaConf.to_container(kept)["token"] == "${oc.env:TOKEN}"
    assert OmegaConf.to_container(kept)["url"] == "https://me:${oc.env:TOKEN}@there"
    from mlflow import MlflowClient

    run_id = json.loads(Path("run/summary.json").read_text())["run_id"]
    client = MlflowClient(f"sqlite:///{own_folder}/runs.db")
    params = client.get_run(run_id).data.params
    assert (params["model.token"], params["model.known.token"]) == ("<oc.env:TOKEN>",) * 2
    assert (params["model.width"], params["tracking.uri"]) == ("4", "sqlite:///runs.db")
    assert client.search_logged_models(["1"])[0].status == "READY"  # created again, with the token
    assert cli.main(["-cd", "run", "-cn", "rerun", "hydra.run.dir=again", "tracking.enabled=false"]) == 0


@pytest.mark.slow
def test_diff_of_code_omits_password(own_folder, capfd, ended):
    def git(*words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True, capture_output=True)

    git("init")
    for name in ("note.txt", "app.cfg", "own.pem"):
        Path(name).write_text("nothing\n")
    git("add", ".")
    git("commit", "-m", "first")
    git("remote", "add", "origin", f"https://me:{SECRET}@there/mine.git")
    Path("note.txt").write_text(f"the store is {STORE}, its word {SECRET}\n")
    Path("app.cfg").write_text("API_KEY=0th3r-W0rd\n")
    Path("own.pem").write_text("0th3r-W0rd\n")
    assert cli.main([*SMALL, f"tracking.uri={STORE}", "tracking.grace_seconds=0"]) == 0
    diff = Path("run/git.diff").read_text()
    assert "the store is" in diff and "# app.cfg is left out" in diff and "0th3r-W0rd" not in diff
    shown_nowhere(capfd, own_folder, "note.txt", ".git/config")
    (start,) = (event["tags"] for event in read_events(Path("run")) if event["kind"] == "start")
    assert start["mlflow.source.git.repoURL"] == "https://there/mine.git" and start["mlflow.source.git.branch"]
    assert cli.main([*SMALL[:-2], "hydra.run.dir=off", "tracking.enabled=false", "tracking.git_diff=false"]) == 0
    assert not Path("off/git.diff").exists()


@pytest.mark.slow
def test_a_sweep_keeps_no_password(warm, own_folder, capfd, monkeypatch):
    monkeypatch.setenv("PLACE", other := "0th3r-W0rd")
    words = [word for word in SMALL if "hydra" not in word]
    uri = f"tracking.uri='{STORE}/${{oc.env:PLACE}}'"
    process = warm.command(own_folder, "-m", *words, "seed=1,2", uri, "tracking.grace_seconds=0")
    told, _ = process.communicate()
    assert process.returncode == 0, told
    assert SECRET not in told and other not in told
    assert "/<oc.env:PLACE>" in told
    assert files_with(other, own_folder) == []
    shown_nowhere(capfd, own_folder)


def test_what_is_written_down_by_hand(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    cfg = OmegaConf.create(
        {
            "tracking": {"uri": "http://me:it's@a\\b@host"},
            "data": {
                "url": "s3://me:word@there",
                "ref": "s3://me:${oc.env:HOME}@there",
                "list": [
                    "x://a:b@c,x://a:${oc.env:HOME}@c",
                    "x://${oc.env:HOME}:${oc.env:HOME}@c",
                    "x://${oc.env:HOME}:b@c",
                ],
            },
            "same": "${data.url}",
            "home": "${oc.env:HOME}",
        }
    )
    kept = secrets.for_disk(cfg)
    assert OmegaConf.create(kept).tracking.uri == "http://me:***@host"
    assert kept["data"] == {
        "url": "s3://me:***@there",
        "ref": "s3://me:${oc.env:HOME}@there",
        "list": [
            "x://a:***@c,x://a:${oc.env:HOME}@c",
            "x://${oc.env:HOME}:${oc.env:HOME}@c",
            "x://${oc.env:HOME}:***@c",
        ],
    }
    found = secrets.for_display(cfg)
    assert (found["same"], found["home"]) == ("s3://me:***@there", "<oc.env:HOME>")
    assert found["data"]["ref"] == "s3://me:<oc.env:HOME>@there"
    assert secrets.filled_in(found)["home"] == os.environ["HOME"] == cfg.home


def test_address_instead_of_file_is_hidden():
    assert SECRET not in str(RunnerError(*path_problems("data.path", f"{STORE}/x.csv")))


def test_missing_data_password_is_requested():
    cfg = OmegaConf.create({"data": {"_target_": "x", "url": "s3://me:***@there"}})
    assert any(problem.help == "use `data.url=s3://me:PASSWORD@there`" for problem in problems(cfg))


def test_journal_with_missing_reference_builds_no_model(own_folder):
    with pytest.raises(KeyError):
        secrets.filled_in({"token": "<oc.env:NOT_THERE>"})
    with Journal(own_folder) as journal:
        journal.event("note", text="")  # a run directory does not store secrets here; the journal reads as before
    assert files_with(SECRET, own_folder) == []
