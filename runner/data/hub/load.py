"""Loads sets of the Hugging Face Hub, or files, as tables of the `datasets` library, and chooses their columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.config.checks import choice
from runner.config.packages import not_installed
from runner.errors import Problem, RunnerError, first_line, nearest

KINDS = ("auto", "classification", "regression", "language")
#: what targets are usually called, the likeliest first
TARGETS = ("label", "labels", "target", "targets", "class", "y", "fine_label")
#: columns that only number the rows
NUMBERING = ("id", "idx", "index", "__index_level_0__")
NUMBER, LIST, TEXT, IMAGE, CLASS, OTHER = "number", "list", "text", "image", "class", "other"


@dataclass(frozen=True)
class Chosen:
    """What is read of a table."""

    form: str  # of the inputs: number (lists of numbers too), text or image
    inputs: tuple[str, ...]
    target: str | None  # None for language, where the following tokens are the targets
    kind: str  # classification, regression or language
    names: tuple[str, ...]  # of the classes, where the column itself knows them


def chosen(features: Any, *, inputs: str | Sequence[str] | None, target: str | None, kind: str) -> Chosen:
    """Choose columns by a table's features. Raises: RunnerError with the columns of the table."""
    choice(kind, KINDS, key="data.kind")
    forms = {name: form_of(feature) for name, feature in features.items()}
    asked = [inputs] if isinstance(inputs, str) else None if inputs is None else list(inputs)
    for key, names in (("inputs", asked or []), ("target", [target] if target else [])):
        for name in names:
            if name not in forms:
                hits = nearest(name, forms) or list(forms)
                problem = f"there is no column `{name}`; there are {_told(forms)}"
                raise RunnerError.suggest(f"data.{key}={name}", problem, (f"data.{key}={hit}" for hit in hits))
    if kind != "language":
        target = target or _found_target(forms, taken=asked or [])
    columns = asked or _found_inputs({name: form for name, form in forms.items() if name != target}, kind)
    form = _one_form(columns, forms)
    if target is None or kind == "language":
        if form != TEXT:
            ways = [f"data.target={name}" for name in forms if name not in columns]
            problem = f"`data.target` is not set, and no column is called {' or '.join(TARGETS[:3])}; there are {_told(forms)}"
            raise RunnerError.suggest("data.target=null", problem, ways, "use a table with a target")
        return Chosen(form, tuple(columns), None, "language", ())
    if kind == "auto":
        is_number = getattr(features[target], "dtype", "").startswith("float") or forms[target] == LIST
        kind = "regression" if is_number else "classification"
    if forms[target] in (IMAGE, OTHER):
        problem = f"column `{target}` has {forms[target]} values, and a target is a class or a number"
        raise RunnerError.of(f"data.target={target}", problem, "use a column with classes or numbers as `data.target`")
    own = tuple(features[target].names) if forms[target] == CLASS else ()
    return Chosen(form, tuple(columns), target, kind, own)


def form_of(feature: Any) -> str:
    """What a column holds, in one word."""
    from datasets import features as known

    dtype = str(getattr(feature, "dtype", ""))
    if isinstance(feature, known.Image):
        return IMAGE
    if isinstance(feature, known.ClassLabel):
        return CLASS
    if isinstance(feature, known.Value):
        if "string" in dtype:
            return TEXT
        return NUMBER if dtype.startswith(("int", "uint", "float", "bool")) else OTHER
    inner = getattr(feature, "feature", None)
    if inner is not None:
        return LIST if form_of(inner) in (NUMBER, LIST) else OTHER
    return OTHER


def _found_target(forms: dict[str, str], *, taken: Sequence[str]) -> str | None:
    free = [name for name in forms if name not in taken]
    for name in TARGETS:
        if hits := [column for column in free if column.lower() == name]:
            return hits[0]
    classes = [name for name in free if forms[name] == CLASS]
    return classes[0] if len(classes) == 1 else None


def _found_inputs(forms: dict[str, str], kind: str) -> list[str]:
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
    problem = f"the input columns are not clear: there are {_told(forms)}"
    ways = [f"data.inputs={name}" for name in [*images, *texts]]
    ways += [f"data.inputs=[{','.join(numbers)}]"] * bool(numbers)
    raise RunnerError.suggest("data.inputs=null", problem, ways, "use a table of numbers, texts or images")


def _one_form(columns: Sequence[str], forms: dict[str, str]) -> str:
    found = {NUMBER if forms[name] in (LIST, CLASS) else forms[name] for name in columns}
    if len(found) == 1 and OTHER not in found and not (IMAGE in found and len(columns) > 1):
        return found.pop()
    problem = f"inputs must be numbers, texts or one image; these are {_told({name: forms[name] for name in columns})}"
    alike = [name for name in columns if forms[name] in (NUMBER, LIST)] or list(columns[:1])
    raise RunnerError.suggest(f"data.inputs=[{','.join(columns)}]", problem, [f"data.inputs=[{','.join(alike)}]"])


def _told(forms: dict[str, str]) -> str:
    return ", ".join(f"{name} ({form})" for name, form in forms.items()) or "none"


#: readers of files that data.path may name. Not all that the library has: some have read pickles, which can run code.
BUILDERS = ("csv", "json", "parquet", "arrow", "text", "imagefolder")
BY_ENDING = {
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
#: how sets call their splits
SPLITS = {"train": ("train", "training"), "val": ("validation", "valid", "val", "dev"), "test": ("test", "testing")}
#: what a folder of save_to_disk() has
SAVED = ("dataset_dict.json", "state.json")
Files = str | Sequence[str] | Mapping[str, Any]


def loaded(
    path: str,
    subset: str | None = None,
    *,
    split: Mapping[str, str] | None = None,
    data_files: Files | None = None,
    data_dir: str | None = None,
    streaming: bool = False,
    num_rows: int | None = None,
) -> dict[str, Any]:
    """{"train": a `datasets.Dataset`, maybe "val" and "test"}, mapped into memory from the library's cache.

    Images are left encoded. A set that is streamed comes as its first `num_rows` rows of each split, in memory.
    Raises: RunnerError for a set that is not there, can't be reached or can't be read, and for splits that it lacks.
    """
    datasets = _library()
    asked = _asked(path, subset, data_files, data_dir)
    if streaming and num_rows is None:
        problem = "a stream has no length, and rows are drawn by their number"
        raise RunnerError.of(
            "data.streaming=true", problem, "use `data.num_rows=10000`, the number of rows to fetch for each split"
        )
    if num_rows is not None and not streaming:
        problem = "`data.num_rows` limits a stream, and `data.streaming` is off"
        fix = f"use `data.streaming=true`, or `data.limit={num_rows}` for that many rows in total"
        raise RunnerError.of(f"data.num_rows={num_rows}", problem, fix)
    if problems := _beside(path, subset=subset, data_files=data_files, data_dir=data_dir):
        raise RunnerError(*problems)
    with _quiet(datasets), _explained(asked):
        if _is_saved(path):
            found = datasets.load_from_disk(str(Path(path).expanduser()))
        else:
            words = _words(path, subset, data_files, data_dir)
            found = datasets.load_dataset(**words, streaming=streaming)
        found = found if isinstance(found, Mapping) else {"train": found}
        names = _chosen(dict(split or {}), list(found), asked)
        tables = {name: _encoded(found[theirs], datasets) for name, theirs in names.items()}
        if streaming:
            return {name: _first_rows(table, num_rows, datasets) for name, table in tables.items()}
        return tables


def _beside(path: str, **settings: Any) -> list[Problem]:
    is_file = Path(path).expanduser().is_file()
    if not is_file and not _is_saved(path):
        return []
    problem = f"`{path}` is {'one file' if is_file else 'a data set of save_to_disk()'}, which is read completely"
    said = {name: value for name, value in settings.items() if value is not None}
    return [Problem.suggest(f"data.{name}={value}", problem, [f"data.{name}=null"]) for name, value in said.items()]


def _library() -> Any:
    try:
        import datasets  # an optional package, and a slow one
    except ImportError:
        problem = "reading Hugging Face data sets needs a package that is not installed"
        raise not_installed("data=huggingface", problem, "huggingface") from None
    return datasets


def _words(path: str, subset: str | None, data_files: Files | None, data_dir: str | None) -> dict[str, Any]:
    place, asked = Path(path).expanduser(), f"data.path={path}"
    if path in BUILDERS:
        if data_files is None and data_dir is None:
            problem = f"`{path}` reads files, and none are named"
            fix = "use `data.data_files=FILE`" + (" or `data.data_dir=DIRECTORY`" if path != "text" else "")
            raise RunnerError.of(asked, problem, fix)
        if subset is not None:
            raise RunnerError.suggest(
                f"data.subset={subset}", f"`{path}` reads files, which have no subsets", ["data.subset=null"]
            )
        return {"path": path, "data_files": _expanded(data_files), "data_dir": _expanded(data_dir)}
    if place.is_file():
        if place.suffix.lower() not in BY_ENDING:
            problem = f"the format of `{place.name}` is not known from its ending"
            ways = [f"data.path={name} data.data_files={path}" for name in BUILDERS[:3]]
            raise RunnerError.suggest(asked, problem, ways)
        more = {"sep": "\t"} if place.suffix.lower() == ".tsv" else {}
        return {"path": BY_ENDING[place.suffix.lower()], "data_files": str(place), **more}
    if not place.is_dir() and (path.startswith((".", "/", "~")) or path.count("/") > 1 or place.suffix in BY_ENDING):
        there = [item.name for item in place.parent.iterdir()] if place.parent.is_dir() else []
        ways = [f"data.path={place.parent / hit}" for hit in nearest(place.name, there)]
        otherwise = "use `data.path=FILE`, or a name from huggingface.co/datasets"
        problem = f"there is no file or directory `{path}`, and the Hub has no such names"
        raise RunnerError.suggest(asked, problem, ways, otherwise, code="missing-file")
    if path in _all_builders():
        problem = f"the reader `{path}` is not supported; {', '.join(BUILDERS)} are"
        raise RunnerError.suggest(asked, problem, (f"data.path={name}" for name in BUILDERS))
    return {
        "path": str(place) if place.is_dir() else path,
        "name": subset,
        "data_files": _expanded(data_files) if place.is_dir() else data_files,
        "data_dir": data_dir,
    }


def _expanded(files: Any) -> Any:
    if isinstance(files, Mapping):
        return {name: _expanded(inner) for name, inner in files.items()}
    if isinstance(files, Sequence) and not isinstance(files, str):
        return [_expanded(inner) for inner in files]
    return None if files is None else str(Path(files).expanduser())


def _all_builders() -> list[str]:
    import pkgutil

    from datasets import packaged_modules

    return [module.name for module in pkgutil.iter_modules(packaged_modules.__path__)]


def _is_saved(path: str) -> bool:
    return any((Path(path).expanduser() / name).is_file() for name in SAVED)


def _chosen(asked: dict[str, str], there: list[str], set_asked: str) -> dict[str, str]:
    listed = ", ".join(there)
    if unknown := [name for name in asked if name not in SPLITS]:
        problem = f"there is no split `{unknown[0]}`; splits are called {', '.join(SPLITS)}"
        raise RunnerError.of(
            f"data.split.{unknown[0]}={asked[unknown[0]]}", problem, "use `'data.split={train:...,val:...}'`"
        )
    for name, theirs in asked.items():
        if theirs not in there:
            hits = nearest(theirs, there) or there
            ways = [f"data.split.{name}={hit}" for hit in hits]
            problem = f"the data set has no split `{theirs}`; it has {listed}"
            raise RunnerError.suggest(f"data.split.{name}={theirs}", problem, ways)
    found = asked or {
        name: next(hit for hit in hits if hit in there) for name, hits in SPLITS.items() if set(hits) & set(there)
    }
    if "train" not in found and len(there) == 1:
        found = {"train": there[0]}
    if "train" not in found:
        problem = f"the training split is not clear; the data set has {listed}"
        raise RunnerError.suggest(set_asked, problem, (f"data.split={{train:{name}}}" for name in there))
    return found


def _encoded(table: Any, datasets: Any) -> Any:
    for name, feature in (table.features or {}).items():
        if isinstance(feature, datasets.Image):
            table = table.cast_column(name, datasets.Image(decode=False))
    return table


def _first_rows(stream: Any, count: int | None, datasets: Any) -> Any:
    return datasets.Dataset.from_list(list(stream.take(count)), features=stream.features)


def _asked(path: str, subset: str | None, data_files: Files | None, data_dir: str | None) -> str:
    parts = {"path": path, "subset": subset, "data_files": data_files, "data_dir": data_dir}
    return " ".join(f"data.{name}={value}" for name, value in parts.items() if value is not None)


@contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    was_quiet = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not was_quiet:
            datasets.enable_progress_bars()


@contextmanager
def _explained(asked: str) -> Iterator[None]:
    try:
        yield
    except RunnerError:
        raise
    except Exception as error:
        raise RunnerError(_problem(asked, error)) from error


def _problem(asked: str, error: Exception) -> Problem:
    from datasets import config, exceptions

    lines = [first_line(cause) for cause in (error, error.__cause__) if cause and str(cause).strip()]
    said = "; ".join(lines) or type(error).__name__
    if isinstance(error, ConnectionError | exceptions.DatasetNotFoundError):
        is_offline = config.HF_HUB_OFFLINE
        why = "`HF_HUB_OFFLINE` is set" if is_offline else "there is none of this name, or the Hub can't be reached"
        problem = f"the data set is not in {config.HF_DATASETS_CACHE} and not on the Hub: {why} ({said})"
        fix = "use a name from huggingface.co/datasets (OWNER/NAME), or `data.path=csv data.data_files=FILE`"
        return Problem(asked, problem, f"run `unset HF_HUB_OFFLINE`, or {fix}" if is_offline else fix)
    if "Config name is missing" in said or "BuilderConfig" in said:
        return Problem(asked, str(error).strip(), "use `data.subset=NAME` with one of these")
    return Problem(
        asked, f"the data can't be read: {said}", f"use complete files of that format ({', '.join(BUILDERS)})"
    )
