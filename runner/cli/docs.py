"""`docs`: prints a page of the documentation; in a terminal formatted, in a pipe as Markdown."""

from __future__ import annotations

from pathlib import Path

from runner.command import Arguments, Facts
from runner.errors import RunnerError, nearest
from runner.version import CONF, HERE


def topics() -> dict[str, Path]:
    """Return the page of each topic. The pages of packages are next to their code."""
    pages = {"how-it-works": HERE / "README.md", "options": CONF / "README.md", "changelog": HERE / "CHANGELOG.md"}
    pages |= {page.parent.name: page for page in sorted(HERE.glob("*/README.md")) if page.parent != CONF}
    return {page.stem: page for page in sorted((HERE / "docs").rglob("*.md"))} | pages


def show(arguments: Arguments) -> Facts:
    """Print the page of a topic, or the topics with their titles.

    Raises:
        RunnerError: There is no such topic.
    """
    pages = topics()
    if not arguments.values:
        titles = {
            name: page.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for name, page in pages.items()
        }
        width = max(map(len, titles))
        print("\n".join(f"{name:<{width}}  {title}" for name, title in titles.items()))
        return {"topics": titles}
    topic = arguments.values[0]
    if topic not in pages:
        problem, otherwise = f"there is no page `{topic}`", f"use one of {', '.join(pages)}"
        ways = [f"python -m runner docs {hit}" for hit in nearest(topic, pages)]
        raise RunnerError.suggest(f"docs {topic}", problem, ways, otherwise, code="unknown-option")
    text = pages[topic].read_text(encoding="utf-8")
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    if console.is_terminal:
        console.print(Markdown(text))
    else:
        print(text, end="")
    return {"topic": topic, "text": text}
