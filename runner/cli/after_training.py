"""A verb's words go in, Hydra's flags sorted out of them; its work is done, and its exit code comes out. Imports nothing heavy."""

from __future__ import annotations

from runner.cli.options import ParsedWords, check_keys, explained, last_value

HELP = ("--help", "-h")


def help_of(verb: str) -> int:
    """Prints what a verb takes."""
    print(explained(verb))
    return 0


def do(asked: ParsedWords, flags: list[str], overrides: list[str]) -> int:
    """Runs the verb. Raises: RunnerError for a person's mistakes."""
    check_keys(asked.verb, overrides)
    given = asked.flags
    if asked.verb == "evaluate":
        from runner.runs.evaluate import evaluate  # torch, as all below

        return evaluate(asked.run, overrides, as_json="--json" in given, tracked="--track" in given)
    if asked.verb == "predict":
        from runner.runs.predict import predict

        return predict(
            asked.run,
            given["--input"],
            given["--output"],
            batch_size=asked.number("--batch-size", 1024),
            keep="--keep" in given,
            device=last_value(overrides, "device"),
            precision=last_value(overrides, "train.precision"),
        )
    if asked.verb == "export":
        from runner.runs.export import export

        return export(asked.run, given["--format"], given.get("--output"), predictions="--predictions" in given)
    if asked.verb == "serve":
        from runner.runs.serve import serve

        return serve(asked.run, asked.number("--port", 5001, most=65535), predictions="--predictions" in given)
    if asked.verb == "register":
        from runner.runs.register import register

        return register(asked.run, given["--name"], overrides, alias=given.get("--alias"), again="--again" in given)
    return _find_rate(asked, flags, overrides)


def _find_rate(asked: ParsedWords, flags: list[str], overrides: list[str]) -> int:
    from runner.plan.lr_find import find_rate

    return find_rate(
        flags,
        overrides,
        num_steps=asked.number("--steps", 100, least=10),
        lowest=asked.amount("--from", 1e-7),
        highest=asked.amount("--to", 10.0),
        as_json="--json" in asked.flags,
    )
