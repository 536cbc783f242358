"""A plugin for pytest that selects the tests that take the `device` fixture."""


def pytest_collection_modifyitems(config, items):
    others = [item for item in items if "device" not in item.fixturenames or "device" in _parameters(item)]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


def _parameters(item) -> dict:
    return getattr(getattr(item, "callspec", None), "params", {})
