"""Metrics over a whole split equal scikit-learn's for any batches, and nothing in a batch reads the device."""

import math

import numpy as np
import pytest
import torch
from refused import problems_of
from simulated import run_simulated
from sklearn import metrics as sk
from torch import nn

from runner.config.instantiate import build
from runner.config.packages import install
from runner.device.placement import place
from runner.device.precision import make_precision
from runner.errors import RunnerError
from runner.inspection.host_reads import HostReads
from runner.tasks.classification import Classification
from runner.tasks.metric_names import CLASSES, NAMED, is_rising, metrics_for
from runner.tasks.metrics import MAX_VALUES, make_metrics
from runner.tasks.regression import Regression
from runner.training.evaluate import evaluate, make_eval_step

CPU = torch.device("cpu")
F1 = {"_target_": "torchmetrics.classification.MulticlassF1Score", "num_classes": 4}


def classes(count, rows=257):
    draw = torch.Generator().manual_seed(count)
    targets = torch.randint(count, (rows,), generator=draw)
    return torch.randn(rows, count, generator=draw) + 1.2 * torch.eye(count)[targets], targets


def measured(task, inputs, targets, size=50, **settings):
    batches = zip(inputs.split(size), targets.split(size), strict=True)  # the last one is smaller
    return evaluate(nn.Identity(), task, batches, precision=make_precision("fp32", device=CPU), **settings)


def multilabel(edges):
    """Return logits and targets of three labels, each of which another share of the rows has."""
    logits, _ = classes(3)
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(9))
    return logits, (logits + noise > torch.tensor(edges)).float()


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")  # from sklearn
def test_metrics_of_absent_classes_and_labels_ignore_them():
    logits, targets = classes(4)
    logits, targets = logits[targets != 2], targets[targets != 2]
    found = measured(Classification(num_classes=4, metrics=["auroc", "balanced_accuracy"]), logits, targets)
    said, true, sure = logits.argmax(1).numpy(), targets.numpy(), logits.double().softmax(1).numpy()
    expected = np.mean([sk.roc_auc_score(true == label, sure[:, label]) for label in (0, 1, 3)])
    assert found["auroc"] == pytest.approx(expected, abs=1e-6)
    assert found["balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(true, said), abs=1e-6)
    logits, targets = multilabel([0.0, math.inf, 0.0])
    task = Classification(kind="multilabel", num_classes=None, num_outputs=3, metrics=["auroc"])
    sure, true = logits.double().sigmoid().numpy(), targets.numpy()
    expected = np.mean([sk.roc_auc_score(true[:, label], sure[:, label]) for label in (0, 2)])
    assert measured(task, logits, targets)["auroc"] == pytest.approx(expected, abs=1e-6)
    task = Classification(kind="multilabel", num_classes=None, num_outputs=1, metrics=["f1", "auroc"])
    expected = sk.f1_score(targets[:, 0].numpy(), (logits[:, 0] > 0).numpy())
    assert measured(task, logits[:, :1], targets[:, :1])["f1"] == pytest.approx(expected, abs=1e-6), "of one label"


@pytest.mark.parametrize("count", [2, 4])
def test_auroc_of_one_class_is_nan(count):
    logits, targets = classes(count)
    task = Classification(num_classes=count, metrics=["auroc", "balanced_accuracy"])
    found = measured(task, logits[targets == 1], targets[targets == 1])
    assert math.isnan(found["auroc"]) and found["balanced_accuracy"] == pytest.approx(found["accuracy"])
    again = measured(task, logits, targets)
    assert again["auroc"] == measured(Classification(num_classes=count, metrics=["auroc"]), logits, targets)["auroc"]


def reported(*batches):
    """Evaluate a task that reports these values, batch by batch."""
    each = iter(batches)

    def task(model, batch):
        return {name: torch.tensor(value) for name, value in next(each).items()}

    return measured(task, torch.ones(4, 1), torch.ones(4), size=2)


@pytest.mark.parametrize("second", [{"loss": 3.0, "extra": 1.0}, {"other": 3.0}, {}])
def test_batches_with_other_values_are_refused(second):
    assert reported({"loss": 1.0, "a": 10.0}, {"a": 20.0, "loss": 3.0}) == {"loss": 2.0, "a": 15.0}
    with pytest.raises(RunnerError, match="the values of a batch are"):
        reported({"loss": 1.0}, second)


def test_task_may_be_a_loss_of_torch():
    class Loss(nn.CrossEntropyLoss):
        def forward(self, model, batch):
            return {"loss": super().forward(model(batch[0]), batch[1])}

    logits, targets = classes(4)
    expected = sk.log_loss(targets, logits.double().softmax(1))
    assert measured(Loss(weight=torch.ones(4)), logits, targets)["loss"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e9])
@pytest.mark.parametrize("width", [1, 2])
def test_metrics_without_a_unit_ignore_the_unit(unit, width):
    torch.manual_seed(0)
    true = torch.randn(50, width) + 3
    said = true + torch.randn(50, width)
    task = Regression(num_outputs=width, metrics=["r2", "explained_variance"])
    found = measured(task, said * unit, true * unit)
    assert found["r2"] == pytest.approx(sk.r2_score(true, said), rel=1e-4)
    assert found["explained_variance"] == pytest.approx(sk.explained_variance_score(true, said), rel=1e-4)


def test_of_one_row_there_is_no_r2():
    task = Regression(num_outputs=1, metrics=["r2"])
    assert math.isnan(measured(task, torch.ones(1, 1), torch.zeros(1, 1))["r2"])
    assert measured(task, torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [3.0]]))["r2"] == pytest.approx(0.5)


@pytest.mark.parametrize(("width", "mean"), [(3, 0.0), (1, 5000.0)], ids=["three", "far from 0"])
def test_regression_metrics_equal_scikit_learns(width, mean):
    draw = torch.Generator().manual_seed(width)
    targets = mean + torch.randn(257, width, generator=draw)
    outputs = targets + 0.3 * torch.randn(257, width, generator=draw)
    found = measured(Regression(num_outputs=width, metrics=["r2", "mape", "explained_variance"]), outputs, targets)
    true, said = targets.double().numpy(), outputs.double().numpy()
    assert found["r2"] == pytest.approx(sk.r2_score(true, said), abs=1e-6)
    assert found["mape"] == pytest.approx(sk.mean_absolute_percentage_error(true, said), rel=1e-6)
    assert found["explained_variance"] == pytest.approx(sk.explained_variance_score(true, said), abs=1e-6)
    assert found["rmse"] == pytest.approx(math.sqrt(sk.mean_squared_error(true, said)), rel=1e-5)


def of_each_class(score, true, said):  # columns of 0 and 1
    return np.mean([score(true[:, at], said[:, at]) for at in range(true.shape[1])])


def specificity(true, said):
    return sk.recall_score(true, said, pos_label=0)


def calibration_error(true, sure, bins=15):
    most, right = sure.max(1), sure.argmax(1) == true
    place = np.minimum((most * bins).astype(int), bins - 1)
    return sum(abs(right[place == at].sum() - most[place == at].sum()) for at in range(bins)) / len(true)


def expected_of_classes(kind, logits, true):
    if kind == "multilabel":
        said, sure = (logits > 0).astype(int), torch.from_numpy(logits).double().sigmoid().numpy()
    else:
        said, sure = logits.argmax(1), torch.from_numpy(logits).double().softmax(1).numpy()
    columns, average = [true, said], "macro"  # of 0 and 1
    if kind == "binary":
        sure, average = sure[:, 1], "binary"
    elif kind == "multiclass":
        columns = [np.eye(logits.shape[1], dtype=int)[each] for each in columns]
    scores = {"f1": sk.f1_score, "precision": sk.precision_score, "recall": sk.recall_score, "iou": sk.jaccard_score}
    found = {name: score(true, said, average=average) for name, score in scores.items()} | {
        "specificity": specificity(*columns) if kind == "binary" else of_each_class(specificity, *columns),
        "auroc": sk.roc_auc_score(true, sure, multi_class="ovr"),
        "average_precision": sk.average_precision_score(columns[0], sure),
    }
    if kind == "multilabel":
        found["exact_match"] = sk.accuracy_score(true, said)
    elif kind == "multiclass":
        found |= {"mcc": sk.matthews_corrcoef(true, said), "kappa": sk.cohen_kappa_score(true, said)}
        found |= {f"top{count}": sk.top_k_accuracy_score(true, sure, k=count) for count in (3, 5)}
        found["balanced_accuracy"] = sk.balanced_accuracy_score(true, said)
        found["calibration_error"] = calibration_error(true, sure)
    return found


def expected_of_numbers(said, true):
    said, true = said.astype(float)[:, 0], true.astype(float)[:, 0]
    return {
        "r2": sk.r2_score(true, said),
        "mape": sk.mean_absolute_percentage_error(true, said),
        "smape": np.mean(2 * np.abs(said - true) / (np.abs(said) + np.abs(true))),
        "explained_variance": sk.explained_variance_score(true, said),
        "pearson": np.corrcoef(true, said)[0, 1],
        "spearman": np.corrcoef(true.argsort().argsort(), said.argsort().argsort())[0, 1],
    }


@pytest.mark.parametrize(
    ("kind", "outputs"), [("binary", 2), ("multiclass", 7), ("multilabel", 3), ("regression", 1), ("autoencoding", 1)]
)
def test_every_short_name_has_scikit_learns_number(kind, outputs):
    logits, targets = classes(outputs)
    logits = logits[:, :1] + 2 if outputs == 1 else logits
    if kind == "multilabel":
        logits, targets = multilabel([-0.9, 0.0, 1.4])  # macro and micro would be equal otherwise
    elif outputs == 1:
        targets = logits + 0.5 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(9))
    else:
        targets = torch.where(targets == 1, torch.zeros_like(targets), targets) if kind == "multiclass" else targets
        targets[:5] = 1  # a rare one
    names = [name for name in NAMED if NAMED[name].kinds == CLASSES] if kind == "binary" else metrics_for(kind)
    if kind == "multilabel":
        task = Classification(metrics=names, kind=kind, num_classes=None, num_outputs=3)
    elif outputs > 1:
        task = Classification(metrics=names, num_classes=outputs)
    else:
        task = Regression(num_outputs=1, metrics=dict(make_metrics(names, kind=kind, num_outputs=1).items()))
    found = measured(task, logits, targets)
    arrays = logits.numpy(), targets.numpy()
    expected = expected_of_classes(kind, *arrays) if outputs > 1 else expected_of_numbers(*arrays)
    assert kind == "autoencoding" or expected.keys() == set(names)
    assert {name: found[name] for name in names} == {name: pytest.approx(expected[name], abs=1e-5) for name in names}


def test_interrupted_evaluation_leaves_nothing_for_the_next():
    logits, targets = classes(4)
    task = Classification(num_classes=4, metrics=["f1", "auroc"])
    whole = measured(task, logits, targets)
    judge = make_eval_step(task, precision=make_precision("fp32", device=CPU))

    def breaks_off():
        yield logits[:50], targets[:50]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(nn.Identity(), task, breaks_off(), precision=make_precision("fp32", device=CPU), eval_step=judge)
    judge(nn.Identity(), (logits[:9], targets[:9]))  # leaves values in the task
    assert measured(task, logits, targets) == whole


def test_many_rows_are_passed_on_before_the_end(monkeypatch):
    monkeypatch.setattr("runner.tasks.metrics.MAX_WAITING", 500)  # three batches of 200 at a time
    logits, targets = classes(4)
    task = Classification(num_classes=4, metrics=["f1"])
    expected = sk.f1_score(targets.numpy(), logits.argmax(1).numpy(), average="macro")
    assert measured(task, logits, targets)["f1"] == pytest.approx(expected, abs=1e-6)
    task.metrics["f1"].update(logits, targets)  # more than 500 at once
    assert task.metrics["f1"]._num == 0


class Own:
    def reset(self):
        self.sum, self.rows = 0.0, 0

    def update(self, predictions, targets):
        self.sum, self.rows = self.sum + (predictions.argmax(1) == targets).sum(), self.rows + len(targets)

    def compute(self):
        return self.sum / self.rows


def hits(predictions, targets):
    return (predictions.argmax(1) == targets).float().mean()


def test_custom_object_and_function_count_each_row_the_same():
    logits, targets = classes(4)
    found = measured(Classification(num_classes=4, metrics={"own": Own(), "mean": hits}), logits, targets)
    assert found["own"] == found["mean"] == pytest.approx(found["accuracy"], rel=1e-6)


def test_function_gets_a_whole_split_or_is_not_called():
    logits, targets = classes(2)

    def f1(said, true):
        assert len(said) == len(targets)
        right = (said.argmax(1) == 1) & (true == 1)
        return 2 * right.sum() / ((said.argmax(1) == 1).sum() + (true == 1).sum())

    task = Classification(num_classes=2, metrics={"own": f1})
    expected = pytest.approx(sk.f1_score(targets.numpy(), logits.argmax(1).numpy()))
    assert measured(task, logits, targets, 7)["own"] == expected
    assert task.metrics["own"].compute() is None


@pytest.mark.parametrize("name", NAMED)
def test_named_metric_has_its_direction(name):
    assert is_rising(f"val/{name}") == NAMED[name].is_rising


def test_a_value_for_each_class_is_named_by_it():
    logits, targets = classes(4)
    task = build({"_target_": "runner.tasks.Classification", "num_classes": 4,
                  "metrics": {"f1": {**F1, "average": "none"}}}, key="task")  # fmt: skip
    found = measured(task, logits, targets, labels=("a cat", "dog/wolf", "ox", "ant"))
    expected = sk.f1_score(targets.numpy(), logits.argmax(1).numpy(), average=None)
    assert [name for name in found if name.startswith("f1")] == ["f1_a_cat", "f1_dog_wolf", "f1_ox", "f1_ant"]
    assert [value for name, value in found.items() if "f1" in name] == pytest.approx(expected.tolist(), abs=1e-6)
    assert "f1_0" in measured(task, logits, targets)


def test_metrics_that_are_not_curves_are_refused():
    logits, targets = classes(4)
    with pytest.raises(RunnerError, match="0-d tensor"):
        measured(Classification(num_classes=4, metrics={"own": lambda said, true: said}), logits, targets)
    table = build(
        {"_target_": "torchmetrics.classification.MulticlassConfusionMatrix", "num_classes": 4}, key="metrics"
    )
    with pytest.raises(RunnerError, match=r"\(4, 4\)"):
        measured(Classification(num_classes=4, metrics={"table": table}), logits, targets)
    logits, targets = classes(MAX_VALUES + 1)
    many = build({**F1, "num_classes": MAX_VALUES + 1, "average": "none"}, key="metrics")
    with pytest.raises(RunnerError, match="average=macro"):
        measured(Classification(num_classes=MAX_VALUES + 1, metrics={"f1": many}), logits, targets)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Classification(num_classes=3, metrics=["f2", "cohen_kappa", "jaccard"]),
        lambda: Classification(num_classes=3, metrics="aucroc"),
        lambda: Classification(num_classes=3, metrics=["top5"]),
        lambda: Classification(metrics=["f1"]),
        lambda: Classification(num_classes=3, metrics={"f1": "f1"}),
        lambda: Classification(num_classes=3, metrics={"loss": hits}),
        lambda: Classification(num_classes=3, metrics={"a/b": hits}),
        lambda: Classification(num_classes=3, metrics={"items": hits}),
        lambda: Classification(num_classes=3, metrics={"own": Own}),
        lambda: Classification(num_classes=3, metrics=[F1]),
        lambda: Regression(num_outputs=1, metrics=["auroc"]),
        lambda: Regression(num_outputs=1, metrics={"rmse": hits}),
    ],
    ids=range(12),
)
def test_wrong_metrics_are_refused(make, messages):
    messages(problems_of(make))


def test_without_torchmetrics_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torchmetrics", None)
    monkeypatch.setitem(__import__("sys").modules, "torchmetrics.classification", None)
    assert problems_of(Classification, num_classes=3, metrics=["f1"])[0].help == f"run `{install('metrics')}`"


@pytest.mark.parametrize("name", ["text.bert.BERTScore", "image.fid.FrechetInceptionDistance", "classification.os"])
def test_torchmetrics_that_download_are_refused(name):
    with pytest.raises(RunnerError):
        build({"_target_": f"torchmetrics.{name}"}, key="task.metrics.x")


@pytest.mark.parametrize(
    "metrics", [["f1", "auroc", "top3", "mcc", "calibration_error"], {"own": hits}], ids=["torchmetrics", "own"]
)
def test_no_batch_reads_the_device(device, metrics):
    logits, targets = classes(4)
    task = place(Classification(num_classes=4, metrics=metrics), device)
    judge = make_eval_step(task, precision=make_precision("fp32", device=device))
    batch = logits.to(device), targets.to(device)
    with HostReads(device) as watch:
        for _ in range(2):
            judge(nn.Identity(), batch)
    assert [str(read) for read in watch.reads] == []


def gathered(device):
    logits, targets = classes(4)
    numbers = Regression(num_outputs=4, metrics=["r2", "explained_variance", "mape"])
    named = ["f1", "auroc", "mcc", "top3"]
    weighted = Classification(num_classes=4, class_weights=[1.0, 2.0, 3.0, 4.0], metrics=named)
    found = {}
    for task, own in ((numbers, torch.eye(4)[targets]), (weighted, targets)):
        batches, precision = [(logits.to(device), own.to(device))], make_precision("fp32", device=device)
        found[task.name] = evaluate(nn.Identity(), place(task, device), batches, precision=precision)
    return found


@pytest.mark.slow
def test_metrics_of_a_device_equal_the_cpus():
    """It has no float64."""
    found, expected = run_simulated("mps", gathered), gathered(CPU)
    for task, values in expected.items():
        assert found[task] == pytest.approx(values, rel=1e-5)
