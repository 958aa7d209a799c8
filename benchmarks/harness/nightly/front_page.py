"""The page that leads to the others: asv's, and the newest night of each machine.

Knows links and colours. Refuses to know what is on the pages.
"""

import html
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.files import write_whole
from benchmarks.harness.nightly.fleet import Member

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


def write_front_page(site: Path, fleet: Sequence[Member]) -> None:
    """The first page of `site`, with a row for each machine, those of one kind together."""
    ordered = sorted(fleet, key=lambda each: (each.sku, each.machine))
    write_whole(site / "index.html", _PAGE.format(machines="\n".join(_row(site, each) for each in ordered)))


def _row(site: Path, member: Member) -> str:
    folder, verdict = f"machines/{member.machine}", member.verdict
    there = [name for name in ("report.html", "summary.md") if (site / folder / name).is_file()]
    links = ", ".join(f'<a href="{folder}/{name}">{name.partition(".")[0]}</a>' for name in there)
    kind, machine, commit, finished, headline = map(html.escape, (member.sku, member.machine, *_of_night(member)))
    return (
        f'<tr><td>{kind}<td>{machine}<td><b class="{verdict.replace(" ", "-")}">{verdict}</b><td>{commit}'
        f"<td>{finished}<td>{headline} {f'({links})' * bool(links)}"
    )


def _of_night(member: Member) -> tuple[str, str, str]:
    commit, _, headline = member.told
    finished = (member.night.finished or "") if member.night else ""
    return commit, f"{finished[:16].replace('T', ' ')} UTC" if finished else "never", headline
