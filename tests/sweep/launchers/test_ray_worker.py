from __future__ import annotations

import io
import tarfile

import pytest

from runner.sweep.launchers.ray_worker import pack, unpack, variables_of


def test_a_folder_arrives_as_it_left_and_what_was_there_already_stays(tmp_path):
    there, home = tmp_path / "there", tmp_path / "home"
    (there / "journal").mkdir(parents=True)
    (there / ".hydra").mkdir()
    (there / "journal/journal.bin").write_bytes(bytes(range(256)) * 1000)
    (there / ".hydra/config.yaml").write_text("seed: 1\n")
    (there / "summary.json").write_text("{}")
    home.mkdir()
    (home / "summary.json").write_text("of an earlier try")
    (home / "notes.txt").write_text("the person's")

    unpack(pack(there), home)

    found = {str(path.relative_to(home)): path.read_bytes() for path in home.rglob("*") if path.is_file()}
    assert found == {
        "journal/journal.bin": bytes(range(256)) * 1000,
        ".hydra/config.yaml": b"seed: 1\n",
        "summary.json": b"{}",
        "notes.txt": b"the person's",
    }


def test_a_folder_that_is_not_there_is_no_luggage(tmp_path):
    assert pack(tmp_path / "nothing") == b""
    unpack(b"", tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []


def packed(name, kind=tarfile.REGTYPE):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, "/etc"
        archive.addfile(member)
    return buffer.getvalue()


def test_nothing_is_unpacked_outside_the_folder(tmp_path):
    with pytest.raises(ValueError, match="outside"):
        unpack(packed("../outside"), tmp_path / "inside")
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE])
def test_nothing_but_files_is_unpacked(tmp_path, kind):
    with pytest.raises(ValueError, match="not a file"):
        unpack(packed("way", kind), tmp_path / "inside")
    assert not (tmp_path / "inside/way").exists()


def test_a_link_that_was_there_leads_nothing_outside(tmp_path):
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside/journal").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="outside"):
        unpack(packed("journal/outside"), tmp_path / "inside")
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
