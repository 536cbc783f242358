"""The layout of weights in memory, and oneDNN's linear layers."""

import copy
import json
from pathlib import Path

import pytest
import torch
from refused import problems_of
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, vmap
from torch.nn.utils import parametrizations

from runner import cli
from runner.device import layers, torch_private
from runner.device.layers import OneDNNLinear, lay_out, overruns, take_onednn, takes_channels_last
from runner.inspection.costs import flops_of
from runner.models.resnet import ResNet
from runner.training.cpu_threads import Products

CPU = """processor\t: 0
vendor_id\t: {vendor}
cpu family\t: {family}
model\t\t: 2
flags\t\t: fpu avx2 {flag} sha_ni

processor\t: 1
"""


def nets(*layers):
    """Return the same model twice, one with torch's products."""
    torch.manual_seed(0)
    of_torch = nn.Sequential(*layers)
    ours = copy.deepcopy(of_torch)
    take_onednn(ours, requested=True)
    return of_torch, ours


@pytest.fixture
def products(monkeypatch):
    """Record the rows of oneDNN's products, of any size, in their order."""
    made, product = [], torch_private.onednn_linear
    monkeypatch.setattr(torch_private, "onednn_linear", lambda *given: made.append(len(given[0])) or product(*given))
    monkeypatch.setattr(layers, "MIN_MULTIPLICATIONS", 0)
    monkeypatch.setattr(layers, "MIN_SHARED_NUMBERS", 0)
    return made


def test_only_plain_linear_layers_are_replaced():
    of_torch, ours = nets(nn.Linear(3, 4), nn.LazyLinear(4), parametrizations.weight_norm(nn.Linear(4, 2)))
    assert [type(layer) is OneDNNLinear for layer in ours] == [True, False, False]
    assert isinstance(ours[0], nn.Linear) and repr(ours) == repr(of_torch)
    assert ours[0].state_dict().keys() == of_torch[0].state_dict().keys()
    take_onednn(of_torch, requested=False)
    assert type(of_torch[0]) is nn.Linear


@pytest.mark.parametrize(
    ("cpu", "is_taken"),
    [
        ({"vendor": "AuthenticAMD", "family": 26, "flag": "avx512f"}, True),
        ({"vendor": "AuthenticAMD", "family": 25, "flag": "avx512f"}, False),  # Zen 4 computes 512 bits in two halves
        ({"vendor": "AuthenticAMD", "family": 26, "flag": "avx512"}, False),  # hidden by a virtual machine
        ({"vendor": "GenuineIntel", "family": 26, "flag": "avx512f"}, False),
        ({}, False),  # another system
    ],
)
def test_onednn_is_default_on_amd_avx512(cpu, is_taken, tmp_path, monkeypatch):
    if cpu:
        (tmp_path / "cpuinfo").write_text(CPU.format(**cpu))
    monkeypatch.setattr(layers, "CPUINFO", tmp_path / "cpuinfo")
    layers._is_faster_here.cache_clear()
    model = nn.Sequential(nn.Linear(3, 4))
    for device in ("mps", "cpu"):
        lay_out(model, device=torch.device(device), precision="fp32", settings={})
        assert type(model[0]) is (OneDNNLinear if is_taken and device == "cpu" else nn.Linear)
    layers._is_faster_here.cache_clear()


def test_torch_without_onednn_is_reported(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    (problem,) = problems_of(take_onednn, nn.Linear(3, 4), requested=True)
    assert (problem.source, problem.suggestions) == ("backends.cpu.onednn=true", ("backends.cpu.onednn=null",))
    model = nn.Sequential(nn.Linear(3, 4))
    take_onednn(model, requested=None)
    assert type(model[0]) is nn.Linear


ROWS = {
    "rows": lambda: torch.randn(6, 5),
    "sequences": lambda: torch.randn(2, 3, 5),
    "turned": lambda: torch.randn(5, 6).t(),
    "a part": lambda: torch.randn(6, 10)[:, ::2],
    "one": lambda: torch.randn(5),
    "repeated": lambda: torch.randn(1, 5).expand(6, 5),
    "overlapping": lambda: torch.randn(10).unfold(0, 5, 1),
}


def other(name, make):
    """Return a function that replaces a layer's tensor."""
    return lambda layer: setattr(layer, name, nn.Parameter(make()))


#: changes of the layer, and of its rows
OTHERWISE = {
    "a bias with gaps": (other("bias", lambda: torch.randn(7, 2)[:, 1]), Tensor.clone),
    "a bias of one number": (other("bias", lambda: torch.randn(1)), Tensor.clone),
    "a bias of another type": (other("bias", lambda: torch.randn(7).double()), Tensor.clone),
    "a weight with gaps": (other("weight", lambda: torch.randn(7, 10)[:, ::2]), Tensor.clone),
    "a sparse weight": (other("weight", lambda: torch.eye(7, 5).to_sparse()), Tensor.clone),
    "sparse rows": (lambda layer: None, Tensor.to_sparse),
    "nested rows": (lambda layer: None, lambda rows: torch.nested.nested_tensor([rows[:2], rows[2:]])),
}


@pytest.mark.parametrize(("rows", "has_bias"), [*((rows, True) for rows in ROWS), ("sequences", False), ("one", False)])
def test_values_and_gradients_equal_torchs(rows, has_bias, products):
    of_torch, ours = nets(nn.Linear(5, 7, bias=has_bias), nn.Tanh(), nn.Linear(7, 4, bias=has_bias))
    given, found = ROWS[rows](), []
    for model in (of_torch, ours):
        own = given.detach().requires_grad_()
        values = model(own)
        wanted = (own, *model.parameters())
        gradients = torch.autograd.grad(values.sum(), wanted, create_graph=True)  # strides of 0
        penalty = sum((gradient**2).sum() for gradient in gradients)
        again = torch.autograd.grad(penalty, wanted, allow_unused=True)
        found.append((values, *gradients, *(each for each in again if each is not None)))
    torch.testing.assert_close(found[1], found[0])
    assert products
    num = len(products)
    with torch.no_grad():
        torch.testing.assert_close(ours(given), found[0][0].detach())
    assert len(products) == num + 2


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("name", OTHERWISE)
def test_other_layouts_and_types_use_torch(name, products):
    of_torch, ours = nets(nn.Linear(5, 7))
    change, changed = OTHERWISE[name]
    rows, found = changed(torch.randn(6, 5)), []
    for model in (of_torch, ours):
        torch.manual_seed(0)
        change(model[0])
        try:
            values = model(rows)
            found.append(list(values.unbind()) if values.is_nested else values)
        except (RuntimeError, TypeError) as error:
            found.append(str(error))
    assert products == []
    if isinstance(found[0], str):
        assert found[1] == found[0]
    else:
        torch.testing.assert_close(found[1], found[0])


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("has_gradients", [True, False])
def test_forward_mode_differentiation_is_torchs(has_gradients, products):
    found = []
    for model in nets(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4)):
        torch.manual_seed(0)
        rows = torch.randn(6, 5, requires_grad=True)
        with forward_ad.dual_level(), torch.set_grad_enabled(has_gradients):
            values = model(forward_ad.make_dual(rows, torch.ones(6, 5)))
            found.append([forward_ad.unpack_dual(values).tangent])
        values = model(rows.detach().requires_grad_())
        with forward_ad.dual_level():  # only its gradients are tracked
            given = forward_ad.make_dual(torch.ones(6, 4), torch.randn(6, 4))
            for gradient in torch.autograd.grad(values, (*model.parameters(),), given, create_graph=has_gradients):
                found[-1].append(forward_ad.unpack_dual(gradient).tangent)
    torch.testing.assert_close(found[1], found[0])
    assert len(products) == 2


def test_unneeded_gradient_is_not_computed(products):
    _, ours = nets(nn.Linear(5, 7), nn.Linear(7, 4))
    ours[0].weight.requires_grad_(False)
    ours(torch.randn(6, 5)).sum().backward()
    # two forward; the gradients of the second layer's rows and weight, as the first layer's bias is trained
    assert len(products) == 4
    assert ours[0].weight.grad is None and ours[0].bias.grad is not None


def test_small_products_are_bitwise_identical(monkeypatch):
    of_torch, ours = nets(nn.Linear(5, 7))
    rows = torch.randn(6, 5)
    assert torch.equal(of_torch(rows), ours(rows))
    monkeypatch.setattr(layers, "MIN_MULTIPLICATIONS", 6 * 5 * 7 + 1)
    made = []
    monkeypatch.setattr(torch_private, "onednn_linear", lambda *given: made.append(given))
    ours(rows)
    assert made == []


@pytest.mark.parametrize(("threads", "num"), [(1, 3), (2, 2)])
def test_threads_do_not_share_small_results(threads, num, products, monkeypatch):
    monkeypatch.setattr(layers, "MIN_SHARED_NUMBERS", 6 * 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    _, ours = nets(nn.Linear(6, 8))  # (6, 8) forward, (6, 6) and (8, 6) backward
    rows = torch.randn(6, 6, requires_grad=True)
    ours(rows).sum().backward()
    assert len(products) == num


@pytest.mark.parametrize("where", ["autocast", "vmap", "float64", "compiled", "meta"])
def test_elsewhere_it_is_torchs(where, products, monkeypatch):
    _, ours = nets(nn.Linear(5, 7))
    rows = torch.randn(6, 5)
    if where == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            assert ours(rows).dtype == torch.bfloat16
    elif where == "vmap":
        weights = {name: torch.stack([value, value]) for name, value in ours.named_parameters()}
        found = vmap(lambda own: functional_call(ours, own, (rows,)))(weights)
        torch.testing.assert_close(found[1], ours[0].weight.new_tensor(found[0].tolist()))
    elif where == "float64":
        ours.double()(rows.double())
    elif where == "compiled":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        ours(rows)
    else:
        assert ours.to("meta")(rows.to("meta")).shape == (6, 7)
    assert products == []


def test_its_operations_are_counted(products):
    """A run on a CPU chooses its threads by the number of operations."""
    found = []
    for model in nets(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 4)):
        with Products() as counted:
            model(torch.randn(6, 5))
        found.append((counted.flops, counted.num))
    assert found == [(2 * 6 * (5 * 7 + 7 * 4), 2)] * 2 and len(products) == 2
    op = torch.ops.mkldnn._linear_pointwise.default
    assert flops_of(op, (torch.ones(6, 5), torch.ones(7, 5)), {}, None) == 2 * 6 * 5 * 7


def test_onednn_run_learns_and_evaluates_identically(own_folder, products, capsys):
    words = ["data=digits", "model=mlp", "device=cpu", "tracking.enabled=false", "train.num_epochs=1", "data.limit=300"]
    for asked in ("false", "true"):
        assert products == []
        assert cli.main([*words, f"backends.cpu.onednn={asked}", f"hydra.run.dir=of_{asked}"]) == 0
    assert products
    ours, of_torch = (
        json.loads(Path(f"of_{asked}/summary.json").read_text())["metrics"] for asked in ("true", "false")
    )
    assert ours["test/loss"] == pytest.approx(of_torch["test/loss"], rel=1e-4)
    products.clear()
    capsys.readouterr()
    assert cli.main(["evaluate", "of_true", "--json"]) == 0
    assert products
    assert json.loads(capsys.readouterr().out)["metrics"]["test/loss"] == ours["test/loss"]


PLAIN, CONV_1D = nn.Linear(2, 2), nn.Conv1d(1, 4, 3)
CONV, WITH_DROPOUT = (nn.Sequential(nn.Conv2d(1, 4, 3), nn.Dropout2d(rate)) for rate in (0.0, 0.5))


@pytest.mark.parametrize(
    ("model", "device", "precision", "requested", "takes", "reason"),
    [
        (CONV, "cpu", "fp32", None, True, "auto"),
        (CONV, "cuda", "fp32", None, False, ""),
        (CONV, "cuda", "bf16", None, True, "auto"),
        (CONV, "cuda", "tf32", None, True, "auto"),
        (CONV, "mps", "fp32", None, False, ""),
        (CONV, "cuda", "fp32", True, True, "as asked"),
        (CONV, "cpu", "fp32", False, False, ""),
        (PLAIN, "cpu", "fp32", None, False, ""),
        (PLAIN, "cpu", "fp32", True, False, ""),
        (CONV_1D, "cpu", "fp32", None, False, ""),
        (WITH_DROPOUT, "cpu", "bf16", None, False, "dropout"),  # another layout would draw other masks
        (WITH_DROPOUT, "cuda", "bf16", None, True, "auto"),
    ],
)
def test_channels_last(model, device, precision, requested, takes, reason):
    decision = takes_channels_last(model, device=torch.device(device), precision=precision, requested=requested)
    assert decision[0] is takes and reason in decision[1] and bool(reason) is bool(decision[1])


def test_channels_last_only_with_four_dimensions():
    model = nn.Sequential(nn.Conv2d(8, 4, 3), nn.Conv3d(8, 4, 3))
    model.register_buffer("table", torch.rand(2, 3, 4, 5))
    model.register_buffer("wide_table", torch.rand(2, 3, 4, 5, 6))
    before = dict(model.state_dict(keep_vars=True))
    values = {name: value.detach().clone() for name, value in before.items()}
    said = lay_out(model, device=torch.device("cpu"), precision="fp32", settings={})
    assert said.startswith("channels last")
    after = dict(model.state_dict(keep_vars=True))
    assert all(after[name] is before[name] and torch.equal(after[name], values[name]) for name in before)
    last = {name for name, value in after.items() if value.dim() == 4}
    assert last == {"0.weight", "table"}
    assert all(after[name].is_contiguous(memory_format=torch.channels_last) for name in last)
    assert all(value.is_contiguous() for name, value in after.items() if name not in last)


NARROW, WIDE = ResNet((1, 8, 8), 10, depth=8, width=4), ResNet((1, 8, 8), 10, depth=8)


def test_channels_last_is_skipped_if_unsafe():
    """oneDNN#6035: a 1x1 convolution with a stride and 2 to 7 inputs (15 with AVX-512)."""
    choose, layer = {"device": torch.device("cpu"), "precision": "fp32"}, overruns(NARROW)
    reason = f"auto: oneDNN overwrites memory in {layer} otherwise"
    assert takes_channels_last(NARROW, **choose, requested=None) == (False, reason)
    assert takes_channels_last(NARROW, **choose, requested=False) == (False, "")
    assert takes_channels_last(WIDE, **choose, requested=None)[0] is True
    (problem,) = problems_of(takes_channels_last, NARROW, **choose, requested=True)
    assert layer in problem.message and "backends.cpu.channels_last=null" in problem.help
    assert takes_channels_last(NARROW, device=torch.device("cuda"), precision="bf16", requested=None)[0] is True


@pytest.mark.parametrize(
    ("layer", "is_so"),
    [
        (nn.Conv2d(4, 8, 1, stride=2), True),
        (nn.Conv2d(15, 8, 1, stride=(1, 2)), True),
        (nn.Conv2d(32, 8, 1, stride=2, groups=8), True),
        (nn.Conv2d(16, 8, 1, stride=2), False),
        (nn.Conv2d(1, 8, 1, stride=2), False),
        (nn.Conv2d(4, 8, 1), False),
        (nn.Conv2d(4, 8, 3, stride=2), False),
        (nn.Linear(4, 8), False),
    ],
)
def test_which_layers_overwrite_memory(layer, is_so):
    assert overruns(nn.Sequential(layer)) == ("0" if is_so else "")


def test_compiled_step_skips_unsafe_channels_last(own_folder, monkeypatch):
    requests = []

    def compile_graph(graph, inputs, *, options):
        requests.append(options.get("layout_optimization"))
        return graph

    monkeypatch.setattr(torch_private, "compile_graph", compile_graph, raising=False)
    words = ["device=cpu", "tracking.enabled=false", "train.compile=true", "task.plots=false"]
    words += ["model=resnet", "model.depth=8"]
    words += ["data.limit=320", "train.num_steps=2"]  # one batch size; the first step is eager
    for width in (4, 16):
        assert cli.main([*words, f"model.width={width}", f"hydra.run.dir=w{width}"]) == 0
    assert requests == [False, None]


def test_channels_last_run_reports_and_exports(own_folder, capsys):
    words = ["device=cpu", "tracking.enabled=false", "train.num_epochs=1", "data.limit=300", "model=cnn"]
    for name, more in (("mine", []), ("plain", ["backends.cpu.channels_last=false"])):
        assert cli.main([*words, *more, f"hydra.run.dir={name}"]) == 0
        assert ("channels last" in capsys.readouterr().out) is (name == "mine")
    mine, plain = (torch.load(f"{name}/checkpoints/best.pt", weights_only=True)["model"] for name in ("mine", "plain"))
    filters = next(key for key, value in mine.items() if value.dim() == 4 and value.shape[1] > 1)
    assert mine[filters].is_contiguous(memory_format=torch.channels_last) and plain[filters].is_contiguous()
    torch.testing.assert_close(mine[filters], plain[filters], rtol=1e-2, atol=1e-3)
    assert cli.main(["export", "mine", "--format", "safetensors"]) == 0
