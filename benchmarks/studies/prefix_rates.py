"""The claims of the prefix study about hit rates: what bounds one, and what one is worth.

Knows the simulation's draws and requests that were served. The ceiling is counted a second time here, apart from any
cache, from the draws alone.
"""

from collections.abc import Iterator

from benchmarks.harness.breakeven import effective_speedup
from benchmarks.harness.popularity import zipf_order
from benchmarks.harness.report import number_text
from benchmarks.harness.results import BenchmarkResult
from benchmarks.harness.stats import Interval, median
from benchmarks.studies.claims import ALIKE, Claim, equality, told
from benchmarks.studies.prefix_points import (
    SERVED,
    UNLIMITED,
    ZIPF,
    Results,
    by_parameter,
    estimate,
    measured,
)

_NUM_REQUESTS, _NUM_PROMPTS = 200, 32
"""Of the simulation, theirs and ours."""


def claims_of_rates(results: Results) -> Iterator[Claim]:
    """Those claims for which enough was measured."""
    yield from _of_ceiling(results)
    served = [(result, arm) for result in by_parameter(results, SERVED, "alpha").values() for arm in _arms(result)]
    if served:
        yield _of_worth(*max(served, key=lambda each: _share_of_hits(*each)))


def _of_ceiling(results: Results) -> Iterator[Claim]:
    """What a cache without end misses are the first uses."""
    ceilings, is_exact = {}, True
    for alpha, result in by_parameter(results, ZIPF, "alpha").items():
        missed = measured(result, "num_missed_requests", UNLIMITED)
        if missed is not None and missed.value is not None:
            num_seeds = result.details.get("hit_rate", {}).get(UNLIMITED, {}).get("num_seeds", 1)
            is_exact &= missed.value == sum(_num_distinct(alpha, seed) for seed in range(num_seeds))
            ceilings[alpha] = 1 - missed.value / (num_seeds * _NUM_REQUESTS)
    if ceilings:
        rates = ", ".join(f"{100 * rate:.1f} % at alpha {alpha:g}" for alpha, rate in ceilings.items())
        which = f"exactly the first uses of each prompt, so that hits = {_NUM_REQUESTS} - distinct"
        yield Claim(
            text="with more slots the hit rate converges to 84-91 %",
            verdict="holds in part" if is_exact else "does not hold",
            evidence=f"without a limit {rates}; what is missed then {'is' if is_exact else 'is NOT'} {which}",
            artefact="compulsory misses: a ceiling of so few draws, no property of a cache" if is_exact else "",
        )  # fmt: skip


def _num_distinct(alpha: float, seed: int) -> int:
    return len(set(zipf_order(_NUM_REQUESTS, _NUM_PROMPTS, alpha, seed)))


def _arms(result: BenchmarkResult) -> list[str]:
    """Those with a cache, of which some requests hit and some do not."""
    compared = [arm for arm in result.runs if measured(result, "effective_speedup", f"{arm} over off")]
    return [arm for arm in compared if 0 < _share_of_hits(result, arm) < 1]


def _of_worth(result: BenchmarkResult, arm: str) -> Claim:
    """Were hits free, a share h of them would make 1 / (1 - h) of it; they are not."""
    speedup, share = measured(result, "effective_speedup", f"{arm} over off"), _share_of_hits(result, arm)
    assert speedup is not None
    free, found = 1 / (1 - share), estimate(speedup)
    ends = (found.interval.low, found.interval.high)
    verdict = equality(Interval(*(None if end is None else end / free for end in ends)), ALIKE)
    worth = effective_speedup(share, _speedup_of_hits(result, arm))
    return Claim(
        text="a hit rate is a speedup", verdict=verdict,
        evidence=(
            f"alpha {result.params['alpha']:g}, {arm}: {100 * share:.1f} % of requests hit, {number_text(free)}x were "
            f"hits free; served it is {told(found)}x, and 1 / ((1 - h) + h / s) is {number_text(worth)}x"
        ),
        artefact="a hit still runs its suffix and reads its prefix" if verdict == "does not hold" else "",
    )  # fmt: skip


def _share_of_hits(result: BenchmarkResult, arm: str) -> float:
    runs = result.runs.get(arm, ())
    return sum(bool(run.num_cached) for run in runs) / len(runs) if runs else 0.0


def _speedup_of_hits(result: BenchmarkResult, arm: str) -> float:
    """The median of TTFT without a cache over that of a hit, of the same prompt."""
    pairs = zip(result.runs["off"], result.runs[arm], strict=True)
    ratios = [slow.ttft_s / fast.ttft_s for slow, fast in pairs if slow.ttft_s and fast.ttft_s and fast.num_cached]
    return median(ratios) or 1.0
