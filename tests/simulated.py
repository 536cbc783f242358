"""Whole runs and functions on a device that this machine lacks, with real numbers on the CPU (runner/simulated/).

result = run_simulated("cuda:1", train, 3)       # train(device, 3) in a process of its own; the result by JSON
python tests/simulated.py cuda:1 -- -m runner device=cuda:1 train.num_epochs=2
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

from runner.simulated import simulated_device


def run_simulated(device: str, function, *args, timeout: float = 120):
    """`function(device, *args)` in a process of its own, where `device` is pretended ("cpu" is what it is).

    function: of a module's top level; its file is run again over there. Arguments and result travel as JSON.
    """
    file, name = Path(sys.modules[function.__module__].__file__), function.__qualname__
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        call = ["--call", str(file), name, str(answer), json.dumps(args)]
        done = _child(["-W", "error", __file__, device, *call], timeout=timeout)
        assert done.returncode == 0, f"{name} on {device} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return json.loads(answer.read_text())


def simulated_command(device: str, *words: str, timeout: float = 120, **settings) -> subprocess.CompletedProcess:
    """`python WORDS` under the device: `-m MODULE ...` or `SCRIPT ...`. settings: of subprocess.run, cwd and env."""
    return _child([__file__, device, "--", *words], timeout=timeout, **settings)


def _child(words, **settings):
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, **settings)


def _call(device, file: str, name: str, answer: str, args: str) -> None:
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    Path(answer).write_text(json.dumps(getattr(module, name)(device, *json.loads(args))))


def _run(words: list[str]) -> None:
    """As `python WORDS` would."""
    if words[0] == "-m":
        sys.path[0] = str(Path.cwd())
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(words[0]).parent)
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("device", help="cpu, cuda:1, mps, ...")
    parser.add_argument("--call", nargs=4, metavar=("FILE", "FUNCTION", "ANSWER", "ARGUMENTS"))
    parser.add_argument("words", nargs="*", help="-m MODULE ... or SCRIPT ..., after --")
    given = parser.parse_args()
    with contextlib.ExitStack() as stack:
        device = torch.device(given.device)
        if device.type != "cpu":
            device = stack.enter_context(simulated_device(given.device))
        if given.call:
            _call(device, *given.call)
        else:
            _run(given.words)


if __name__ == "__main__":
    main()
