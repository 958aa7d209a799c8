"""The gate for counts: what is exact is compared exactly, and whatever cannot be compared is red.

Knows numbers, the direction in which each is better, and that a missing one is not a good one. Refuses to know
tolerances, noise and where the counts come from: a count that needs a tolerance is no count.
"""

import dataclasses
import math
from collections.abc import Hashable, Iterable, Mapping
from typing import Literal, TypeVar

from benchmarks.harness.errors import InstrumentError

K = TypeVar("K", bound=Hashable)
Better = Literal["lower", "higher"]
Verdict = Literal["worse", "better", "no data"]

NOTHING = "nothing was compared"
"""The key of the only change of a comparison of nothing, which is red."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One count that is not the same in head as in base; a value that is missing, NaN or infinite is None here."""

    key: Hashable
    base: float | None
    head: float | None
    better: Better
    verdict: Verdict

    @property
    def difference(self) -> float | None:
        """Head - base, or None where either is unknown."""
        return None if self.base is None or self.head is None else self.head - self.base

    def __str__(self) -> str:
        if self.key == NOTHING:
            return f"{self.verdict}: {NOTHING}"
        values = f"{_told(self.base)} -> {_told(self.head)}"
        change = "" if self.difference is None else f" ({_whole(self.difference):+,}{_share(self)})"
        return f"{self.verdict}: {_name(self.key)} {values}{change}, {self.better} is better"


def exact_changes(
    base: Mapping[K, float | None] | Mapping[K, int],
    head: Mapping[K, float | None] | Mapping[K, int],
    better: Better | Mapping[K, Better] = "lower",
) -> list[Change]:
    """Every key of either side whose values differ by anything at all, in base's order, then head's.

    `better` is one direction for all keys, or one for each. A key that either side lacks, or where a value is None,
    NaN or infinite, is `no data`. No keys at all give one change, `NOTHING`. Raises InstrumentError for a key without
    a direction.
    """
    keys = list(dict.fromkeys([*base, *head]))
    if not keys:
        return [Change(key=NOTHING, base=None, head=None, better="lower", verdict="no data")]
    found = (_change(key, _finite(base.get(key)), _finite(head.get(key)), _direction(key, better)) for key in keys)
    return [change for change in found if change is not None]


def histogram_changes(base: Mapping[str, int], head: Mapping[str, int]) -> list[Change]:
    """Which entries of two histograms differ, fewer being better; an entry that one side lacks counts 0 there."""
    names = sorted({*base, *head})
    filled = [{name: histogram.get(name, 0) for name in names} for histogram in (base, head)]
    return exact_changes(filled[0], filled[1]) if names else []


def is_red(changes: Iterable[Change]) -> bool:
    """Does any count get worse, or could any not be compared?"""
    return any(change.verdict != "better" for change in changes)


def format_changes(changes: Iterable[Change]) -> str:
    """One line per change, the red ones first; a sentence where there is none."""
    ordered = sorted(changes, key=lambda change: change.verdict == "better")
    return "\n".join(map(str, ordered)) or "every count is the same"


def _change(key: Hashable, base: float | None, head: float | None, better: Better) -> Change | None:
    if base is None or head is None:
        return Change(key=key, base=base, head=head, better=better, verdict="no data")
    if base == head:
        return None
    is_worse = head > base if better == "lower" else head < base
    return Change(key=key, base=base, head=head, better=better, verdict="worse" if is_worse else "better")


def _finite(value: float | None) -> float | None:
    """The value itself, unrounded, or None where it says nothing. Integers of any size are finite."""
    return value if value is not None and (isinstance(value, int) or math.isfinite(value)) else None


def _direction(key: K, better: Better | Mapping[K, Better]) -> Better:
    found = better.get(key) if isinstance(better, Mapping) else better
    if found not in ("lower", "higher"):
        raise InstrumentError(f"{_name(key)} has the direction {found!r}; choose from: lower, higher")
    return found


def _name(key: Hashable) -> str:
    return " ".join(map(str, key)) if isinstance(key, tuple) else str(key)


def _told(value: float | None) -> str:
    return "unknown" if value is None else f"{_whole(value):,}"


def _whole(value: float) -> float:
    """Without a decimal point where there is nothing behind it: a count that went through a file is a float."""
    return int(value) if not isinstance(value, int) and value.is_integer() else value


def _share(change: Change) -> str:
    """The relative change, for the reader only: the verdict does not depend on it."""
    return f", {change.difference / change.base:+.2%}" if change.base and change.difference is not None else ""
