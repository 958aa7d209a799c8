"""Judges all times and rates of a comparison together: as a family, and by whether the machine was quiet.

Knows that a launch may be disturbed, that many looks and many quantities are as many chances to be wrong, and that
report-only quantities must not cost the others anything. Refuses to know counts and gaps.
"""

import dataclasses
import math
from collections.abc import Iterator

from benchmarks.harness.gate.evidence import Case, Evidence, Key
from benchmarks.harness.gate.paired import MIN_LAUNCHES, LogRatio, adjusted, over_looks, ratio_over_launches
from benchmarks.harness.gate.rows import Row, Said, said_of_time
from benchmarks.harness.gate.rules import Rules
from benchmarks.harness.metrics import metric
from benchmarks.harness.stats import Estimate, Interval, median

CONTROL_MOVED = 0.10
"""The control kernel is the same work on both sides. So much of a difference is no accident of its placement."""


def timed_rows(evidence: Evidence, rules: Rules) -> Iterator[Row]:
    """A row for every quantity with pairs. Those that gate and those that do not are adjusted apart.

    Raises InstrumentError for more undisturbed launches than the rules plan.
    """
    for is_gated in (True, False):
        keys = [key for key in evidence.pairs if metric(key.metric).gate == is_gated]
        ratios = {key: _ratio(evidence, key, rules) for key in keys}
        ps = adjusted([_p_over_looks(ratio, rules) for ratio in ratios.values()])
        for (key, ratio), p in zip(ratios.items(), ps, strict=True):
            yield _row(evidence, rules, key, ratio, None if ratio.p is None else p)


def _ratio(evidence: Evidence, key: Key, rules: Rules) -> LogRatio:
    """Without a p where the machine was disturbed: such a quantity proves nothing."""
    logs = [pairs.logs(metric(key.metric)) for pairs in evidence.pairs_of(key)]
    found = ratio_over_launches(logs, rules.confidence)
    return dataclasses.replace(found, p=None) if _disturbance(evidence, key, rules) else found


def _p_over_looks(ratio: LogRatio, rules: Rules) -> float:
    """1 for a quantity that cannot be judged yet: it stays a member of its family."""
    if ratio.p is None:
        return 1.0
    if rules.looks_once:
        return ratio.p
    return float(over_looks(ratio.p, ratio.num_launches, first=MIN_LAUNCHES, last=rules.max_launches))


def _row(evidence: Evidence, rules: Rules, key: Key, ratio: LogRatio, p: float | None) -> Row:
    every, of = evidence.pairs_of(key), metric(key.metric)
    base = median([sample for pairs in every for sample in pairs.base])
    head = median([sample for pairs in every for sample in pairs.head])
    disturbance = _disturbance(evidence, key, rules)
    said: Said = ("contaminated", disturbance) if disturbance else said_of_time(of, rules, base, ratio, p)
    return Row(
        key=key, verdict=said[0], why=said[1], is_gated=of.gate, base=base, head=head, ratio=_as_estimate(ratio), p=p,
        num_launches=len(every), num_pairs=sum(len(pairs.base) for pairs in every),
        num_disturbed=len(evidence.contaminated.get(key.of_case, ())),
    )  # fmt: skip


def _disturbance(evidence: Evidence, key: Key, rules: Rules) -> str:
    """Why a quantity proves nothing: too few quiet launches, or a load on one side only. "" where it may."""
    disturbed, num_quiet = evidence.contaminated.get(key.of_case, {}), len(evidence.pairs_of(key))
    if disturbed and (num_quiet < MIN_LAUNCHES or num_quiet < len(disturbed)):
        number, why = next(iter(disturbed.items()))
        return f"{len(disturbed)} of {len(disturbed) + num_quiet} launches were disturbed, launch {number} by: {why}"
    return _load_on_one_side(evidence, key.of_case, rules)


def _load_on_one_side(evidence: Evidence, case: Case, rules: Rules) -> str:
    """Whether the control kernel, which no commit can touch, was slower beside one side, launch after launch."""
    every = evidence.control.get(case, ())
    logs = [[math.log(head / base) for base, head in zip(each.base, each.head, strict=True)] for each in every]
    found = ratio_over_launches(logs)
    if found.value is None or found.p is None or found.p > rules.alpha:
        return ""
    if abs(found.value) < math.log1p(CONTROL_MOVED):
        return ""
    side, slower = ("head" if found.value > 0 else "base"), math.expm1(abs(found.value))
    return f"the control kernel ran {100 * slower:.0f} % slower beside {side}: something else loaded that side only"


def _as_estimate(ratio: LogRatio) -> Estimate:
    logs = (ratio.value, ratio.interval.low, ratio.interval.high)
    value, low, high = (None if log is None else math.exp(log) for log in logs)
    return Estimate(value=value, interval=Interval(low, high), num_samples=ratio.num_launches)
