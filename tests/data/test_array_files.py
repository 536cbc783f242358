import builtins

import numpy as np
import pytest

from runner.config.packages import install
from runner.data import array_files
from runner.data.array_files import UNNAMED, existing, opened
from runner.errors import RunnerError

X = np.arange(12.0).reshape(6, 2)


def problem(path, key="data.path", ask=()):
    with pytest.raises(RunnerError) as caught, opened(str(path), key=key) as found:
        for name in ask:
            found.read(name)
    (problem,) = caught.value.problems
    assert problem.source == f"{key}={path}"
    return problem


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_reads_arrays_by_name(own_folder, save):
    save("a.npz", x=X, objects=np.array([{}, 1], dtype=object))
    with opened("a.npz", key="data.path") as found:
        assert found.names == ["x", "objects"]
        assert found.read("x").tolist() == X.tolist()


def test_npy_is_mapped_if_large(own_folder, monkeypatch):
    monkeypatch.setattr(array_files, "MAPPED_BYTES", 10)
    np.save("a.npy", X)
    with opened("a.npy", key="data.path") as found:
        table = found.read(UNNAMED)
    assert isinstance(table, np.memmap)
    assert table.flags.writeable
    table += 1
    assert np.load("a.npy").tolist() == X.tolist(), "the file stays as it is"


def test_safetensors_outlive_their_file(own_folder):
    torch, saving = pytest.importorskip("torch"), pytest.importorskip("safetensors.torch")
    saving.save_file({"x": torch.tensor(X).bfloat16(), "y": torch.arange(6)}, "a.safetensors")
    with opened("a.safetensors", key="data.path") as found:
        assert found.names == ["x", "y"]
        x = found.read("x")
    assert x.tolist() == X.tolist()


def test_a_home_folder_is_known(own_folder, monkeypatch):
    monkeypatch.setenv("HOME", str(own_folder))
    np.save("a.npy", X)
    assert existing("~/a.npy", key="data.path") == own_folder / "a.npy"


def test_missing_file_suggests_the_nearest(own_folder, messages):
    (own_folder / "sets").mkdir()
    for name in ("digits.npz", "faces.npy", "notes.txt"):
        (own_folder / "sets" / name).touch()
    assert messages(problem("sets/digit.npz")).suggestions == ("data.path=sets/digits.npz",)
    assert messages(problem("sets/zzz.npz")).suggestions == ("data.path=sets/digits.npz", "data.path=sets/faces.npy")
    assert messages(problem("sets")).suggestions == ("data.path=sets/digits.npz", "data.path=sets/faces.npy")


def test_a_missing_folder(own_folder, messages):
    (own_folder / "sets").mkdir()
    (own_folder / "sets/my digits.npz").touch()
    near = messages(problem("stes/digits.npz", key="data.targets_path"))
    assert near.suggestions == ("'data.targets_path=sets/my digits.npz'",)
    messages(problem("elsewhere/digits.npz", key="data.targets_path"))
    messages(problem("digits.npz"))


@pytest.mark.parametrize("name", ["a.txt", "a", "a.csv"])
def test_other_kinds_of_file(own_folder, name, messages):
    (own_folder / name).write_text("1,2")
    messages(problem(name))


@pytest.mark.parametrize("ending", [".npz", ".npy", ".safetensors"])
@pytest.mark.parametrize("content", [b"", b"nothing of the kind", None], ids=["empty", "another", "half"])
def test_broken_files(own_folder, ending, content):
    if ending == ".safetensors":
        pytest.importorskip("safetensors.numpy").save_file({"x": X}, "a.safetensors")
    else:
        np.save("a.npy", X) if ending == ".npy" else np.savez("a.npz", x=X)
    file = own_folder / f"a{ending}"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if content is None else content)
    assert "complete file" in problem(f"a{ending}").help


def test_broken_array_inside_file_is_refused(own_folder):
    np.savez_compressed("a.npz", x=np.random.default_rng(0).normal(size=1000))
    content = bytearray((own_folder / "a.npz").read_bytes())
    content[2000:2100] = bytes(100)
    (own_folder / "a.npz").write_bytes(content)
    assert "complete file" in problem("a.npz", ask=["x"]).help


@pytest.mark.parametrize("ending", [".npz", ".npy"])
def test_pickled_objects_are_refused(own_folder, ending, messages):
    array = np.array([{}, 1], dtype=object)
    np.save("a.npy", array) if ending == ".npy" else np.savez("a.npz", x=array)
    messages(problem(f"a{ending}", ask=["x"]))


def test_a_file_that_may_not_be_read(own_folder, messages):
    """Built by hand, as tests may run as root, which may read all files."""
    found = array_files._unreadable(own_folder / "a.npz", "data.path=a.npz", PermissionError(13, "Permission denied"))
    messages(found)


def test_missing_safetensors_is_named(own_folder, monkeypatch):
    (own_folder / "a.safetensors").touch()
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("safetensors"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert problem("a.safetensors").help == f"run `{install('safetensors')}`"
