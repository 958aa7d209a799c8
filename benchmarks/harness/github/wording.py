"""The Markdown that people find on GitHub, and the hidden line by which it is found again.

Knows text. Refuses to know how it gets there.
"""

import re
from typing import TYPE_CHECKING
from urllib.parse import quote

if TYPE_CHECKING:
    from benchmarks.harness.nightly.folder import Night

MAX_CHARACTERS = 65_536
"""GitHub takes no longer body."""

_CUT = "> **Cut**: {num:,} characters, and GitHub takes {most:,}. All of it is in the files of the run.\n\n"


def marker(*words: str) -> str:
    """A line that nobody sees. Words are quoted: none can end it."""
    return f"<!-- nanoserve {' '.join(quote(word, safe='') for word in words)} -->"


def is_marked(body: str | None, *words: str) -> bool:
    """Whether a body begins with that marker, or with one that goes on after these words."""
    return (body or "").startswith(marker(*words).removesuffix("-->"))


def whole(head: str, text: str) -> str:
    """`head`, then as much of `text` as fits. What was cut is said first: at the end it might stand inside a block."""
    text = text.replace("\r\n", "\n").strip()
    if len(head) + len(text) + 1 <= MAX_CHARACTERS:
        return f"{head}\n{text}"
    notice = _CUT.format(num=len(text), most=MAX_CHARACTERS)
    room = MAX_CHARACTERS - len(head) - len(notice) - 1
    return f"{head}\n{notice}{text[:room].rpartition(chr(10))[0] or text[:room]}"


def calmed(text: str) -> str:
    """A stranger's text mentions nobody and hides nothing."""
    return re.sub(r"@(?=\w)", "@\u200b", text.replace("<!--", "&lt;!--"))


def about(night: "Night", run_url: str) -> str:
    """Where a night is from, a line."""
    commits = f"`{night.head[:12]}` after `{night.base[:12]}`" if night.base else f"`{night.head[:12]}`"
    run = f" ([run]({run_url}))" if run_url else ""
    return f"Machine `{night.machine}` ({night.sku}), commit {commits}, {night.finished or 'not finished'}{run}"


def body_of(night: "Night", mark: str, explained: str, run_url: str) -> str:
    """Of an issue: what happened, where, what ends it, and the night's own summary."""
    return whole(mark, f"**{night.headline}**\n\n{about(night, run_url)}\n\n{explained}\n\n{night.summary}")


def comment_of(night: "Night", mark: str, told: str, run_url: str) -> str:
    """Of a comment on an issue: a sentence, and the night."""
    return whole(mark, f"{told} {night.headline}\n\n{about(night, run_url)}")
