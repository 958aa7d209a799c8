"""The pages: asv's of all machines in a results folder, and the newest page and summary of each beside them.

Knows asv's configuration and where pages go. Refuses to know what is on them. Nothing here is committed.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.errors import ArchiveError, InstrumentError
from benchmarks.harness.files import write_whole
from benchmarks.harness.nightly.fleet import Member
from benchmarks.harness.nightly.front_page import write_front_page
from benchmarks.harness.nightly.plan import Places, publish_command
from benchmarks.harness.nightly.runner import Command, Runner, last_line

PUBLISH_LIMIT_S = 1800.0


def prepare(places: Places) -> Path:
    """Write the configuration that asv measures and publishes with at night, and return it."""
    write_whole(places.config, _config(places.root, places.store, places.site / "asv"))
    places.site.mkdir(parents=True, exist_ok=True)
    return places.config


def publish_fleet(places: Places, runner: Runner, fleet: Sequence[Member]) -> None:
    """Make the pages of every machine in the folder. Raises InstrumentError where asv cannot."""
    config = prepare(places)
    log = places.root / ".asv" / "nightly-publish.txt"
    words = publish_command(config)
    ended = runner.run(Command(words=words, log=log, limit_s=PUBLISH_LIMIT_S), lambda pid, created: None)
    if ended.returncode != 0:
        raise InstrumentError(
            f"merged, but asv publish ended with {ended.returncode}: {last_line(log)} (all of it: {log})"
        )
    show_newest(places, fleet)


def show_newest(places: Places, fleet: Sequence[Member]) -> None:
    """Put the newest night of each machine beside asv's pages, and before all of them the one that leads there."""
    shutil.rmtree(places.site / "machines", ignore_errors=True)
    for member in fleet:
        if member.night is not None:
            _copy_pages(member.night.folder, places.site, member.machine)
    write_front_page(places.site, fleet)


def _config(root: Path, kept: Path, html: Path) -> str:
    """asv's configuration, with the results of all machines of the folder, whichever branch is checked out.

    Raises ArchiveError where the checkout's own cannot be read.
    """
    from asv.util import UserError, load_json

    try:
        told = load_json(str(root / "asv.conf.json"), js_comments=True)
    except (OSError, ValueError, UserError) as error:
        raise ArchiveError(f"{root / 'asv.conf.json'} cannot be read: {error}") from error
    places = {"results_dir": str(kept.absolute()), "html_dir": str(html.absolute())}
    return json.dumps(told | places | {"branches": ["HEAD"]}, indent=1)


def _copy_pages(night: Path, site: Path, machine: str) -> None:
    """Put the page and the summary of a machine's night beside asv's."""
    folder = site / "machines" / machine
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("report.html", "report.csv", "report.md", "summary.md"):
        if (night / name).is_file():
            shutil.copyfile(night / name, folder / name)
