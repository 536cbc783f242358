"""Functions that the tests of the process pool run in separate processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def report(payload):
    """Write the properties of the process to a file."""
    path = Path(payload.decode())
    facts = {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "session": os.getsid(0),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "warm": "statistics" in sys.modules,
        "stdin": sys.stdin.read(),
    }
    print("hello from the job")
    print("and from its stderr", file=sys.stderr)
    path.write_text(json.dumps(facts))


def end_as_told(payload):
    what = payload.decode()
    if what.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[what])
    elif what == "raise":
        raise ValueError("no")
    elif what == "sys.exit":
        sys.exit(7)
    elif what == "os._exit":
        os._exit(9)
    return int(what) if what.isdigit() else 0


def wait(payload):
    """Write the pid and wait. A SIGTERM ends the process like a run, unless the payload says to ignore it."""
    path, cares = payload.decode().split(":")
    if cares == "no":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(path).with_suffix(".writing").write_text(f"{os.getpid()} {child.pid}")
    Path(path).with_suffix(".writing").rename(path)
    time.sleep(600)


def add(one, other):
    return one + other


def fail():
    raise ValueError("it does not work")


def die():
    print("last words")
    sys.stdout.flush()
    os._exit(1)


def on_device(device):
    import torch

    return float(torch.ones(3, device=device).sum())
