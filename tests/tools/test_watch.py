"""`python -m runner watch`: frames of a run and of a sweep, in a pipe, and in a terminal that is restored afterwards."""

import json
import os
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console
from synthetic_sweep import Folder
from written_journals import end, start

from runner import cli
from runner.tools import watch as watching
from runner.tools.live import thin
from runner.tools.watch import Canvas
from runner.tracking.journal import Journal

pty, termios = pytest.importorskip("pty"), pytest.importorskip("termios")  # not on Windows


def begin(folder, *, num_steps=200, names=("train/loss", "val/loss", "train/accuracy"), seed=0):
    """Write a run's directory, and a journal with half of its steps."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rerun.yaml").write_text("seed: 0\n")
    journal = Journal(folder)
    start(journal, params={"facts.num_steps": str(num_steps)}, tags={"device": "cpu", "changed": "model=mlp seed=7"})
    steps = np.arange(1, num_steps // 2 + 1)
    values = np.exp(-steps / num_steps + seed)[:, None] * np.ones(len(names))
    journal.points(names, steps, steps, values)
    return journal


@pytest.fixture
def run(own_folder):
    folder = Path("outputs/a/run")
    with begin(folder) as journal:
        end(journal)
    return folder


@pytest.mark.parametrize(("width", "height", "panels"), [(80, 24, 2), (200, 50, 2), (40, 12, 1), (20, 6, 1)])
def test_a_frame_fits_where_it_is_drawn(run, width, height, panels):
    target, console = watching.find_target(str(run)), Console(width=width, height=height)
    target.read()
    for plain in (False, True):
        frame = target.draw(width, height, plain=plain, foot="q leaves, it continues")
        rows = console.render_lines(frame, console.options.update(height=height))
        lines = ["".join(part.text for part in row) for row in rows]
        assert len(lines) == height and all(cell_len(line) == width for line in lines)
        assert sum(line.count("step 100") for line in lines[1:]) == panels or width < 40
        assert plain == (not any("⠀" < letter <= "⣿" for line in lines for letter in line))
        assert lines[-1].startswith("q leaves, it continues"[: width - 1])
    assert lines[0].startswith("outputs/a/run  finish"[: width - 1])


def test_over_a_pipe_one_frame_without_moves(run, capsys, monkeypatch):
    assert cli.main(["watch", str(run)]) == 0
    said = capsys.readouterr().out
    head, changed, loss, *_ = said.splitlines()
    assert head == "outputs/a/run  finished  step 100 of 200 (50%)" and changed == "model=mlp seed=7"
    assert loss == "loss  train 0.6065  val 0.6065 (best 0.6065 at 100)"
    assert "\x1b" not in said and not any(line != line.rstrip() for line in said.splitlines())
    monkeypatch.setenv("TERM", "dumb")
    assert cli.main(["watch", "last"]) == 0
    assert capsys.readouterr().out.isascii()


def test_for_programs_one_frames_data(run, capsys):
    with Journal(run) as journal:
        start(journal)  # it was resumed, and the command does not wait for its end
        assert cli.main(["watch", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["status"], found["step"], found["goal"]) == ("running", 100, "val/loss")
    curve = found["metrics"]["train/loss"]
    assert curve["points"] == len(curve["curve"]["steps"]) == len(curve["curve"]["least"]) == 100
    assert curve["curve"]["steps"][0] == 1 and curve["curve"]["least"][-1] == curve["last"]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([10, 20, 24], [10, 20, 24]),
        (list(range(1, 501)), list(range(1, 501))),
        (list(range(7, 3000, 7)), list(range(7, 3000, 7))),
        (list(range(1, 1001)), list(range(1, 1001, 2))),  # two per column
        ([10, 20, 10, 24], [10, 20, 24]),  # resumed from an earlier step
    ],
)
def test_watch_json_curve_has_steps(own_folder, capsys, steps, expected):
    with begin(Path("run"), names=("train/loss",), num_steps=2) as journal:
        journal.points(("val/loss",), steps, [0] * len(steps), np.ones((len(steps), 1)))
        journal.points(("val/accuracy",), steps[:1], [0], [[np.nan]])
        end(journal)
    assert cli.main(["watch", "run", "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    assert metrics["val/loss"]["curve"]["steps"] == expected
    assert metrics["val/accuracy"]["curve"]["steps"] == []


def test_watch_sweep_has_row_per_job(own_folder, capsys):
    sweep = Folder(own_folder / "multirun/1/2", ("seed=1,2,3",))
    for seed in (1, 2):
        sweep.job((f"seed={seed}",), summary={"metrics": {}, "num_steps": 100})
        with begin(sweep.path / str(seed - 1), seed=seed) as journal:
            end(journal)
    folder = sweep.close()
    assert cli.main(["watch", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "multirun/1/2  2 jobs: 2 finished"
    assert lines[1].split() == ["job", "name", "state", "step", "val/loss", "best"]
    assert lines[3].split()[:6] == ["1", "seed=2", "finished", "100/200", "4.4817", "4.4817"]
    assert lines[4] == "val/loss of all, the best in colour"
    assert cli.main(["watch", str(folder), "--json"]) == 0
    jobs = json.loads(capsys.readouterr().out)["jobs"]
    assert [job["metrics"]["val/loss"]["points"] for job in jobs] == [100, 100]


def test_watch_line_is_connected():
    steep = Canvas(4, 4, low=0.0, high=1.0)
    steep.draw(thin((np.array([1, 2]), np.array([0.0, 1.0])), steep.columns, first=1, last=2), "bright")
    assert [line.plain != "    " for line in steep.lines()] == [True] * 4


class Screen:
    """A pseudo-terminal: it records the drawn text, and types keys once a text appears."""

    def __init__(self, monkeypatch):
        self.ours, theirs = pty.openpty()
        self.keyboard = os.fdopen(os.dup(theirs), "r")
        self.out = os.fdopen(theirs, "w", encoding="utf-8")
        self.drawn, self.before = b"", termios.tcgetattr(self.keyboard)
        for name, file in (("stdin", self.keyboard), ("stdout", self.out)):
            monkeypatch.setattr(sys, name, file)
        for name, value in {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}.items():
            monkeypatch.setenv(name, value)

    def when(self, text, do):
        """Read in a thread, and call the function once after the text was drawn."""

        def read():
            is_done = False
            while True:
                try:
                    self.drawn += os.read(self.ours, 1 << 16)
                except OSError:
                    return
                if b"[the end]" in self.drawn:
                    return
                if not is_done and text.encode() in self.drawn:
                    is_done = True
                    do()

        self.thread = threading.Thread(target=read)
        self.thread.start()

    def close(self):
        """Return everything that was drawn; check that the terminal's settings are restored."""
        self.out.write("[the end]")
        self.out.flush()
        self.thread.join(30)
        assert termios.tcgetattr(self.keyboard) == self.before
        for file in (self.out, self.keyboard):
            file.close()
        os.close(self.ours)
        return self.drawn.decode(errors="replace")


ENTER, LEAVE, SHOW = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"


def test_q_leaves_run_unchanged(own_folder, monkeypatch):
    with begin(Path("outputs/a/run")):
        screen = Screen(monkeypatch)
        screen.when("q leaves", lambda: os.write(screen.ours, b"q"))
        assert cli.main(["watch", "outputs/a/run"]) == 0
        drawn = screen.close()
    places = [drawn.index(text) for text in (ENTER, "loss", LEAVE, "it continues; python -m runner watch")]
    assert places == sorted(places) and SHOW in drawn


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_gives_the_screen_back(own_folder, monkeypatch, number, code):
    before = signal.getsignal(signal.SIGTERM)
    with begin(Path("outputs/a/run")):
        screen = Screen(monkeypatch)
        screen.when("q leaves", lambda: os.kill(os.getpid(), getattr(signal, number)))
        assert cli.main(["watch", "outputs/a/run"]) == code
        drawn = screen.close()
    assert LEAVE in drawn and SHOW in drawn and signal.getsignal(signal.SIGTERM) == before


def test_watch_ends_with_run_and_last_frame(own_folder, monkeypatch):
    monkeypatch.setattr(watching, "SECONDS_BETWEEN_READS", 0.01)
    journal = begin(Path("outputs/a/run"))
    screen = Screen(monkeypatch)

    def go_on():
        monkeypatch.setenv("COLUMNS", "100")  # makes its window wider during the run
        journal.points(["train/loss"], [200], [0], [[0.25]])
        while b"step 200" not in screen.drawn:  # it is drawn before the end
            screen.drawn += os.read(screen.ours, 1 << 16)
        end(journal)

    screen.when("q leaves", go_on)
    assert cli.main(["watch", "outputs/a/run"]) == 0
    drawn = screen.close()
    journal.close()
    stays = drawn[drawn.index(LEAVE) :]
    assert "finished" in stays and "step 200 of 200 (100%)" in stays and "0.2500" in stays and "q leaves" not in stays
    assert "step 200" in drawn[: drawn.index(LEAVE)]
