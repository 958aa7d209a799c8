"""How far a session has come, and how long it may still take.

Knows the cases of a session in their order, an injected clock, and what each of them took the last time. Refuses to
know what a case is and where the words go.
"""

from collections.abc import Callable, Mapping, Sequence


class Pace:
    """One for a session. Until there is anything to estimate from, it only counts."""

    def __init__(self, cases: Sequence[str], last_s: Mapping[str, float], now_s: Callable[[], float]) -> None:
        """`last_s` holds the seconds that cases took in an earlier session; it may know others, and lack some."""
        self._cases, self._last_s, self._now_s = list(cases), dict(last_s), now_s
        self._start_s = self._first_sample_s = now_s()
        self._at = 0
        self.taken_s: dict[str, float] = {}

    def begin(self, case: str) -> None:
        self._at, self._start_s = self._cases.index(case), self._now_s()

    def end(self) -> None:
        self.taken_s[self._cases[self._at]] = self._now_s() - self._start_s

    def say(self, phase: str, number: int, total: int) -> str:
        """The words for a run that begins now: number `number` of at most `total` in its phase."""
        if (phase, number) == ("sample", 1):
            self._first_sample_s = self._now_s()
        left_s = self._left_s(number, total) if phase == "sample" else None
        told = f"case {self._at + 1} of {len(self._cases)}, {phase} {number} of {total}"
        return told if left_s is None else f"{told}, about {_words(left_s)} left"

    def _left_s(self, number: int, total: int) -> float | None:
        """The rest of this case, at the pace of its samples so far, and the cases after it."""
        of_case = self._last_s.get(self._cases[self._at])
        if number > 1:
            of_case = (self._now_s() - self._first_sample_s) / (number - 1) * (total - number + 1)
        others = [self._expected_s(case) for case in self._cases[self._at + 1 :]]
        if of_case is None or None in others:
            return None
        return of_case + sum(each for each in others if each is not None)

    def _expected_s(self, case: str) -> float | None:
        """What the case took the last time; of a new one, what those of this session took on average."""
        if case in self._last_s or not self.taken_s:
            return self._last_s.get(case)
        return sum(self.taken_s.values()) / len(self.taken_s)


def _words(seconds: float) -> str:
    """Rounded: it is an estimate."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min"
