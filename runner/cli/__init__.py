"""The words of a command line become one command, and its result an exit code."""

from runner.cli.dispatch import main
from runner.cli.train import run

__all__ = ["main", "run"]
