"""The table of commands: its entries are complete, and another package can add one."""

import json
import re

import pytest

from runner import cli
from runner.cli import table
from runner.cli.table import COMMANDS
from runner.command import Command, Option, amount, number
from runner.errors import RunnerError
from runner.version import HERE

PLUGIN = re.compile(r"```python\n(# my_package.py\n.*?)```", re.DOTALL)
OTHER = """
from runner.cli import Command, Option

def greet(given):
    print("hello", given["--name"], *given.overrides)
    return 3

COMMAND = Command("greet", "Use", "Say hello", greet, options=(Option("--name", "NAME", "Who it is", default="you"),), keys=("",))
"""


@pytest.fixture
def other_package(own_folder, monkeypatch):
    """Install a package like an installer: a module, and its entry points in a .dist-info."""
    (own_folder / "site/other-1.0.dist-info").mkdir(parents=True)
    (own_folder / "site/other_commands.py").write_text(OTHER)
    (own_folder / "site/other-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")

    def install(entries="greet = other_commands:COMMAND"):
        (own_folder / "site/other-1.0.dist-info/entry_points.txt").write_text(f"[runner.commands]\n{entries}\n")

    install()
    monkeypatch.syspath_prepend(str(own_folder / "site"))
    return install


def test_command_of_other_package_runs(other_package, capfd):
    assert cli.main(["greet", "--name", "Ada", "seed=3"]) == 3
    assert capfd.readouterr().out == "hello Ada seed=3\n"
    assert cli.main(["greet", "--nam", "Ada"]) == 2
    assert "--name Ada" in capfd.readouterr().err
    assert cli.main(["greet", "--help"]) == 0
    assert "Usage: python -m runner greet [--name NAME]" in capfd.readouterr().out


def test_command_of_other_package_is_listed(other_package, capfd, monkeypatch):
    assert cli.main(["--help"]) == 0
    assert "  greet      Say hello\n" in capfd.readouterr().out
    monkeypatch.setenv("COMP_LINE", "runner gre")
    assert cli.main(["-sc", "query=bash"]) == 0
    assert "greet" in capfd.readouterr().out.split()
    assert cli.main(["greeet"]) == 2
    assert "python -m runner greet" in capfd.readouterr().err


def test_broken_third_party_command_gives_warning(other_package, capfd):
    other_package(
        "greet = nowhere:COMMAND\nwave = other_commands:greet\nhi = other_commands:COMMAND\ntrain = other_commands:COMMAND"
    )
    assert cli.main(["--help"]) == 0
    out, err = capfd.readouterr()
    assert "warning: the command `greet` can't be loaded from nowhere:COMMAND" in err
    assert "`wave` is left out" in err and "Say hello" not in out
    assert "other_commands:COMMAND is the command `greet`: `hi` is left out" in err
    assert "warning: the command `train` of other_commands:COMMAND has a built-in command's name" in err


def test_mapping_from_command_is_its_json(other_package, own_folder, capfd):
    text = PLUGIN.search((HERE / "README.md").read_text())[1]
    (own_folder / "site/readme_command.py").write_text(text)
    other_package("hello = readme_command:COMMAND")
    assert cli.main(["hello", "a", "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out) == {"run": "a"} and err == "hello a\n"


@pytest.mark.parametrize("command", COMMANDS.values(), ids=lambda command: command.name)
def test_command_entry_is_whole(command, capfd):
    assert command.group in table.GROUPS
    assert len(command.help) < 60 and command.help[0].isupper() and command.help[-1] != "."
    assert callable(command.find_function())
    assert all(option.help and option.help[-1] != "." for option in command.options)
    assert cli.main([command.name, "--help"]) == 0
    shown = capfd.readouterr().out
    assert shown.startswith(f"Usage: python -m runner {command.name}")
    assert all(option.usage in shown for option in command.options)


def test_added_entry_is_a_command(monkeypatch, capfd):
    command = Command(
        "count", "Use", "Count", lambda given: given["--to"], options=(Option("--to", "N", "", number(2, 9)),)
    )
    monkeypatch.setitem(COMMANDS, "count", command)
    assert cli.main(["count", "--to=5"]) == 5
    assert cli.main(["count", "--to", "10", "seed=1"]) == 2
    err = capfd.readouterr().err
    assert "--to 10" in err and "2 to 9" in err and "seed=1" in err
    assert "| `count [--to N]` | Count. |" in table.reference()


@pytest.mark.parametrize("value", ["0", "-1", "x", "inf", "nan"])
def test_amount_out_of_range_is_error(value):
    with pytest.raises(RunnerError):
        amount(Option("--seconds", "SECONDS"), value)
