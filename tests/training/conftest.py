"""The background thread of a training, for tests of what works with one."""

import pytest

from runner.training.background import Background


@pytest.fixture
def background():
    background = Background()
    yield background
    background.close()
