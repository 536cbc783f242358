"""The code that a configuration can reach: every allowed callable is read, with everything of ours and the libraries that it calls."""

import ast
import builtins
import functools
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from runner.config.allowed import LIBRARIES, PARTS, is_part, under
from runner.config.instantiate import locate
from runner.errors import RunnerError
from runner.version import HERE, PACKAGES

ROOMS = ("runner.data", "runner.models", "runner.tasks", "runner.training")
#: packages whose code is read; calls to other packages are judged by their names
READ = ("runner", "torch.nn", "torch.optim", "torchmetrics")
#: functions that write, run, unpickle, import or download
BEYOND = re.compile(
    r"(subprocess|shutil|tempfile|pickle|marshal|shelve|socket|ssl|http|urllib|requests|ctypes|runpy|multiprocessing"
    r"|concurrent|mlflow|huggingface_hub|transformers|datasets|timm|torchvision|torch\.(hub|package|serialization)"
    r"|torch\.utils\.(cpp_extension|model_zoo))\..*|importlib\.(import_module|reload)|torch\.jit.*\.(load|save)"
    r"|(os|posix)\.(?!walk|cpu_count|sched_getaffinity).*|builtins\.(open|exec|eval|compile|__import__)|_?io\.open|numpy\.(load|save\w*|fromfile|memmap)"
)
#: the same, as methods of objects whose type the source does not show
METHODS = """
write write_text write_bytes open touch mkdir unlink rename rmdir symlink_to chmod hardlink_to tofile dump save savez to_csv
to_parquet import_module exec_module system popen Popen urlopen urlretrieve from_pretrained load_dataset create_model
"""
#: reviewed code, and the reason why it is safe
REVIEWED = {
    ("runner.data.array_files._names_and_reader", "numpy.load"): "arrays alone: allow_pickle is false",
    ("runner.data.array_files._names_and_reader", "open"): "reads",
    ("runner.data.hub.load.form_of", "datasets.features"): "kinds of columns",
    ("runner.data.hub.load._all_builders", "datasets.packaged_modules"): "lists their names",
    ("runner.data.hub.load._errors_of_the_user", "datasets.config"): "reads whether a network is allowed",
    ("runner.data.hub.load._errors_of_the_user", "datasets.exceptions"): "kinds of errors",
    ("runner.data.hub.load.load_tables", "datasets."): "of the Hub files of data, no code",
    ("runner.data.hub.load.load_tables", "load_dataset"): "of the Hub files of data, no code",
    ("runner.data.vision.dataset._opened", "open"): "Pillow's, which reads",
    ("runner.data.vision.dataset.each", "concurrent.futures.thread.ThreadPoolExecutor"): "decodes images",
    ("runner.data.tables.files.TableFile", "open"): "reads",
    ("runner.data.tables.table.MappedRows", "numpy.load"): "reads the cache; allow_pickle is false",
    ("runner.data.tables.table.MappedRows", "numpy.memmap"): "reads the cache",
    ("runner.data.tables.table.mapped", "shutil.disk_usage"): "reads",
    ("runner.data.tables.table._write", "numpy.save"): "of the cache, below a name that holds a digest",
    ("runner.data.tables.table._write", "open"): "of the cache, below a name that holds a digest",
    ("runner.data.tables.table._write", "shutil.rmtree"): "of the cache, below a name that holds a digest",
    ("runner.data.tables.table._write", "tempfile.mkdtemp"): "of the cache, below a name that holds a digest",
    ("runner.data.tables.table._write", "write"): "of the cache, below a name that holds a digest",
    ("runner.data.tables.table._write", "write_text"): "of the cache, below a name that holds a digest",
    ("runner.data.tables.table.cache", "os._Environ"): "reads",
    ("runner.data.tables.table.mapped", "mkdir"): "the cache's own folder",
    ("runner.data.language.tokens.mapped", "numpy.load"): "reads; allow_pickle is false",
    ("runner.errors._secrets", "os._Environ"): "reads what no message may show",
    ("runner.errors._secrets", "urllib.parse.unquote"): "spells a text",
    ("runner.errors._spellings", "urllib.parse.quote"): "spells a text",
    ("runner.errors.credentials", "urllib.parse.unquote"): "spells a text",
    ("runner.errors.credentials", "urllib.parse.unquote_plus"): "spells a text",
    ("runner.data.language.tokens.mapped", "numpy.memmap"): "reads",
    ("runner.models.external._library", "importlib.import_module"): "timm or transformers",
    ("runner.models.external._settings", "from_pretrained"): "trust_remote_code is false",
    ("runner.models.external.timm_model", "create_model"): "a name that timm lists; no files, no addresses",
    ("runner.models.external._load_or_build", "from_pretrained"): "safetensors; trust_remote_code is false",
    ("runner.tasks.metrics._make", "importlib.import_module"): "one of two modules of torchmetrics",
    ("torch.nn.functional.interpolate", "importlib.import_module"): "a name that is written there",
    ("torch.nn.functional.max_pool3d_with_indices", "importlib.import_module"): "a name that is written there",
    ("torch.nn.functional.pad", "importlib.import_module"): "a name that is written there",
}


def below(names):
    """Yield the public modules at and below these names, imported."""
    for name in names:
        module = importlib.import_module(name)
        yield module
        found = pkgutil.iter_modules(getattr(module, "__path__", ()))
        yield from below(f"{name}.{item.name}" for item in found if not item.name.startswith("_"))


@pytest.fixture(scope="module")
def allowed():
    """Return every callable that a configuration reaches, with a path to it."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runner.config.instantiate.nearest", lambda *_: [])  # takes 8 ms for each of 2,000 refusals
        for module in below((*ROOMS, *LIBRARIES)):
            exported = {name: getattr(module, name) for name in getattr(module, "__all__", ())}
            for name, thing in {**vars(module), **exported}.items():
                if callable(thing) and not name.startswith("_") and thing not in found:
                    try:
                        found[locate(f"{module.__name__}.{name}")] = f"{module.__name__}.{name}"
                    except RunnerError:
                        continue
    return found


def suspects(start):
    """Return the places in code reachable from `start` that write, run or download, with the function's name."""
    seen, waiting, found = set(), list(start), set()
    while waiting:
        thing = waiting.pop()
        home = str(getattr(thing, "__module__", ""))
        if id(thing) in seen or not under(home, READ) or not (inspect.isclass(thing) or inspect.isfunction(thing)):
            continue
        seen.add(id(thing))
        where = f"{home}.{thing.__qualname__}"
        waiting += thing.__mro__ if inspect.isclass(thing) else [getattr(thing, "__wrapped__", None)]
        for name in names_in(thing):
            waiting.append(name)
            if BEYOND.fullmatch(called := full_name(name)) or called in METHODS.split():
                found.add((where, called))
    return found


def names_in(thing):
    """Return the names in a function's or class's source: the object if it is known, else the name of a method."""
    known = {**vars(builtins), **vars(importlib.import_module(thing.__module__))}
    if inspect.isfunction(thing):
        closed = inspect.getclosurevars(thing).nonlocals if thing.__closure__ else {}
        known = {**vars(builtins), **thing.__globals__, **closed}
        yield from closed.values()
    for node in ast.walk(source(thing)):
        if isinstance(node, ast.Name) and node.id in known:
            yield known[node.id]
        elif isinstance(node, ast.Attribute) and (inner := followed(node, known)) is not None:
            yield inner
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and followed(node.func, known) is None:
            yield node.func.attr
        elif isinstance(node, ast.Import):
            yield from (f"{item.name}." for item in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), known["__package__"] or ".")
            is_read = under(module, READ)
            for item in node.names:
                yield getattr(importlib.import_module(module), item.name) if is_read else f"{module}.{item.name}"


def followed(node, known):
    """Return the object of `a.b.c` if the path consists of modules and classes, else None."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    outer = followed(node.value, known) if isinstance(node, ast.Attribute) else None
    return getattr(outer, node.attr, None) if inspect.ismodule(outer) or inspect.isclass(outer) else None


def source(thing):
    code = getattr(thing, "__code__", None)
    module, name = (code.co_filename, code.co_qualname) if code else (inspect.getfile(thing), thing.__qualname__)
    return definitions(module).get(name, ast.parse(""))


@functools.cache
def definitions(file):
    """Return the functions and classes of a file by their qualified names."""
    found = {}

    def walk(node, outer):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                found[outer + child.name] = child
                walk(child, f"{outer}{child.name}.<locals>.")
            elif isinstance(child, ast.ClassDef):
                found[outer + child.name] = child
                walk(child, f"{outer}{child.name}.")
            else:
                walk(child, outer)

    if Path(file).is_file():
        walk(ast.parse(Path(file).read_text()), "")
    return found


def full_name(thing):
    if isinstance(thing, str):
        return thing
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', type(thing).__name__)}"


def test_allowed_targets_never_write_run_or_fetch(allowed):
    assert len(allowed) > 400
    assert {path for path in allowed.values() if under(path, ROOMS)} == set(PARTS), (
        "each by its public name, and no other"
    )
    found = suspects(allowed)
    assert not sorted(found - REVIEWED.keys())
    gone = {(where, what) for where, what in REVIEWED.keys() - found if where.startswith("runner.")}
    assert not gone, "reviewed, and no longer there"


def test_what_writes_runs_or_fetches_is_seen(allowed):
    from runner.data.language.tokens import write_tokens
    from runner.models.weights import load_weights

    assert ("runner.data.language.tokens.write_tokens", "open") in suspects([write_tokens])
    assert ("runner.models.weights._from_torch", "torch.serialization.load") in suspects([load_weights])


def test_allowed_parts_exist_and_are_used(own_folder):
    named = {str(node.get("_target_")) for node in map(OmegaConf.load, (PACKAGES / "conf").rglob("*.yaml"))}
    for file in HERE.rglob("*.py"):
        if file.name != "allowed.py":
            named |= {node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)}
    ours = {name for name in named if isinstance(name, str) and under(name, ROOMS) and is_callable(name)}
    assert ours == set(PARTS)
    assert all(callable(locate(part, own_code=False)) for part in PARTS)


def is_callable(name):
    module, _, last = name.rpartition(".")
    return last.isidentifier() and module != "runner" and callable(getattr(importlib.import_module(module), last, None))


NO_PARTS = """
runner.data.write_tokens runner.data.language.tokens.write_tokens runner.data.language.tokens.read_note
runner.models.weights.load_weights runner.models.mlp.MLP.forward runner.models.mlp runner.data
torch.nn.modules.module.register_module_forward_hook torch.nn.Module.load_state_dict torch.nn.parallel.DistributedDataParallel
torch.nn.utils.parametrize.register_parametrization torch.nn.attention.sdpa_kernel torch.optim.swa_utils.update_bn
torch.nn.Embedding.from_pretrained
"""


@pytest.mark.parametrize("target", NO_PARTS.split())
def test_neighbor_of_allowed_part_is_refused(target):
    with pytest.raises(RunnerError, match="not a part that a configuration may name"):
        locate(target)


def test_allowed_prefix_must_end_at_dot(own_folder, monkeypatch):
    place = own_folder.parent / "elsewhere"
    place.mkdir()
    for name in ("torch_nn", "timm_evil"):
        (place / f"{name}.py").write_text("class Net:\n    pass\n")
    assert under("torch.nn.Linear", ("torch.nn",)) and not under("torch.nnx.Linear", ("torch.nn",))
    monkeypatch.syspath_prepend(place)
    monkeypatch.setenv("RUNNER_ALLOW", "timm")
    for name in ("torch_nn.Net", "timm_evil.Net"):
        with pytest.raises(RunnerError, match="not a part that a configuration may name"):
            locate(name)
    monkeypatch.setenv("RUNNER_ALLOW", "timm_evil")
    assert locate("timm_evil.Net").__name__ == "Net"


def test_callable_object_is_not_an_allowed_function():
    assert is_part(torch.nn.functional.relu, "torch.nn.functional")
    assert not is_part(torch.nn.ReLU(), "torch.nn.functional")
