"""Initialize lazy layers, and refuse a model with weights that torch does not register."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from runner.device import backends
from runner.device.placement import map_tensors
from runner.errors import NO_MOVES, Problem, RunnerError, moves_itself, refuse
from runner.inspection import call_site
from runner.inspection.tensor_names import TensorNames


def check_module(model: object, *, source: str) -> None:
    """Raises: RunnerError for a model that torch can't train."""
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        problem = f"`_target_` makes a `{kind}`, which is not a `torch.nn.Module`"
        raise RunnerError.of(
            source, problem, f"make it `class {kind}(nn.Module)`, with `super().__init__()` first in `__init__`"
        )


def has_lazy(model: nn.Module) -> bool:
    """Return whether the model has lazy layers (nn.LazyLinear)."""
    return any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers()))


def know_shapes(model: nn.Module, call: Callable[[nn.Module, Any], Any], batch: Callable[[], Any]) -> None:
    """Initialize lazy layers with a batch. Their weights depend only on the seed, and are drawn in the order of the layers.

    Args:
        call: What a step calls, e.g., a task.
        batch: Makes a batch, which is moved to the device of the weights.

    Raises:
        RunnerError: If the forward pass fails.
    """
    lazy = [module for module in model.modules() if any(map(is_lazy, _own(module)))]
    device = next(iter(_own(lazy[0]))).device
    was_training = model.training
    if isinstance(call, nn.Module):
        call.to(device)  # it may have tensors
    try:
        with backends.generators_restored(device), torch.no_grad():
            call(model.eval(), map_tensors(batch(), lambda tensor: tensor.to(device)))
    except RunnerError:
        raise
    except Exception as error:
        problem = (
            f"the first forward pass, which sets the shapes of lazy layers, failed: {type(error).__name__}: {error}"
        )
        fix = NO_MOVES if moves_itself(error) else f"correct {call_site.line_of_error(error)}"
        raise RunnerError.of("model", problem, fix) from error
    finally:
        model.train(was_training)
    for module in lazy:  # initialize again: the forward pass may have drawn numbers that depend on the rows
        if callable(reset := getattr(module, "reset_parameters", None)) and not any(map(is_lazy, _own(module))):
            reset()
    if left := [name for name, tensor in model.named_parameters() if is_lazy(tensor)]:
        problem = f"`{left[0]}` has no shape after a forward pass, because forward doesn't use it"
        raise RunnerError.of("model", problem, f"use `{left[0].rpartition('.')[0]}` in forward, or remove it")


def check_trains(model: nn.Module, *, source: str) -> None:
    """Raises: RunnerError for a model without weights, or with unregistered ones, e.g., layers in a plain list.

    Unregistered weights would not be trained, saved or moved. A list or dict with a module that is also registered is a
    choice between modules, as in SimCLR, and accepted.
    """
    known = {id(parameter) for parameter in model.parameters()}
    modules = {id(module) for module in model.modules()}
    names = TensorNames()
    names.model(model)
    problems: dict[str, Problem] = {}
    for tensor, name in names.all():
        is_shape = tensor.is_meta  # e.g., the base model of an ensemble by torch.func: nothing to train
        if tensor.requires_grad and tensor.is_leaf and id(tensor) not in known and not is_shape:
            holder, attribute, held = _holder(model, name.path)
            if any(id(part) in modules for part in _parts(held)):
                continue
            called, instead = _instead(held)
            problem = f"torch can't see `{name.path}`, so it would not be trained or saved: `{holder}.{attribute}` is {called}"
            fix = f"write `self.{attribute} = {instead}` in `{holder}.__init__`, or `requires_grad_(False)` if it isn't trained"
            problems.setdefault(f"{holder}.{attribute}", Problem(source, problem, fix))
    refuse(problems.values())
    if not known:
        raise RunnerError.of(
            source, "the model has no parameters, so there is nothing to train", "use a model with layers"
        )


def _own(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _holder(model: nn.Module, path: str) -> tuple[str, str, Any]:
    words = path.partition("[")[0].split(".")[1:]
    while len(words) > 1 and isinstance(child := model._modules.get(words[0]), nn.Module):
        model, words = child, words[1:]
    return type(model).__name__, words[0], vars(model).get(words[0])


def _parts(held: Any) -> list[Any]:
    if isinstance(held, Mapping):
        return list(held.values())
    return list(held) if isinstance(held, list | tuple) else []


def _instead(held: Any) -> tuple[str, str]:
    """Return what an attribute with weights is, and what to write instead."""
    if isinstance(held, Tensor):
        return "a plain tensor", "nn.Parameter(...)"
    name = type(held).__name__
    if not isinstance(held, Mapping | list | tuple):
        return f"a `{name}`, which is not an `nn.Module`", f"{name}(...)` with `class {name}(nn.Module)"
    kind = "Parameter" if (parts := _parts(held)) and all(isinstance(part, Tensor) for part in parts) else "Module"
    return f"a plain {name}", f"nn.{kind}{'Dict' if isinstance(held, Mapping) else 'List'}(...)"
