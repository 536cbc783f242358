"""The seed of random tests: FUZZ_SEED, or the current commit, so that each commit draws other cases, and the same ones each time."""

import os
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path

from hypothesis import HealthCheck, seed, settings


def _commit():
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:  # git is missing
        return ""
    return done.stdout.strip()


SEED = os.environ.get("FUZZ_SEED") or _commit() or "0"
NUM_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
AGAIN = f"fuzz: FUZZ_SEED={SEED} draws the same cases again"


def often(least):
    """Return settings for `least` examples, or FUZZ_EXAMPLES, drawn from the seed."""
    how = settings(
        max_examples=NUM_EXAMPLES or least,
        derandomize=False,  # Hypothesis would enable it in CI
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    return lambda test: seed(SEED)(how(test))


def drawn(name: str, cases: Sequence, num: int) -> list:
    """Return `num` of the cases, others with each commit, or all cases with FUZZ_EXAMPLES. name: Of the draw."""
    return list(cases) if NUM_EXAMPLES else random.Random(f"{SEED} {name}").sample(list(cases), num)
