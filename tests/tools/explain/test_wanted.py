"""The step to explain, and the text about it."""

from pathlib import Path

import pytest

from runner.tools.explain.explain import Wanted


@pytest.mark.parametrize(
    ("step", "every", "said"),
    [
        (20, 10, "train/loss is 0.5 at step 20"),
        (30, 10, "train/loss is nan at step 30"),
        (13, 10, "no train/loss was logged at step 13 (metrics.every=10)"),
        (13, 1, "no train/loss was logged at step 13"),  # lost with a damaged part of the journal
    ],
)
def test_step_without_point_is_not_nan(step, every, said):
    by_step = {10: 1.0, 20: 0.5, 30: float("nan")}
    assert Wanted(Path(), step, is_failure=False, by_step=by_step, every=every).in_words == said
