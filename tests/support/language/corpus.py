"""Nothing goes in; sentences.txt comes out, with its entropy: what no model can learn of it.

`python tests/support/language/corpus.py` writes the file beside this one anew, the same each time, and prints the figures.
The grammar has no recursion and no two derivations of one text, so that the entropy of a text is that of the choices
which make it: H(symbol) = H(its choice) + the mean over its choices of what stands in them.
"""

from __future__ import annotations

import math
import random
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("sentences.txt")
NUM_CHARACTERS = 200_000
SEED = 7


def words(text: str) -> list[tuple[float, list[str]]]:
    """A few are frequent, many are rare."""
    return [(1 / (rank + 2), [word]) for rank, word in enumerate(text.split())]


#: of each symbol, weights and what stands for it; what is no symbol is text
GRAMMAR: dict[str, list[tuple[float, list[str]]]] = {
    "LINE": [
        (5, ["CLAUSE", ".\n"]),
        (2, ["CLAUSE", " ", "AND", " ", "CLAUSE", ".\n"]),
        (1, ["WHEN", "TIME", ", ", "CLAUSE", ".\n"]),
    ],
    "AND": words("and but so"),
    "WHEN": [(1, ["in the "]), (1, ["every "])],
    "TIME": words("morning evening winter summer spring"),
    "CLAUSE": [(3, ["ONE", " ", "DOES"]), (2, ["MANY", " ", "DO"])],
    "ONE": [(3, ["the ", "KIND", "BEING"]), (2, ["a ", "KIND", "BEING"])],
    "MANY": [(3, ["the ", "KIND", "BEING", "s"]), (2, ["NUMBER", " ", "KIND", "BEING", "s"])],
    "NUMBER": words("two three many seven"),
    "KIND": [(3, []), (2, ["QUALITY", " "])],
    "QUALITY": words("small old quiet brown happy tired young kind"),
    "BEING": words("cat farmer dog sailor bird teacher horse baker goat doctor hen miller duck painter"),
    "THING": words("lamp boat stone basket letter bell ladder wheel drum table"),
    "DOES": [(2, ["SEEING", "s ", "OBJECT"]), (1, ["GOING", "s", "PLACE"])],
    "DO": [(2, ["SEEING", " ", "OBJECT"]), (1, ["GOING", "PLACE"])],
    "SEEING": words("see find follow hear call"),
    "GOING": words("sleep wait sing run rest dance"),
    "OBJECT": [(1, ["ONE"]), (2, ["the ", "THING"]), (1, ["a ", "THING"])],
    "PLACE": [(2, []), (1, [" near the ", "THING"]), (1, [" in the ", "GROUND"])],
    "GROUND": words("garden forest village field market"),
}


def drawn(symbol: str, draw: random.Random) -> tuple[str, float]:
    """A text, and its information in nats."""
    if symbol not in GRAMMAR:
        return symbol, 0.0
    weights = [weight for weight, _ in GRAMMAR[symbol]]
    chosen = draw.choices(range(len(weights)), weights)[0]
    parts = [drawn(part, draw) for part in GRAMMAR[symbol][chosen][1]]
    information = -math.log(weights[chosen] / sum(weights))
    return "".join(text for text, _ in parts), information + sum(more for _, more in parts)


@cache
def expected(symbol: str) -> tuple[float, float]:
    """The mean length in characters, and the entropy in nats."""
    if symbol not in GRAMMAR:
        return len(symbol), 0.0
    total = sum(weight for weight, _ in GRAMMAR[symbol])
    length = entropy = 0.0
    for weight, parts in GRAMMAR[symbol]:
        share = weight / total
        length += share * sum(expected(part)[0] for part in parts)
        entropy += share * (sum(expected(part)[1] for part in parts) - math.log(share))
    return length, entropy


def entropy_rate() -> float:
    """Nats per character: no model's loss on new text stays below it."""
    length, entropy = expected("LINE")
    return entropy / length


def corpus() -> tuple[str, float]:
    """The text, and what it holds in nats per character."""
    draw, lines, length, total = random.Random(SEED), [], 0, 0.0
    while length < NUM_CHARACTERS:
        line, information = drawn("LINE", draw)
        lines.append(line)
        length, total = length + len(line), total + information
    return "".join(lines), total / length


if __name__ == "__main__":
    text, information = corpus()
    FILE.write_text(text, newline="\n")
    print(f"{FILE.name}: {len(text):,} characters of {len(set(text))} kinds")
    print(f"entropy {entropy_rate():.4f} nats a character; this text holds {information:.4f}")
