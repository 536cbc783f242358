"""A device that this machine lacks, pretended with real numbers on the CPU, so that whole runs can be tested on it.

    result = run_simulated("cuda:1", train, 3)       # train(device, 3) in a process of its own; the result by JSON
    python tests/simulated.py cuda:1 -- -m runner device=cuda:1 train.num_epochs=2
    with simulated_device("mps") as device: ...      # in such a process

Tensors say cuda:1 or mps:0 and obey: mixing devices raises, .numpy() raises, .cpu() and .to() copy, a generator must be
the device's, MPS refuses float64 and what it has no kernel for (PYTORCH_ENABLE_MPS_FALLBACK=1 lets that pass). What
is drawn at random is drawn by the CPU's generator, so the same seed gives the CPU's run, bit for bit, where both take
the same kernels.

Not modelled: time, streams (all work is done at once), memory (constants), torch.compile, torch.load() without
map_location, recurrent layers' fused kernels, several processes on one device; sys.platform stays what it is. It lies
to private parts of torch; test_simulated.py names them one by one, so that an upgrade of torch says what broke.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch
from simulated_tensor import Making, pretence
from simulated_torch import Naming, replacements

#: c10::DeviceType
DEVICE_TYPES = {"cuda": 1, "mps": 13, "meta": 14}
GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
ADD_GUARD = "_ZN3c104impl24DeviceGuardImplRegistrarC1ENS_10DeviceTypeEPKNS0_24DeviceGuardImplInterfaceE"


@contextlib.contextmanager
def simulated_device(name: str):
    """The device that `name` says, for the rest of this process: the guard stays when the block ends."""
    import torch._dynamo  # takes seconds; later it would meet torch.cuda's functions twice and refuse

    device = torch.device(name)
    _add_guard(device.type)
    with contextlib.ExitStack() as stack:
        pretence.device, pretence.current_index = torch.device(device.type, device.index or 0), 0
        for owner, attribute, value in list(replacements([Making, Naming])):
            stack.enter_context(mock.patch.object(owner, attribute, value))
        before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor([1.0], device=...) is made on the CPU, then copied
        stack.callback(torch._C._set_only_lift_cpu_tensors, before)
        stack.enter_context(Making())
        stack.enter_context(Naming())
        yield pretence.device


def _add_guard(kind: str) -> None:
    """Gives the device type meta's guard, which does nothing, for good. C++ asks for one wherever a tensor of that type
    is made or differentiated; without one it raises, or ends the process (parts of autograd are noexcept)."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 21).in_dll(library, GUARDS)
    if guards[DEVICE_TYPES[kind]]:
        return
    add = getattr(library, ADD_GUARD)
    add.argtypes, add.restype = [ctypes.c_void_p, ctypes.c_int8, ctypes.c_void_p], None
    add(None, DEVICE_TYPES[kind], guards[DEVICE_TYPES["meta"]])


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
    sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed
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
