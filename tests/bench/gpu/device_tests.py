"""A plugin for pytest that selects the tests that take the `device` fixture, and prints a failure immediately."""

import os


def pytest_collection_modifyitems(config, items):
    others = [item for item in items if "device" not in item.fixturenames or "device" in _parameters(item)]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


def pytest_runtest_logreport(report):
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid}\n{report.longreprtext[-4000:]}", flush=True)


def _parameters(item) -> dict:
    return getattr(getattr(item, "callspec", None), "params", {})
