"""The claims of the cache study, each held against what was measured here, with the interval that decides.

Knows what was claimed and what would refute it. Refuses to decide where an interval holds both: "cannot tell".
"""

import math
from collections.abc import Callable, Iterator, Sequence

from benchmarks.harness.fits import Fit, best_fit, crossover, growth
from benchmarks.harness.results import BenchmarkResult
from benchmarks.harness.slopes import PER_TOKENS, itl_ratio_slope, itl_slope_s, speedup_if_constant, speedup_of_totals
from benchmarks.harness.stats import Estimate, Interval, quantile
from benchmarks.harness.timing import RunTiming
from benchmarks.studies.cache_points import GENERATION, PROMPT, points_of
from benchmarks.studies.claims import Claim, Verdict, median_of, ratio_of, side, told

_FLAT = 0.1

Points = Sequence[tuple[int, BenchmarkResult]]


def claims_of(results: Sequence[BenchmarkResult]) -> Iterator[Claim]:
    """Those claims for which enough was measured."""
    generation, prompt = points_of(results, GENERATION), points_of(results, PROMPT)
    both = [(tokens, result) for tokens, result in generation if "naive" in result.runs]
    if len(generation) > 1:
        yield _of_rate(generation, "cached", "cached tokens/s rises with length", rises=True)
        yield _of_decode(generation)
    if len(both) > 1:
        yield _of_rate(both, "naive", "naive tokens/s falls with length", rises=False)
        yield _of_widening(both)
    if len(prompt) > 2:
        yield _of_prefill(prompt)


def _of_rate(points: Points, arm: str, text: str, *, rises: bool) -> Claim:
    """The rate of the longest answers over that of the shortest."""
    (short, first), (long, last) = points[0], points[-1]
    longest, shortest = ([run.e2e_tokens_per_s for run in result.runs[arm]] for result in (last, first))
    found = ratio_of(longest, shortest)
    evidence = f"{arm} rate at {long} tokens / rate at {short}: {told(found)}"
    return Claim(text=text, verdict=side(found.interval, 1.0, above=rises), evidence=evidence)


def _of_widening(points: Points) -> Claim:
    """How much of the widening speedup is left where the naive path's cost does not grow."""
    (short, first), (long, last) = points[0], points[-1]
    measured = ratio_of(_each(last, speedup_of_totals), _each(first, speedup_of_totals))
    constant = ratio_of(_each(last, speedup_if_constant), _each(first, speedup_if_constant))
    slope = median_of([each for each in _each(last, itl_ratio_slope) if each is not None])
    verdict = side(slope.interval, 0.0, above=True)
    share = _share(measured, constant)
    evidence = (
        f"the speedup widens {told(measured)} times from {short} to {long} tokens; at a constant naive cost it would "
        f"widen {told(constant)} times{share}; r(L) grows by {told(slope)} per {PER_TOKENS:,} tokens of context"
    )
    text = "the widening speedup is O(n) against O(n^2)"
    return Claim(text=text, verdict="holds in part" if verdict == "holds" else verdict, evidence=evidence)


def _share(measured: Estimate, constant: Estimate) -> str:
    """In logarithms, as factors multiply."""
    if not measured.value or not constant.value or measured.value <= 1 or constant.value <= 1:
        return ""
    share = math.log(constant.value) / math.log(measured.value)
    return f", which is {100 * share:.0f} % of it: prefill shared among more tokens"


def _of_prefill(points: Points) -> Claim:
    """Linear would be without an overhead; what is affine doubles its prompt and not its TTFT."""
    xs, ys = _pooled(points, lambda run: run.ttft_s)
    kind = growth(xs, ys)
    fit = best_fit(xs, ys)
    verdict: Verdict = "cannot tell" if kind is None else "holds" if kind == "proportional" else "does not hold"
    evidence = f"TTFT is {kind or 'open'}: {fit.equation('prompt tokens', 1e3, 'ms')}{_crossing(fit)}"
    return Claim(text="prefill is linear in the prompt", verdict=verdict, evidence=evidence)


def _crossing(fit: Fit) -> str:
    """A parabola has none."""
    root = crossover(fit) if fit.kind == "affine" else None
    if root is None or root.value is None or root.low is None or root.high is None:
        return ""
    return f"; half of it is overhead at {root.value:.0f} [{root.low:.0f}, {root.high:.0f}] tokens"


def _of_decode(points: Points) -> Claim:
    """The slope of ITL inside each run of the longest answers: surely below a tenth of it per 1,000 tokens is flat.

    Not over the prompts of the sweep: those cases lie minutes apart, in which a shared host changes more than a cache.
    """
    tokens, last = points[-1]
    found = median_of([slope * 1e6 for run in last.runs["cached"] if (slope := itl_slope_s(run)) is not None])
    itl_us = 1e6 * (quantile([gap for run in last.runs["cached"] for gap in run.itls_s or ()], 0.5) or 0.0)
    verdict: Verdict = "holds" if _is_within(found.interval, _FLAT * itl_us) else "cannot tell"
    if side(found.interval, _FLAT * itl_us, above=True) == "holds":
        verdict = "does not hold"
    evidence = f"inside runs of {tokens} tokens ITL grows by {told(found)} us per {PER_TOKENS:,} tokens of context"
    return Claim(text="decode is flat", verdict=verdict, evidence=evidence)


def _is_within(interval: Interval, limit: float) -> bool:
    return interval.low is not None and interval.high is not None and -limit < interval.low <= interval.high < limit


def _pooled(points: Points, value_of: Callable[[RunTiming], float | None]) -> tuple[list[float], list[float]]:
    found = [(tokens, value_of(run)) for tokens, result in points for run in result.runs["cached"]]
    return [x for x, y in found if y is not None], [y for _, y in found if y is not None]


def _each(result: BenchmarkResult, of: Callable[[RunTiming, RunTiming], float | None]) -> list[float | None]:
    return [of(slow, fast) for slow, fast in zip(result.runs["naive"], result.runs["cached"], strict=True)]
