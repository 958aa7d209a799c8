"""The page that leads to the others: asv's, and the newest night of each machine.

Knows links. Refuses to know what is on the pages.
"""

import html
from pathlib import Path

from benchmarks.harness.files import write_whole
from benchmarks.harness.nightly.folder import Night

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>nanoserve: benchmarks</title>
<style>body {{ font: 16px/1.5 system-ui; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}</style>
<h1>Benchmarks of every night</h1>
<p><a href="asv/index.html">Every series, commit by commit</a></p>
<ul>
{machines}
</ul>
</html>
"""


def write_front_page(site: Path, nights: list[Night]) -> None:
    """The first page of `site`, with a line for each night."""
    write_whole(site / "index.html", _PAGE.format(machines="\n".join(_line(site, night) for night in nights)))


def _line(site: Path, night: Night) -> str:
    folder = f"machines/{night.machine}"
    page = "report.html" if (site / folder / "report.html").is_file() else "summary.md"
    name, told = html.escape(f"{night.machine} ({night.sku})"), html.escape(night.headline)
    return f'<li><a href="{folder}/{page}">{name}</a>: {told}</li>'
