"""Load a file of weights into a model, and describe which of them were used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.config.packages import not_installed
from runner.errors import RunnerError, listed, nearest

#: prefixes of wrappers: torch.compile, DataParallel, and modules that contain the model
PREFIXES = ("_orig_mod.", "module.", "model.")
#: keys of the weights in a checkpoint
INSIDE = ("model", "state_dict", "model_state_dict")
BEST = "checkpoints/best.pt"
MAX_NAMES = 8  # in a message


def load_weights(model: nn.Module, path: str, *, strict: bool) -> str:
    """Load weights by name, and return a description of the loaded and unchanged ones.

    Files are read with weights_only=True. A wrapper's prefix is removed from names that fit the model without it.

    Args:
        path: FILE.safetensors, FILE.pt or .pth (a state_dict, or a checkpoint with one), or a run directory, for its best
            weights.
        strict: False loads only weights with the same name and shape.

    Raises:
        RunnerError: For a missing or invalid file, each wrong name if strict, or no matching name at all.
    """
    own = model.state_dict()
    found = _unwrapped(read_weights(path), set(own))
    fitting = {name: value for name, value in found.items() if name in own and value.shape == own[name].shape}
    amiss = _amiss(own, found)
    if amiss and (strict or not fitting):
        fix = "use `model.strict=false` to load what fits, or a model with the sizes of the file"
        if any(name.endswith(".lora_down") for name in found):
            fix = "run `python -m runner export RUN --format safetensors`, which merges LoRA, and use that file"
        elif not fitting:
            fix = "use a file of this model, or the model of this file"
        raise RunnerError.of(f"model.weights={path}", "\n".join(amiss), fix)
    model.load_state_dict(fitting, strict=False)
    taken = f"{len(fitting)} of the model's {len(own)} tensors come from {path}"
    return "; ".join([taken, *amiss])


def load_trained(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load the weights of a run into its model, which becomes float64 if they are (train.precision=fp64)."""
    trained = [state[name] for name, _ in model.named_parameters() if name in state]
    if trained and all(value.dtype == torch.float64 for value in trained if value.is_floating_point()):
        model.double()
    model.load_state_dict(state)


def read_weights(path: str) -> dict[str, Tensor]:
    """Return tensors by name, on the host. Raises: RunnerError for a missing file, or one without tensors."""
    file = Path(path)
    is_there = exists(file)
    if is_there and file.is_dir():
        file = file / BEST
        if not file.is_file():
            problem = f"the directory has no `{BEST}`: it belongs to no run, or to a run without weights yet"
            raise RunnerError.of(f"model.weights={path}", problem, "use a run directory, or a file of weights")
    if not is_there or not file.is_file():
        beside = sorted(file.parent.glob("*")) if exists(file.parent) else []
        there = [str(each) for each in beside if each.suffix in (".safetensors", ".pt", ".pth")]
        source, problem = f"model.weights={path}", f"there is no file `{path}`"
        ways = [f"model.weights={hit}" for hit in nearest(path, there)]
        otherwise = "use a file or a run directory that exists"
        raise RunnerError.suggest(source, problem, ways, otherwise, code="missing-file")
    found = _from_safetensors(file) if file.suffix == ".safetensors" else _from_torch(file)
    for key in INSIDE:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
            break
    items = found.items() if isinstance(found, Mapping) else ()
    named = {str(name): value for name, value in items if isinstance(value, Tensor)}
    if not named:
        problem = f"the file contains {type(found).__name__}, not tensors by name"
        fix = "save it with `torch.save(model.state_dict(), FILE)`"
        raise RunnerError.of(f"model.weights={path}", problem, fix)
    return named


def exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long for a file
        return False


def _from_safetensors(file: Path) -> Any:
    try:
        from safetensors.torch import load_file  # an optional dependency
    except ImportError:
        problem = "reading the file needs `safetensors`, which is not installed"
        raise not_installed(f"model.weights={file}", problem, "safetensors") from None
    try:
        return load_file(file)
    except Exception as error:
        problem = f"the file can't be read: {type(error).__name__}: {error}"
        raise RunnerError.of(f"model.weights={file}", problem, "download or copy the file again") from error


def _from_torch(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        problem = "the file is damaged, or can't be read without running code"
        fix = "save it with `torch.save(model.state_dict(), FILE)`, or use a `.safetensors` file"
        raise RunnerError.of(f"model.weights={file}", problem, fix) from error


def _unwrapped(found: dict[str, Tensor], own: set[str]) -> dict[str, Tensor]:
    better = True
    while better:
        better = False
        for prefix in PREFIXES:
            shorter = {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}
            if len(own & set(shorter)) > len(own & set(found)) or (not own & set(found) and len(shorter) == len(found)):
                found, better = shorter, True
                break
    longer = {f"model.{name}": value for name, value in found.items()}  # names in runner.models.external
    return longer if len(own & set(longer)) > len(own & set(found)) else found


def _amiss(own: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> list[str]:
    shapes = [
        f"{name} ({'x'.join(map(str, found[name].shape))} in the file, {'x'.join(map(str, value.shape))} in the model)"
        for name, value in own.items()
        if name in found and found[name].shape != value.shape
    ]
    missing = [name for name in own if name not in found and not name.endswith("num_batches_tracked")]
    other = [name for name in found if name not in own]
    near = [f"{name} (like {hits[0]} in the file)" if (hits := nearest(name, other)) else name for name in missing]
    lists = (("of another shape", shapes), ("not in the file", near), ("not in the model", other))
    return [f"{words}: {listed(names, MAX_NAMES)}" for words, names in lists if names]
