"""How far apart two builds are, from the log-ratios of their pairs, launch by launch; and what many looks may conclude.

Knows numbers only. Refuses to know metrics, directions and verdicts. Samples of one launch share its luck (placement in
memory, threads), so a launch counts once: its centre (`hodges_lehmann`). Between two equal builds those scatter
symmetrically around 0, however skewed a timing is, because base and head could be swapped.

How it was chosen, by simulation (12 pairs of sd 3 % in a launch, launches of sd 1.4 %; tests/test_gate_paired.py):

- *Centre.* A mean without the highest and the lowest tenth of the launches (so one of each from 10 on), with Yuen's
  (1974) standard error and Student's t. Its 95 % interval holds the truth in 93.8 to 95.6 % of runs of 4 to 20
  launches, also on skewed and heavy-tailed noise, and from 10 launches on with one of them ridden by a burst of 5 to
  25 %; below 10 such a burst makes it too wide (99 %), never too narrow. With 12 launches, p < 1 % and a true 3 %, it
  sees 98 of 100, and 92 of 100 with such a burst, where the plain mean sees 99 and 32.
- *Not a bootstrap.* Percentiles over resampled launches cover 82 % at 5 launches, 91 % at 12; widened as in `stats.py`
  92 and 94.5 %. Resampling the pairs inside launches as well covers 95 % at 5 and 97 % at 20: it counts the noise of
  the pairs twice (Field and Welsh 2007). A studentised one covers 95 %, but 89 % with a burst.
- *Looks.* A comparison that looks after each launch and stops when it is sure gets several chances to be wrong. Each
  look may spend twice the alpha of the one before, the last one half of it all: `over_looks`. That bounds the sum,
  however alike the looks are. An O'Brien-Fleming boundary by Lan and DeMets (1983), which supposes known variances,
  raised 1.5 % false alarms where 1 % was asked for, and made stricter until it keeps 1 % it sees no more than this.

Two equal builds, alpha 1 %, looks after launches 4 to 12: any alarm, worse or better, in at most 0.8 % of comparisons
of 1 quantity, 0.9 % of 3 and 1.0 % of 12, before any floor. How often a change of one quantity is found, and after how
many launches on average, launches of sd 1.4 %:

    quantities     2 %            3 %            5 %            10 %
    1              83 % in 10.5   99 % in 8.7    all in 7.0     all in 5.6
    3              68 % in 11.0   98 % in 9.5    all in 7.5     all in 6.0
    12             42 % in 11.6   89 % in 10.4   all in 8.2     all in 6.5
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.stats import CONFIDENCE, Interval, finite_array, hodges_lehmann, median

MIN_LAUNCHES = 4
"""Below it there is neither interval nor p: three numbers say too little of their own spread."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogRatio:
    """The log of head / base over launches: above 0, head's number is the larger one.

    `value` is None without launches; both ends of `interval`, and the two-sided `p` of "no difference", are None below
    `MIN_LAUNCHES`.
    """

    value: float | None
    interval: Interval
    p: float | None
    num_launches: int


def ratio_over_launches(logs: Sequence[Sequence[float]], confidence: float = CONFIDENCE) -> LogRatio:
    """Estimate the log-ratio from each launch's log-ratios of pairs. The same numbers give the same answer.

    Raises InstrumentError for a launch without pairs and for a number that is not finite.
    """
    launches = np.array([_centre_of(number, launch) for number, launch in enumerate(logs, 1)])
    n = launches.size
    if n < MIN_LAUNCHES:
        return LogRatio(value=median(launches.tolist()), interval=Interval(None, None), p=None, num_launches=n)
    value, error, degrees = centre(launches)
    half = float(_student(degrees).isf((1 - confidence) / 2) * error)
    interval = Interval(float(value) - half, float(value) + half)
    p = float(p_of_centre(value, error, degrees))
    return LogRatio(value=float(value), interval=interval, p=p, num_launches=n)


def _centre_of(number: int, launch: Sequence[float]) -> float:
    found = hodges_lehmann(finite_array(launch, f"launch {number}: pair").tolist())
    if found is None:
        raise InstrumentError(f"launch {number} has no pairs")
    return found


def centre(launches: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64], int]:
    """Centre of the last axis, its standard error, and Student's degrees of freedom of their quotient.

    Trimmed alike at both ends from 10 launches on (Yuen 1974): the error is that of the winsorised launches.
    """
    n = launches.shape[-1]
    cut = n // 10
    ordered, num_kept = np.sort(launches, axis=-1), n - 2 * cut
    winsorised = np.clip(ordered, ordered[..., [cut]], ordered[..., [n - cut - 1]])
    scale = math.sqrt((n - 1) / (num_kept * (num_kept - 1)))
    return ordered[..., cut : n - cut].mean(axis=-1), winsorised.std(axis=-1, ddof=1) * scale, num_kept - 1


def p_of_centre(value: Any, error: Any, degrees: int) -> Any:
    """Two-sided p of a centre of 0, elementwise. Launches that all say the same leave no doubt."""
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient = np.where(np.equal(value, 0), 0.0, np.abs(value) / error)
    return 2 * _student(degrees).sf(quotient)


def _student(degrees: int) -> Any:
    from scipy.stats import t

    return t(degrees)


def over_looks(p: Any, num_launches: int, *, first: int, last: int) -> Any:
    """The p of a comparison that may stop after any launch from `first` to `last`, seen after `num_launches` of them.

    Alpha is spent geometrically: at `last` one half, one launch earlier a quarter, and so on. Each look's p is divided
    by its share, so that the chance of ever coming below alpha is at most alpha. Elementwise.
    """
    if not first <= num_launches <= last:
        raise InstrumentError(f"{num_launches} launches; the looks that were planned are those after {first} to {last}")
    share = 2.0 ** (num_launches - last) / (2 - 2.0 ** (first - last))
    return np.minimum(1.0, np.asarray(p) / share)


def adjusted(ps: Sequence[float]) -> list[float]:
    """The p of each member of a family, adjusted for the others (Benjamini and Hochberg 1995), in the same order."""
    from scipy.stats import false_discovery_control

    return [float(p) for p in false_discovery_control(ps)] if ps else []
