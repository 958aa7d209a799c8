"""What launches of two builds leave behind: paired samples and counts by quantity, and whatever cannot be compared.

Knows the shape of the evidence. Refuses to know where it comes from (`sorting.py` makes it of launches), statistics and
verdicts. A launch is one fresh process of each build; the two take alternate samples.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.metrics import Metric
from benchmarks.harness.results import BenchmarkResult, Measurement

Case = tuple[str, str]
"""A benchmark's node id without its parameters, and the id of the parameters."""

SETUP = ("instrument_version", "model", "dtype", "device", "device_name", "cpu")
"""What every result of a comparison has to say alike in its provenance, as far as it says it."""

SideName = Literal["base", "head"]
SIDES: tuple[SideName, SideName] = ("base", "head")


class Key(NamedTuple):
    """One quantity. `arm` is "" for a metric that compares arms, of which a case has one."""

    benchmark: str
    case: str
    arm: str
    metric: str

    @property
    def of_case(self) -> Case:
        return self.benchmark, self.case


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """What one launch says of one quantity, in the metric's own unit: base[i] and head[i] were taken side by side.

    Raises InstrumentError for sides of unequal length, without samples, or with one that is not positive and finite.
    """

    base: tuple[float, ...]
    head: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.base) != len(self.head) or not self.base:
            raise InstrumentError(
                f"pairs need as many samples of head as of base, and one at least, not {len(self.base)} of base and "
                f"{len(self.head)} of head"
            )
        for side, samples in zip(SIDES, (self.base, self.head), strict=True):
            for index, sample in enumerate(samples):
                if not (math.isfinite(sample) and sample > 0):
                    raise InstrumentError(f"{side} sample {index} is {sample}; a ratio needs positive, finite ones")

    def logs(self, of: Metric) -> tuple[float, ...]:
        """log(head / base) of each pair's costs: above 0, head is worse, whichever direction the metric has.

        Raises InstrumentError where a cost is zero: a share of 1 cannot become better, and has no ratio.
        """
        costs = [(of.cost(base), of.cost(head)) for base, head in zip(self.base, self.head, strict=True)]
        if any(cost <= 0 for pair in costs for cost in pair):
            raise InstrumentError(f"{of.name} has a sample whose cost is zero; there is no ratio to it")
        return tuple(math.log(head) - math.log(base) for base, head in costs)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """An exact metric: the same number in every launch of a side."""

    base: float
    head: float
    num_launches: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What one build left behind in one launch. A case is measured, failed, skipped, or was not asked for."""

    results: tuple[BenchmarkResult, ...] = ()
    failed: Mapping[Case, str] = dataclasses.field(default_factory=dict)
    skipped: Mapping[Case, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        cases = [(result.benchmark, result.case) for result in self.results]
        twice = {case for case in cases if cases.count(case) > 1}
        if twice:
            raise InstrumentError(f"one launch measured twice: {', '.join(map(name_of_case, sorted(twice)))}")

    @property
    def cases(self) -> tuple[Case, ...]:
        return (*((each.benchmark, each.case) for each in self.results), *self.failed, *self.skipped)

    def result_of(self, case: Case) -> BenchmarkResult | None:
        """What was measured of a case; None also where it failed afterwards."""
        found = (each for each in self.results if (each.benchmark, each.case) == case)
        return None if case in self.failed else next(found, None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One fresh process of each build."""

    base: Side
    head: Side

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.base, self.head


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything that launches say, sorted. `sorting.collect` builds it.

    `pairs` holds one entry per undisturbed launch of every timed quantity, `counts` every exact one. `gaps` says why a
    quantity or a whole case cannot be compared, which is never good; `new` what base does not have, and `skipped`
    what neither side measured, which is not bad. `contaminated` says, by case and number of the launch (from 1), what
    disturbed it; its pairs are in `set_aside`, shown and never used. `control` holds, per undisturbed launch, the
    control kernel's median seconds beside each side. `provenance` is what the first result of each side says of itself,
    `notes` whatever else a reader should know.
    """

    num_launches: int
    pairs: Mapping[Key, tuple[Pairs, ...]]
    counts: Mapping[Key, Counts] = dataclasses.field(default_factory=dict)
    gaps: Mapping[Key | Case, str] = dataclasses.field(default_factory=dict)
    new: Mapping[Key | Case, str] = dataclasses.field(default_factory=dict)
    skipped: Mapping[Case, str] = dataclasses.field(default_factory=dict)
    set_aside: Mapping[Key, tuple[Pairs, ...]] = dataclasses.field(default_factory=dict)
    contaminated: Mapping[Case, Mapping[int, str]] = dataclasses.field(default_factory=dict)
    control: Mapping[Case, tuple[Pairs, ...]] = dataclasses.field(default_factory=dict)
    provenance: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {})
    notes: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[Key, ...]:
        """Every quantity that can be compared."""
        return (*self.pairs, *self.counts)

    def pairs_of(self, key: Key) -> tuple[Pairs, ...]:
        """One entry per undisturbed launch that measured the quantity."""
        return self.pairs.get(key, ())


def name_of_case(case: Case) -> str:
    """The node id that pytest prints."""
    benchmark, parameters = case
    return f"{benchmark}[{parameters}]" if parameters else benchmark


def key_of(result: BenchmarkResult, measurement: Measurement) -> Key:
    """The quantity that a measurement is of."""
    arm = "" if measurement.metric.compares_arms else measurement.arm
    return Key(result.benchmark, result.case, arm, measurement.metric.name)
