"""What gates say of records that `gate_power.py` collected: lock step, asv on anchored and on plain passes, medians.

Knows how each tool turns samples into a finding, and makes comparisons of records: in a row, or drawn. Refuses to know
how the records came about, and how they are shown.
"""

import dataclasses
import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.harness.gate.evidence import Evidence, Key, Pairs
from benchmarks.harness.gate.paired import MIN_LAUNCHES, ratio_over_launches
from benchmarks.harness.gate.rows import is_settled
from benchmarks.harness.gate.rules import Rules
from benchmarks.harness.gate.timed import timed_rows
from benchmarks.harness.metrics import metric
from benchmarks.harness.stats import hodges_lehmann, wilson_interval

LEVELS = (0.0, 2.0, 3.0)
"""Percent by which head is slower."""

NUM_DRAWS, NUM_PASSES = 300, 8
FALSE_ALARMS = 0.01
"""What every gate is allowed: the limits of the others are set so that they raise no more of them."""

Lines = Sequence[Mapping[str, Any]]
"""Records."""

Side = Sequence[Sequence[float]]
"""The samples of some processes."""

Ratio = Callable[[Side, Side], float]
"""By how much head is slower than base in the eyes of a tool; 1 where it sees no difference."""

ByCase = Mapping[str, Sequence[Pairs]]
"""The pairs of each launch."""


@dataclasses.dataclass(frozen=True)
class Rate:
    """How often a gate found something among comparisons of one kind."""

    num_found: int
    num: int

    def __str__(self) -> str:
        if not self.num:
            return "n/a"
        ends = wilson_interval(self.num_found, self.num)
        assert ends.low is not None
        assert ends.high is not None
        return f"{100 * self.num_found / self.num:.0f} % [{100 * ends.low:.0f}, {100 * ends.high:.0f}] of {self.num}"


def planted_and_seen(lines: Lines, name: str) -> Iterator[str]:
    """How much of a planted slowdown lock step sees, over all launches of it, in percent."""
    for percent in LEVELS:
        launches = [launch for of_case in _launches(lines, name, percent).values() for launch in of_case]
        found = ratio_over_launches([pairs.logs(metric(name)) for pairs in launches])
        if found.value is not None and found.interval.low is not None and found.interval.high is not None:
            seen = [100 * math.expm1(each) for each in (found.value, found.interval.low, found.interval.high)]
            interval = f"[{seen[1]:+.2f}, {seen[2]:+.2f}]"
            yield f"{name}: {percent:g} % planted, {seen[0]:+.2f} % {interval} seen in {len(launches)} launches"


# Lock step.


def lock_step_rows(lines: Lines, name: str) -> Iterator[tuple[str, ...]]:
    """Gate, limit, false alarms, and what it finds at each level: the gates that measure in lock step."""
    equal = _launches(lines, name, 0.0)
    real = [verdict for launches in equal.values() for verdict in _in_a_row(launches, name)]
    yield "lock step, comparisons in a row", "p <= 1 %", str(_alarms(real)), "-", "-"
    yield "lock step, drawn from these launches", "p <= 1 %", *_drawn(equal, name)
    for percent in (1, 10):
        title = f"asv continuous, {NUM_PASSES} anchored passes a side, drawn"
        yield title, f"{percent} %", *_anchored(equal, name, percent)


def _launches(lines: Lines, name: str, percent: float) -> dict[str, list[Pairs]]:
    """The pairs of each launch, by case."""
    found: dict[str, list[Pairs]] = {}
    for line in lines:
        if (line["kind"], line["percent"]) == ("lockstep", percent):
            base, head = line["sides"]
            for case in base.keys() & head.keys():
                pairs = Pairs(base=tuple(base[case][name]), head=tuple(head[case][name]))
                found.setdefault(case, []).append(pairs)
    return found


def _ended(launches: Sequence[Pairs], name: str) -> tuple[str, int]:
    """What a comparison of this one quantity says, with a look after each launch, and after how many it ends."""
    key, rules = Key("benchmark", "case", "arm", name), Rules()
    for taken in range(MIN_LAUNCHES, rules.max_launches + 1):
        (row,) = timed_rows(Evidence(num_launches=taken, pairs={key: tuple(launches[:taken])}), rules)
        if is_settled(row, rules):
            break
    return row.verdict, taken


def _in_a_row(launches: Sequence[Pairs], name: str) -> Iterator[str]:
    """Comparisons without a launch in common: each begins where the one before ended."""
    start = 0
    while start + Rules().max_launches <= len(launches):
        verdict, taken = _ended(launches[start:], name)
        start += taken
        yield verdict


def _alarms(verdicts: Sequence[str]) -> Rate:
    return Rate(sum(verdict in ("worse", "better") for verdict in verdicts), len(verdicts))


def _drawn(equal: ByCase, name: str) -> Iterator[str]:
    """Comparisons of launches drawn from equal builds, sides swapped by lot, head slowed as much as was planted.

    Swapping is fair: which of two equal builds is called head is arbitrary. The comparisons share their launches: many,
    but no surer than those.
    """
    draw, num = random.Random(0), Rules().max_launches
    for percent in LEVELS:
        verdicts = [
            _ended([_slowed(pairs, percent, swap=draw.random() < 0.5) for pairs in draw.sample(launches, num)], name)[0]
            for launches in equal.values()
            for _ in range(NUM_DRAWS if len(launches) >= num else 0)
        ]
        yield str(_alarms(verdicts) if percent == 0 else Rate(verdicts.count("worse"), len(verdicts)))


def _slowed(pairs: Pairs, percent: float, *, swap: bool) -> Pairs:
    base, head = (pairs.head, pairs.base) if swap else (pairs.base, pairs.head)
    return dataclasses.replace(pairs, base=base, head=tuple(_slower(head, percent)))


def _anchored(equal: ByCase, name: str, limit_percent: float) -> Iterator[str]:
    """asv's test on passes that ran beside a reference: two pairs of runs each, as `asv continuous` takes them."""
    draw, num = random.Random(0), 2 * NUM_PASSES
    ratios = [hodges_lehmann(pairs.logs(metric(name))[:2]) or 0.0 for pairs in itertools.chain(*equal.values())]
    num_draws = NUM_DRAWS if len(ratios) >= num else 0
    draws = [[[math.exp(each)] for each in draw.sample(ratios, num)] for _ in range(num_draws)]
    for percent in LEVELS:
        found = [_asv_ratio(drawn[:NUM_PASSES], _all_slower(drawn[NUM_PASSES:], percent)) for drawn in draws]
        alarms = [each > 1 + limit_percent / 100 or (percent == 0 and each < 1 - limit_percent / 100) for each in found]
        yield str(Rate(sum(alarms), len(alarms)))


# The others.


def other_rows(lines: Lines, name: str, budget_s: float) -> Iterator[tuple[str, ...]]:
    """The same of the tools that measure one process at a time."""
    alone = [line for line in lines if line["kind"] == "alone"]
    if not alone:
        return
    seconds = statistics.median(line["spent_s"] / max(1, len(line["sides"][0])) for line in alone)
    num = max(2, round(budget_s / seconds / 2))
    for title, num_processes, ratio in (
        ("asv continuous, 2 processes a side", 2, _asv_ratio),
        (f"asv continuous, {num} processes a side", num, _asv_ratio),
        ("pytest-benchmark, median of one process", 1, _median_ratio),
        (f"pytest-benchmark, median of {num} processes", num, _median_ratio),
    ):
        yield title, *_others(_windows(alone, name, num_processes), ratio)


def _windows(alone: Lines, name: str, num: int) -> list[tuple[Side, Side]]:
    """Neighbouring processes in turns base and head, by case. Windows overlap: many, but no surer than their number."""
    found = []
    for case in alone[0]["sides"][0]:
        processes = [line["sides"][0][case][name] for line in alone if case in line["sides"][0]]
        windows = (processes[i : i + 2 * num] for i in range(len(processes) - 2 * num + 1))
        found += [(window[::2], window[1::2]) for window in windows]
    return found


def _others(windows: Sequence[tuple[Side, Side]], ratio: Ratio) -> Iterator[str]:
    """With the lowest limit at which 1 % of equal comparisons are false alarms, or the tool's own if that is higher."""
    equal = sorted(ratio(base, head) for base, head in windows)
    limit = max(1.0, equal[math.ceil((1 - FALSE_ALARMS) * len(equal)) - 1]) if equal else math.nan
    yield f"{100 * (limit - 1):.1f} %"
    for percent in LEVELS:
        found = [ratio(base, _all_slower(head, percent)) for base, head in windows]
        yield str(Rate(sum(each > limit for each in found), len(found)))


def _all_slower(side: Side, percent: float) -> Side:
    return [_slower(samples, percent) for samples in side]


def _slower(samples: Sequence[float], percent: float) -> list[float]:
    return [each * (1 + percent / 100) for each in samples]


def _asv_ratio(base: Side, head: Side) -> float:
    """The ratio of medians where asv's own test calls the samples different."""
    from asv._stats import is_different
    from asv_runner.statistics import compute_stats

    pooled = [_pooled(side) for side in (base, head)]
    told = [compute_stats(samples, 1)[1] for samples in pooled]
    return _median_ratio(base, head) if is_different(*pooled, *told) else 1.0


def _median_ratio(base: Side, head: Side) -> float:
    return statistics.median(_pooled(head)) / statistics.median(_pooled(base))


def _pooled(side: Side) -> list[float]:
    return [*itertools.chain(*side)]
