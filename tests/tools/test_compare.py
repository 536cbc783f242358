"""`python -m runner compare`: its arguments and its output."""

import json
import shlex
import shutil

import numpy as np
import pytest
from mlflow import MlflowClient
from rich.console import Console
from synthetic_sweep import Folder

from runner import cli
from runner.errors import RunnerError
from runner.sweep.report import tables
from runner.sweep.report.build import write
from runner.tools.compare import compare


def job(sweep, words, value, **more):
    best = {"metric": "val/loss", "mode": "min", "value": value, "step": 3}
    sweep.job(words, summary={"best": best, "num_steps": 9, **more})


def sweep_of(folder, models, *, seeds=range(8)):
    """Write a sweep. models: By name, a function of the seed."""
    sweep = Folder(folder, (f"model={','.join(models)}", f"seed={','.join(map(str, seeds))}"))
    for model, value in models.items():
        for seed in seeds:
            metrics = {"val/loss": value(seed) + 1, "test/accuracy": 1 - value(seed)}
            job(sweep, (f"model={model}", f"seed={seed}"), value(seed), metrics=metrics)
    return sweep.close()


def noise(seed):
    return float(np.random.default_rng(seed).normal())


MODELS = {
    "mlp": lambda seed: 0.5 + 0.1 * noise(seed),
    "cnn": lambda seed: 0.3 + 0.1 * noise(seed) + 0.01 * noise(seed + 100),
    "linear": lambda seed: 0.31 + 0.1 * noise(seed) + 0.2 * noise(seed + 200),
}


@pytest.fixture
def folder(own_folder):
    return sweep_of(own_folder / "multirun" / "2026-01-01" / "12-00-00", MODELS)


def test_two_configurations_of_a_sweep(folder, capsys):
    assert cli.main(["compare", f"{folder}:model=cnn", f"{folder}:model=mlp"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[:2] == ["A  model=cnn", "B  model=mlp"]
    loss, accuracy = (line.split() for line in said.splitlines()[3:5])
    assert (loss[0], loss[-2:], accuracy[0], accuracy[-1]) == ("val/loss", ["8", "better"], "test/accuracy", "better")
    found = {each.metric: each for each in compare([f"{folder}:model=mlp", f"{folder}:model=cnn"])}
    assert found["val/loss"].verdict == found["test/accuracy"].verdict == "worse"
    assert found["val/loss"].difference.n == 8
    assert found["val/loss"].difference.mean == pytest.approx(0.2, abs=0.01)


def lists_of(folder):
    sweep = Folder(folder)
    for sizes, worse in (("[32]", 1), ("[64,64]", 0), ("{a:1,b:[2,c=3]}", 2)):
        for seed in range(8):
            words = (f"model.hidden_sizes={sizes}", f"name='{sizes},d=4'", "+model.salt=1", f"seed={seed}")
            job(sweep, words, noise(seed) + worse)
    return sweep.close()


@pytest.mark.parametrize(
    "words",
    [
        "model.hidden_sizes=[64,64]",
        "model.hidden_sizes=[64,64],model.salt=1",
        "+model.salt=1,model.hidden_sizes=[64,64]",
        "name='[64,64],d=4',model.salt=1",
        'name="[64,64],d=4"',
        r"name=\[64\,64\]\,d\=4",
    ],
)
def test_values_with_commas(own_folder, words):
    (found,) = compare([f"{lists_of(own_folder / 's')}:{words}", "s:model.hidden_sizes=[32]"])
    assert (found.verdict, found.difference.n, round(found.mean_b - found.mean_a, 6)) == ("better", 8, 1)
    (found,) = compare(["s:model.salt=1,model.hidden_sizes={a:1,b:[2,c=3]}", f"s:{words}"])
    assert (found.difference.n, round(found.mean_a - found.mean_b, 6)) == (8, 2)


def test_compare_selects_number_in_any_form(own_folder):
    sweep = Folder(own_folder / "s")
    for rate in ("0.001", "1e+30", "nan"):
        job(sweep, (f"optimizer.lr={rate}", "seed=1"), 0.1)
    sweep.job(("optimizer.lr=1", "seed=1"), "failed")
    sweep.close()
    for one, other in (("1e-3", "1e30,seed=1"), ("nan", "1.0e-03")):
        (found,) = compare([f"s:optimizer.lr={one}", f"s:optimizer.lr={other}"])
        assert found.difference.n == 1
    for rate, error in (("2e-3", "no job of the sweep has these values"), ("1", "has finished")):
        with pytest.raises(RunnerError, match=error):
            compare([f"s:optimizer.lr={rate}", "s:optimizer.lr=nan"])


def test_compare_sweep_with_its_best(folder, capsys):
    assert cli.main(["compare", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["comparisons"]
    assert [(each["a"], each["b"], each["verdict"]) for each in found] == [
        ("model=cnn", "model=linear", "undecided"),
        ("model=cnn", "model=mlp", "better"),
    ]
    assert found[0]["difference"]["more_seeds"] > 1
    assert cli.main(["compare", str(folder)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("A  model=cnn, the best val/loss: 0.") and "undecided: about" in said


def test_sweeps_are_paired_across_folders(own_folder, capsys):
    before = sweep_of(own_folder / "before", {"mlp": MODELS["mlp"]}, seeds=range(10))
    after = sweep_of(own_folder / "after", {"mlp": lambda seed: MODELS["mlp"](seed) - 0.05}, seeds=range(2, 12))
    found = compare([str(after), str(before)], metric="val/loss")
    assert [(each.verdict, each.difference.n, each.difference.is_paired) for each in found] == [("better", 8, True)]
    assert found[0].mean_a - found[0].mean_b == pytest.approx(found[0].difference.mean)
    other = sweep_of(own_folder / "other", {"mlp": MODELS["mlp"]}, seeds=range(20, 28))
    assert cli.main(["compare", str(before), str(other), "metric=val/loss"]) == 0
    assert "no seed is on both sides" in capsys.readouterr().out


def test_configurations_in_folds(own_folder, capsys):
    for name, models in (("both", ("mlp", "cnn")), ("other", ("mlp",))):
        sweep = Folder(own_folder / name)
        for model in models:
            for fold in range(8):
                job(sweep, (f"model={model}", f"data.fold={fold}/8"), MODELS[model](fold))
        sweep.close()
    (found,) = compare(["both"])
    assert (found.a, found.b, found.verdict, found.difference.n) == ("model=cnn", "model=mlp", "better", 8)
    assert found.unit == "folds" and found.difference.mean == pytest.approx(-0.2, abs=0.01)
    (found,) = compare(["other", "both:model=cnn"])
    assert (found.verdict, found.difference.n, found.difference.is_paired) == ("worse", 8, True)
    assert cli.main(["report", "both"]) == 0
    assert "over folds, mean (95 % interval)" in capsys.readouterr().out


def test_runs_by_the_seed_that_they_had(own_folder):
    for name, seed, value in (("a", 3, 0.1), ("b", 3, 0.2), ("c", 4, 0.3)):
        run = own_folder / name
        run.mkdir()
        (run / "rerun.yaml").write_text(f"defaults: [schema, base, _self_]\ndevice: cpu\nseed: {seed}\nname: null\n")
        best = {"metric": "val/loss", "mode": "min", "value": value, "step": 1}
        (run / "summary.json").write_text(
            json.dumps({"status": "finished", "best": best, "metrics": {}, "num_steps": 1})
        )
    (same,) = compare(["a", "b"], metric="val/loss")
    assert (same.difference.is_paired, same.difference.n, same.verdict) == (True, 1, "undecided")
    (apart,) = compare(["a", "c"])
    assert (apart.difference.is_paired, apart.mean_a, apart.mean_b) == (False, 0.1, 0.3)


@pytest.mark.parametrize(
    ("words", "so", "write"),
    [
        ([], "two runs or sweeps, or one sweep", "name a sweep"),
        (["{}:model=mpl", "{}"], "no job of the sweep has these values", "model=mlp"),
        (["{}:model=mlp,sed=1", "{}"], "no job of the sweep has these values", "seed=1"),
        (["{}", "{}:model=mlp"], "has 3 configurations", ":model=mlp"),
        (["{}:model=mlp", "nowhere"], "there is no directory `nowhere`", "the run's last lines"),
        (["{}", "metric=val/accurcy"], "has a metric `val/accurcy`", "metric=test/accuracy"),
        (["{}:model=mlp", "{}:model=cnn", "metric=val/accurcy"], "no val/accurcy in common", "metric=test/accuracy"),
    ],
)
def test_mistakes(words, so, write, folder, capsys):
    assert cli.main(["compare", *(word.format(folder) for word in words)]) == 2
    said = capsys.readouterr().err
    assert so in said and write in said, said


def test_compare_suggestion_quotes_value_with_blank(own_folder):
    sweep = Folder(own_folder / "blank")
    for value, name in ((0.1, "'two words'"), (0.2, "one")):
        job(sweep, (f"name={name}", "model=mlp", "seed=1"), value)
    sweep.close()
    with pytest.raises(RunnerError) as raised:
        compare(["blank", "blank:name=one"])
    _, written, _ = shlex.split(raised.value.problems[0].help.split("`")[1])
    (found,) = compare([written, "blank:name=one"])
    assert (found.mean_a, found.mean_b) == (0.1, 0.2)


def test_compare_without_validation_uses_test_metrics(own_folder, capsys):
    sweep = Folder(own_folder / "tested")
    for model in ("mlp", "cnn"):
        job(sweep, (f"model={model}", "seed=1"), None, metrics={"test/loss": 1.0})
    sweep.close()
    assert cli.main(["compare", "tested"]) == 2
    assert "help: run `python -m runner compare tested metric=test/loss`" in capsys.readouterr().err
    assert compare(["tested"], metric="test/loss")


def test_no_winner_is_named_without_a_decision(own_folder, capsys):
    """In a report, neither the best job nor the best mean is bold if its lead may be due to chance."""
    undecided = sweep_of(own_folder / "u", {name: MODELS[name] for name in ("cnn", "linear")})
    decided = sweep_of(own_folder / "d", {name: MODELS[name] for name in ("cnn", "mlp")})
    for folder, winner, words in ((undecided, None, "undecided: ~"), (decided, "model=cnn", "worse")):
        report = write(folder)
        assert report.winner == winner
        found = json.loads((folder / "report.json").read_text())
        assert (found["winner"], found["comparisons"][0]["a"]) == (winner, "model=cnn")
        tables.show(report, console := Console(force_terminal=True, width=150, record=True))
        bold = [line for line in console.export_text(styles=True).splitlines() if "\x1b[1m" in line]
        titles = [line for line in bold if "jobs" in line or "state" in line]
        assert len(bold) - len(titles) == (winner is not None)
        assert words in capsys.readouterr().out
        page = (folder / "report.html").read_text()
        assert ("better than each other one" in page, "not decided" in page) == (winner is not None, winner is None)


def with_diverged(folder, value, *, gone):
    """Write a sweep: mlp has a value by its seed; cnn diverges with `gone` of 8 seeds, and has 0.4 with the others."""
    sweep = Folder(folder)
    for model in ("mlp", "cnn"):
        for seed in range(8):
            words = (f"model={model}", f"seed={seed}")
            if model == "cnn" and seed < gone:
                sweep.job(words, "failed", summary={"ending": "not_finite", "num_steps": 9})
                continue
            reached = value + 0.01 * noise(seed) if model == "mlp" else 0.4
            job(sweep, words, reached, metrics={"val/loss": reached})
    return sweep.close()


@pytest.mark.parametrize(("gone", "value"), [(8, 0.5), (7, 0.3)])
def test_diverging_configuration_does_not_block_others(own_folder, gone, value, capsys):
    report = write(with_diverged(own_folder / "s", value, gone=gone))
    assert report.winner == "model=mlp"
    page = (own_folder / "s" / "report.html").read_text()
    assert "n = 8, better than each other one" in page


def stored(client, experiment, *, parent=None, status="FINISHED", losses=(), **params):
    run = client.create_run(experiment, tags={"mlflow.parentRunId": parent} if parent else {})
    for name, value in {"facts.num_steps": len(losses), **params}.items():
        client.log_param(run.info.run_id, name.replace("__", "."), value)
    for step, loss in enumerate(losses):
        client.log_metric(run.info.run_id, "val/loss", loss, step=step)
    client.set_terminated(run.info.run_id, status)
    return run.info.run_id


def test_a_stores_runs_by_their_ids(own_folder, empty_store, monkeypatch, capsys):
    """Runs of a sweep whose directory is elsewhere: its jobs, each by its best value, paired by their seeds."""
    shutil.copy(empty_store, own_folder / "mlflow.db")
    client = MlflowClient(f"sqlite:///{own_folder}/mlflow.db")
    experiment = client.create_experiment("elsewhere", str(own_folder / "artifacts"))
    sweep = client.create_run(experiment).info.run_id
    jobs = {}
    for model, value in MODELS.items():
        for seed in range(8):
            losses = (9.0, value(seed), float("nan"), 5.0)
            jobs[model, seed] = stored(
                client, experiment, parent=sweep, losses=losses, model___target_=model, seed=seed
            )
    stored(client, experiment, parent=sweep, status="FAILED", losses=(0.0,), model___target_="odd", seed=1)
    for seed in range(8):
        gone = stored(client, experiment, parent=sweep, status="FAILED", model___target_="gone", seed=seed)
        client.log_metric(gone, "train/loss", float("nan"), step=3)
    monkeypatch.setattr("runner.tools.compare.MAX_RUNS", 10)  # per page: the other pages are requested, too
    ids = [jobs["mlp", 0], jobs["cnn", 0]]
    assert cli.main(["compare", sweep, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["comparisons"]
    assert sorted((each["a"], each["b"], each["verdict"]) for each in found) == [
        ("model._target_=cnn", "model._target_=gone", "better"),
        ("model._target_=cnn", "model._target_=linear", "undecided"),
        ("model._target_=cnn", "model._target_=mlp", "better"),
    ]
    client.set_tag(sweep, "max_seeds", "64")  # four looks: eight pairs of one sign occur by chance too often
    verdicts = {each.b: each.verdict for each in compare([sweep])}
    assert verdicts["model._target_=gone"] == "undecided" and verdicts["model._target_=mlp"] == "better"
    (two,) = compare(ids)
    assert (two.mean_a, two.mean_b, two.difference.is_paired) == (MODELS["mlp"](0), MODELS["cnn"](0), True)
    for words in ([ids[0], "f" * 32], [*ids, "tracking.uri=sqlite:///other.db"]):
        assert cli.main(["compare", *words]) == 2
        assert "tracking.uri=URI" in capsys.readouterr().err
    assert not (own_folder / "other.db").exists()
