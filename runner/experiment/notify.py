"""Posts a notice to `notify.url` when a run or a sweep ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from http.client import HTTPException
from typing import Any
from urllib.request import Request, urlopen

from runner.errors import finite, without_password

SECONDS = 5.0


def notify(url: str | None, text: str, facts: Mapping[str, Any], *, say: Callable[[str], None]) -> None:
    """POST {"text": TEXT, **facts} as JSON, which Slack's incoming webhooks take, too.

    Waits at most SECONDS for each answer of the network. A notice that is not delivered is a line, and no error.

    Args:
        url: A secret; None: nothing is sent.
    """
    if url is None:
        return
    body = json.dumps(finite({"text": text, **facts})).encode()
    try:
        with urlopen(Request(url, body, {"Content-Type": "application/json"}), timeout=SECONDS):
            pass
    except (OSError, HTTPException, ValueError) as error:
        say(f"notify: the notice was not delivered: {without_password(str(error))}")
