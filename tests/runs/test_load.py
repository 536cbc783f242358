"""Directories that are not a trained run, or not trusted, and their errors: the same for every command."""

import json
import shutil
from pathlib import Path

import pytest

from runner.config import origin
from runner.tracking.journal import Journal


@pytest.fixture
def copy(tmp_path):
    return Path(shutil.copytree("outputs/digits/run", tmp_path / "run"))


def change(file, **values):
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def verbs(folder):
    yield "evaluate", str(folder)
    yield "predict", str(folder), "--input", "train.csv", "--output", "never.csv"
    yield "export", str(folder), "--format", "safetensors"


def refused(run, folder, *output):
    for words in verbs(folder):
        code, _, err = run(*words)
        assert code == 2, words
        for text in output:
            assert text in err, words
    assert not Path("never.csv").exists() and not (folder / "exports").exists()


def test_a_run_without_a_best_checkpoint(run, copy):
    (copy / "checkpoints/best.pt").unlink()
    change(copy / "summary.json", status="failed", error="NotFiniteError: loss is nan at step 3")
    refused(run, copy, "has no `checkpoints/best.pt`", "failed (NotFiniteError: loss is nan at step 3)")
    (copy / "summary.json").unlink()
    refused(run, copy, "killed, without a summary", f"resume {copy}")


def test_load_running_run_raises(run, copy):
    with Journal(copy):
        refused(run, copy, "is still running in another process")


def test_load_failed_run_gives_best_weights(run, copy):
    change(copy / "summary.json", status="failed", versions={"runner": "0.0.1"})
    code, out, _ = run("evaluate", str(copy))
    assert code == 0
    assert "the run's status is failed; these are the best weights" in out
    assert "the run was made with runner 0.0.1; this is" in out


def test_a_torn_checkpoint(run, copy):
    (copy / "checkpoints/best.pt").write_bytes(b"torn")
    refused(run, copy, "its checksum is not that of its content")


def test_weights_of_another_model(run, copy):
    model = json.loads((copy / "model.json").read_text())["model"]
    change(copy / "model.json", model={**model, "hidden_sizes": [9]})
    refused(run, copy, "the weights don't belong to the model", "size mismatch for hidden.0.weight")
    (copy / "model.json").unlink()
    refused(run, copy, "the run did not get as far as its model")


@pytest.mark.parametrize(
    ("values", "output"),
    [
        ({"model": {"_target_": "os.system", "command": "touch owned"}}, "`os.system` is not a part"),
        ({"task": {"_target_": "subprocess.run", "args": "touch owned"}}, "`subprocess.run` is not a part"),
        ({"model": {"_target_": "runner.models.MLP", "in_features": "${oc.env:HOME}"}}, "resolved a second time"),
        ({"unheard": 1}, "can't be read: TypeError"),
    ],
)
def test_load_foreign_card_is_data(run, copy, values, output):
    change(copy / "model.json", **values)
    origin.sign(copy, "")  # as if this user had written it: the rules of a card still apply
    refused(run, copy, output)
    assert not Path("owned").exists()


def test_load_foreign_reader_is_data(run, copy):
    change(copy / "model.json", reader={"_target_": "os.system", "_partial_": True})
    origin.sign(copy, "")
    code, _, err = run("predict", str(copy), "--input", "my_rows.py", "--output", "never.csv")
    assert code == 2 and "`os.system` is not a part" in err


def test_links_out_of_the_folder(run, copy, tmp_path):
    (copy / "checkpoints/best.pt").rename(tmp_path / "elsewhere.pt")
    (copy / "checkpoints/best.pt").symlink_to(tmp_path / "elsewhere.pt")
    refused(run, copy, "leads out of the run's folder")


def test_load_missing_device_raises(run, copy):
    for words in (("evaluate", str(copy), "device=cuda:97"), (*list(verbs(copy))[1], "device=cuda:97")):
        code, _, err = run(*words)
        assert code == 2 and "device=cuda:97" in err


#: the files of a run of an earlier version, with other paths
FORMER = {
    "runner.models.MLP": "runner.models.networks.MLP",
    "runner.tasks.Classification": "runner.tasks.classify.Classification",
}


@pytest.mark.parametrize("is_own", [True, False])
def test_load_run_of_earlier_version(is_own, run, copy):
    for name in origin.SIGNED:
        text = (copy / name).read_text()
        for public, former in FORMER.items():
            assert public in text
            text = text.replace(public, former)
        (copy / name).write_text(text)
    if is_own:
        origin.sign(copy, "")
    assert origin.is_own(copy) == is_own
    output = (
        "error: `runner.models.networks.MLP` is not a part",
        "_target_=runner.models.MLP`",
        "can be trained again with it",
    )
    refused(run, copy, *output)
    for words in (
        ("resume", str(copy), "train.num_epochs=9"),
        ("reproduce", str(copy)),
        ("serve", str(copy)),
        ("-cd", str(copy), "-cn", "rerun"),
    ):
        code, _, err = run(*words)
        assert code == 2 and all(text in err for text in output), err
        assert "--trust" not in err and "Traceback" not in err
