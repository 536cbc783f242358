"""Write a module as safetensors, ONNX, pt2 or an MLflow model; each writer returns a function that computes with the file."""

from __future__ import annotations

import inspect
import json
import logging
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.config.packages import not_installed
from runner.device import torch_private
from runner.device.placement import map_tensors, tensors
from runner.errors import RunnerError
from runner.models.example import CALL, call, is_call, named
from runner.models.weights import load_trained
from runner.runs.load import Trained, built

Compute = Callable[[Any], Any]  # a tree of inputs on the host -> outputs
#: paths that are not the user's code
LIBRARY_PATHS = ("site-packages", "dist-packages", "/lib/python", "runner/runs", "runner/tracking")


def safetensors(trained: Trained, module: nn.Module, example: Any, file: Path) -> Compute:
    """Write the weights, with the card as metadata. Loading them needs the module's code."""
    with _needing("safetensors", "safetensors"):
        from safetensors import safe_open
        from safetensors.torch import save_file
    weights = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in module.state_dict().items()}
    save_file(weights, file, metadata={"format": "pt", "card": json.dumps(asdict(trained.card))})
    with safe_open(file, framework="pt") as found:
        loaded = {name: found.get_tensor(name) for name in found.keys()}  # noqa: SIM118 - not a dict
        node = json.loads(found.metadata()["card"])["model"]
    again: nn.Module = built(node, "model", trained.folder)
    load_trained(again, loaded)
    return partial(call, again.eval())


def pt2(trained: Trained, module: nn.Module, example: Any, file: Path) -> Compute:
    """Write the graph and the weights: torch.export.load() needs only torch."""
    torch.export.save(graph_of(module, example), file)
    return partial(call, torch.export.load(file).module())


def onnx(trained: Trained, module: nn.Module, example: Any, file: Path) -> Compute | None:
    """Write the graph and the weights for other runtimes; return None if onnxruntime is not installed."""
    with _needing("onnx", "onnx"):
        import onnx as _onnx  # noqa: F401
        import onnxscript as _onnxscript  # noqa: F401
    names = input_names(module, example)
    program = torch.onnx.export(
        graph_of(module, example),
        dynamo=True,
        input_names=names,
        output_names=output_names(call(module, example)),
        verbose=False,
    )
    assert program is not None
    is_big = sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values()) > 2**30
    program.save(file, external_data=is_big)  # protobuf ends at 2 GiB
    try:
        from onnxruntime import InferenceSession, SessionOptions
    except ImportError:
        return None
    options = SessionOptions()
    options.intra_op_num_threads = 1  # as many as the machine has would be left behind, spinning
    session = InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    taken = [given.name for given in session.get_inputs()]

    def compute(rows: Any) -> Any:
        arrays = dict(zip(names, (tensor.numpy() for tensor in tensors(rows)), strict=True))
        return [torch.from_numpy(found) for found in session.run(None, {name: arrays[name] for name in taken})]

    return compute


def mlflow(trained: Trained, module: nn.Module, example: Any, folder: Path) -> Compute:
    """Write a directory in MLflow's format: a graph if possible, else a pickle with the modules of the current directory."""
    import tempfile

    from runner.data.tables.encoder import columns_in, frame_of
    from runner.tracking import mlflow_model, mlflow_store

    columns = columns_in(trained.card.reader)
    with mlflow_store.settings(), tempfile.TemporaryDirectory(dir=folder.parent) as place:
        mlflow_model.save(Path(place), "", module, example, reader=trained.card.reader).rename(folder)
        import mlflow.pytorch

        if is_call(example):  # the pyfunc takes one array or table
            return partial(call, mlflow.pytorch.load_model(str(folder)))
        found = mlflow.pyfunc.load_model(str(folder))

    def compute(rows: Any) -> Any:
        with mlflow_store.settings():
            arrays: Any = map_tensors(rows, lambda tensor: tensor.numpy())  # type: ignore[arg-type, return-value]
            said = found.predict(arrays if columns is None else frame_of(columns, arrays))
        return torch_private.tree_map(torch.as_tensor, said)

    return compute


def graph_of(module: nn.Module, example: Any) -> torch.export.ExportedProgram:
    """Return the module's graph for any number of rows. Raises: as torch.export.export."""
    args, kwargs = (tuple(example[CALL]["args"]), example[CALL]["kwargs"]) if is_call(example) else ((example,), {})
    dims = {0: torch.export.Dim.DYNAMIC}
    names = list(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
    shapes = torch_private.tree_map(lambda part: dims if isinstance(part, Tensor) else None, (*args, *kwargs.values()))
    return torch.export.export(module, args, kwargs, dynamic_shapes=dict(zip(names, shapes, strict=True)))


def input_names(module: nn.Module, example: Any) -> list[str]:
    """Return a name for each tensor: `inputs` if it is the only one, else its key, argument or index."""
    example = named(module, example)
    if isinstance(example, Tensor):
        return ["inputs"]
    count = len(tensors(example))
    keys = (
        [str(key) for key, value in example.items() if isinstance(value, Tensor)] if isinstance(example, dict) else []
    )
    return keys if len(keys) == count else [f"inputs_{number}" for number in range(count)]


def output_names(outputs: Any) -> list[str]:
    count = len(tensors(outputs))
    return ["outputs"] if count == 1 else [f"outputs_{number}" for number in range(count)]


@contextmanager
def explained(asked: str, write: str) -> Iterator[None]:
    """Silence the exporters. Raises: RunnerError that names the operation that the format does not support."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are about torch's and MLflow's own code
            yield
    except RunnerError:
        raise
    except Exception as error:
        raise RunnerError.of(asked, _why(error), write) from error
    finally:
        logging.disable(before)


@contextmanager
def _needing(package: str, extra: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        problem = f"the format needs the package `{error.name or package}`, which is not installed"
        raise not_installed(f"--format {package}", problem, extra) from None


def _why(error: Exception) -> str:
    inner: BaseException = error
    while inner.__cause__ is not None:
        inner = inner.__cause__
    text = f"{inner}\n{error}"
    lines = [re.sub(r"\x1b\[\d*m|\[\d+m", "", line).strip() for line in str(inner).splitlines() if line.strip()]
    operations = list(dict.fromkeys(re.findall(r"\b(?:aten|prims|torchvision)\.\w+(?:\.\w+)?", text)))
    called = re.search(r'File "([^"]+)", line (\d+), in \w+\n\s+(\S.*)', str(inner))
    where = f" at {Path(called[1]).name}:{called[2]}, {called[3].strip()}" if called else _where(inner)
    head = f"the operation {', '.join(operations[:3])} can't be in it" if operations else "it can't be written"
    return f"{head}{where} ({type(inner).__name__}: {lines[0][:200] if lines else 'no reason given'})"


def _where(error: BaseException) -> str:
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename).as_posix()
        if not file.startswith("<") and not any(part in file for part in LIBRARY_PATHS):
            return f" at {Path(file).name}:{frame.lineno}"
    return ""
