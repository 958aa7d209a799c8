"""Says how far a long command has come: a line that follows on a terminal, plain lines elsewhere.

Knows a terminal. Refuses to know what takes so long.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple


class Progress(NamedTuple):
    """`now` tells the moment and is forgotten with the next one; `step` tells what stays."""

    now: Callable[[str], None]
    step: Callable[[str], None]


def _forget(text: str) -> None:
    """Say nothing."""


SILENT = Progress(_forget, _forget)


@contextlib.contextmanager
def progress_on_stderr() -> Iterator[Progress]:
    """On a terminal both are shown, elsewhere only what stays."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
    if not console.is_terminal:
        yield Progress(_forget, console.print)
        return
    with console.status("starting") as status:
        yield Progress(status.update, console.print)
