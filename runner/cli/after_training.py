"""Runs a verb after training (evaluate, predict, ...), and returns its exit code. Imports nothing heavy.

Called with the verb's words parsed, and Hydra's flags sorted out of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from runner.cli import answer
from runner.cli.options import ParsedWords, check_keys
from runner.config.identity import key_of
from runner.errors import RunnerError, at_once, without_password

#: what reads a flag's number, by the flag: each is of one verb
NUMBERS: dict[str, Callable[[ParsedWords], Any]] = {
    "--batch-size": lambda asked: asked.number("--batch-size", 1024),
    "--port": lambda asked: asked.number("--port", 5001, most=65535),
    "--step": lambda asked: asked.number("--step", 0) or None,
    "--steps": lambda asked: asked.number("--steps", 100, least=10),
    "--from": lambda asked: asked.amount("--from", 1e-7),
    "--to": lambda asked: asked.amount("--to", 10.0),
    "--seconds": lambda asked: asked.amount("--seconds", 30.0),
}


def do(asked: ParsedWords, flags: list[str], overrides: list[str]) -> int:
    """Runs the verb. Raises: RunnerError for a person's mistakes: those in the words all at once, before anything is loaded."""
    numbers = [partial(read, asked) for flag, read in NUMBERS.items() if flag in asked.flags]
    at_once(asked.check, partial(check_keys, asked.verb, overrides), *numbers)
    try:
        return _do(asked, flags, overrides)
    except RunnerError as error:
        raise _retold(error, asked) from error


def _retold(error: RunnerError, asked: ParsedWords) -> RunnerError:
    from runner.runs import find  # numpy

    if not asked.run:
        return error
    try:
        folder = find.locate(asked.run, verb=asked.verb)
    except RunnerError:
        return error
    files = {"--input", "--output"}  # which are found from here
    flags = [(name, str(Path(value).absolute()) if name in files else value) for name, value in asked.flags.items()]
    return find.retold(error, folder, asked.verb, [*filter(None, chain(*flags)), *asked.rest])


def _do(asked: ParsedWords, flags: list[str], overrides: list[str]) -> int:
    given = asked.flags
    if asked.verb == "evaluate":
        from runner.runs.evaluate import evaluate  # torch, as all below

        found = evaluate(asked.run, overrides, tracked="--track" in given)
        uris = [word for word in overrides if key_of(word) == "tracking.uri"]
        if uris and "--track" not in given:
            print(f"note: {without_password(uris[-1])} hears nothing of this: --track sends it there")
        answer.give(found)
    elif asked.verb == "predict":
        from runner.runs.predict import predict

        files, size, keep = (given["--input"], given["--output"]), NUMBERS["--batch-size"](asked), "--keep" in given
        answer.give(predict(asked.run, *files, batch_size=size, keep=keep, overrides=overrides))
    elif asked.verb == "export":
        from runner.runs.export import export

        answer.give(export(asked.run, given["--format"], given.get("--output"), predictions="--predictions" in given))
    elif asked.verb == "serve":
        from runner.runs.serve import serve

        port, predictions = NUMBERS["--port"](asked), "--predictions" in given
        return serve(asked.run, port, predictions=predictions, ready=answer.give)
    elif asked.verb == "register":
        from runner.runs.register import register

        alias, again = given.get("--alias"), "--again" in given
        answer.give(register(asked.run, given["--name"], overrides, alias=alias, again=again))
    elif asked.verb == "explain":
        from runner.runs.explain.explain import explain

        answer.give(explain(asked.run, overrides, step=NUMBERS["--step"](asked)))
    elif asked.verb == "tune":
        from runner.plan.tune import tune

        seconds, name, precision = NUMBERS["--seconds"](asked), given.get("--name"), "--precision" in given
        answer.give(tune(flags, overrides, seconds=seconds, name=name, precision=precision))
    else:
        from runner.plan.lr_find import find_rate

        num_steps, lowest, highest = (NUMBERS[flag](asked) for flag in ("--steps", "--from", "--to"))
        answer.give(find_rate(flags, overrides, num_steps=num_steps, lowest=lowest, highest=highest))
    return 0
