"""Functions on a device that this machine lacks, with real numbers on the CPU (runner/tools/plan/simulator/)."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import os
import sys
import traceback
import warnings
from contextlib import nullcontext
from pathlib import Path

import torch
from waiting import STAYING

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
        with nullcontext(torch.device("cpu")) if device == "cpu" else simulated_device(device) as used:
            spec = importlib.util.spec_from_file_location(Path(file).stem, file)
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
            return json.dumps(getattr(module, name)(used, *json.loads(args))), ""
    except Exception:
        return None, traceback.format_exc()
