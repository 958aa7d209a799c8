"""The page that leads to the others: asv's, and the newest night of each machine.

Knows links and colours. Refuses to know what is on the pages.
"""

import html
from pathlib import Path

from benchmarks.harness.files import write_whole
from benchmarks.harness.nightly.folder import Night

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>nanoserve: benchmarks</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse }}
th, td {{ text-align: left; vertical-align: top; padding: .4rem 1.2rem .4rem 0; border-bottom: 1px solid #8886 }}
b {{ color: #fff; background: #59636e; border-radius: .3rem; padding: .1rem .5rem; white-space: nowrap }}
b.same, b.better {{ background: #1a7f37 }}
b.worse, b.no-data {{ background: #cf222e }}
</style>
<h1>Benchmarks of every night</h1>
<p><a href="asv/index.html">Every series, commit by commit</a></p>
<table>
<tr><th>kind<th>machine<th>verdict<th>commit<th>finished<th>what it says
{machines}
</table>
</html>
"""


def write_front_page(site: Path, nights: list[Night]) -> None:
    """The first page of `site`, with a row for each night, those of one kind of machine together."""
    ordered = sorted(nights, key=lambda night: (night.sku, night.machine))
    write_whole(site / "index.html", _PAGE.format(machines="\n".join(_row(site, night) for night in ordered)))


def _row(site: Path, night: Night) -> str:
    folder, verdict = f"machines/{night.machine}", night.verdict.replace(" ", "-")
    there = [name for name in ("report.html", "summary.md") if (site / folder / name).is_file()]
    links = ", ".join(f'<a href="{folder}/{name}">{name.partition(".")[0]}</a>' for name in there)
    cells = (night.sku, night.machine, night.head[:12], (night.finished or "")[:16].replace("T", " "), night.headline)
    kind, machine, commit, finished, headline = map(html.escape, cells)
    return (
        f'<tr><td>{kind}<td>{machine}<td><b class="{verdict}">{night.verdict}</b><td>{commit}<td>{finished} UTC'
        f"<td>{headline} ({links})"
    )
