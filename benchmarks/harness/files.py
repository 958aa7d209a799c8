"""Writes a file as a whole or not at all. Knows paths and text, and refuses to know what is written."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """All or nothing: a kill in the middle leaves the file as it was. Makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    spare = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    spare.write_text(text, "utf-8")
    spare.replace(path)
