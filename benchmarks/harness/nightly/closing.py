"""The end of a night: one verdict over all its steps, the summary, and what the next night goes on from.

Knows which steps a green night needs. Refuses to know how they ran.
"""

import dataclasses
import datetime
from collections.abc import Iterator

from benchmarks.harness.files import write_whole
from benchmarks.harness.nightly.fleet import members
from benchmarks.harness.nightly.folder import SUMMARY, Night, read_night
from benchmarks.harness.nightly.missed import MAX_AGE_HOURS
from benchmarks.harness.nightly.plan import Places, history_step
from benchmarks.harness.nightly.site import show_newest
from benchmarks.harness.nightly.state import State, load_state, save_state
from benchmarks.harness.nightly.status import Said, Status, gravest
from benchmarks.harness.nightly.telling import summary

_JUDGED = ("counts", "compare")
_NEEDED = ("measure", "report", "publish")


def close_night(status: Status, places: Places, now: datetime.datetime) -> Night:
    """Say what the night came to. What is committed comes before the word that it is finished."""
    said = gravest(said_by(status))
    write_whole(status.folder / SUMMARY, summary(status, said, places.results, now))
    machine = status.told["machine"]
    save_state(places.results, machine, next_state(load_state(places.results, machine), status, said, now))
    status.finish(said, now)
    show_newest(places, members(places.results, now, MAX_AGE_HOURS))
    return read_night(status.folder)


def said_by(status: Status) -> Iterator[Said]:
    """What each step has to say about HEAD; what a green night needs and has not is no data."""
    why = dict(status.told["skipped"]).get(status.told["head"])
    if why is not None:
        yield "no data", f"no data: HEAD does not build: {why}"
    if status.told.get("moved"):
        yield "no data", "no data: another commit was checked out meanwhile, and benchmarks are the checkout's"
    for name in (*_JUDGED, history_step(status.told["head"]), *_NEEDED):
        step = status.steps.get(name)
        if step is None:
            yield "no data", f"no data: {name} was not done"
        elif step.said is not None:
            yield step.said
        elif step.state not in ("done", "not needed") or name in _JUDGED:
            yield "no data", f"no data: {name} {step.state}, {step.why}"


def next_state(before: State, status: Status, said: Said, now: datetime.datetime) -> State:
    """HEAD becomes the baseline only of a night that found nothing wrong.

    A commit that asv failed on is given up, unless it is HEAD; one that there was no time for is tried again.
    """
    told, steps = status.told, status.steps
    ended = {c for c in told["new"] if (step := steps.get(history_step(c))) and step.state != "out of time"}
    left = [c for c in told["new"] if c not in ended and c not in dict(told["skipped"])]
    of_head = steps.get(history_step(told["head"]))
    if of_head is not None and of_head.state not in ("done", "not needed"):
        left.insert(0, told["head"])
    is_good = said[0] in ("same", "better")
    return dataclasses.replace(
        before,
        last_good=told["head"] if is_good else before.last_good or told["base"],
        last_measured=told["head"],
        left=tuple(left),
        at=now.isoformat(timespec="seconds"),
    )
