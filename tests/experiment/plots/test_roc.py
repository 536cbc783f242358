import numpy as np
import pytest

from runner.experiment.plots.scores import rates


@pytest.mark.parametrize("levels", [2, 7, 10_000])
@pytest.mark.parametrize("share", [0.02, 0.5, 0.97])
def test_the_curves_and_their_areas_are_those_of_sklearn(levels, share):
    from sklearn import metrics

    draw = np.random.default_rng(0)
    truth = draw.random(3000) < share
    scores = ((draw.random(3000) + truth) * levels).round().astype(np.float32) / levels
    false, hit, precision = rates(truth, scores)
    theirs = metrics.roc_curve(truth, scores, drop_intermediate=False)
    assert np.allclose(false, theirs[0]) and np.allclose(hit, theirs[1])
    area = (np.diff(false) * (hit[1:] + hit[:-1])).sum() / 2
    assert area == pytest.approx(metrics.roc_auc_score(truth, scores))
    area = (np.diff(hit) * precision[1:]).sum()
    assert area == pytest.approx(metrics.average_precision_score(truth, scores))
    theirs, recall, _ = metrics.precision_recall_curve(truth, scores)
    assert np.allclose(precision[::-1], theirs) and np.allclose(hit[::-1], recall)
