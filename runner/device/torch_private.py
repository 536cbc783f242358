"""Lists the private names of torch, and their use. Read in torch 2.13; looked up when they are used.

If a release moves a name, its use and this module's test report it. tools/plan/simulator/torch_parts.py has the names that
the simulator replaces.
"""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from runner.errors import RunnerError

if TYPE_CHECKING:  # what classes are made from, and types
    from torch._ops import OpOverload as OpOverload
    from torch.optim import Optimizer
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._pytree import tree_map as tree_map

#: by the name here: torch's name and its use
NAMES = {
    # the step: one kernel for all parameters instead of one for each
    "foreach_add_": ("torch._foreach_add_", "the step counts of all parameters by one kernel"),
    "foreach_copy_": ("torch._foreach_copy_", "a model's buffers kept by one kernel"),
    "foreach_lerp_": ("torch._foreach_lerp_", "the averages of all weights by one kernel"),
    "foreach_mul_": ("torch._foreach_mul_", "gradients of several models scaled by one kernel"),
    "foreach_norm": ("torch._foreach_norm", "the norms of several models' gradients by one kernel"),
    "fused_sgd_": ("torch._fused_sgd_", "SGD's update without its wrapper"),
    "fused_adam_": ("torch._fused_adam_", "Adam's update without its wrapper"),
    "fused_adamw_": ("torch._fused_adamw_", "AdamW's update without its wrapper"),
    "cuda_sleep": ("torch.cuda._sleep", "a clocked step's kernels without the host's gaps between them"),
    "orthogonal": ("torch.optim._muon._zeropower_via_newtonschulz", "Muon's step of a convolution"),
    "muon_rate": ("torch.optim._muon._adjust_lr", "likewise"),
    # linear layers
    "onednn_linear": ("torch.ops.mkldnn._linear_pointwise.default", "float32 products by oneDNN"),
    "transforms_are_active": ("torch._C._are_functorch_transforms_active", "torch.func, which keeps torch's products"),
    # compile
    "dynamo_config": ("torch._dynamo.config", "backward and update compiled with the forward pass"),
    "dynamo_errors": ("torch._dynamo.exc", "what can't be compiled, distinguished from other errors"),
    "compile_graph": ("torch._inductor.compile", "a compiled step that is run several times a call"),
    "make_fx": ("torch.fx.experimental.proxy_tensor.make_fx", "forward and backward of several models as a graph"),
    # the first export of a process
    "export_trace": ("torch.export._trace", "jobs that have imported what an export needs: 1.4 s each"),
    "export_package": ("torch.export.pt2_archive._package", "likewise"),
    # what looks at each operation: guard, plan, the number of threads
    "TorchDispatchMode": ("torch.utils._python_dispatch.TorchDispatchMode", "sees every kernel that is called"),
    "OpOverload": ("torch._ops.OpOverload", "an operation that is a kernel, distinguished from a function"),
    "tree_map": ("torch.utils._pytree.tree_map", "nested arguments with other tensors"),
    "current_autograd_node": ("torch._C._current_autograd_node", "the forward line of an operation in backward"),
    "sequence_number": ("torch.autograd._get_sequence_nr", "the forward line of an operation in backward"),
    "current_graph_task": (
        "torch._C._current_graph_task_id",
        "an operation in backward, distinguished from one in forward",
    ),
    # several models as one
    "exclude_keys": ("torch._C._ExcludeDispatchKeyGuard", "random operations of several models"),
    "KeySet": ("torch._C.DispatchKeySet", "likewise"),
    "vmap_key": ("torch._C.DispatchKey.FuncTorchVmapMode", "likewise"),
    # the simulator
    "eager_transforms": ("torch._functorch.eager_transforms", "torch.func under a simulated device"),
    "vmap": ("torch._functorch.vmap", "torch.vmap under a simulated device"),
    "functions": ("torch._VF", "recurrent layers by a GPU's kernels"),
    "variable_functions": ("torch._C._VariableFunctions", "the original function below the simulated one"),
    "nn_functions": ("torch._C._nn", "the original attention below the simulated one"),
    "attention_by_parts": ("torch._scaled_dot_product_attention_math", "attention as a GPU without a kernel takes it"),
    "no_torch_function": ("torch._C._disabled_torch_function_impl", "a tensor whose results are not wrapped"),
    "DisableTorchFunction": ("torch._C.DisableTorchFunction", "queries of a tensor that modes don't see"),
    "DisableTorchDispatch": ("torch._C._DisableTorchDispatch", "a kernel on the simulated tensor itself"),
    "only_lift_cpu_tensors": ("torch._C._only_lift_cpu_tensors", "torch.tensor([...], device=...), simulated"),
    "set_only_lift_cpu_tensors": ("torch._C._set_only_lift_cpu_tensors", "likewise"),
    "brought_accelerator": ("torch._C._get_privateuse1_backend_name", "an installed accelerator, which C++ asks first"),
    # what torch was built for
    "xpu_is_compiled": ("torch.xpu._is_compiled", "the reason of a missing xpu"),
}


def __getattr__(name: str) -> Any:
    """Raises: RunnerError if this torch does not have the name."""
    if name not in NAMES:
        raise AttributeError(f"{name}: not one of the private names of torch that are used")
    path, use = NAMES[name]
    try:
        value = globals()[name] = pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        import torch

        problem, fix = (
            f"this torch has no {path}, which is needed for: {use}",
            "use torch 2.13, with which this version was tested",
        )
        raise RunnerError.of(f"torch {torch.__version__}", problem, fix, code="missing-value") from None
    return value


def cuda_architectures() -> tuple[str, ...]:
    """Return the GPUs that this torch has kernels for, e.g., sm_90; none without CUDA."""
    import torch

    return tuple((getattr(torch._C, "_cuda_getArchFlags", str)() or "").split())


class WithoutDynamo:
    """Put this before TorchDispatchMode, whose methods otherwise import torch._dynamo at their first call."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


#: methods of Optimizer that import torch._dynamo at their first call
WRAPPED = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")


@contextmanager
def optimizers_without_dynamo() -> Iterator[None]:
    """Let optimizers work in the block without torch._dynamo, which takes 1.5 s to import, and 5 s in a build for CUDA.

    torch's wrapper of these methods imports it to make a function that a compiler skips, and keeps that function as an
    attribute of the method. Here the attribute is the method itself. Use step_without_dynamo() for the steps.
    """
    from torch.optim import Optimizer

    if "torch._dynamo" in sys.modules:
        yield
        return
    methods = [inspect.unwrap(getattr(Optimizer, name)) for name in WRAPPED]
    added = [method for method in methods if not hasattr(method, "__dynamo_disable")]
    for method in added:
        setattr(method, "__dynamo_disable", method)  # a name that a class would change
    try:
        yield
    finally:
        for method in added:
            delattr(method, "__dynamo_disable")


def step_without_dynamo(optimizer: Optimizer) -> None:
    """Take an optimizer's step, with its hooks. One of torch's is called below the wrapper that imports torch._dynamo."""
    import torch

    kind, own = type(optimizer), vars(optimizer).get("step")
    is_replaced = own is not None and not hasattr(own, "_wrapped_by_lr_sched")
    if "torch._dynamo" in sys.modules or is_replaced or not kind.__module__.startswith("torch.optim."):
        optimizer.step()
        return
    with_grad = torch.enable_grad if optimizer.defaults.get("differentiable") else torch.no_grad
    kind.profile_hook_step(with_grad()(inspect.unwrap(kind.step)))(optimizer)
    optimizer._opt_called = True  # type: ignore[attr-defined]  # by which LRScheduler knows that there was a step
