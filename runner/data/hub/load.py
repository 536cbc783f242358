"""Loads sets of the Hugging Face Hub, or files, as tables of the `datasets` library, and chooses their columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.config.checks import choice
from runner.config.packages import not_installed
from runner.errors import Problem, RunnerError, first_line, nearest, refuse

#: readers of files that data.path may name. The library has others, some of which read pickles, which can run code.
BUILDERS = ("csv", "json", "parquet", "arrow", "text")
BY_ENDING = {".tsv": "csv", ".jsonl": "json", ".txt": "text"} | {f".{name}": name for name in BUILDERS[:4]}
#: names of splits in data sets
SPLITS = {"train": ("train", "training"), "val": ("validation", "valid", "val", "dev"), "test": ("test", "testing")}
#: files of a directory that save_to_disk() wrote
SAVED = ("dataset_dict.json", "state.json")
#: usual names of targets, the likeliest first
TARGETS = ("label", "labels", "target", "targets", "class", "y", "fine_label")
#: columns that only number the rows
NUMBERING = ("id", "idx", "index", "__index_level_0__")
NUMBER, LIST, TEXT, IMAGE, CLASS, OTHER = "number", "list", "text", "image", "class", "other"


def load_tables(
    path: str, subset: str | None = None, data_files: Any = None, split: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return {"train": a `datasets.Dataset`, ...} with "val" and "test" if the set has them. Images stay encoded.

    split: the set's names of the splits; None to find them. Raises: RunnerError.
    """
    try:
        import datasets  # an optional package, and a slow one
    except ImportError:
        problem = "reading Hugging Face data sets needs a package that is not installed"
        raise not_installed("data=huggingface", problem, "huggingface") from None
    settings = {"path": path, "subset": subset, "data_files": data_files}
    setting = " ".join(f"data.{name}={value}" for name, value in settings.items() if value is not None)
    arguments = _arguments(Path(path).expanduser(), settings, setting)
    was_quiet = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        with _errors_of_the_user(setting):
            saved = str(Path(path).expanduser())
            loaded = datasets.load_dataset(**arguments) if arguments else datasets.load_from_disk(saved)
            loaded = loaded if isinstance(loaded, Mapping) else {"train": loaded}
            tables = {}
            for name, theirs in _choose_splits(dict(split or {}), list(loaded), setting).items():
                tables[name] = loaded[theirs]
                for column, feature in tables[name].features.items():
                    if isinstance(feature, datasets.Image):
                        tables[name] = tables[name].cast_column(column, datasets.Image(decode=False))
            return tables
    finally:
        if not was_quiet:
            datasets.enable_progress_bars()


def _arguments(file: Path, settings: Mapping[str, Any], setting: str) -> dict[str, Any] | None:
    """Return the arguments of load_dataset(); None for a directory of save_to_disk(). Raises: RunnerError."""
    path, ending, files = settings["path"], file.suffix.lower(), settings["data_files"]
    is_saved = any((file / name).is_file() for name in SAVED)
    is_whole = is_saved or (file.is_file() and path not in BUILDERS)
    unused = ("subset", "data_files") if is_whole else ("subset",) if path in BUILDERS else ()
    problem = f"`{path}` is read completely, as files without subsets"
    refuse(
        Problem.suggest(f"data.{name}={settings[name]}", problem, [f"data.{name}=null"])
        for name in unused
        if settings[name] is not None
    )
    if is_saved:
        return None
    if path in BUILDERS:
        if files is None:
            problem = f"`{path}` reads files, and `data.data_files` is not set"
            raise RunnerError.of(setting, problem, "use `data.data_files=FILE`")
        return {"path": path, "data_files": _expanded(files)}
    if file.is_file() and ending in BY_ENDING:
        return {"path": BY_ENDING[ending], "data_files": str(file), **({"sep": "\t"} if ending == ".tsv" else {})}
    if file.is_file():
        ways = [f"data.path={name} data.data_files={path}" for name in BUILDERS[:3]]
        raise RunnerError.suggest(setting, f"the format of `{file.name}` is not known from its ending", ways)
    if not file.is_dir() and (path.startswith((".", "/", "~")) or path.count("/") > 1 or ending in BY_ENDING):
        there = [item.name for item in file.parent.iterdir()] if file.parent.is_dir() else []
        ways = [f"data.path={file.parent / hit}" for hit in nearest(file.name, there)]
        fix = "use `data.path=FILE`, or a name from huggingface.co/datasets"
        problem = f"there is no file or directory `{path}`, and the Hub has no such names"
        raise RunnerError.suggest(setting, problem, ways, fix, code="missing-file")
    if path in _all_builders():  # before a directory of that name, which the library would not read
        problem = f"the reader `{path}` is not supported; {', '.join(BUILDERS)} and directories are"
        raise RunnerError.suggest(setting, problem, (f"data.path={name}" for name in BUILDERS))
    if file.is_dir():  # absolute: the library takes `pandas` for its reader of pickles
        return {"path": str(file.absolute()), "name": settings["subset"], "data_files": _expanded(files)}
    return {"path": path, "name": settings["subset"], "data_files": files}


def _all_builders() -> list[str]:
    import pkgutil

    from datasets import packaged_modules

    return [module.name for module in pkgutil.iter_modules(packaged_modules.__path__)]


def _expanded(files: Any) -> Any:
    if isinstance(files, Mapping):
        return {name: _expanded(inner) for name, inner in files.items()}
    if isinstance(files, Sequence) and not isinstance(files, str):
        return [_expanded(inner) for inner in files]
    return None if files is None else str(Path(files).expanduser())


def _choose_splits(names: dict[str, str], there: list[str], setting: str) -> dict[str, str]:
    for name, theirs in names.items():
        if name not in SPLITS:
            problem = f"there is no split `{name}`; splits are called {', '.join(SPLITS)}"
            fix = "use `'data.split={train:...,val:...}'`"
            raise RunnerError.of(f"data.split.{name}={theirs}", problem, fix)
        choice(theirs, there, key=f"data.split.{name}")
    chosen = names or {
        name: next(hit for hit in hits if hit in there) for name, hits in SPLITS.items() if set(hits) & set(there)
    }
    if "train" not in chosen and len(there) == 1:
        return {"train": there[0]}
    if "train" not in chosen:
        problem = f"the training split is not clear; the data set has {', '.join(there)}"
        raise RunnerError.suggest(setting, problem, (f"data.split={{train:{name}}}" for name in there))
    return chosen


@contextmanager
def _errors_of_the_user(setting: str) -> Iterator[None]:
    from datasets import config, exceptions

    try:
        yield
    except RunnerError:
        raise
    except Exception as error:  # the library and its readers raise any class
        lines = [first_line(cause) for cause in (error, error.__cause__) if cause and str(cause).strip()]
        reason = "; ".join(lines) or type(error).__name__
        problem = f"the data can't be read: {reason}"
        fix = f"use complete files of that format ({', '.join(BUILDERS)})"
        if isinstance(error, ConnectionError | exceptions.DatasetNotFoundError):
            is_offline = config.HF_HUB_OFFLINE
            why = "`HF_HUB_OFFLINE` is set" if is_offline else "the name is wrong, or the Hub can't be reached"
            problem = f"the data set is not in {config.HF_DATASETS_CACHE} and not on the Hub: {why} ({reason})"
            fix = "use a name from huggingface.co/datasets (OWNER/NAME), or `data.path=csv data.data_files=FILE`"
            fix = f"run `unset HF_HUB_OFFLINE`, or {fix}" if is_offline else fix
        elif "Config name is missing" in reason or "BuilderConfig" in reason:
            problem, fix = str(error).strip(), "use `data.subset=NAME` with one of these"
        raise RunnerError.of(setting, problem, fix) from error


@dataclass(frozen=True)
class HubColumns:
    """The columns of a table that are read."""

    form: str  # of the inputs: number (lists of numbers, too), text or image
    inputs: tuple[str, ...]
    target: str | None  # None for language, whose targets are the tokens that follow
    kind: str  # classification, regression or language
    names: tuple[str, ...] = ()  # of the classes, if the column itself has them


def choose_columns(features: Any, *, inputs: str | Sequence[str] | None, target: str | None, kind: str) -> HubColumns:
    """Choose columns by a table's features. Raises: RunnerError with the columns of the table."""
    forms = {name: form_of(feature) for name, feature in features.items()}
    named = [inputs] if isinstance(inputs, str) else list(inputs or ())
    for key, names in (("inputs", named), ("target", [target] if target else [])):
        for name in names:
            choice(name, forms, key=f"data.{key}")
    if kind != "language":
        target = target or _find_target(forms, taken=named)
    columns = named or _find_inputs({name: form for name, form in forms.items() if name != target}, kind)
    form = _shared_form(columns, forms)
    if target is None or kind == "language":
        if form != TEXT:
            ways = [f"data.target={name}" for name in forms if name not in columns]
            problem = f"`data.target` is not set, and no column is called {' or '.join(TARGETS[:3])}; there are {described(forms)}"
            raise RunnerError.suggest("data.target=null", problem, ways, "use a table with a target")
        return HubColumns(form, tuple(columns), None, "language")
    if forms[target] in (IMAGE, OTHER):
        problem = f"column `{target}` has {forms[target]} values, and a target is a class or a number"
        raise RunnerError.of(f"data.target={target}", problem, "use a column with classes or numbers as `data.target`")
    if kind == "auto":
        is_number = getattr(features[target], "dtype", "").startswith("float") or forms[target] == LIST
        kind = "regression" if is_number else "classification"
    classes = tuple(features[target].names) if forms[target] == CLASS else ()
    return HubColumns(form, tuple(columns), target, kind, classes)


def form_of(feature: Any) -> str:
    """Return what a column holds: number, list (of numbers), text, image, class or other."""
    from datasets import features as known

    if isinstance(feature, known.Image):
        return IMAGE
    if isinstance(feature, known.ClassLabel):
        return CLASS
    if isinstance(feature, known.Value):
        is_number = feature.dtype.startswith(("int", "uint", "float", "bool"))
        return TEXT if "string" in feature.dtype else NUMBER if is_number else OTHER
    inner = getattr(feature, "feature", None)
    return LIST if inner is not None and form_of(inner) in (NUMBER, LIST) else OTHER


def _find_target(forms: dict[str, str], *, taken: Sequence[str]) -> str | None:
    free = [name for name in forms if name not in taken]
    named = [column for name in TARGETS for column in free if column.lower() == name]
    classes = [name for name in free if forms[name] == CLASS]
    return named[0] if named else classes[0] if len(classes) == 1 else None


def _find_inputs(forms: dict[str, str], kind: str) -> list[str]:
    useful = {name: form for name, form in forms.items() if name.lower() not in NUMBERING}
    images = [name for name, form in useful.items() if form == IMAGE]
    texts = [name for name, form in useful.items() if form == TEXT]
    numbers = [name for name, form in useful.items() if form in (NUMBER, LIST)]
    if len(images) == 1:
        return images
    if len(texts) == 1 and (not numbers or kind == "language"):
        return texts
    if numbers and not texts and not images:
        return numbers
    ways = [f"data.inputs={name}" for name in [*images, *texts]]
    ways += [f"data.inputs=[{','.join(numbers)}]"] * bool(numbers)
    problem = f"the input columns are not clear: there are {described(forms)}"
    raise RunnerError.suggest("data.inputs=null", problem, ways, "use a table of numbers, texts or images")


def _shared_form(columns: Sequence[str], forms: dict[str, str]) -> str:
    found = {NUMBER if forms[name] in (LIST, CLASS) else forms[name] for name in columns}
    if len(found) == 1 and OTHER not in found and not (IMAGE in found and len(columns) > 1):
        return found.pop()
    problem = (
        f"inputs must be numbers, texts or one image; these are {described({name: forms[name] for name in columns})}"
    )
    alike = [name for name in columns if forms[name] in (NUMBER, LIST)] or list(columns[:1])
    raise RunnerError.suggest(f"data.inputs=[{','.join(columns)}]", problem, [f"data.inputs=[{','.join(alike)}]"])


def described(forms: dict[str, str]) -> str:
    return ", ".join(f"{name} ({form})" for name, form in forms.items()) or "none"
