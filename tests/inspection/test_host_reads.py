"""The reads of a step on the host, with the CPU as the device; test_simulated.py uses a simulated device."""

import copy
import io
import logging
import sys
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from runner.inspection.host_reads import HostRead, HostReads

NET = """\
import torch
from torch import nn

class Gate(nn.Module):
    def forward(self, x):
        scale = float(x.detach().sum())
        return x * scale

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), Gate())

    def forward(self, x):
        return self.layers(x)
"""


def found(call):
    with HostReads("cpu") as watch:
        call()
    return [read.what for read in watch.reads]


def tensors():
    torch.manual_seed(0)
    x = torch.randn(4, 3)
    return x, torch.tensor([0, 2, 1, 2]), x > 0, torch.tensor(2)


READS = {
    "item": (lambda x, y, m, t: t.item(), "tensor.item()"),
    "float": (lambda x, y, m, t: float(t), "float(tensor)"),
    "int": (lambda x, y, m, t: int(t), "int(tensor)"),
    "if": (lambda x, y, m, t: 1 if t > 0 else 0, "bool(tensor)"),
    "assert": (lambda x, y, m, t: x.isfinite().all() or 0, "bool(tensor)"),
    "range": (lambda x, y, m, t: range(t), "a tensor used as an index"),
    "tolist": (lambda x, y, m, t: y.tolist(), "tensor.tolist()"),
    "numpy": (lambda x, y, m, t: y.numpy(), "tensor.numpy()"),
    "asarray": (lambda x, y, m, t: np.asarray(y), "numpy.asarray(tensor)"),
    "cpu": (lambda x, y, m, t: y.cpu(), "tensor.cpu()"),
    "to cpu": (lambda x, y, m, t: y.to("cpu"), "tensor.to('cpu')"),
    "cpu and numpy": (lambda x, y, m, t: x.detach().cpu().numpy(), "tensor.cpu()"),
    "print": (lambda x, y, m, t: print(y, file=io.StringIO()), "print(tensor)"),
    "repr": (lambda x, y, m, t: repr(y), "print(tensor)"),
    "f-string": (lambda x, y, m, t: f"{t:.3f}", "f'{tensor}'"),
    "in": (lambda x, y, m, t: t in y, "value in tensor"),
    "nonzero": (lambda x, y, m, t: y.nonzero(), "nonzero()"),
    "where": (lambda x, y, m, t: torch.where(m), "where()"),
    "unique": (lambda x, y, m, t: y.unique(), "unique()"),
    "consecutive": (lambda x, y, m, t: torch.unique_consecutive(y), "unique_consecutive()"),
    "masked_select": (lambda x, y, m, t: x.masked_select(m), "masked_select()"),
    "mask": (lambda x, y, m, t: x[m], "tensor[mask]"),
    "row and mask": (lambda x, y, m, t: x[0, m[0]], "tensor[mask]"),
    "write to mask": (lambda x, y, m, t: x.__setitem__(m, x.sum()), "tensor[mask] = value"),
    "scalar index": (lambda x, y, m, t: x[t], "tensor[tensor]"),
    "slice": (lambda x, y, m, t: x[:t], "tensor[tensor]"),
    "list index": (lambda x, y, m, t: x[[0, 2]], "tensor[list], a copy of the list to the device"),
    "host index": (lambda x, y, m, t: x[torch.randperm(4)], "tensor[index], a copy of the index to the device"),
    "write by host index": (
        lambda x, y, m, t: x.__setitem__(torch.tensor([0, 1]), t.float()),
        "tensor[index], a copy of the index to the device",
    ),
    "equal": (lambda x, y, m, t: torch.equal(x, x), "equal()"),
    "allclose": (lambda x, y, m, t: torch.allclose(x, x), "allclose()"),
    "bincount": (lambda x, y, m, t: torch.bincount(y), "bincount()"),
    "repeat": (lambda x, y, m, t: x.repeat_interleave(y, 0), "repeat_interleave() without output_size"),
    "one_hot": (lambda x, y, m, t: F.one_hot(y), "one_hot()"),
    "arange": (lambda x, y, m, t: torch.arange(t), "arange()"),
    "linspace": (lambda x, y, m, t: torch.linspace(0, t, 3), "linspace()"),
    "inverse": (lambda x, y, m, t: torch.linalg.inv(x[:3]), "linalg_inv()"),
    "tensor of tensors": (lambda x, y, m, t: torch.tensor([t, t]), "torch.tensor([tensor, ...])"),
    "number": (lambda x, y, m, t: torch.tensor(1.0, device=x.device), "torch.tensor(number), a copy to the device"),
    "new_tensor": (lambda x, y, m, t: x.new_tensor([1.0]), "tensor.new_tensor(number), a copy to the device"),
    "to device": (lambda x, y, m, t: torch.arange(3).to(x.device), "tensor.to(device), a copy from the host"),
    "copy_ there": (lambda x, y, m, t: y.copy_(torch.arange(4)), "tensor.copy_(), a copy to the device"),
    "copy_ here": (lambda x, y, m, t: torch.zeros(4).copy_(y), "tensor.copy_(), a copy to the host"),
    "synchronize": (lambda x, y, m, t: torch.cpu.synchronize(), "torch.cpu.synchronize()"),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_is_found_once_and_named_as_it_is_written(name):
    call, what = READS[name]
    given = tensors()
    assert found(lambda: call(*given)) == [what]


def test_a_line_that_reads_twice_is_told_twice():
    x, _, mask, _ = tensors()
    assert found(lambda: x.__setitem__(mask, x[mask])) == ["tensor[mask]", "tensor[mask] = value"]


NO_READS = {
    "fill mask": lambda x, y, m, t: x.__setitem__(m, 0),
    "masked_fill": lambda x, y, m, t: x.masked_fill(m, 0.0),
    "where": lambda x, y, m, t: torch.where(m, x, 0.0),
    "index by tensor": lambda x, y, m, t: x[y],
    "write by index": lambda x, y, m, t: x.__setitem__(y, x.sum()),
    "index_select": lambda x, y, m, t: x.index_select(0, y),
    "host mask": lambda x, y, m, t: x[torch.tensor([True, False, True, False])],
    "write to host mask": lambda x, y, m, t: x.__setitem__(torch.tensor([True, False, True, False]), x.sum()),
    "one_hot of a known size": lambda x, y, m, t: F.one_hot(y, 3),
    "repeat by a number": lambda x, y, m, t: x.repeat_interleave(2, 0),
    "repeat of a known size": lambda x, y, m, t: x.repeat_interleave(y, 0, output_size=5),
    "any": lambda x, y, m, t: m.any(),
    "to the same device": lambda x, y, m, t: x.to(x.device),
    "dtype": lambda x, y, m, t: (x.to(torch.float16), x.double(), y.to(x), y.type(torch.int32)),
    "non_blocking": lambda x, y, m, t: torch.arange(3).to(x.device, non_blocking=True),
    "shapes": lambda x, y, m, t: (x.shape, x.device, len(x), x.numel(), x.is_cuda, x.dtype, x.view(-1)),
    "iteration": lambda x, y, m, t: [row for row in x],  # noqa: C416
    "a host tensor": lambda x, y, m, t: torch.tensor(0.5).item(),
    "a number that joins": lambda x, y, m, t: x * torch.tensor(2.0),
    "a draw on the host": lambda x, y, m, t: bool(torch.rand(1) < 0.5),
    "device=cpu": lambda x, y, m, t: torch.zeros(3, device="cpu").tolist(),
    "numpy's data": lambda x, y, m, t: torch.as_tensor(np.arange(3)).tolist(),
    "stack into a row": lambda x, y, m, t: torch.stack((x.sum(), x.mean()), out=x[0, :2]),
    "deepcopy": lambda x, y, m, t: copy.deepcopy((x, nn.Linear(2, 2))),
    "multinomial": lambda x, y, m, t: torch.multinomial(x.abs(), 1),
    "quantile": lambda x, y, m, t: x.quantile(0.5),
}


@pytest.mark.parametrize("name", NO_READS)
def test_what_reads_nothing_is_left_in_peace(name):
    given = tensors()
    assert found(lambda: NO_READS[name](*given)) == []


def test_reads_are_found_in_inference_mode_too():
    x, y, mask, t = tensors()
    with torch.inference_mode():
        assert found(lambda: (t.item(), x.to("cpu"), torch.where(mask), F.one_hot(y))) == [
            *("tensor.item()", "tensor.to('cpu')", "where()", "one_hot()")
        ]


def test_what_joins_the_host_with_the_device_is_the_devices():
    x, *_ = tensors()
    assert found(lambda: float(torch.tensor(2.0) * x.sum())) == ["float(tensor)"]
    assert found(lambda: torch.zeros(()).add_(x.sum()).item()) == ["tensor.item()"]
    moved = found(lambda: torch.arange(3).to(x.device).tolist())
    assert moved == ["tensor.to(device), a copy from the host", "tensor.tolist()"]


class Block(nn.Module):
    """The most common layers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.rnn = nn.LSTM(8, 8, batch_first=True)
        self.conv = nn.Sequential(nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Sequential(nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))

    def forward(self, x):
        h, _ = self.rnn(self.embed(x))
        h = self.conv(h.transpose(1, 2)).transpose(1, 2)
        h = h + self.attention(h, h, h)[0] + F.scaled_dot_product_attention(h, h, h, is_causal=True)
        h = h.masked_fill((x == 0)[..., None], 0.0)
        h[x == 1] = 0.0
        return self.head(h).mean(1)


OPTIMIZERS = {
    "adam": torch.optim.Adam,
    "adam fused": lambda p: torch.optim.Adam(p, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw by a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
    "adagrad": torch.optim.Adagrad,
    "nadam": torch.optim.NAdam,
    "radam foreach": lambda p: torch.optim.RAdam(p, foreach=True),
    "rmsprop": torch.optim.RMSprop,
}


def make_step(make_optimizer, *, scaler=None, half=None):
    torch.manual_seed(0)
    model = Block()
    optimizer = make_optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    x, y = torch.randint(0, 7, (4, 6)), torch.randint(0, 3, (4,))
    average, row = copy.deepcopy(model), torch.zeros(2)

    def step():
        with torch.autocast("cpu", half, enabled=half is not None):
            logits = model(x)
            loss = F.cross_entropy(logits, y) + F.mse_loss(logits.float().softmax(-1), F.one_hot(y, 3).float())
        (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.1)
        torch.stack((loss.detach(), norm), out=row)

    step.model, step.optimizer = model, optimizer
    return step


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_ordinary_step_reads_nothing_first_and_later(name):
    step = make_step(OPTIMIZERS[name])
    for _ in range(2):
        with HostReads("cpu") as watch:
            step()
        assert [str(read) for read in watch.reads] == []


def test_autocast_and_fused_optimizers_read_nothing_but_others_do():
    # otherwise oneDNN has no LSTM, but torch 2.13 tries to use it
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert found(make_step(OPTIMIZERS["adam"], half=torch.bfloat16)) == []
    assert found(make_step(OPTIMIZERS["adam fused"], scaler=torch.amp.GradScaler("cpu"))) == []
    assert found(make_step(OPTIMIZERS["adamw foreach"], scaler=torch.amp.GradScaler("cpu")))[0] == "tensor.item()"
    assert "tensor.item()" in found(make_step(lambda p: torch.optim.Adafactor(p, foreach=False)))


def test_watching_changes_no_bit_of_the_step():
    plain, watched = make_step(OPTIMIZERS["adam"]), make_step(OPTIMIZERS["adam"])
    for step in (plain, watched):
        torch.manual_seed(1)
        with HostReads("cpu") if step is watched else torch.enable_grad():
            step()
    pairs = zip(plain.model.state_dict().values(), watched.model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.fixture
def my_models(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    import my_models

    yield my_models
    del sys.modules["my_models"]


def test_the_line_and_the_module_are_the_persons(my_models):
    model, x = my_models.Net(), torch.ones(2, 4)
    with HostReads("cpu") as watch:
        model(x)
    assert watch.reads == [HostRead("float(tensor)", "my_models.py:6", "Net.layers.1")]
    assert str(watch.reads[0]) == "float(tensor) at my_models.py:6 in Net.layers.1"


def test_the_line_is_not_a_librarys_when_that_reads():
    log, x = logging.getLogger("test_host_reads"), torch.ones(2)
    log.propagate = False
    log.addHandler(handler := logging.StreamHandler(io.StringIO()))
    with HostReads("cpu") as watch:
        log.warning("x is %s", x)
        np.atleast_2d(x)
    log.removeHandler(handler)
    lines = [read.line.split(":")[0].rsplit("/", 1)[-1] for read in watch.reads]
    assert set(lines) == {"test_host_reads.py"}
    assert str(HostRead("float(tensor)", "a.py:1")) == "float(tensor) at a.py:1"


def test_what_hooks_and_autograd_functions_do_in_backward_is_seen():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            grad.tolist()
            return grad * 2

    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: grad.cpu())
    assert found(lambda: Double.apply(x).sum().backward()) == ["tensor.tolist()", "tensor.cpu()"]


def test_loop_reports_each_read_except_those_of_another_thread():
    x = torch.ones(3)
    assert found(lambda: [float(part) for part in x]) == ["float(tensor)"] * 3

    def elsewhere():
        x.tolist()
        torch.cpu.synchronize()

    def call():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    assert found(call) == []


def test_nothing_remains_also_after_a_failure():
    from torch.nn.modules import module as hooks

    before = torch.cpu.synchronize, torch.cuda.synchronize, torch.cuda.Event.synchronize
    step = make_step(OPTIMIZERS["adam"])
    with pytest.raises(ZeroDivisionError), HostReads("cpu") as watch:
        step()
        float(torch.ones(1, device=torch.device("cpu")))
        raise ZeroDivisionError
    float(torch.ones(()))
    torch.cpu.synchronize()
    assert len(watch.reads) == 1
    assert (torch.cpu.synchronize, torch.cuda.synchronize, torch.cuda.Event.synchronize) == before
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0
    assert not hooks._global_forward_hooks and not hooks._global_forward_pre_hooks
    assert not sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks
    kept = [getattr(m, name) for m in step.model.modules() for name in vars(m) if name.endswith("_hooks")]
    assert kept and not any(kept)


class Own(nn.Linear):  # containers of torch are not compiled separately
    def __init__(self):
        super().__init__(2, 2)

    def forward(self, x):
        return super().forward(x).relu()


def test_a_compiled_model_is_compiled_after_the_watched_step():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    model = Own()
    model.compile(backend=backend)
    with HostReads("cpu"):
        model(torch.ones(1, 2))
    assert not compiled
    model(torch.ones(1, 2))
    assert compiled
    torch._dynamo.reset()
