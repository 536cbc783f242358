"""Run a function once for the same arguments, and repeat its result or exception."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """functools.cache stores no exceptions: after a timeout, each test would start the same slow process again."""

    @functools.cache
    def outcome(*arguments):
        try:
            return function(*arguments), None
        except Exception as error:
            return None, error

    @functools.wraps(function)
    def told(*arguments):
        found, error = outcome(*arguments)
        if error is not None:
            raise error
        return found

    return told
