"""What each look of a comparison would say of each quantity, for many orders of the same launches at once.

Knows the rules of `timed.py` and `rows.py` as operations on arrays, and shifts: head slower by so much. Refuses to know
where launches come from, and families. tests/test_gate_trials.py holds all of it against `judge`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.gate.evidence import Evidence, Key
from benchmarks.harness.gate.paired import MIN_LAUNCHES, centre, over_looks, p_of_centre
from benchmarks.harness.gate.rules import GRAVITY, Rules, Verdict
from benchmarks.harness.gate.timed import CONTROL_MOVED
from benchmarks.harness.metrics import Metric, metric
from benchmarks.harness.stats import hodges_lehmann

Floats = NDArray[np.float64]
Ints = NDArray[np.integer[Any]]
Bools = NDArray[np.bool_]

CODES: Mapping[Verdict, int] = {verdict: code for code, verdict in enumerate(GRAVITY)}
"""The gravest verdict has the lowest code."""

LOOSE = len(GRAVITY)
"""The same, but not within half the margin: the case goes on."""

ALL = slice(None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Launches that all measured the same quantities, in the order in which they ran.

    `logs` holds the centre of each launch's log-ratios of costs, `base` its samples of base, `control` the log-ratio
    of the control kernel beside the two sides; NaN where the launch was disturbed, or has no such number.
    """

    keys: tuple[Key, ...]
    logs: Floats  # launch, key
    base: Floats  # key, launch, pair
    control: Floats  # launch, key

    @property
    def num_launches(self) -> int:
        return len(self.logs)


def pool_of(launches: Sequence[Evidence], keys: Sequence[Key]) -> Pool:
    """From the evidence of single launches that all have these quantities. Those of a case stand together."""
    ordered = sorted(keys)
    num_pairs = [len(pairs.base) for each in launches for key in ordered for pairs in each.pairs_of(key)]
    base = np.full((len(ordered), len(launches), max(num_pairs, default=1)), np.nan)
    logs, control = np.full((2, len(launches), len(ordered)), np.nan)
    for number, launch in enumerate(launches):
        for place, key in enumerate(ordered):
            for pairs in launch.pairs_of(key):
                logs[number, place] = hodges_lehmann(pairs.logs(metric(key.metric)))
                base[place, number, : len(pairs.base)] = pairs.base
            for beside in launch.control.get(key.of_case, ()):
                control[number, place] = math.log(beside.head[0] / beside.base[0])
    return Pool(keys=tuple(ordered), logs=logs, base=base, control=control)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Centres:
    """Centre and standard error of the first 4, 5, ... defined numbers in each order (size, comparison, key).

    `num` says how many are defined among the first 1, 2, ... launches (launches asked for, comparison, key).
    """

    value: Floats
    error: Floats
    degrees: tuple[int, ...]
    num: Ints

    def p(self) -> Floats:
        return np.stack([p_of_centre(*each) for each in zip(self.value, self.error, self.degrees, strict=True)])

    def of_keys(self, keys: slice, shifts: Any = 0.0) -> "_Centres":
        """Some of the keys, their numbers shifted."""
        return _Centres(
            value=self.value[..., keys] + np.asarray(shifts),
            error=self.error[..., keys],
            degrees=self.degrees,
            num=self.num[..., keys],
        )

    def as_asked(self, of_size: Any, otherwise: Any) -> Any:
        """From sizes to launches asked for; below the fewest launches, `otherwise`."""
        found = np.take_along_axis(of_size, np.maximum(self.num - MIN_LAUNCHES, 0), axis=0)
        return np.where(self.num >= MIN_LAUNCHES, found, otherwise)


def _centres(drawn: Floats) -> _Centres:
    """Of numbers in the order of the launches (comparison, launch, key); what is NaN is skipped over."""
    is_defined = ~np.isnan(drawn)
    compact = np.take_along_axis(drawn, np.argsort(~is_defined, axis=1, kind="stable"), axis=1).swapaxes(1, 2)
    each = [centre(compact[..., :size]) for size in range(MIN_LAUNCHES, drawn.shape[1] + 1)]
    value, error, degrees = zip(*each, strict=True)
    num = np.cumsum(is_defined, axis=1).swapaxes(0, 1)
    return _Centres(value=np.stack(value), error=np.stack(error), degrees=degrees, num=num)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """What every look says, as far as it does not depend on the family (launches asked for, comparison, key).

    `p` is that over the looks, `sure` the verdict where p, adjusted, is at most alpha, `unsure` the one elsewhere.
    """

    p: Floats
    sure: Ints
    unsure: Ints

    def with_one(self, place: int, one: "Looks") -> "Looks":
        """The same with other looks at one quantity."""
        arrays: list[Any] = [array.copy() for array in (self.p, self.sure, self.unsure)]
        for array, column in zip(arrays, (one.p, one.sure, one.unsure), strict=True):
            array[..., place] = column[..., 0]
        return Looks(p=arrays[0], sure=arrays[1], unsure=arrays[2])


class Quantities:
    """The pool's quantities in comparisons whose launches come in these `orders` (comparison, launch)."""

    def __init__(self, pool: Pool, orders: Ints, rules: Rules) -> None:
        self._metrics = [metric(key.metric) for key in pool.keys]
        self._rules = rules
        self._centres = _centres(pool.logs[orders])
        self._half = _quantiles(rules, self._centres.degrees)[:, None, None] * self._centres.error
        medians = [_base_medians(*numbers, orders) for numbers in zip(pool.base, pool.logs.T, strict=True)]
        self._base = np.stack(medians, axis=-1)
        self._is_disturbed = _is_disturbed(self._centres.num) | _is_loaded(_centres(pool.control[orders]), rules)

    def looks(self, shifts: Sequence[float], keys: slice = ALL) -> Looks:
        """With head's cost multiplied by exp(shift), a shift for each of the keys."""
        centres = self._centres.of_keys(keys, shifts)
        sure, unsure = self._verdicts(centres.value, keys)
        p = np.where(self._is_disturbed[..., keys], 1.0, centres.as_asked(self._over_looks(centres.p()), 1.0))
        return Looks(p=p, sure=self._as_asked(sure, keys), unsure=self._as_asked(unsure, keys))

    def _verdicts(self, value: Floats, keys: slice) -> tuple[Ints, Ints]:
        """Where p is low enough, and where it is not (size, comparison, key)."""
        half = self._half[..., keys]
        is_same, is_settled = (
            self._of_each(keys, test, value - half) & self._of_each(keys, test, value + half)
            for test in (_is_same, _is_settled)
        )
        unsure = np.where(is_same, np.where(is_settled, CODES["same"], LOOSE), CODES["cannot tell"])
        moved = np.where(value > 0, CODES["worse"], CODES["better"])
        return np.where(self._of_each(keys, _is_change, value), moved, unsure), unsure

    def _of_each(self, keys: slice, test: Callable[..., Bools], logs: Floats) -> Bools:
        each = zip(
            self._metrics[keys], np.moveaxis(self._base[..., keys], -1, 0), np.moveaxis(logs, -1, 0), strict=True
        )
        return np.stack([test(of, self._rules, base, log) for of, base, log in each], axis=-1)

    def _over_looks(self, ps: Floats) -> Floats:
        first, last = MIN_LAUNCHES, self._rules.max_launches
        return np.stack([over_looks(p, size, first=first, last=last) for size, p in enumerate(ps, first)])

    def _as_asked(self, codes: Ints, keys: slice) -> Ints:
        as_asked = self._centres.of_keys(keys).as_asked(codes, CODES["cannot tell"])
        found: Ints = np.where(self._is_disturbed[..., keys], CODES["contaminated"], as_asked).astype(np.int8)
        return found


def _quantiles(rules: Rules, degrees: Sequence[int]) -> Floats:
    from scipy.stats import t

    return np.asarray(t.isf((1 - rules.confidence) / 2, degrees))


def _base_medians(samples: Floats, logs: Floats, orders: Ints) -> Floats:
    """Base's median over the first 4, 5, ... quiet launches (size, comparison); `samples` by launch and pair."""
    quiet_first = np.argsort(np.isnan(logs[orders]), axis=1, kind="stable")
    compact = samples[np.take_along_axis(orders, quiet_first, axis=1)]
    sizes = range(MIN_LAUNCHES, orders.shape[1] + 1)
    return np.stack([_median_of_defined(compact[:, :size].reshape(len(orders), -1)) for size in sizes])


def _median_of_defined(samples: Floats) -> Floats:
    """Over the last axis; NaN without any."""
    ordered = np.sort(samples, axis=1)  # NaN last
    num = np.maximum(np.count_nonzero(~np.isnan(ordered), axis=1), 1)
    middle = np.stack([(num - 1) // 2, num // 2], axis=1)
    found: Floats = np.take_along_axis(ordered, middle, axis=1).mean(axis=1)
    return found


def _is_disturbed(num_quiet: Ints) -> Bools:
    """Whether too few launches were quiet (launches asked for, comparison, key)."""
    num_disturbed = np.arange(1, len(num_quiet) + 1)[:, None, None] - num_quiet
    found: Bools = (num_disturbed > 0) & ((num_quiet < MIN_LAUNCHES) | (num_quiet < num_disturbed))
    return found


def _is_loaded(control: _Centres, rules: Rules) -> Bools:
    """Whether something else loaded one side only (launches asked for, comparison, key)."""
    has_moved = (control.p() <= rules.alpha) & (np.abs(control.value) >= math.log1p(CONTROL_MOVED))
    found: Bools = control.as_asked(has_moved, False)
    return found


def _is_change(of: Metric, rules: Rules, base: Floats, log: Floats) -> Bools:
    """Whether head's cost, exp(log) times base's, differs by the threshold and by both floors of the metric."""
    cost: Any = of.cost  # is its own inverse, and takes arrays
    head = cost(cost(base) * np.exp(log))
    loss, best = np.abs(head - base), (np.minimum if of.better == "lower" else np.maximum)(base, head)
    is_above_floors = (loss > 0) & (loss >= of.floor_absolute) & (loss >= of.floor_relative * best)
    found: Bools = is_above_floors & (np.abs(log) >= math.log1p(rules.threshold))
    return found


def _is_same(of: Metric, rules: Rules, base: Floats, log: Floats) -> Bools:
    return (np.abs(log) <= math.log1p(rules.margin)) | ~_is_change(of, rules, base, log)


def _is_settled(of: Metric, rules: Rules, base: Floats, log: Floats) -> Bools:
    return (np.abs(log) <= math.log1p(rules.early_margin)) | ~_is_change(of, rules, base, log)
