"""Each test here runs in the directory of the real runs."""

import pytest


@pytest.fixture(autouse=True)
def here(at_home):
    return at_home
