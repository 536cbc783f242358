"""The words of a command line become one command, and its result an exit code."""

from runner.cli.check_first import CheckFirst
from runner.cli.dispatch import main
from runner.cli.train import run

__all__ = ["CheckFirst", "main", "run"]
