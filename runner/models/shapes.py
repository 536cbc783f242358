"""Refuses inputs whose shape a model doesn't take, and finds sizes that divide them."""

from __future__ import annotations

from collections.abc import Sequence

from runner.errors import RunnerError

#: what a row is called, by its number of dimensions
FORMS = {
    1: "tokens of shape (length,)",
    2: "signals of shape (channels, length)",
    3: "images of shape (channels, height, width)",
}
TOKENS, SIGNALS, IMAGES = FORMS


def check_shape(
    shape: Sequence[int], *, model: str, takes: Sequence[int], vocab_size: int | None = None, takes_tokens: bool = False
) -> None:
    """Refuse a row that the model doesn't take.

    Args:
        takes: The numbers of dimensions; with a vocab_size only tokens.
        takes_tokens: Whether the model takes tokens if `model.vocab_size` is set.
    """
    wanted = takes if vocab_size is None else (TOKENS,)
    if len(shape) in wanted:
        return
    source, forms = f"model={model} on inputs of shape {tuple(shape)}", [FORMS[num_dims] for num_dims in wanted]
    if vocab_size is not None:
        problem = f"with `model.vocab_size` `{model}` needs {forms[0]}"
        raise RunnerError.suggest(source, problem, ["model.vocab_size=null"])
    if takes_tokens and len(shape) == TOKENS:
        problem = f"`{model}` needs {forms[0]}, or tokens and `model.vocab_size`"
        fix = "use `model.vocab_size=N` for N tokens, `model=mlp` for tables, or inputs saved as `x[:, None]`"
        raise RunnerError.of(source, problem, fix)
    has_convolution = len(shape) in (SIGNALS, IMAGES)
    ways = ["model=cnn"] if has_convolution else ["model=mlp"]
    raise RunnerError.suggest(source, f"`{model}` needs {' or '.join(forms)}", ways)


def nearest_divisors(number: int, *sizes: int) -> list[int]:
    """Return the two whole numbers next to `number` that divide all sizes, the nearest first."""
    divisors = [each for each in range(1, min(sizes) + 1) if not any(size % each for size in sizes)]
    return sorted(divisors, key=lambda each: abs(each - number))[:2]
