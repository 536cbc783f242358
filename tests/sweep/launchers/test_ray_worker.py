import os

import pytest

from runner.sweep.launchers.ray import variables_of
from runner.sweep.launchers.ray_worker import files_in, write_files


def test_a_folder_arrives_as_it_left_and_what_was_there_already_stays(tmp_path):
    there, home = tmp_path / "there", tmp_path / "home"
    (there / "journal").mkdir(parents=True)
    (there / ".hydra").mkdir()
    (there / "journal/journal.bin").write_bytes(bytes(range(256)) * 1000)
    (there / ".hydra/config.yaml").write_text("seed: 1\n")
    (there / "summary.json").write_text("{}")
    os.utime(there / "summary.json", (1000, 1000))
    (there / "way").symlink_to(tmp_path)
    home.mkdir()
    (home / "summary.json").write_text("of an earlier try")
    (home / "notes.txt").write_text("the person's")

    write_files(files_in(there), home)

    assert (home / "summary.json").stat().st_mtime == 1000
    assert {name: content for name, (content, _) in files_in(home).items()} == {
        "journal/journal.bin": bytes(range(256)) * 1000,
        ".hydra/config.yaml": b"seed: 1\n",
        "summary.json": b"{}",
        "notes.txt": b"the person's",
    }
    assert files_in(tmp_path / "nothing") == {}


@pytest.mark.parametrize("name", ["../outside", "/outside", "journal/outside"])
def test_nothing_is_written_outside_the_folder(name, tmp_path):
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside/journal").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="outside"):
        write_files({name: (b"", 0.0)}, tmp_path / "inside")
    assert not (tmp_path / "outside").exists()


def test_a_job_takes_along_what_its_yaml_names_and_what_is_said_to_mlflow_and_the_runner():
    environment = {
        "HOME": "/h",
        "DATA": "/d",
        "MLFLOW_TRACKING_URI": "http://m",
        "RUNNER_ALLOW": "timm",
        "PATH": "/bin",
    }
    taken = variables_of("data: {path: '${oc.env:DATA}/x'}\nother: ${oc.env: ABSENT,1}\n", environment)
    assert taken == {"DATA": "/d", "MLFLOW_TRACKING_URI": "http://m", "RUNNER_ALLOW": "timm"}
