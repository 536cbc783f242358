"""An operation on a pretended device's tensors goes in; it is computed on the CPU, under that device's rules, and comes
out as that device's tensors."""

from __future__ import annotations

import copy
import functools
import os
import re
from pathlib import Path
from types import SimpleNamespace

import torch
import torchgen
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten

#: take tensors of the host beside the device's
COPIES = {aten._to_copy, aten.copy_, aten.copy, aten._foreach_copy_, aten.set_}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
#: TORCH_LIBRARY_IMPL(aten, MPS) in MPSFallback.mm: these always run on the CPU there
MPS_FALLBACKS = {"embedding_renorm_", "linalg_svd", "linalg_svd.U", "_linalg_svd", "col2im", "upsample_nearest3d.vec"}


#: what is pretended in this process. current_index is what "cuda" means without a number
pretence = SimpleNamespace(device=torch.device("cpu"), current_index=0, running_backward=0)


def _seen_by_modes(method):
    """A mode such as HostReads hears of the call first, by this name, as it does of Tensor's own methods."""

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        if has_torch_function_unary(self):
            return handle_torch_function(call, (self,), self, *args, **kwargs)
        return method(self, *args, **kwargs)

    return call


class SimulatedTensor(Tensor):
    """Says it lies on the pretended device. Its numbers are in `on_cpu`, whose memory it shares.

    C++ takes it for a tensor of that device too (dispatch_device: it asks `prim.device`, answered below; the keys for
    the backend choose the autocast list of the device), but every kernel goes through `__torch_dispatch__`.
    """

    on_cpu: Tensor
    pretended: torch.device
    __torch_function__ = torch._C._disabled_torch_function_impl  # results are wrapped below, and only those that should

    @staticmethod
    def __new__(cls, on_cpu, device):
        if device.type == "mps" and on_cpu.dtype in (torch.float64, torch.complex128):
            raise TypeError(
                f"Cannot convert a MPS Tensor to {str(on_cpu.dtype)[6:]} dtype as the MPS framework doesn't support "
                "float64. Please use float32 instead."
            )
        self = Tensor._make_subclass(cls, on_cpu, dispatch_device=True, device_for_backend_keys=device)
        self.on_cpu, self.pretended = on_cpu, device
        return self

    # C++ would answer these by prim.device, which lies while backward runs
    device = property(lambda self: self.pretended)
    is_cuda = property(lambda self: self.pretended.type == "cuda")
    is_mps = property(lambda self: self.pretended.type == "mps")
    is_cpu = property(lambda self: False)

    # what Tensor does with the numbers is for its own class only
    @_seen_by_modes
    def __format__(self, spec):
        return format(self.item() if self.dim() == 0 else str(self), spec)

    @_seen_by_modes
    def __repr__(self, *, tensor_contents=None):
        return f"{repr(self.on_cpu.detach())[:-1]}, device='{self.pretended}')"

    @_seen_by_modes
    def tolist(self):
        return self.on_cpu.tolist()

    @_seen_by_modes
    def numpy(self, *, force=False):
        if force:
            return self.on_cpu.detach().numpy()
        kind = f"can't convert {self.pretended} device type tensor to numpy."
        raise TypeError(f"{kind} Use Tensor.cpu() to copy the tensor to host memory first.")

    @_seen_by_modes
    def __array__(self, dtype=None, copy=None):
        return self.numpy()

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            new = memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
            new._is_param = getattr(self, "_is_param", False)  # what nn.Parameter asks
            new.grad = copy.deepcopy(self.grad, memo)
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        """Pickled as a tensor of the CPU: torch.load() needs map_location to bring it back to the device."""
        return self.on_cpu.detach().clone().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})


class Making(TorchDispatchMode):
    """Sees what begins without a tensor of the device: torch.zeros(..., device="cuda:1"), tensor.to("cuda:1")."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.is_inference_mode_enabled() and func.namespace == "aten":
            with self:  # composed ops (to, linear) come as they are there, not as their parts
                result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        device = (kwargs or {}).get("device")
        to_device = device is not None and (device.type == pretence.device.type or _is_engines(device))
        if to_device or any(issubclass(kind, SimulatedTensor) for kind in types):
            return compute(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def compute(func, args, kwargs):
    if func is torch.ops.prim.device.default:
        # The autograd engine asks at::accelerator for the stream of each gradient on an accelerator; a build without
        # one raises there. Told "meta", it asks for none. Python's own `.device` is not asked by way of this.
        return torch.device("meta") if pretence.running_backward else args[0].pretended
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    ours = [tensor for tensor in inputs if isinstance(tensor, SimulatedTensor)]
    device = ours[0].pretended if ours else None
    asked = kwargs.get("device")
    if asked is not None:
        device = pretence.device if _is_engines(asked) else asked
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if ours:
        _check_same_device(func, args, inputs, ours[0].pretended)
    if device.type == "mps" or (ours and ours[0].is_mps):
        _check_mps_kernel(func)

    result = func(*_on_cpu(args), **_on_cpu(kwargs))
    if torch.Tag.inplace_view in func.tags:  # squeeze_() and the like change the outer tensor's shape as well
        with torch._C._DisableTorchDispatch():
            func(*args, **kwargs)
    given = {id(tensor.on_cpu if isinstance(tensor, SimulatedTensor) else tensor): tensor for tensor in inputs}

    def wrap(value):
        if not isinstance(value, Tensor):
            return value
        if id(value) in given:  # written in place, or `out=`
            return given[id(value)]
        return value if device.type == "cpu" else SimulatedTensor(value, device)

    return tree_map(wrap, result)


def _on_cpu(tree):
    return tree_map(lambda value: value.on_cpu if isinstance(value, SimulatedTensor) else value, tree)


def _is_engines(device):
    """In backward C++ makes zeros and the like on the device that it was told."""
    return device.type == "meta" and pretence.running_backward > 0


def _check_same_device(func, args, inputs, device):
    kernel = func._overloadpacket
    if kernel in COPIES:
        return
    if kernel in INDEXING:  # indices may come from the host, what they index and what is written may not
        inputs = [args[0], *args[2:3]]
    for tensor in inputs:
        is_number = tensor.dim() == 0 and tensor.device.type == "cpu"
        if tensor.device != device and not is_number:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{device} and {tensor.device}! (in {func})"
            )


def _check_mps_kernel(func):
    name = func.name().removeprefix("aten::")
    falls_back = os.environ.get("PYTORCH_ENABLE_MPS_FALLBACK") == "1"
    if func.namespace == "aten" and not falls_back and not has_mps_kernel(name):
        raise NotImplementedError(f"The operator '{func.name()}' is not currently implemented for the MPS device.")


@functools.cache
def has_mps_kernel(name: str) -> bool:
    """name: mm, add.Tensor. True also for what is composed of other ops, and for what the list does not name."""
    keys = _kernel_table().get(name)
    return keys is None or name in MPS_FALLBACKS or any(key == "MPS" or "Composite" in key for key in keys)


@functools.cache
def _kernel_table() -> dict[str, set[str]]:
    """Op name to dispatch keys, from native_functions.yaml, which every torch wheel ships; by pattern, in 0.1 s, since
    a YAML parser takes seconds. What C++ registers for MPS by hand is not in it (MPS_FALLBACKS has what is known)."""
    path = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    table: dict[str, set[str]] = {}
    delegates: dict[str, str] = {}
    for entry in re.split(r"^- func: ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        name = entry[: entry.index("(")]
        dispatch = re.search(r"^  dispatch:\n((?:    .*\n|\s*#.*\n)+)", entry, flags=re.MULTILINE)
        delegate = re.search(r"^  structured_delegate: (\S+)", entry, flags=re.MULTILINE)
        table[name] = set(re.findall(r"(\w+)(?=[\w, ]*:)", dispatch[1])) if dispatch else set()
        if delegate:
            delegates[name] = delegate[1]
        elif not dispatch:
            table[name] = {"CompositeImplicitAutograd"}
    return {name: keys | table.get(delegates.get(name, ""), set()) for name, keys in table.items()}
