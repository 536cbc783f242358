"""The command line: turns it into one command of a table, and the result into text, JSON and an exit code."""

from runner.cli.dispatch import main
from runner.command import Arguments, Command, Option

__all__ = ["Arguments", "Command", "Option", "main"]
