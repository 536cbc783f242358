import pytest
import torch
from refused import problems_of
from torch import nn
from torch.nn import functional as F

from runner.tasks.classification import Classification
from runner.tasks.task import is_predicting

LOGITS = torch.tensor([[2.0, 0.0], [0.0, 2.0], [2.0, 0.0]])
TARGETS = torch.tensor([0, 1, 1])


def judged(task, outputs, targets):
    return {name: value.item() for name, value in task(nn.Identity(), (outputs, targets)).items()}


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_classification_reports_cross_entropy_and_accuracy(smoothing):
    values = judged(task := Classification(label_smoothing=smoothing), LOGITS, TARGETS)
    assert list(values) == ["loss", "accuracy"] and is_predicting(task)
    assert values["loss"] == pytest.approx(F.cross_entropy(LOGITS, TARGETS, label_smoothing=smoothing).item())
    assert values["accuracy"] == pytest.approx(2 / 3)


class Wide(nn.Module):
    def __init__(self, num_classes=2):
        super().__init__()

    def forward(self, inputs):
        return inputs


@pytest.mark.parametrize(
    ("model", "outputs"),
    [(Wide(), LOGITS), (nn.Identity(), LOGITS), (Wide(), LOGITS.argmax(1)), (Wide(), torch.zeros(3, 3, 1))],
    ids=range(4),
)
def test_wrong_outputs_name_the_models_fix(model, outputs, messages):
    messages(problems_of(Classification(num_classes=3), model, (outputs, TARGETS)))


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)], ids=["(B,)", "(B, 1)"])
@pytest.mark.parametrize("settings", [{}, {"label_smoothing": 0.1}, {"class_weights": [0.5, 2.0]}])
def test_one_logit_equals_two_logits(shape, settings):
    logit = torch.tensor([-1.0, 0.5, 3.0])
    task, two = Classification(num_classes=2, **settings), torch.stack([torch.zeros(3), logit], 1)
    assert judged(task, logit.reshape(shape), TARGETS) == judged(task, two, TARGETS)
    outputs = task.outputs(nn.Identity(), (logit.reshape(shape), TARGETS))
    torch.testing.assert_close(task.predictions(outputs)[:, 1], logit.sigmoid())
    if not settings:
        expected = F.binary_cross_entropy_with_logits(logit, TARGETS.float()).item()
        assert judged(task, logit, TARGETS)["loss"] == pytest.approx(expected, rel=1e-6)


def test_soft_targets_count_by_their_parts_and_the_stronger_class_is_right():
    soft = torch.tensor([[0.7, 0.3], [0.6, 0.4], [0.2, 0.8]])
    values = judged(Classification(num_classes=2), LOGITS, soft)
    assert values["loss"] == pytest.approx(F.cross_entropy(LOGITS, soft).item())
    assert values["accuracy"] == pytest.approx(1 / 3)
    assert Classification(num_classes=2).targets((LOGITS, soft)).tolist() == [0, 0, 1]


def test_balanced_weights_give_each_class_the_same_part():
    task = Classification(num_classes=3, class_counts=[8, 2, 0], class_weights="balanced")
    assert task.class_weights.tolist() == [0.625, 2.5, 1.0]
    assert dict(task.named_buffers()).keys() == {"class_weights"} and not task.state_dict()
    logits, targets = torch.randn(10, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0] * 8 + [1] * 2)
    by_row = F.cross_entropy(logits, targets, reduction="none")
    expected = (by_row[:8].mean() + by_row[8:].mean()) / 2
    assert judged(task, logits, targets)["loss"] == pytest.approx(expected.item(), rel=1e-6)


def test_weighted_batches_add_up_to_the_whole():
    task = Classification(num_classes=2, class_weights=[1.0, 5.0])
    whole = judged(task, LOGITS, TARGETS)["loss"]
    parts = [judged(task, LOGITS[cut], TARGETS[cut])["loss"] for cut in (slice(0, 1), slice(1, 3))]
    assert whole == pytest.approx((parts[0] + 2 * parts[1]) / 3)


def test_several_labels_a_row_are_a_question_each():
    logits, targets = torch.tensor([[2.0, -1.0, 0.5], [-1.0, 3.0, 1.0]]), torch.tensor([[1.0, 0, 0], [0, 1, 1]])
    task = Classification(kind="multilabel", num_classes=None, num_outputs=3)
    values = judged(task, logits, targets)
    assert values["loss"] == pytest.approx(F.binary_cross_entropy_with_logits(logits, targets).item())
    assert values["accuracy"] == pytest.approx(5 / 6)
    torch.testing.assert_close(task.predictions(logits), logits.sigmoid())
    assert task.targets((None, targets)).dtype == torch.int64
    smoothed = Classification(kind="multilabel", label_smoothing=0.2, class_weights=[1.0, 2.0, 0.0])
    expected = F.binary_cross_entropy_with_logits(logits, targets * 0.8 + 0.1, torch.tensor([1.0, 2.0, 0.0]))
    assert judged(smoothed, logits, targets)["loss"] == pytest.approx(expected.item())


def test_pixels_have_classes_too():
    logits, targets = torch.randn(2, 3, 4, 4), torch.randint(3, (2, 4, 4))
    values = judged(Classification(num_classes=3), logits, targets)
    assert values["loss"] == pytest.approx(F.cross_entropy(logits, targets).item())
    assert values["accuracy"] == pytest.approx((logits.argmax(1) == targets).float().mean().item())


@pytest.mark.parametrize(
    "settings",
    [
        {"num_classes": None},
        {"kind": "multiclass", "num_classes": None},
        {"kind": "multilabel", "num_classes": 3},
        {"kind": "multi-label"},
        {"label_smoothing": 1.0},
        {"class_weights": "balanced"},
        {"class_weights": "ballanced", "num_classes": 2},
        {"class_weights": [1.0], "num_classes": 2},
        {"class_weights": [1.0, -1.0], "num_classes": 2},
        {"plots": ["residuals"]},
        {"plots": ["confusoin"]},
    ],
    ids=str,
)
def test_classification_with_unsuitable_settings_is_refused(settings, messages):
    messages(problems_of(Classification, **settings))


def test_the_pictures_that_are_asked_for():
    assert Classification().plots[0] == "confusion"
    assert Classification(plots=False).plots == ()
    assert Classification(plots=["roc"]).plots == ("roc",)
