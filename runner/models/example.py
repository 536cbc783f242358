"""An example of a model's inputs: one tensor or container of tensors, or the whole call where `forward` takes more."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

#: the key of an example that is a call; its value has `args` and `kwargs`
CALL = "forward()"


class _Called(Exception):
    """The model is called, and its forward pass is not needed."""


def call_of(model: nn.Module, run: Callable[[], object]) -> Any:
    """Return the inputs of the first call of a model, without running its forward pass; None if `run` doesn't call it.

    A single positional argument is returned as it is.
    """
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((args, kwargs))
        raise _Called

    hook = model.register_forward_pre_hook(stop, with_kwargs=True, prepend=True)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            run()
    except Exception:
        if not calls:
            return None
    finally:
        hook.remove()
    if not calls:
        return None
    args, kwargs = calls[0]
    return args[0] if len(args) == 1 and not kwargs else {CALL: {"args": list(args), "kwargs": kwargs}}


def is_call(example: Any) -> bool:
    """Return whether an example is a whole call."""
    return isinstance(example, dict) and set(example) == {CALL}


def call(model: nn.Module, example: Any) -> Any:
    """Return the model's outputs for an example."""
    return model(*example[CALL]["args"], **example[CALL]["kwargs"]) if is_call(example) else model(example)


def ordered(model: nn.Module, example: Any) -> Any:
    """Return a call with its arguments in the order of `forward`'s; any other example as it is.

    Raises:
        TypeError: If `forward` takes other arguments.
    """
    args, kwargs = (example[CALL]["args"], example[CALL]["kwargs"]) if is_call(example) else ([example], {})
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    return {CALL: {"args": list(bound.args), "kwargs": bound.kwargs}} if is_call(example) else example


def named(model: nn.Module, example: Any) -> Any:
    """Return the inputs of a call by the names that `forward` gives them; any other example as it is."""
    if not is_call(example):
        return example
    return dict(inspect.signature(model.forward).bind(*example[CALL]["args"], **example[CALL]["kwargs"]).arguments)
