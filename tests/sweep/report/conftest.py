"""Generated sweeps for the tests of the report."""

import pytest
from synthetic_sweep import Folder, grid, search, train


@pytest.fixture
def write():
    """The functions that write a sweep's directory."""

    class Write:
        folder = Folder
        grid, search, train = map(staticmethod, (grid, search, train))

    return Write


@pytest.fixture(scope="session")
def grid_folder(tmp_path_factory):
    return grid(tmp_path_factory.mktemp("grid") / "14-03-11")


@pytest.fixture(scope="session")
def search_folder(tmp_path_factory):
    return search(tmp_path_factory.mktemp("search") / "15-40-00")
