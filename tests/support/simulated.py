"""Whole runs and functions on a device that this machine lacks, with real numbers on the CPU (runner/tools/plan/simulator/).

result = run_simulated("cuda:1", train, 3)       # train(device, 3) in a separate process; the result as JSON
python tests/support/simulated.py cuda:1 -- -m runner device=cuda:1 train.num_epochs=2
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import functools
import importlib.util
import json
import os
import runpy
import subprocess
import sys
import traceback
import warnings
from pathlib import Path

import torch
from waiting import STAYING

sys.path.append(str(Path(__file__).resolve().parents[2]))  # for a checkout that is not installed

from runner.sweep.launchers.process_pool import ProcessPool, call
from runner.tools.plan.simulator import simulated_device

SUPPORT = Path(__file__).resolve().parent
#: modules that take a simulating process seconds to import
HEAVY = (
    "runner.sweep.launchers.preload",
    "torch._subclasses.fake_tensor",
    "torch.fx.experimental.symbolic_shapes",
    "runner.tools.plan.worker",
)


def run_simulated(device: str, function, *args, cwd: Path | None = None):
    """Call `function(device, *args)` in a separate process, where `device` is simulated ("cpu" is real).

    function: A top-level function of a module, whose file runs again in the process. Arguments and result are sent as JSON.
    cwd: The current directory of the process, whose modules it may import.
    """
    file, name = Path(sys.modules[function.__module__].__file__), function.__qualname__
    given = (device, str(file), name, json.dumps(args), str(cwd or Path.cwd()), dict(os.environ))
    answer, error = call(_warm(), _call, *given)
    assert answer is not None, f"{name} on {device}:\n{error}"
    return json.loads(answer)


def simulated_command(device: str, *words: str, **settings) -> subprocess.CompletedProcess:
    """Run `python WORDS` under the device: `-m MODULE ...` or `SCRIPT ...`. settings: Of subprocess.run, cwd and env."""
    command = [sys.executable, __file__, device, "--", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, **settings)


@functools.cache
def _warm() -> ProcessPool:
    """Return the preloaded process of this test process: each function is called in a fork of it, with torch already imported."""
    paths = os.pathsep.join(map(str, (SUPPORT.parents[1], SUPPORT)))
    nursery = ProcessPool({"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, preload=HEAVY)
    STAYING.add(nursery._warm.pid)
    atexit.register(nursery.close)
    return nursery


def _call(device, file: str, name: str, args: str, cwd: str, environment: dict[str, str]) -> tuple[str | None, str]:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.path.insert(0, cwd)
    warnings.simplefilter("error")
    try:
        with _pretended(device) as pretended:
            spec = importlib.util.spec_from_file_location(Path(file).stem, file)
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
            return json.dumps(getattr(module, name)(pretended, *json.loads(args))), ""
    except Exception:
        return None, traceback.format_exc()


def _pretended(name: str) -> contextlib.AbstractContextManager[torch.device]:
    return contextlib.nullcontext(torch.device("cpu")) if name == "cpu" else simulated_device(name)


def run_program(words: list[str]) -> None:
    """Run the program like `python WORDS`."""
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
    parser.add_argument("words", nargs="*", help="-m MODULE ... or SCRIPT ..., after --")
    given = parser.parse_args()
    with _pretended(given.device):
        run_program(given.words)


if __name__ == "__main__":
    main()
