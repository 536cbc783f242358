"""A run on a disk that becomes full, and resumes when there is space: python full_disk.py DISK [WORD ...], in a forked program.

DISK: an empty directory, where only these processes see a disk of 4 MiB. Prints the exit codes and outputs of both commands, and
the checkpoints between them.
"""

import ctypes
import os
import subprocess
import sys
import traceback
from pathlib import Path

import torch
from waiting import wait_for

NEW_MOUNTS, NEW_USER = 0x00020000, 0x10000000  # for unshare(2)
STEPS_AN_EPOCH = 12


def main() -> None:
    child = os.fork()  # with one thread, as a new user namespace requires
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    try:
        fill_and_go_on(Path(sys.argv[1]), sys.argv[2:])
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def fill_and_go_on(disk: Path, words: list[str]) -> None:
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
