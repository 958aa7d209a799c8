"""What is said of one quantity: its numbers on both sides, their ratio, a verdict and the reason for it.

Knows a metric's direction and floors, through its declaration. Refuses to know the rest of the comparison: what depends
on the family of all quantities (`timed.py`) comes in as a finished p.
"""

import dataclasses
import math

from benchmarks.harness.exact import exact_changes
from benchmarks.harness.gate.evidence import Case, Counts, Key
from benchmarks.harness.gate.paired import MIN_LAUNCHES, LogRatio
from benchmarks.harness.gate.rules import Rules, Verdict
from benchmarks.harness.metrics import Metric, metric
from benchmarks.harness.stats import Estimate, Interval

Said = tuple[Verdict, str]
"""A verdict, and why."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What is said of one quantity, or of a whole case: then `arm` and `metric` of its key are "".

    `base` and `head` are the medians of all undisturbed samples in the metric's unit. `ratio` compares costs, head over
    base: above 1, head is worse. `p` is adjusted for the looks and for the rest of its family.
    """

    key: Key
    verdict: Verdict
    why: str
    is_gated: bool
    base: float | None = None
    head: float | None = None
    ratio: Estimate | None = None
    p: float | None = None
    num_launches: int = 0
    num_pairs: int = 0
    num_disturbed: int = 0

    @property
    def change(self) -> Estimate | None:
        """By what share the number itself went up, or down: below 0 for a rate that is worse."""
        if self.ratio is None or self.ratio.value is None or not self.base:
            return None
        of, base = metric(self.key.metric), self.base
        ends = [end for end in (self.ratio.interval.low, self.ratio.interval.high) if end is not None]
        shares = sorted(_implied(of, base, end) / base - 1 for end in ends)
        interval = Interval(shares[0], shares[1]) if len(shares) == 2 else Interval(None, None)
        value = _implied(of, base, self.ratio.value) / base - 1
        return Estimate(value=value, interval=interval, num_samples=self.ratio.num_samples)


def _implied(of: Metric, base: float, ratio: float) -> float:
    """Head's value when its cost is base's times `ratio`."""
    return of.value_of(of.cost(base) * ratio)


def row_without_numbers(key: Key | Case, said: Said) -> Row:
    """A quantity, or a whole case, that cannot be compared. What a case lacks may always have been gated."""
    if isinstance(key, Key):
        return Row(key=key, verdict=said[0], why=said[1], is_gated=metric(key.metric).gate)
    return Row(key=Key(*key, "", ""), verdict=said[0], why=said[1], is_gated=True)


def row_of_counts(key: Key, counts: Counts) -> Row:
    """A count has neither floor nor tolerance: any growth of its cost is worse, any shrinking better."""
    of = metric(key.metric)
    changes = exact_changes({key: counts.base}, {key: counts.head}, of.better)
    verdict: Verdict = changes[0].verdict if changes else "same"
    why = f"{counts.head - counts.base:+,.15g}; counts have no tolerance" if changes else "the same count"
    ratio = None
    if counts.base > 0 and counts.head > 0:
        costs = of.cost(counts.head) / of.cost(counts.base)
        ratio = Estimate(value=costs, interval=Interval(costs, costs), num_samples=counts.num_launches)
    return Row(
        key=key, verdict=verdict, why=why, is_gated=of.gate, base=counts.base, head=counts.head, ratio=ratio,
        num_launches=counts.num_launches,
    )  # fmt: skip


def is_settled(row: Row, rules: Rules) -> bool:
    """Whether more launches would not change what is said of an undisturbed quantity."""
    if row.verdict != "same" or row.ratio is None or not row.key.metric or metric(row.key.metric).is_exact:
        return row.verdict not in ("cannot tell", "contaminated")
    ends = (row.ratio.interval.low, row.ratio.interval.high)
    early = dataclasses.replace(rules, margin=rules.early_margin)
    return row.base is not None and all(
        end is not None and _is_same(metric(row.key.metric), early, row.base, math.log(end)) for end in ends
    )


def said_of_time(of: Metric, rules: Rules, base: float | None, found: LogRatio, p: float | None) -> Said:
    """The verdict on an undisturbed time or rate, and why. `p` is adjusted; None where it is too early for one."""
    low, high = found.interval.low, found.interval.high
    if found.value is None or low is None or high is None or p is None or base is None:
        return "cannot tell", f"{found.num_launches} undisturbed launches; it takes {MIN_LAUNCHES}"
    is_sure = p <= rules.alpha
    if is_sure and _is_change(of, rules, base, found.value):
        return "worse" if found.value > 0 else "better", "surely changed, by more than its floors"
    if all(_is_same(of, rules, base, end) for end in (low, high)):
        return "same", "surely no change that matters"
    if is_sure:
        return "cannot tell", "surely changed, but by less than its floors or by more"
    return "cannot tell", f"neither surely changed nor surely within {100 * rules.margin:g} % of no change"


def _is_change(of: Metric, rules: Rules, base: float, log: float) -> bool:
    """Whether a change is large enough to be called one: the threshold's, and both floors of the metric."""
    head = _implied(of, base, math.exp(log))
    return abs(log) >= math.log1p(rules.threshold) and (of.is_worse(base, head) or of.is_worse(head, base))


def _is_same(of: Metric, rules: Rules, base: float, log: float) -> bool:
    return abs(log) <= math.log1p(rules.margin) or not _is_change(of, rules, base, log)
