"""What a study claimed and what speaks for or against it: the verdicts, and the intervals that decide.

Knows numbers with intervals. Refuses to decide where an interval holds both: "cannot tell".
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from benchmarks.harness.report import number_text
from benchmarks.harness.stats import Estimate, Interval, paired_ratio, quantile, quantile_interval

Verdict = Literal["holds", "holds in part", "does not hold", "cannot tell"]

ALIKE = 0.05
"""Two times within five percent of each other are alike: a host drifts by as much between two cases."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """In the study's words, and what speaks for or against it in ours.

    `artefact` names what made the published figure, where that is the way of measuring and not the thing measured.
    """

    text: str
    verdict: Verdict
    evidence: str
    artefact: str = ""

    def __str__(self) -> str:
        made = f"\n    artefact: {self.artefact}" if self.artefact else ""
        return f'{self.verdict}: "{self.text}"\n    {self.evidence}{made}'


def side(interval: Interval, limit: float, *, above: bool) -> Verdict:
    """Whether everything that the interval allows lies on that side of the limit, or everything on the other."""
    if interval.low is None or interval.high is None or interval.low <= limit <= interval.high:
        return "cannot tell"
    return "holds" if (interval.low > limit) == above else "does not hold"


def equality(interval: Interval, tolerance: float) -> Verdict:
    """Whether a ratio is 1 for all that matters: surely so within the tolerance, surely not so beyond it."""
    if interval.low is None or interval.high is None:
        return "cannot tell"
    least, most = 1 / (1 + tolerance), 1 + tolerance
    if interval.low > most or interval.high < least:
        return "does not hold"
    return "holds" if least <= interval.low and interval.high <= most else "cannot tell"


def median_of(values: Sequence[float]) -> Estimate:
    """The median of some runs with its interval."""
    return Estimate(value=quantile(values, 0.5), interval=quantile_interval(values, 0.5), num_samples=len(values))


def ratio_of(above: Sequence[float | None], below: Sequence[float | None]) -> Estimate:
    """Sample by sample, where both sides have one."""
    pairs = [(a, b) for a, b in zip(above, below, strict=False) if a is not None and b is not None]
    return paired_ratio([a for a, _ in pairs], [b for _, b in pairs])


def told(found: Estimate, factor: float = 1.0) -> str:
    """For people: the value times `factor`, with its interval where there is one."""
    if found.value is None:
        return "undefined"
    low, high = found.interval.low, found.interval.high
    ends = "" if low is None or high is None else f" [{number_text(low * factor)}, {number_text(high * factor)}]"
    return number_text(found.value * factor) + ends
