"""The claims of the cache study, each held against what was measured here, with the interval that decides.

Knows what was claimed and what would refute it. Refuses to decide where an interval holds both: "cannot tell".
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from benchmarks.harness.fits import Fit, best_fit, crossover, growth
from benchmarks.harness.report import number_text
from benchmarks.harness.results import BenchmarkResult
from benchmarks.harness.slopes import PER_TOKENS, itl_ratio_slope, itl_slope_s, speedup_if_constant, speedup_of_totals
from benchmarks.harness.stats import Estimate, Interval, paired_ratio, quantile, quantile_interval
from benchmarks.harness.timing import RunTiming
from benchmarks.studies.cache_points import GENERATION, PROMPT, points_of

_FLAT = 0.1

Verdict = Literal["holds", "holds in part", "does not hold", "cannot tell"]
Points = Sequence[tuple[int, BenchmarkResult]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """In the study's words, and what speaks for or against it in ours."""

    text: str
    verdict: Verdict
    evidence: str


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
    found = _ratio([run.e2e_tokens_per_s for run in last.runs[arm]], [run.e2e_tokens_per_s for run in first.runs[arm]])
    evidence = f"{arm} rate at {long} tokens / rate at {short}: {_told(found)}"
    return Claim(text=text, verdict=_side(found.interval, 1.0, above=rises), evidence=evidence)


def _of_widening(points: Points) -> Claim:
    """How much of the widening speedup is left where the naive path's cost does not grow."""
    (short, first), (long, last) = points[0], points[-1]
    measured = _ratio(_each(last, speedup_of_totals), _each(first, speedup_of_totals))
    constant = _ratio(_each(last, speedup_if_constant), _each(first, speedup_if_constant))
    slope = _median([each for each in _each(last, itl_ratio_slope) if each is not None])
    verdict = _side(slope.interval, 0.0, above=True)
    share = _share(measured, constant)
    evidence = (
        f"the speedup widens {_told(measured)} times from {short} to {long} tokens; at a constant naive cost it would "
        f"widen {_told(constant)} times{share}; r(L) grows by {_told(slope)} per {PER_TOKENS:,} tokens of context"
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
    found = _median([slope * 1e6 for run in last.runs["cached"] if (slope := itl_slope_s(run)) is not None])
    itl_us = 1e6 * (quantile([gap for run in last.runs["cached"] for gap in run.itls_s or ()], 0.5) or 0.0)
    verdict: Verdict = "holds" if _is_within(found.interval, _FLAT * itl_us) else "cannot tell"
    if _side(found.interval, _FLAT * itl_us, above=True) == "holds":
        verdict = "does not hold"
    evidence = f"inside runs of {tokens} tokens ITL grows by {_told(found)} us per {PER_TOKENS:,} tokens of context"
    return Claim(text="decode is flat", verdict=verdict, evidence=evidence)


def _median(values: Sequence[float]) -> Estimate:
    return Estimate(value=quantile(values, 0.5), interval=quantile_interval(values, 0.5), num_samples=len(values))


def _is_within(interval: Interval, limit: float) -> bool:
    return interval.low is not None and interval.high is not None and -limit < interval.low <= interval.high < limit


def _pooled(points: Points, value_of: Callable[[RunTiming], float | None]) -> tuple[list[float], list[float]]:
    found = [(tokens, value_of(run)) for tokens, result in points for run in result.runs["cached"]]
    return [x for x, y in found if y is not None], [y for _, y in found if y is not None]


def _each(result: BenchmarkResult, of: Callable[[RunTiming, RunTiming], float | None]) -> list[float | None]:
    return [of(slow, fast) for slow, fast in zip(result.runs["naive"], result.runs["cached"], strict=True)]


def _ratio(above: Sequence[float | None], below: Sequence[float | None]) -> Estimate:
    """Sample by sample."""
    pairs = [(a, b) for a, b in zip(above, below, strict=False) if a is not None and b is not None]
    return paired_ratio([a for a, _ in pairs], [b for _, b in pairs])


def _side(interval: Interval, limit: float, *, above: bool) -> Verdict:
    if interval.low is None or interval.high is None or interval.low <= limit <= interval.high:
        return "cannot tell"
    return "holds" if (interval.low > limit) == above else "does not hold"


def _told(found: Estimate) -> str:
    if found.value is None:
        return "undefined"
    ends = (found.interval.low, found.interval.high)
    interval = "" if None in ends else f" [{', '.join(number_text(end) for end in ends if end is not None)}]"
    return number_text(found.value) + interval
