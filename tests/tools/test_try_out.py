"""`python -m runner try`, as a user types it: real runs, kept and discarded; and errors with their fixes."""

import json
import shlex
from pathlib import Path

import pytest
from synthetic_sweep import Folder

from runner import cli
from runner.runs.find import find
from runner.sweep.report.results import Goal
from runner.tools import tries, try_out
from runner.tools.compare import one
from runner.tools.tries import Decision, Side

SHORT = ("data=iris", "model=linear", "train.num_epochs=2", "tracking.enabled=false", "task.plots=false", "device=cpu")
MODEL = """
import torch

class Salted(torch.nn.Linear):
    def __init__(self, in_features, out_features, salt):
        torch.rand(salt)  # other weights for the same seed: no better and no worse
        super().__init__(in_features, out_features)
        if salt == 13:
            self.weight.data.fill_(float("nan"))
"""


@pytest.fixture
def answer(own_folder, warm_jobs, warm_programs, capfd):
    def run(*words):
        capfd.readouterr()
        code = cli.main([*words, "--json"])
        out, said = capfd.readouterr()
        return code, json.loads(out), said

    return run


def lines():
    return [json.loads(line) for line in Path("multirun/tries/tries.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_night(answer, own_folder):
    (own_folder / "own.py").write_text(MODEL)
    _, run, _ = answer(*SHORT, "model._target_=own.Salted", "+model.salt=0")
    code, better, said = answer("try", "optimizer.lr=0.03", "--against", "last")
    assert (code, better["verdict"], len(better["values"])) == (0, "kept", 12), said
    assert better["against"]["values"]["0"] == run["best"]["value"]
    assert find("last").absolute() == Path(run["folder"]), "and none of the runs that try began"
    assert better["difference"]["n"] == 12 and better["difference"]["high"] < 0 and better["fair"]["by"] == "epochs"
    assert better["configuration"][-1] == "optimizer.lr=0.03" and "+model.salt=0" in better["configuration"]
    code, worse, said = answer("try", "model.salt=13", "--against", "best")
    assert (code, worse["verdict"]) == (1, "discarded"), said
    assert worse["why"].startswith("a run of it has no value: seed 0: train/loss is nan at step 1")
    assert worse["against"]["name"] == "try 1" and worse["words"] == ["model.salt=13"]
    assert lines() == [better, worse] and Path(worse["folder"], "report.json").is_file()
    code, found, _ = answer("try", "plan.device_memory=1KiB", "--against", "last", "device=cuda:0")
    assert code == 1 and found["why"].startswith("it would not run: a step takes "), found


@pytest.mark.slow
def test_other_code_is_tried_by_its_seeds(answer, own_folder):
    (own_folder / "own.py").write_text(MODEL)
    answer(*SHORT, "model._target_=own.Salted", "+model.salt=0")
    (own_folder / "own.py").write_text(MODEL + "\n# changed\n")
    answer("try", "--against", "last")  # a run does not record files outside a repository
    (own_folder / "own.py").write_text(MODEL + "        self.weight.data *= 20\n")
    code, found, said = answer("try")
    assert (code, found["verdict"], found["words"]) == (1, "discarded", []), said
    assert found["code"]["files"] != found["against"]["code"]["files"] and len(found["against"]["values"]) == 12


def test_try_quotes_folder_for_hydra(tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(try_out, "measure", lambda sides, look, context, config: found.append(config) or decided)
    decided = Decision(tries.KEPT, "", {}, {})
    own, other = (Side(name, [], [], Goal("val/loss", "min"), {}) for name in ("try 1", "last"))
    folder = tmp_path / "it's übung, 1 & (2)"
    over = try_out._decide(own, other, [], folder, is_new=True, is_over=True)
    assert over.why.startswith("the time was up after 0 seeds of both") and not found  # nothing is started
    assert try_out._decide(own, other, [], folder, is_new=True) is decided
    assert found[0].hydra.sweep.dir == str(folder)


@pytest.mark.parametrize(
    ("words", "so", "write"),
    [
        ([], "no change has been kept here yet", "use --against last"),
        (["--against", "nowhere"], "there is no directory nowhere", "last"),
        (["--budget", "soon"], "--budget must be a number above 0", "--budget 60"),
        (["seed=3"], "seeds of what it is tried against", "leave seed out"),
        (["sweep.until=decided", "sweep.max_seeds=9"], "its own sweep", "leave sweep.max_seeds out"),
        (["-m", "optimizer.lr=1,2"], "the configuration of what it is tried against", "KEY=VALUE"),
        (["optimizer.lr=1,2"], "a comma between values", ""),
    ],
)
def test_mistakes(words, so, write, own_folder, capsys):
    assert cli.main(["try", *words]) == 2
    said = capsys.readouterr().err.replace("`", "")
    assert so in said and write in said, said
    assert not list(Path("multirun/tries").glob("*.jsonl"))


def test_try_names_fold_like_sweep(own_folder, capsys):
    made = Folder(own_folder / "it's a sweep", ("data.fold=range(4)", "data.num_folds=4"))
    for fold in range(4):
        best = {"metric": "val/loss", "mode": "min", "value": 1.0 + fold, "step": 1}
        made.job((f"data.fold={fold}", "data.num_folds=4"), summary={"best": best})
    made.close()
    assert cli.main(["try", "--against", "it's a sweep", "optimizer.lr=0.1"]) == 2
    (write,) = (line for line in capsys.readouterr().err.splitlines() if "help:" in line)
    words = shlex.split(write.split("`")[1])
    assert words[3:] == ["try", "--against", "it's a sweep:data.fold=0"]
    assert one(words[5], verb="try").values(Goal("val/loss", "min")) == {(0, "0/4"): 1.0}


def test_mistakes_in_what_is_tried(at_home, run):
    """None of them starts a try."""
    for words, so in (
        (["optimizer.lrr=1"], "optimizer.lr"),
        (["train.num_epochs=3"], "longer training is not a better configuration"),
        (["metric=val/accurcy"], "has no val/accurcy"),
    ):
        code, _, said = run("try", "--against", "outputs/digits/run", *words)
        assert code == 2 and so in said, said
    assert not Path("multirun/tries/tries.jsonl").exists()
