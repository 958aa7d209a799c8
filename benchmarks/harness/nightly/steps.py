"""Does steps one after the other, within the time that a night has, and writes down what became of each.

Knows a deadline, the runner and the night's record. Refuses to know what the steps are.
"""

import datetime
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from benchmarks.harness.nightly.history import WhyNot
from benchmarks.harness.nightly.runner import Command, Ended, Hear, Runner, last_line
from benchmarks.harness.nightly.status import Said, Status, Step

CLOSING_S = 600.0
"""What a cheap step that closes the night may take after the deadline."""


class Tools(NamedTuple):
    """What a night works with, so that a test can do without processes and clocks."""

    runner: Runner
    why_not_built: WhyNot
    now: Callable[[], datetime.datetime]
    clock: Callable[[], float]
    say: Hear


class Steps:
    """The steps of one night. One that came to its end before the night was killed is not done again."""

    def __init__(self, status: Status, tools: Tools, max_s: float) -> None:
        self.status, self._tools = status, tools
        self._end_s = tools.clock() + max_s

    @property
    def left_s(self) -> float:
        return self._end_s - self._tools.clock()

    def run(
        self,
        name: str,
        words: Sequence[str],
        *,
        good: Collection[int] = (0,),
        environment: Mapping[str, str] | None = None,
        closes: bool = False,
        judged: Callable[[Ended], Said] | None = None,
    ) -> bool:
        """Whether the step is done, now or before. `good` are the exit statuses of one that did its work."""
        if self.status.has_done(name):
            return self.status.steps[name].state == "done"
        limit_s = max(self.left_s, CLOSING_S) if closes else self.left_s
        if limit_s <= 0:
            self._end(name, Step(state="out of time", why="the night was over before it could begin"))
            return False
        log = self.status.folder / "logs" / f"{name.replace(' ', '-')}.txt"
        self._tools.say(f"{name}: begins, {limit_s / 3600:.1f} h are left")
        ended = self._tools.runner.run(
            Command(words=words, log=log, limit_s=limit_s, environment=environment or {}),
            lambda pid, created: self.status.keep(name, Step(state="running", process=(pid, created))),
        )
        self._end(name, _step_of(ended, good, last_line(log), judged))
        return self.status.steps[name].state == "done"

    def spare(self, name: str, why: str, said: Said | None = None) -> None:
        """A step that there is no need for, or nothing to do it with."""
        if not self.status.has_done(name):
            self._end(name, Step(state="not needed", why=why, said=said))

    def _end(self, name: str, step: Step) -> None:
        self.status.keep(name, step)
        told = step.said[1] if step.said else step.why
        self._tools.say(f"{name}: {step.state} after {step.seconds:.0f} s{f', {told}' if told else ''}")


def _step_of(ended: Ended, good: Collection[int], last: str, judged: Callable[[Ended], Said] | None) -> Step:
    if ended.is_out_of_time:
        return Step(state="out of time", seconds=ended.seconds, why="the night was over before it came to its end")
    is_good = ended.returncode in good
    why = "" if is_good else f"exit status {ended.returncode}: {last[:300]}"
    said = judged(ended) if judged is not None and is_good else None
    return Step(
        state="done" if is_good else "failed", returncode=ended.returncode, seconds=ended.seconds, why=why, said=said
    )
