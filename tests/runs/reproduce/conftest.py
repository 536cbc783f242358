"""Each test here has a separate directory and run."""

import pytest


@pytest.fixture(autouse=True)
def here():
    """Replaces the fixture of tests/runs, which changes to the directory of the real runs."""
