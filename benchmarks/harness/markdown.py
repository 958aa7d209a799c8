"""Markdown that whatever is put into it cannot break. Knows text, and refuses to know what it says."""

import html
import re
from collections.abc import Iterable, Sequence


def escaped(text: str) -> str:
    """Nothing in a name, a subject or a reason may become a column, a tag, a mention or emphasis."""
    clean = html.escape(" ".join(text.split()), quote=False)
    return "".join(f"\\{each}" if each in "|*_`[]@#~" else each for each in clean)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The headings as they are, the cells so that none ends its column."""
    lines = [headings, ["---"] * len(headings), *([escaped(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plain(text: str) -> str:
    """The same for a terminal, which shows no Markdown: what was escaped is itself again."""
    return re.sub(r"\\([|*_`\[\]@#~])", r"\1", html.unescape(text))
