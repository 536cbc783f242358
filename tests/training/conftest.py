"""The background thread of a training, for tests of the parts that use it."""

import pytest

from runner.training.background import Background


@pytest.fixture
def background():
    background = Background()
    yield background
    background.close()
