"""A disk that becomes full in the middle of a run, and later has space again."""

import ctypes
import os
import shutil
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from own_disks import in_its_own_disks
from waiting import wait_for

pytestmark = pytest.mark.slow

NEW_MOUNTS, NEW_USER = 0x00020000, 0x10000000  # for unshare(2)
STEPS_AN_EPOCH = 12
WORDS = ("model=mlp", "device=cpu", "task.plots=false", "train.checkpoint_every_steps=20", "metrics.pull_every=20")


def test_full_disk_ends_run_that_can_resume(warm, tmp_path, empty_store):
    if in_its_own_disks() is None:
        pytest.skip("no mount namespaces for this account")
    (tmp_path / "disk").mkdir()
    shutil.copy(empty_store, tmp_path / "runs.db")
    words = [f"tracking.uri=sqlite:///{tmp_path}/runs.db", "tracking.grace_seconds=2"]
    command = [sys.executable, __file__, str(tmp_path / "disk"), *WORDS, *words]
    process = warm.program(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    told, _ = process.communicate()
    before, _, after = told.partition("second ")
    assert "first 1" in before and after.startswith("0"), told
    assert "Traceback" not in told and "Logging error" not in told, told
    assert "the disk is full" in before and "python -m runner resume run" in before
    assert "last.pt" in before and "writing" not in before
    assert '"status": "finished"' in after


def main() -> None:
    """Run on a disk that becomes full, in a forked program; print the exit codes, outputs and checkpoints."""
    child = os.fork()  # with one thread, as a new user namespace requires
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    try:
        fill_and_resume(Path(sys.argv[1]), sys.argv[2:])
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def fill_and_resume(disk: Path, words: list[str]) -> None:
    have_own_mounts()
    for mount in (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]):
        subprocess.run(["mount", *mount], check=True)
    os.chdir(disk)
    process = start(*words, "train.num_epochs=100000", "hydra.run.dir=run")
    wait_for(Path("run/checkpoints/last-before.pt").exists)
    subprocess.run(["dd", "if=/dev/zero", "of=filler", "bs=1k"], stderr=subprocess.DEVNULL, check=False)
    print("first", process.wait(), Path("../output").read_text(), sorted(Path("run/checkpoints").iterdir()))
    Path("filler").unlink()
    done = torch.load("run/checkpoints/last.pt", weights_only=True)["step"] // STEPS_AN_EPOCH
    process = start("resume", "run", f"train.num_epochs={done + 4}")
    print("second", process.wait(), Path("../output").read_text(), Path("run/summary.json").read_text())


def start(*words: str) -> subprocess.Popen:
    with Path("../output").open("w") as output:
        return subprocess.Popen([sys.executable, "-m", "runner", *words], stdout=output, stderr=output)


def have_own_mounts() -> None:
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_MOUNTS | (NEW_USER if user else 0)):
        raise OSError(ctypes.get_errno(), "unshare")
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")


if __name__ == "__main__":
    main()
