"""Each test here has a folder and a run of its own."""

import pytest


@pytest.fixture(autouse=True)
def here():
    """Not the folder of the real runs, which tests/runs has."""
