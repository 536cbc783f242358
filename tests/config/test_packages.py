import tomllib

from runner.config.packages import EXTRAS, install
from runner.version import PACKAGES

ROOT = PACKAGES


def test_the_packages_are_those_of_the_extras():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {name: tuple(extras[name]) for name in EXTRAS} == EXTRAS


def test_a_bound_is_in_quotes_for_the_shell():
    assert install("search") == 'pip install "optuna>=4.9" cmaes'


def test_no_message_and_no_page_installs_a_strangers_package():
    """`runner` on the public index is another project."""
    found = [path for path in ROOT.rglob("*") if path.suffix in (".py", ".md", ".yaml", ".toml", ".txt")]
    found = [path for path in found if path.relative_to(ROOT).parts[0] in ("runner", "conf", "tests", "README.md")]
    assert len(found) > 300
    said = "runner" + "["  # and as a pattern
    texts = {path: path.read_text().replace("\\", "") for path in found}
    assert not [path for path, text in texts.items() if said in text or "pip install " + "runner" in text]
