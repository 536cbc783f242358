"""Nothing goes in; Hydra knows our launchers and sweepers, afterwards. Their settings stand in conf/hydra/."""

from __future__ import annotations

from hydra.core.plugins import Plugins

from runner import sweep


def register() -> None:
    """Makes the classes plugins. Hydra 1.3 takes them from the package hydra_plugins alone; 1.4 dropped that (hydra#3015)."""
    in_its_package = getattr(Plugins, "is_in_toplevel_plugins_module", None)
    if in_its_package is not None and not in_its_package("runner.sweep.Grid"):
        ours_too = staticmethod(lambda name: name.startswith("runner.sweep.") or in_its_package(name))
        Plugins.is_in_toplevel_plugins_module = ours_too  # type: ignore[assignment]
    for name in sweep.__all__:
        Plugins.instance().register(plugin := getattr(sweep, name))
        Plugins.instance().class_name_to_class[f"runner.sweep.{name}"] = plugin  # Hydra has it by its module alone
