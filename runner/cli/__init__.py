"""The command line: finds the command that its words ask for, runs it, and returns the exit code."""

from runner.cli.dispatch import main
from runner.cli.table import Command, Option
from runner.cli.train import run

__all__ = ["Command", "Option", "main", "run"]
