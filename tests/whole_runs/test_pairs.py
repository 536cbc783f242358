"""Every data set with every model and every task: three steps are trained, or it is refused with a suggestion.

A twelfth of all 720: each pair of a model and a task with some of the data.
"""

import functools
import itertools

import numpy as np
import pytest
import torch
from omegaconf import open_dict

from runner.config.compose import composed_with, composer
from runner.device import probe
from runner.errors import RunnerError
from runner.experiment.build import prepare_training
from runner.experiment.build_data import prepare_data
from runner.experiment.check import check
from runner.training.evaluate import evaluate
from runner.training.step.train_step import make_step

DATA = {
    "digits": ("image", "classes", ["data.limit=60"]),
    "images": ("image", "classes", ["data.path=pictures"]),
    "mnist1d": ("signal", "classes", ["data.limit=60"]),
    "playground": ("row", "classes", ["data.num_rows=60"]),
    "synthetic": ("image", "classes", ["data.num_rows=60"]),
    "synthetic ": ("row", "numbers", ["data.num_rows=60", "data.num_features=5", "data.num_classes=null"]),
    "breast_cancer": ("row", "classes", []),
    "wine": ("row", "classes", []),
    "iris": ("row", "classes", []),
    "diabetes": ("row", "numbers", []),
    "table": ("row", "classes", ["data.path=rows.csv", "data.target=kind"]),
    "table ": ("row", "numbers", ["data.path=rows.csv", "data.target=[a,b]", "data.kind=regression"]),
    "table  ": ("row", "labels", ["data.path=rows.csv", "data.target=[old,warm]", "data.kind=multilabel"]),
    "arrays": ("row", "classes", ["data.path=rows.npz"]),
    "huggingface": (
        "row",
        "classes",
        ["data.path=csv", "data.data_files=rows.csv", "data.target=kind", "data.inputs=[a,b,old,warm]"],
    ),
    "huggingface ": ("tokens", "classes", ["data.path=csv", "data.data_files=texts.csv", "data.target=kind"]),
    "text": ("windows", "tokens", ["data.path=text.txt", "data.context_length=8"]),
    "tokens": ("windows", "tokens", ["data.path=tokens.npy", "data.vocab_size=50", "data.context_length=8"]),
}
MODELS = {
    "linear": ("image", "signal", "row"),
    "mlp": ("image", "signal", "row"),
    "cnn": ("image", "signal"),
    "resnet": ("image",),
    "vit": ("image",),
    "gru": ("signal", "tokens"),
    "lstm": ("signal", "tokens"),
    "transformer": ("signal", "tokens"),
    "gpt": ("windows",),
    "autoencoder": ("image", "signal", "row"),
}
SMALL = {
    "resnet": ["model.depth=20", "model.width=8"],
    "vit": ["model.patch_size=2", "model.width=16", "model.depth=1", "model.num_heads=2"],
}
#: tables, whose columns a layer in front of the model encodes
COLUMNS = ("breast_cancer", "diabetes", "iris", "table", "wine")
#: two numbers per row and two classes: outputs of both kinds have the same shape
ALIKE = ("playground",)
#: the kinds of targets that each task accepts
TASKS = {
    "classification": ("classes", "labels"),
    "regression": ("numbers",),
    "autoencoding": ("classes", "labels", "numbers"),
    "language": ("tokens",),
}


def suits(data, model, task):
    inputs, targets, _ = DATA[data]
    tells_inputs = model == "autoencoder"  # the outputs have the shape of the inputs
    if task == "autoencoding" and data.strip() in COLUMNS:  # a layer before the model changes the inputs
        return False
    return inputs in MODELS[model] and targets in TASKS[task] and tells_inputs == (task == "autoencoding")


@pytest.fixture
def files(own_folder):
    from PIL import Image

    draw = np.random.default_rng(0)
    rows = [f"{a:.3f},{b:.3f},{color},{old},{warm},{kind}" for a, b, color, old, warm, kind in zip(
        draw.normal(size=60), draw.normal(size=60), draw.choice(["red", "blue"], 60), draw.integers(0, 2, 60),
        draw.integers(0, 2, 60), draw.choice(["yes", "no"], 60), strict=True,
    )]  # fmt: skip
    (own_folder / "rows.csv").write_text("\n".join(["a,b,color,old,warm,kind", *rows, ""]))
    (own_folder / "texts.csv").write_text("text,kind\n" + "this is good,yes\nthat was bad,no\n" * 30)
    (own_folder / "text.txt").write_text("the cat sat on the mat. " * 60)
    np.save(own_folder / "tokens.npy", draw.integers(0, 50, 2000).astype(np.uint16))
    np.savez(own_folder / "rows.npz", x=draw.normal(size=(60, 4)), y=np.arange(60) % 3)
    for name, number in itertools.product(("cat", "dog"), range(15)):
        folder = own_folder / "pictures" / name
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (12, 12, 3), dtype=np.uint8)).save(folder / f"{number}.png")


def composed(*words):
    return composed_with(composer([]), words)


@functools.cache
def chosen(group, name):
    """Compose an option once, as a composition takes a second."""
    return composed(f"{group}={name}", *(SMALL.get(name, []) if group == "model" else []))[group]


def three_steps(whole, data):
    """Return the losses of three steps, and the values of a split."""
    check(whole, probe())
    parts = prepare_training(whole, torch.device("cpu"), data)
    step = make_step(parts.model, parts.task, optimizer=parts.optimizer, precision=parts.precision)
    epochs = itertools.chain.from_iterable(parts.train.epoch(number) for number in itertools.count())
    losses = [float(step((batch,))["loss"]) for batch in itertools.islice(epochs, 3)]
    values = evaluate(parts.kept_model, parts.task, parts.val.epoch(0), precision=parts.precision)
    return losses, values


def some_of(data):
    """Return the pairs of a model and a task to test with the data."""
    return list(itertools.product(MODELS, TASKS))[5 * list(DATA).index(data) % 12 :: 12]


@pytest.mark.slow
@pytest.mark.parametrize("data", DATA)
def test_pair_trains_or_says_why_not(data, files):
    base = composed("device=cpu", "train.batch_size=10", "data.num_workers=0", f"data={data.strip()}", *DATA[data][2])
    prepared = prepare_data(base, torch.device("cpu"))
    wrong = []
    for model, task in some_of(data):
        cfg = base.copy()
        with open_dict(cfg):
            cfg.model, cfg.task = chosen("model", model), chosen("task", task)
        try:
            losses, values = three_steps(cfg, prepared)
        except RunnerError as error:
            is_clear = all(problem.source and problem.message and problem.help for problem in error.problems)
            if suits(data, model, task) or not is_clear:
                wrong.append(f"{model} {task}: {error}")
            continue
        except Exception as error:
            wrong.append(f"{model} {task}: {type(error).__name__}: {error}")
            continue
        if not suits(data, model, task) and data not in ALIKE:
            wrong.append(f"{model} {task}: it trains")
        if not np.isfinite([*losses, *values.values()]).all():
            wrong.append(f"{model} {task}: {losses}, {values}")
    for batches in prepared.loaders.values():
        batches.close()
    assert not wrong, "\n".join(wrong)


def test_pairs_cover_each_data_model_task():
    from runner.config.compose import CONF

    known = {"data": {name.strip() for name in DATA}, "model": set(MODELS), "task": set(TASKS)}
    #: options that need another package, fit only one other option, or are user-defined
    apart = {"data": set(), "model": {"timm", "huggingface", "gan"}, "task": {"own", "adversarial"}}
    for group, names in known.items():
        assert {path.stem for path in (CONF / group).glob("*.yaml")} == names | apart[group]
