"""The folder of the real runs is the current one of each test here."""

import pytest


@pytest.fixture(autouse=True)
def here(at_home):
    return at_home
