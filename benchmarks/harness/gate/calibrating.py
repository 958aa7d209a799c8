"""Computes a calibration from launches: false alarms, what became of planted slowdowns, the smallest effects found.

Knows which comparisons are made of which launches. Refuses to know how a comparison goes (`trials.py`) and how launches
come about (`gathering.py`).

Comparisons in a row share no launch: few, but independent, so that an interval can be given. Draws without replacement
share all of them: many, so that a rate of 1 % shows, but no surer than their launches. Over pools they are right on
average: what a draw varies less, because it takes a good part of the pool, the pool's own mean varies.
"""

import dataclasses
import datetime
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import INSTRUMENT_VERSION
from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.gate.calibration import Calibration, Level, Proportion, Score
from benchmarks.harness.gate.comparison import Plan
from benchmarks.harness.gate.evidence import Key, name_of_case
from benchmarks.harness.gate.gathering import IDENTICAL, Effort, Gathered, brief, gather
from benchmarks.harness.gate.looks import Pool, pool_of
from benchmarks.harness.gate.paired import LogRatio, ratio_over_launches
from benchmarks.harness.gate.progress import SILENT, Progress
from benchmarks.harness.gate.rules import GRAVITY, Rules, Verdict
from benchmarks.harness.gate.trials import Comparisons, Trials, drawn_orders, in_a_row, smallest_effects
from benchmarks.harness.identity import identity
from benchmarks.harness.metrics import METRICS, metric
from benchmarks.harness.stats import Estimate, Interval

RATES = (0.80, 0.95)

_TOLERANCE = 0.1
"""A tenth of a planted slowdown may be missing before it is called another one: parts of a time are not slowed."""


def calibrate(plan: Plan, effort: Effort, progress: Progress = SILENT) -> Calibration:
    """Measure a build against itself and against slower copies, and say what of it a comparison finds.

    Raises InstrumentError for an effort that cannot suffice, and where too many launches left nothing.
    """
    _check_enough(effort.num_launches, plan.rules)
    gathered = gather(plan, effort, progress)
    progress.step(f"draws {effort.num_draws} comparisons for each question")
    return calibration_of(gathered, plan, effort)


def calibration_of(gathered: Gathered, plan: Plan, effort: Effort) -> Calibration:
    """What the launches say under the plan's rules, without their threshold: it would hide what the machine can see."""
    _check_enough(len(gathered.launches[IDENTICAL]), plan.rules, gathered.notes)
    told = gathered.every[0].provenance[0]
    study = Study(gathered, plan.rules, effort)
    quantities = tuple(map(study.of_quantity, range(len(study.pool.keys))))
    names = {key.metric for key in study.pool.keys}
    metrics = tuple(study.of_metric(name, quantities) for name in METRICS if name in names)
    return Calibration(
        machine=identity(),
        model=str(told["model"]), dtype=str(told["dtype"]), device=str(told["device"]),
        at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        commit=plan.head.revision.commit,
        instrument_version=INSTRUMENT_VERSION,
        rules=study.rules,
        sampling=plan.sampling,
        num_launches=study.pool.num_launches,
        taken_s=gathered.taken_s,
        endings=study.endings,
        whole=study.of_everything(),
        metrics=metrics,
        quantities=quantities,
        notes=tuple(_notes(gathered, metrics)),
    )  # fmt: skip


def _check_enough(num_launches: int, rules: Rules, notes: Sequence[str] = ()) -> None:
    if num_launches < rules.max_launches:
        raise InstrumentError(
            f"{num_launches} launches make no comparison of up to {rules.max_launches}: a calibration takes as many at "
            f"least, and better four times as many{''.join(f'; {note}' for note in notes)}"
        )


class _Planted(NamedTuple):
    """A planted level: its launches, and the comparisons that have what was measured in them, or are made of them."""

    level: float
    pool: Pool
    drawn: Trials
    real: Trials


class Study:
    """All comparisons that the launches can make, and what they say of one quantity or of several together."""

    def __init__(self, gathered: Gathered, rules: Rules, effort: Effort) -> None:
        self.rules = dataclasses.replace(rules, threshold=0.0, looks_once=False)
        self.pool = pool_of(gathered.launches[IDENTICAL], gathered.keys)
        self._everything = list(range(len(self.pool.keys)))
        orders = drawn_orders(self.pool.num_launches, self.rules.max_launches, effort.num_draws, effort.seed)
        self._comparisons = Comparisons(self.pool, orders, self.rules)
        self._drawn = self._comparisons.slowed([0.0] * len(self.pool.keys))
        self._real = in_a_row(self.pool, self.rules)
        self._planted = [self._of_level(level, gathered) for level in effort.levels if gathered.launches[level]]

    def _of_level(self, level: float, gathered: Gathered) -> _Planted:
        pool = pool_of(gathered.launches[level], self.pool.keys)
        measured = [_measured(pool, [place]).value for place in self._everything]
        shifts = [_shift(key, level) if log is None else log for key, log in zip(pool.keys, measured, strict=True)]
        return _Planted(level, pool, self._comparisons.slowed(shifts), in_a_row(pool, self.rules))

    @property
    def endings(self) -> dict[Verdict, int]:
        """How drawn comparisons of equal builds end."""
        found = Counter(GRAVITY[code] for code in self._drawn.of_whole)
        return {verdict: found[verdict] for verdict in GRAVITY if found[verdict]}

    def of_quantity(self, place: int) -> Score:
        """One quantity, and what is found of it where nothing else changes."""

        def rate_of(effect: float) -> float:
            trials = self._comparisons.slowed_alone(place, math.log1p(effect))
            return float(trials.said("worse")[:, place].mean())

        return self._score(self.pool.keys[place], [place], *smallest_effects(rate_of, RATES))

    def of_metric(self, name: str, quantities: Sequence[Score]) -> Score:
        """All quantities of a metric. What is found of it is found of the worst one."""
        places = [place for place, key in enumerate(self.pool.keys) if key.metric == name]
        each = [(quantities[place].effect80, quantities[place].effect95) for place in places]
        effect80, effect95 = (None if None in effects else max(effects) for effects in zip(*each, strict=True))
        return self._score(Key("", "", "", name), places, effect80, effect95)

    def of_everything(self) -> Score:
        """The whole comparison, which is red where anything is worse."""

        def rate_of(effect: float) -> float:
            trials = self._comparisons.slowed([_shift(key, effect) for key in self.pool.keys])
            return float(trials.said("worse").any(axis=1).mean())

        return self._score(Key("", "", "", ""), self._everything, *smallest_effects(rate_of, RATES))

    def _score(self, key: Key, places: list[int], effect80: float | None, effect95: float | None) -> Score:
        return Score(
            key=key,
            false_alarms=_proportion(self._real.said("worse", "better")[:, places].any(axis=1)),
            drawn_false_alarms=_proportion(self._drawn.said("worse", "better")[:, places].any(axis=1)),
            effect80=effect80,
            effect95=effect95,
            mean_launches=float(self._drawn.num_asked[:, places].max(axis=1).mean()),
            levels=tuple(self._level(planted, key, places) for planted in self._planted),
        )

    def _level(self, planted: _Planted, key: Key, places: list[int]) -> Level:
        of_steps = [place for place in places if key.metric or not metric(self.pool.keys[place].metric).compares_arms]
        drawn, real = (trials.said("worse")[:, places] for trials in (planted.drawn, planted.real))
        found, really = (_worst(each) if key.metric else _proportion(each.any(axis=1)) for each in (drawn, real))
        measured = _as_share(_measured(planted.pool, of_steps))
        return Level(planted=planted.level, measured=measured, found=found, found_for_real=really)


def _shift(key: Key, effect: float) -> float:
    """What a slowdown of every step does to a quantity: nothing to a ratio of two arms, which both are slower."""
    return 0.0 if metric(key.metric).compares_arms else math.log1p(effect)


def _measured(pool: Pool, places: list[int]) -> LogRatio:
    """How much worse head was in these launches, all of the quantities weighing the same."""
    logs = pool.logs[:, places]
    return ratio_over_launches(
        [[float(launch[~np.isnan(launch)].mean())] for launch in logs if not np.isnan(launch).all()]
    )


def _as_share(ratio: LogRatio) -> Estimate:
    logs = (ratio.value, ratio.interval.low, ratio.interval.high)
    value, low, high = (None if log is None else math.expm1(log) for log in logs)
    return Estimate(value=value, interval=Interval(low, high), num_samples=ratio.num_launches)


def _proportion(is_so: Any) -> Proportion:
    return Proportion(num=int(is_so.sum()), n=len(is_so))


def _worst(is_so: Any) -> Proportion:
    """Of the quantity (comparison, key) that is found least often."""
    return Proportion(num=int(is_so.sum(axis=0).min()), n=len(is_so))


# What a reader has to know beside the numbers.


def _notes(gathered: Gathered, metrics: Sequence[Score]) -> Iterator[str]:
    yield from gathered.notes
    for name, why in gathered.left_out.items():
        yield f"left out: {name}: {brief(why)}"
    disturbed = Counter(case for launch in gathered.every for case in launch.contaminated)
    for case, num in disturbed.items():
        yield f"{name_of_case(case)}: {num} of {len(gathered.every)} launches were disturbed and set aside"
    for score in metrics:
        for level in score.levels:
            yield from _doubt(score, level)


def _doubt(score: Score, level: Level) -> Iterator[str]:
    """A planted slowdown that is surely measured as another one."""
    of, low, high = metric(score.key.metric), level.measured.interval.low, level.measured.interval.high
    meant, leeway = (0.0 if of.compares_arms else level.planted), _TOLERANCE * level.planted
    if low is not None and high is not None and not low - leeway <= meant <= high + leeway:
        value = math.nan if level.measured.value is None else level.measured.value
        yield (
            f"{100 * level.planted:.3g} % planted were measured as {100 * value:.2g} % [{100 * low:.2g} .. "
            f"{100 * high:.2g}] in {of.title}: the plant or the instrument is off"
        )
