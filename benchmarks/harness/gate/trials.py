"""Comparisons made of launches that were measured once: their looks one after the other, for all orders at once.

Knows when a comparison goes on, and how alpha is shared in the family of its quantities. Refuses to know what one look
says of one quantity (`looks.py`). A case that asks for its n-th launch is given the n-th of the order, also where it
had been clear for a while in between.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from benchmarks.harness.gate.looks import CODES, LOOSE, Bools, Floats, Ints, Looks, Pool, Quantities
from benchmarks.harness.gate.paired import MIN_LAUNCHES
from benchmarks.harness.gate.rules import Rules, Verdict

STEP = 0.0025
"""Between the effects that are tried."""

LARGEST_EFFECT = 0.20
"""No larger slowdown is tried."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """How comparisons ended (comparison, key): the verdicts, and how many launches each quantity's case asked for."""

    codes: Ints
    num_asked: Ints

    @property
    def of_whole(self) -> Ints:
        """The verdict on each comparison."""
        found: Ints = self.codes.min(axis=1)
        return found

    @property
    def num_launches(self) -> Ints:
        found: Ints = self.num_asked.max(axis=1)
        return found

    def said(self, *verdicts: Verdict) -> Bools:
        """Whether each quantity got one of these verdicts (comparison, key)."""
        return np.isin(self.codes, [CODES[verdict] for verdict in verdicts])


class Comparisons:
    """Comparisons of a build with itself, and with slower ones, over the same launches in the same `orders`."""

    def __init__(self, pool: Pool, orders: Ints, rules: Rules) -> None:
        self._rules = rules
        self._quantities = Quantities(pool, orders, rules)
        cases = list(dict.fromkeys(key.of_case for key in pool.keys))
        self._case = np.array([cases.index(key.of_case) for key in pool.keys])
        self._first_of_case = np.flatnonzero(np.diff(self._case, prepend=-1))
        self._unshifted = self._quantities.looks([0.0] * len(pool.keys))

    def slowed(self, shifts: Sequence[float]) -> Trials:
        """How they end with head's costs multiplied by exp(shift), a shift for each key."""
        return self._judged(self._quantities.looks(shifts))

    def slowed_alone(self, place: int, shift: float) -> Trials:
        """The same where nothing but the quantity at this place has changed."""
        one = self._quantities.looks([shift], slice(place, place + 1))
        return self._judged(self._unshifted.with_one(place, one))

    def _judged(self, looks: Looks) -> Trials:
        """Look after each launch, and give the cases that are not clear another one."""
        num_asked = np.full((looks.p.shape[1], len(self._first_of_case)), MIN_LAUNCHES)  # none is clear before
        rows = np.arange(len(num_asked))
        codes = self._look(looks, rows, num_asked)
        for _ in range(MIN_LAUNCHES, self._rules.max_launches):
            is_open = np.logical_or.reduceat(_is_open(codes[rows]), self._first_of_case, axis=1)
            goes_on = is_open.any(axis=1)
            rows = rows[goes_on]
            num_asked[rows] += is_open[goes_on]
            codes[rows] = self._look(looks, rows, num_asked[rows])
        codes = np.where(codes == LOOSE, CODES["same"], codes)
        return Trials(codes=codes, num_asked=num_asked[:, self._case])

    def _look(self, looks: Looks, rows: Ints, num_asked: Ints) -> Ints:
        """The verdicts in some of the comparisons after so many launches of each case (comparison, key)."""
        where = (num_asked[:, self._case] - 1, rows[:, None], np.arange(len(self._case)))
        return np.where(_is_sure(looks.p[where], self._rules.alpha), looks.sure[where], looks.unsure[where])


def _is_open(codes: Ints) -> Bools:
    found: Bools = np.isin(codes, [CODES["cannot tell"], CODES["contaminated"], LOOSE])
    return found


def _is_sure(p: Floats, alpha: float) -> Bools:
    """Whose p, adjusted for the family (Benjamini and Hochberg), is at most alpha: all up to the last that is."""
    num_keys = p.shape[1]
    ordered = np.sort(p, axis=1)
    is_low = ordered * (num_keys / np.arange(1, num_keys + 1)) <= alpha
    limits = np.where(is_low, ordered, -1.0).max(axis=1, initial=-1.0)
    found: Bools = p <= limits[:, None]
    return found


def in_a_row(pool: Pool, rules: Rules) -> Trials:
    """Comparisons that have no launch in common: each begins where the one before ended, while launches suffice.

    None begins that might run out of launches, so that whether one counts does not depend on how it ends.
    """
    none = np.empty((0, len(pool.keys)), dtype=np.int64)
    each = list(_in_a_row(pool, rules))
    return Trials(
        codes=np.concatenate([none, *(trial.codes for trial in each)]),
        num_asked=np.concatenate([none, *(trial.num_asked for trial in each)]),
    )


def _in_a_row(pool: Pool, rules: Rules) -> Iterator[Trials]:
    start = 0
    while start + rules.max_launches <= pool.num_launches:
        order = np.arange(start, start + rules.max_launches)[None]
        trial = Comparisons(pool, order, rules).slowed([0.0] * len(pool.keys))
        yield trial
        start += int(trial.num_launches[0])


def drawn_orders(num_launches: int, length: int, num_draws: int, seed: int) -> Ints:
    """Orders of `length` different ones of the launches (draw, launch); the same seed draws the same."""
    rng = np.random.default_rng(seed)
    found: Ints = np.argsort(rng.random((num_draws, num_launches)), axis=1)[:, :length]
    return found


def smallest_effects(rate_of: Callable[[float], float], rates: Sequence[float]) -> list[float | None]:
    """From which share on a slowdown is found at each of these rates; None where not even the largest is.

    `rate_of` has to rise with its share. Between two steps of the grid it is taken for straight.
    """
    rate_at = functools.cache(lambda step: rate_of(step * STEP))
    return [_smallest_effect(rate_at, rate) for rate in rates]


def _smallest_effect(rate_at: Callable[[int], float], rate: float) -> float | None:
    low, high = 0, round(LARGEST_EFFECT / STEP)
    if rate_at(high) < rate:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if rate_at(middle) >= rate else (middle, high)
    below, above = min(rate_at(low), rate), rate_at(high)
    return STEP * (low + ((rate - below) / (above - below) if above > below else 0.0))
