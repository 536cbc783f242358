"""notify.url gets a JSON notice when a run or a sweep ends, and stays a secret."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from runner import cli

WORDS = ["model=mlp", "data=iris", "device=cpu", "train.num_epochs=1", "task.plots=false", "tracking.enabled=false"]
SECRET = "T0/B0/xyzzy"


@pytest.fixture
def server():
    """An HTTP server; `notices` are the bodies that it got, `status` is its answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            server.notices.append(json.loads(body))
            self.send_response(server.status)
            self.end_headers()

        def log_message(self, *words):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.notices, server.status = [], 200
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        server.url = f"http://127.0.0.1:{server.server_port}/{SECRET}"
        yield server
        server.shutdown()
        thread.join()


def files_with(text, folder="."):
    return [path for path in Path(folder).rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def test_finished_run_posts_its_result_and_hides_the_address(own_folder, server, capsys):
    assert cli.main([*WORDS, f"notify.url={server.url}", "hydra.run.dir=out", "tracking.enabled=true"]) == 0
    (notice,) = server.notices
    assert notice["status"] == "finished" and notice["directory"] == str(own_folder / "out")
    assert notice["text"].startswith("out: finished") and notice["best"]["metric"] in notice["text"]
    assert notice["metrics"]["val/loss"] == json.loads(Path("out/summary.json").read_text())["metrics"]["val/loss"]
    assert files_with("xyzzy") == [] and "xyzzy" not in "".join(capsys.readouterr())


def test_address_from_environment_and_failure(own_folder, server, monkeypatch, capsys):
    monkeypatch.setenv("RUNNER_NOTIFY_URL", server.url)
    assert cli.main([*WORDS, "hydra.run.dir=out", "optimizer=sgd", "optimizer.lr=1e30", "train.num_epochs=5"]) == 1
    (notice,) = server.notices
    assert (notice["status"], notice["ending"]) == ("failed", "not_finite") and "nan" in notice["text"]
    assert files_with("xyzzy") == [] and "notify" not in Path("out/rerun.yaml").read_text()
    server.status = 500
    assert cli.main([*WORDS, "hydra.run.dir=other"]) == 0
    said = "".join(capsys.readouterr())
    assert "notice was not delivered: HTTP Error 500" in said and "xyzzy" not in said


def test_sweep_posts_one_notice(own_folder, server):
    sweep = ["-m", "seed=1,2,3", "model.hidden_sizes=[4],[64]", "hydra.sweep.dir=sweep", f"notify.url={server.url}"]
    assert cli.main([*(word for word in WORDS if "model=" not in word), "model=mlp", *sweep]) == 0
    (notice,) = server.notices
    assert notice["jobs"] == {"finished": 6} and len(notice["comparisons"]) == 1
    assert "6 finished" in notice["text"] and files_with("xyzzy") == []


def test_wrong_address_and_foreign_configuration_are_refused(own_folder, server, capsys):
    assert cli.main([*WORDS, "notify.url=xyzzy", "hydra.run.dir=out", "model.dropout=2"]) == 2
    said = capsys.readouterr().err
    assert "notify.url=http://127.0.0.1:8000" in said and "model.dropout" in said and "xyzzy" not in said
    assert cli.main([*WORDS, "notify.url=http://127.0.0.1/xyzzy{"]) == 2  # no composition has noted it
    assert "xyzzy" not in capsys.readouterr().err
    assert cli.main([*WORDS, "hydra.run.dir=out"]) == 0
    with Path("out/rerun.yaml").open("a") as file:
        file.write(f"notify:\n  url: {server.url}\n")
    assert cli.main(["-cd", "out", "-cn", "rerun", "hydra.run.dir=again"]) == 2
    assert "no address for notices" in capsys.readouterr().err and server.notices == []
