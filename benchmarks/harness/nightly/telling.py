"""What people read of a night: a summary in Markdown, with the verdict first and the command that comes next.

Knows how a night reads. Refuses to judge it.
"""

import datetime
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.markdown import escaped, table
from benchmarks.harness.nightly.plan import Asked, given_words, history_step
from benchmarks.harness.nightly.status import Said, Status, Step

_MOST_COMMITS = 20


def summary(status: Status, said: Said, results: Path, now: datetime.datetime) -> str:
    """The whole of it: verdict, steps, what was left out and why, what to do, and both comparisons below."""
    told = status.told
    parts = [f"## Nightly on {escaped(told['machine'])}: {said[0]}", f"**{escaped(said[1])}**"]
    parts += [table(("", ""), _facts(status, now))]
    parts += [lines for lines in (_suspects(status, said), _what_to_do(status, said, results)) if lines]
    steps = [_cells(name, step) for name, step in status.steps.items()]
    parts += ["### Steps", table(("step", "state", "verdict", "took", "what it says"), steps)]
    parts += [
        section for section in map("\n".join, (_skipped(status), _not_reached(status), _notes(status))) if section
    ]
    for name in ("counts", "compare"):
        path = status.folder / f"{name}.md"
        if path.is_file():
            parts += [f"### {name.capitalize()}", _without_folded(path.read_text("utf-8"))]
    return "\n\n".join(parts) + "\n"


def _without_folded(told: str) -> str:
    """The gate's Markdown with what changed; the rows that did not lie in the file beside the summary."""
    shown = re.sub(r"<details>.*?</details>\n*", "", told, flags=re.DOTALL)
    return shown.replace("### Benchmarks: ", "", 1).strip()


def _facts(status: Status, now: datetime.datetime) -> Iterator[tuple[str, str]]:
    told = status.told
    began = datetime.datetime.fromisoformat(told["started"])
    yield "machine", f"{told['machine']} ({told['sku']})"
    yield "head", f"{told['head'][:12]} {told['subject']}"
    yield "base", "none" if told["base"] is None else f"{told['base'][:12]}{_relation(status)}"
    yield "began", f"{began:%Y-%m-%d %H:%M} UTC, {(now - began).total_seconds() / 60:.0f} min"
    yield "page, logs", str(status.folder)
    if told["missed"]:
        yield "no data", f"no night on {', '.join(told['missed'])}; the last one ended {told['last_night']}"


def _relation(status: Status) -> str:
    if status.told["base"] == status.told["head"]:
        return ", which is HEAD: nothing is new, it is compared with itself to watch the machine"
    return f", {len(status.told['between'])} commits before" if len(status.told["between"]) != 1 else ", the one before"


def _suspects(status: Status, said: Said) -> str:
    """Who it can have been: the commits since the base that build."""
    skipped = dict(status.told["skipped"])
    among = [each for each in status.told["between"] if each[0] not in skipped]
    if said[0] != "worse" or not among:
        return ""
    told = [f"- {commit[:12]} {escaped(subject)}" for commit, subject in among[:_MOST_COMMITS]]
    more = [f"- and {len(among) - _MOST_COMMITS} more"] if len(among) > _MOST_COMMITS else []
    return "\n".join(["Since the base:" if len(among) > 1 else "It was:", "", *told, *more])


def _what_to_do(status: Status, said: Said, results: Path) -> str:
    told, parts = status.told, list[str]()
    if said[0] in ("worse", "cannot tell") and told["base"] is not None:
        parts += ["To look closer:", "", f"    {shlex.join(_compare_again(told))}", ""]
    if said[0] == "contaminated":
        parts += ["What keeps this machine from measuring well:", "", "    python -m benchmarks doctor", ""]
    if said[0] == "no data":
        parts += [f"What each step has printed lies in `{status.folder / 'logs'}`."]
    if said[0] == "worse":
        command = ["python", "-m", "benchmarks", "nightly", "--results", str(results), "--machine", told["machine"]]
        parts += ["If it is meant to be so, declare it the new baseline of this machine:", ""]
        parts += [f"    {shlex.join([*command, '--accept', told['head'][:12]])}"]
    return "\n".join(parts).rstrip()


def _compare_again(told: Mapping[str, Any]) -> list[str]:
    """What the night has run, with its options."""
    asked = Asked(**told["asked"])
    device = ["--device", asked.device] if asked.device != "auto" else []
    options = [*given_words(asked), *device]
    return ["python", "-m", "benchmarks", "compare", told["base"][:12], told["head"][:12], *options]


def _cells(name: str, step: Step) -> tuple[str, ...]:
    verdict, why = step.said or ("", step.why)
    return name, step.state, verdict, f"{step.seconds:.0f} s", why


def _skipped(status: Status) -> Iterator[str]:
    if status.told["skipped"]:
        yield "### Skipped, because they do not build\n"
    for commit, why in status.told["skipped"]:
        yield f"- {commit[:12]}: {escaped(why)}"


def _not_reached(status: Status) -> Iterator[str]:
    skipped = dict(status.told["skipped"])
    left = [c for c in status.told["new"] if history_step(c) not in status.steps and c not in skipped]
    if left:
        yield "### No data, the night was over\n"
        yield f"- {', '.join(each[:12] for each in left)}: not in asv's history yet, the next night goes on with them"


def _notes(status: Status) -> Iterator[str]:
    if status.told["notes"]:
        yield "### Notes\n"
    yield from (f"- {escaped(note)}" for note in status.told["notes"])
