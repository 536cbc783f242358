"""The simulated device follows a device's rules and has the CPU's numbers, and a step on it reads nothing."""

import copy
import ctypes
import functools
import hashlib
import io
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from simulated import run_simulated
from torch import nn

from runner.data.loading.loaders import Resident, Streamed
from runner.device.capabilities import has_mps_kernel
from runner.inspection.host_reads import HostReads
from runner.tools.plan.simulator.device import ADD_GUARD, GUARDS
from runner.tools.plan.simulator.tensor import Pretence
from runner.training.background import Background
from runner.training.metric_buffer import MetricBuffer
from runner.version import PACKAGES

pytestmark = pytest.mark.slow
DEVICES = ("cuda:1", "mps")
NUM_STEPS = 8


def everything(device):
    """Run the parts of the tests below, in one process per device, as a process takes seconds to start."""
    parts = [train_all, read_everything, stream]
    if device.type != "cpu":
        parts += [break_rules, keep_house, ask_torch]
    return {part.__name__: part(device) for part in parts}


@functools.cache
def results(device):
    return run_simulated(device, everything)


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(0.2)
        )
        self.head = nn.Linear(4 * 16, 3)

    def forward(self, x):
        return self.head(self.features(x.view(-1, 1, 8, 8)).flatten(1))


def mlp(dropout=0.1):
    return nn.Sequential(
        nn.Linear(64, 32), nn.ReLU(), nn.Dropout(dropout), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 3)
    )


def rows():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    return x, (x[:, :3] + 0.1).argmax(1)


CASES = {
    "mlp, Adam fused, EMA": {"model": mlp, "optimizer": partial(torch.optim.Adam, fused=True), "ema": True},
    "mlp, AdamW foreach, clipped": {"model": mlp, "optimizer": partial(torch.optim.AdamW, foreach=True), "clip": 0.5},
    "mlp, SGD, accumulated": {"model": mlp, "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9), "group": 2},
    "cnn, Adam": {"model": CNN, "optimizer": torch.optim.Adam},
    "cnn, AdamW fused, clipped": {"model": CNN, "optimizer": partial(torch.optim.AdamW, fused=True), "clip": 1.0},
    "mlp, bf16": {"model": mlp, "optimizer": torch.optim.AdamW, "half": torch.bfloat16},
    "cnn, bf16": {"model": CNN, "optimizer": torch.optim.AdamW, "half": torch.bfloat16},
    "mlp, fp16": {"model": mlp, "optimizer": partial(torch.optim.AdamW, fused=True), "half": torch.float16},
}


def train(device, *, model, optimizer, clip=None, ema=False, group=1, half=None):
    """Take some steps like a run. Returns its rows, a digest of all weights, and the reads of the steps."""
    torch.manual_seed(0)
    model = model().to(device)
    parameters = list(model.parameters())
    optimizer = optimizer(parameters)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 20)
    scaler = torch.amp.GradScaler(device.type) if half is torch.float16 else None
    average, ring = copy.deepcopy(model).requires_grad_(False), torch.zeros(NUM_STEPS, 2, device=device)
    x, y = (part.to(device) for part in rows())
    watch = HostReads(device)
    for step, row in enumerate(ring):
        order = torch.randperm(64, generator=torch.Generator().manual_seed(step)).to(device)
        with watch:
            total = torch.zeros((), device=device)
            for part in order.split(32)[:group]:
                with torch.autocast(device.type, half, enabled=half is not None):
                    loss = F.cross_entropy(model(x.index_select(0, part)), y.index_select(0, part)) / group
                (scaler.scale(loss) if scaler else loss).backward()
                total += loss.detach()
            norm = nn.utils.clip_grad_norm_(parameters, clip) if clip else torch.ones((), device=device)
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if ema:
                with torch.no_grad():
                    torch._foreach_lerp_(list(average.parameters()), parameters, 0.1)
            torch.stack((total, norm), out=row)
    with torch.inference_mode():
        model.eval()
        x, y = (part.to(device) for part in rows())
        accuracy = (model(x).argmax(-1) == y).float().mean().item()
    weights = [value.cpu() for part in (model, average) for value in part.state_dict().values()]
    return {
        "rows": ring.tolist(),
        "weights": hashlib.sha256(b"".join(value.numpy().tobytes() for value in weights)).hexdigest(),
        "accuracy": accuracy,
        "devices": sorted({str(value.device) for value in model.state_dict().values()}),
        "reads": [str(read) for read in watch.reads],
    }


def train_all(device):
    return {name: train(device, **case) for name, case in CASES.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_simulated_training_equals_cpu_without_reads(device, name):
    there, here = results(device)["train_all"][name], results("cpu")["train_all"][name]
    assert there["devices"] == ["cuda:1" if device == "cuda:1" else "mps:0"]
    assert there["reads"] == here["reads"] == []
    assert here["rows"][-1][0] < here["rows"][0][0]
    if "16" in name:  # each kind of device has a list of operations that autocast leaves in float32
        assert torch.allclose(torch.tensor(there["rows"]), torch.tensor(here["rows"]), atol=0.01)
    else:
        assert {**there, "devices": None} == {**here, "devices": None}


def read_everything(device):
    """Return the reads that HostReads finds in each line."""
    torch.manual_seed(0)
    x, t, mask = torch.randn(4, 3).to(device), torch.tensor(2).to(device), torch.ones(4, 3, dtype=torch.bool).to(device)
    calls = [
        lambda: float(t),
        lambda: t.item(),
        lambda: 1 if t > 0 else 0,
        lambda: x.tolist(),
        lambda: x.cpu().numpy(),
        lambda: x.to("cpu"),
        lambda: f"{t:.2f}",
        lambda: str(x),
        lambda: x.nonzero(),
        lambda: x[mask],
        lambda: x.__setitem__(mask, x.sum()),
        lambda: x.__setitem__(mask, 0.0),
        lambda: x[t],
        lambda: x[[0, 1]],
        lambda: x[torch.tensor([0, 1])],
        lambda: F.one_hot(t, 4),
        lambda: torch.equal(x, x),
        lambda: torch.tensor(1.0, device=x.device),
        lambda: torch.arange(3).to(x.device),
        lambda: x.copy_(torch.zeros(4, 3)),
        lambda: torch.zeros(4, 3).copy_(x),
        lambda: torch.rand(1).item(),
    ]
    said = []
    for call in calls:
        with HostReads(device) as watch:
            call()
        said.append([read.what for read in watch.reads])
    return said


@pytest.mark.parametrize("device", DEVICES)
def test_simulated_read_is_named(device):
    there, here = list(results(device)["read_everything"]), list(results("cpu")["read_everything"])
    assert [len(found) for found in here] == [1] * 11 + [0] + [1] * 3 + [0] + [1] * 5 + [0]
    # x[mask] = 0 differs: C++ converts the 0 to a tensor on the host for CUDA, and on the device for MPS
    assert here.pop(11) == []
    assert there.pop(11) == (["tensor[mask] = value"] if device == "mps" else [])
    assert there == here


def message(call):
    try:
        call()
    except (RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "passed"


def break_rules(device):
    x, host, double = torch.ones(2, 2).to(device), torch.ones(2, 2), torch.ones(2, dtype=torch.float64)
    return {
        "mixed": message(lambda: x @ host),
        "mixed loss": message(lambda: F.cross_entropy(x, torch.tensor([0, 1]))),
        "mixed parameter": message(lambda: nn.Linear(2, 2)(x)),
        "host indexed by device": message(lambda: host[torch.tensor([0]).to(device)]),
        "other number": message(lambda: x + torch.ones(2, 2, device="cuda:0")) if device.type == "cuda" else None,
        "a number joins": message(lambda: x + torch.tensor(2.0)),
        "index from the host": message(lambda: x[torch.tensor([0])]),
        "numpy": message(x.numpy),
        "generator": message(lambda: torch.randn(2, device=device, generator=torch.Generator())),
        "own generator": message(lambda: torch.randn(2, device=device, generator=torch.Generator(device))),
        "float64": message(lambda: double.to(device)),
        "model in float64": message(lambda: nn.Linear(2, 2, dtype=torch.float64).to(device)),
        "no kernel": message(lambda: torch.poisson(x)),
        "a copy": x.cpu().data_ptr() != x.backing.data_ptr(),
    }


def test_cuda_keeps_its_rules():
    broken = results("cuda:1")["break_rules"]
    for name in ("mixed", "mixed loss", "mixed parameter"):
        assert "Expected all tensors to be on the same device" in broken[name]
        assert "at least two devices, cuda:1 and cpu!" in broken[name]
    assert "found at least two devices" in broken["host indexed by device"]
    assert "cuda:1 and cuda:0" in broken["other number"]
    assert "can't convert cuda:1 device type tensor to numpy. Use Tensor.cpu()" in broken["numpy"]
    assert "Expected a 'cuda' device type for generator but found 'cpu'" in broken["generator"]
    allowed = ("a number joins", "index from the host", "own generator", "float64", "model in float64", "no kernel")
    assert {name: broken[name] for name in allowed} == dict.fromkeys(allowed, "passed")
    assert broken["a copy"]


def test_simulated_mps_lacks_float64_and_kernels(monkeypatch):
    broken = results("mps")["break_rules"]
    for name in ("float64", "model in float64"):
        assert "the MPS framework doesn't support float64" in broken[name]
    assert broken["no kernel"] == (
        "NotImplementedError: The operator 'aten::poisson' is not currently implemented for the MPS device."
    )
    monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", "1")
    assert run_simulated("mps", break_rules)["no kernel"] == "passed"


def test_mps_kernels_are_from_wheels_list():
    has = ["mm", "add.Tensor", "_fused_adamw_", "native_dropout", "linear", "stack.out", "_foreach_lerp_.Scalar"]
    assert all(map(has_mps_kernel, [*has, "embedding_renorm_", "not_in_the_list"]))
    assert not any(map(has_mps_kernel, ["poisson", "_ctc_loss", "take", "heaviside", "_fused_adagrad_"]))


def keep_house(device):
    """Test the operations around a step: modules that move, checkpoints, copies, threads."""
    model = CNN()
    weight, tied = model.head.weight, nn.ModuleList([model.head, nn.Sequential(model.head)])
    # before the model moves: its parameters remain the same objects
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model.to(device)
    tied.to(device)
    x, y = (part.to(device) for part in rows())
    F.cross_entropy(model(x), y).backward()
    optimizer.step()

    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    on_host = torch.load(io.BytesIO(file.getvalue()), map_location="cpu", weights_only=True)
    on_device = torch.load(io.BytesIO(file.getvalue()), map_location=device)
    fresh = CNN().to(device)
    again = torch.optim.AdamW(fresh.parameters(), fused=True)
    fresh.load_state_dict(on_host["model"])
    again.load_state_dict(on_device["optimizer"])
    for model_, optimizer_ in ((model, optimizer), (fresh, again)):
        torch.manual_seed(1)
        optimizer_.zero_grad()
        F.cross_entropy(model_(x), y).backward()
        optimizer_.step()
    made = []
    thread = threading.Thread(target=lambda: made.append(torch.zeros(2, device=device)))
    thread.start()
    thread.join()
    copied, q = copy.deepcopy(model), torch.randn(1, 2, 3, 4).to(device)
    leaf = torch.ones(2, 2, device=device, requires_grad=True)
    leaf.clamp(max=3.0).sum().backward()  # C++ creates zeros here, on the device that the autograd engine uses
    with torch.inference_mode():
        host, there = torch.zeros(2), torch.ones(2, device=device)
        written = [host.copy_(there) is host, there.add_(1) is there, there.device == device]
    host.double().copy_(torch.ones(2, device=device))  # float64 stays on the host, so that MPS need not refuse it
    return {
        "identity": model.head.weight is weight and isinstance(weight, nn.Parameter) and weight.device == device,
        "tied": tied[0].weight is tied[1][0].weight,
        "resumed": all(map(torch.equal, model.state_dict().values(), fresh.state_dict().values())),
        "loaded onto": str(on_device["model"]["head.weight"].device),
        "thread": made[0].device == device,
        "deepcopy": torch.equal(copied.head.weight.grad, weight.grad) and copied.head.weight is not weight,
        "backward": leaf.grad.device == device,
        "in inference mode": all(written) and host.device.type == "cpu",
        "attention": F.scaled_dot_product_attention(q, q, q, is_causal=True).device == device,
        "foreach": sys.modules["torch.optim.optimizer"]._default_to_fused_or_foreach([x], False)[1],
        "back": str(model.to("cpu").head.weight.device),
        "in place": tuple(torch.zeros(2, 3, device=device).t_().shape),
        "repr": repr(torch.ones(1).to(device)),
        "by kind": torch.zeros(1, device=device.type).device.index,
        "by number": [str(nn.Linear(1, 1).to(number).weight.device) for number in (0, torch.device(0))],
        "module": torch.get_device_module().__name__,
    }


@pytest.mark.parametrize(("device", "name"), [("cuda:1", "cuda:1"), ("mps", "mps:0")])
def test_what_surrounds_a_step_works(device, name):
    assert results(device)["keep_house"] == {
        **dict.fromkeys(("identity", "tied", "resumed", "thread", "deepcopy", "backward", "attention"), True),
        "in inference mode": True,
        "loaded onto": name,
        "foreach": device == "cuda:1",  # torch.optim's automatic choice
        "back": "cpu",
        "in place": [3, 2],
        "repr": f"tensor([1.], device='{name}')",
        "by kind": 0,  # "cuda" is cuda:0 until torch.cuda.set_device changes it
        "by number": ["cuda:0" if device == "cuda:1" else "mps:0"] * 2,
        "module": "torch.cuda" if device == "cuda:1" else "torch.mps",
    }


def stream(device):
    """The project's loaders and metric buffer: on CUDA with pinned memory, a side stream and events."""
    seen, windows, background = [], [], Background()
    buffer = MetricBuffer(device, windows.append, background=background, pull_every=3)
    settings = {"batch_size": 10, "device": device, "seed": 0, "shuffle": True}
    for batches in (Resident(rows(), **settings), Streamed(rows(), **settings)):
        for x, y in batches.epoch(0):
            assert x.device == y.device == device
            seen.append(float(x.sum()))
            buffer.write({"loss": x.mean(), "accuracy": y.float().mean()})
        batches.close()
    buffer.pull()
    background.close()
    return seen, [row for window in windows for row in window.values.tolist()]


def test_simulated_loaders_and_buffer_equal_cpu():
    seen, written = results("cpu")["stream"]
    assert seen[:7] == seen[7:]
    assert len(written) == 14
    assert results("cuda:1")["stream"] == results("mps")["stream"] == [seen, written]


def ask_torch(device):
    if device.type == "mps":
        free, total = torch.mps.driver_allocated_memory(), torch.mps.recommended_max_memory()
        torch.mps.synchronize()
        with pytest.raises(AssertionError, match="Torch not compiled with CUDA enabled"):
            torch.ones(1).cuda()
        return [torch.backends.mps.is_available(), torch.accelerator.device_count(), 0 < free < total]
    torch.cuda.set_device(1)
    free, total = torch.cuda.mem_get_info(device)
    with torch.cuda.device(0):
        inside = torch.zeros(1, device="cuda").device.index
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(device)
    return {
        "available": torch.cuda.is_available() and torch.accelerator.is_available(),
        "counts": [torch.cuda.device_count(), torch.accelerator.device_count()],
        "current": [torch.cuda.current_device(), torch.ones(1).cuda().device.index, inside],
        "name": torch.cuda.get_device_properties(device).name,
        "memory": 0 < free < total and torch.cuda.max_memory_allocated(device) > 0,
        "kind": torch.accelerator.current_accelerator().type,
        "pinned": torch.empty(2, pin_memory=True).pin_memory().device.type,
    }


def test_torchs_modules_answer():
    assert results("mps")["ask_torch"] == [True, 1, True]
    assert results("cuda:1")["ask_torch"] == {
        "available": True,
        "counts": [2, 2],
        "current": [1, 1, 0],
        "name": "Simulated GPU",
        "memory": True,
        "kind": "cuda",
        "pinned": "cpu",
    }


def test_a_backward_pass_is_of_its_thread():
    pretence, seen = Pretence(), []
    pretence.running_backward = 1
    reader = threading.Thread(target=lambda: seen.append(pretence.running_backward))
    reader.start()
    reader.join()
    assert seen == [0] and pretence.running_backward == 1


def test_simulators_child_failure_is_raised():
    with pytest.raises(AssertionError, match="ZeroDivisionError: division by zero"):
        run_simulated("cpu", fail)


def fail(device):
    return 1 / 0


def test_zoo_broken_fork_does_not_affect_others():
    first = run_simulated("cpu", parent)
    with pytest.raises(RuntimeError, match="without an answer"):
        run_simulated("mps", break_off)
    assert run_simulated("cuda:1", parent) == first


def parent(device):
    return os.getppid()


def break_off(device):
    os.abort()


def test_private_torch_names_of_simulator_exist():
    """If torch changes one, this test names it; the tests above show the effect."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libc10.so"))
    for symbol in (GUARDS, ADD_GUARD):
        assert hasattr(library, symbol), symbol
    names = """
        torch._C._DisableTorchDispatch torch._C._disabled_torch_function_impl torch._C._only_lift_cpu_tensors
        torch._C._set_only_lift_cpu_tensors torch.Tag.inplace_view torch.ops.prim.device.default
        torch.autograd._engine_run_backward torch.autograd.graph._engine_run_backward
        torch._scaled_dot_product_attention_math torch.nn.Module._apply torch.nn.Module._call_impl
        torch.__future__.set_swap_module_params_on_conversion torch.cuda._lazy_init torch.cuda._exchange_device
        torch._C._get_accelerator torch._C._get_privateuse1_backend_name torch.utils.rename_privateuse1_backend
        torch.cuda.amp.common.amp_definitely_not_available torch.compiler.set_stance torch.utils._pytree.tree_map
    """
    for name in names.split():
        found = torch
        for part in name.split(".")[1:]:
            assert hasattr(found, part), name
            found = getattr(found, part)
    for module in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        assert torch.Tensor in sys.modules[module]._foreach_supported_types, module
    settings = {"dispatch_device": True, "device_for_backend_keys": torch.device("cpu")}
    assert torch.Tensor._make_subclass(torch.Tensor, torch.ones(1), **settings) is not None


REGISTERED = """
import ctypes, sys
from pathlib import Path
import torch
import torch._dynamo
from runner.tools.plan.simulator import device as module

def is_begun():  # 3: the driver is there, and nobody has begun it
    try:
        return ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != 3
    except OSError:
        return False

library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
guards = (ctypes.c_void_p * 21).in_dll(library, module.GUARDS)
add = getattr(library, module.ADD_GUARD)
add.argtypes, add.restype = [ctypes.c_void_p, ctypes.c_int8, ctypes.c_void_p], None
add(None, 1, guards[0])  # as a torch built for CUDA has one of its own
torch.cuda.is_available = lambda: True  # and as where it has a GPU
before, was_begun = torch.backends.cudnn.enabled, is_begun()
print("BEGINS", file=sys.stderr, flush=True)
with module.simulated_device(sys.argv[1]) as device:
    assert guards[1] == guards[14], "a real guard asks the driver for the GPU"
    assert torch.cuda.is_available() is (device.type == "cuda")
    assert not torch.backends.cudnn.enabled
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Dropout()).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    torch.manual_seed(0)
    loss = model(torch.randn(4, 2, device=device)).sum()
    loss.backward()
    optimizer.step()
    assert loss.device == model[0].weight.grad.device == device
print("ENDS", file=sys.stderr, flush=True)
assert is_begun() == was_begun
assert torch.backends.cudnn.enabled is before
"""


@pytest.mark.skipif(sys.platform != "linux", reason="where libc10 lies")
def test_simulator_with_cuda_torch_needs_no_gpu():
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES), "LD_DEBUG": "libs"}
    command = [sys.executable, "-c", REGISTERED, "cuda:3"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, [line for line in done.stderr.splitlines() if not line.startswith(" ")]
    # a torch built for CUDA searches the driver's library at its first use, e.g., in a plain backward pass
    assert "find library=libcuda.so" not in done.stderr.split("BEGINS")[1].split("ENDS")[0]
