"""One night from beginning to end: which steps there are, in the order of what they are worth.

Counts first, which no noise reaches; then the comparison, HEAD's place in asv's history and its page; then the other
new commits, the newest first, for as long as there is time. Knows the order of things. Refuses to know how a step runs
(`steps.py`), which commits it is about (`history.py`) and what is made of it (`closing.py`).
"""

import dataclasses
import datetime
import functools
import shlex

from benchmarks.harness.asv_process import knows_machine
from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.gate.revisions import Revision, has_changed, resolve
from benchmarks.harness.gate.rules import EXIT_CODES
from benchmarks.harness.nightly import asv_store, plan
from benchmarks.harness.nightly.closing import close_night
from benchmarks.harness.nightly.folder import (
    Night,
    name_of_night,
    newest_finished,
    nights_folder,
    nights_of,
    read_night,
)
from benchmarks.harness.nightly.history import look_back
from benchmarks.harness.nightly.judging import said_of_comparison
from benchmarks.harness.nightly.missed import is_of_future, missed_nights
from benchmarks.harness.nightly.plan import Asked, Places
from benchmarks.harness.nightly.runner import end_leftover
from benchmarks.harness.nightly.site import prepare
from benchmarks.harness.nightly.state import load_state
from benchmarks.harness.nightly.status import Status
from benchmarks.harness.nightly.steps import Steps, Tools

_RESUMABLE = datetime.timedelta(hours=24)
_JUDGED = sorted({*EXIT_CODES.values()})


def run_night(asked: Asked, sku: str, places: Places, tools: Tools, max_s: float) -> Night:
    """Run it, or go on with the one that was killed. Raises InstrumentError for what is wrong from the start."""
    _refuse_future(asked, places, tools.now())
    status = _unfinished(asked, places, tools) or _begun(asked, sku, places, tools)
    steps = Steps(status, tools, max_s)
    prepare(places)
    _compare(steps, asked)
    _measure(steps, asked, places)
    _fill_history(steps, asked, places, tools)
    steps.run("publish", plan.publish_command(places.config), closes=True)
    status.told["moved"] = resolve("HEAD", places.root).commit != status.told["head"]
    return close_night(status, places, tools.now())


def _refuse_future(asked: Asked, places: Places, now: datetime.datetime) -> None:
    """Nights are told apart by their time: beside one of the future, tonight's would never be the newest."""
    found = nights_of(places.results, asked.machine)
    if found and is_of_future(read_night(found[-1]).began_at, now):
        raise InstrumentError(
            f"it is {now:%Y-%m-%d %H:%M} UTC, and the newest night is {found[-1].name}: a clock is wrong, or was. Set "
            f"this machine's, or else: rm -r {shlex.quote(str(found[-1]))}"
        )


def _unfinished(asked: Asked, places: Places, tools: Tools) -> Status | None:
    """The newest night, where it was killed, is young, and is about the same commit in the same way."""
    found = nights_of(places.results, asked.machine)
    status = Status.read(found[-1]) if found else None
    if status is None or status.told["finished"] is not None:
        return None
    _end_leftovers(status, tools)
    began = datetime.datetime.fromisoformat(status.told["started"])
    is_same = (status.told["head"], status.told["asked"]) == (
        resolve("HEAD", places.root).commit,
        dataclasses.asdict(asked),
    )
    if not is_same or tools.now() - began > _RESUMABLE:
        tools.say(
            f"{status.folder.name} was not finished and stays so: it is of another commit, too old, or other options"
        )
        return None
    tools.say(f"goes on with {status.folder.name}")
    return status


def _end_leftovers(status: Status, tools: Tools) -> None:
    """Whether the killed night is gone on with or not: what it has left would compute beside the next one."""
    for name, step in status.steps.items():
        if step.state == "running" and step.process and end_leftover(*step.process):
            tools.say(f"{name}: ended what the killed night had left running")


def _begun(asked: Asked, sku: str, places: Places, tools: Tools) -> Status:
    now, state = tools.now(), load_state(places.results, asked.machine)
    last = newest_finished(places.results, asked.machine)
    tools.say("looks which commits build")
    history = look_back(places.root, state, tools.why_not_built)
    is_other = has_changed(Revision(name="HEAD", commit=history.head.commit), places.root, "benchmarks", "conftest.py")
    notes = [*history.notes, *(["the checkout's benchmarks are not HEAD's: they have changes"] if is_other else [])]
    told = {
        "machine": asked.machine,
        "sku": sku,
        "head": history.head.commit,
        "subject": history.head.subject,
        "base": history.base,
        "new": [*history.new],
        "again": [*state.left],
        "between": [[*each] for each in history.between],
        "skipped": [[commit, why] for commit, why in history.skipped.items()],
        "missed": missed_nights(None if last is None else last.finished_at, now),
        "last_night": None if last is None else last.finished,
        "notes": notes,
        "asked": dataclasses.asdict(asked),
        "started": now.isoformat(timespec="seconds"),
    }
    name = name_of_night(now, history.head.commit)
    status = Status(nights_folder(places.results, asked.machine) / name, told)
    status.write()
    return status


def _head_builds(status: Status) -> bool:
    return status.told["head"] not in dict(status.told["skipped"])


def _compare(steps: Steps, asked: Asked) -> None:
    told, night = steps.status.told, steps.status.folder
    base, head = told["base"], told["head"]
    commands = {"counts": plan.counts_command, "compare": plan.compare_command}
    for name, command in commands.items():
        if base is None or not _head_builds(steps.status):
            why = "there is no earlier commit that builds" if _head_builds(steps.status) else "HEAD does not build"
            steps.spare(name, why, ("no data", f"no data: {why}, nothing could be compared"))
            continue
        judged = functools.partial(said_of_comparison, night / f"{name}.json")
        steps.run(name, command(base, head, night, asked), good=_JUDGED, judged=judged)


def _measure(steps: Steps, asked: Asked, places: Places) -> None:
    """HEAD alone: its place in asv's history, and the page."""
    if not _head_builds(steps.status):
        return
    head, night = steps.status.told["head"], steps.status.folder
    _run_asv(steps, head, asked, places)
    if steps.run("measure", plan.measure_command(night, asked)):
        steps.run("report", plan.report_command(night), closes=True)


def _fill_history(steps: Steps, asked: Asked, places: Places, tools: Tools) -> None:
    """The other new commits, for as long as there is time."""
    skipped = dict(steps.status.told["skipped"])
    for commit in steps.status.told["new"]:
        if steps.left_s <= 0 or commit in skipped:
            continue
        why = tools.why_not_built(commit)
        if why:
            steps.status.note("skipped", [commit, why])
            tools.say(f"{commit[:12]} is skipped, it does not build: {why}")
        else:
            _run_asv(steps, commit, asked, places)


def _run_asv(steps: Steps, commit: str, asked: Asked, places: Places) -> None:
    """A commit has one place in the history: what an earlier night has measured is not measured again."""
    name = plan.history_step(commit)
    if steps.status.has_done(name):
        return
    is_owed = commit in steps.status.told["again"] or name in steps.status.steps
    if not is_owed and asv_store.has_measured(places.store, asked.machine, commit):
        steps.spare(name, "asv has measured it before")
        return
    if not knows_machine(asked.machine):
        steps.run("asv machine", plan.name_machine_command(asked.machine))
    for said in asv_store.remove_unreadable(places.store, asked.machine):
        steps.status.note("notes", said)
    command, environment = plan.history_command(places.config, commit, asked.machine), plan.history_environment(asked)
    steps.run(name, command, environment=environment)
