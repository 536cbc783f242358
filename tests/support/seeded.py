"""The seed of random tests: FUZZ_SEED, or the same one each time. FUZZ_EXAMPLES sets the number of examples, and runs all cases."""

import os
import random
from collections.abc import Sequence

from hypothesis import HealthCheck, seed, settings

SEED = os.environ.get("FUZZ_SEED") or "0"
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
    """Return `num` of the cases, the same ones each time, or all with FUZZ_EXAMPLES. name: Of the draw."""
    return list(cases) if NUM_EXAMPLES else random.Random(f"{SEED} {name}").sample(list(cases), num)
