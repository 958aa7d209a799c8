"""How the cost of a token grows: lines through the event log of a run, of a pair of runs, of all that a sample ran.

Knows event logs and lines through them. Refuses to know clocks and intervals: each function here gives one number per
run, pair or sample, and the spread of those is the business of `results.py`.

The line through the gaps of a run is that of Theil (1950) and Sen (1968), the median of the slopes of all pairs of
gaps: one stalled step does not turn it. Context is the number of positions that a step attends to.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from benchmarks.harness.fits import is_quadratic_needed
from benchmarks.harness.timing import RunTiming, speedup
from benchmarks.harness.traffic import itl_s, steady_tokens_per_s

PER_TOKENS = 1_000
"""Slopes are told per so many tokens of context."""

NUM_FIRST_TOKENS = 8
"""The tokens whose mean cost a path would have for ever if its cost did not grow."""

Power = Literal[0, 1, 2]


class Line(NamedTuple):
    """y at x = 0, its growth per unit of x, and the xs between which it is known."""

    intercept: float
    slope: float
    x_min: float
    x_max: float

    def at(self, x: float) -> float:
        return self.intercept + self.slope * x

    @property
    def growth(self) -> float | None:
        """y at the end over y at the beginning; None where either is not positive."""
        return speedup(self.at(self.x_max), self.at(self.x_min))


def robust_line(xs: Sequence[float], ys: Sequence[float]) -> Line | None:
    """Theil and Sen's line, through the medians of both; None below two different xs."""
    x, y = np.asarray(xs, float), np.asarray(ys, float)
    first, second = np.triu_indices(x.size, 1)
    differ = x[first] != x[second]
    if not differ.any():
        return None
    slopes = (y[second] - y[first])[differ] / (x[second] - x[first])[differ]
    slope = float(np.median(slopes))
    return Line(float(np.median(y)) - slope * float(np.median(x)), slope, float(x.min()), float(x.max()))


def contexts_of(run: RunTiming) -> list[int] | None:
    """The context of the step behind each gap between tokens; None where the source tells no prompt length."""
    if run.num_prompt_tokens is None or run.itls_s is None:
        return None
    return [run.num_prompt_tokens + place for place in range(1, len(run.itls_s) + 1)]


# One run.


def itl_line(run: RunTiming) -> Line | None:
    """ITL in seconds against context."""
    contexts = contexts_of(run)
    return None if not contexts else robust_line(contexts, run.itls_s or ())


def itl_slope_s(run: RunTiming) -> float | None:
    """Seconds by which the ITL grows per 1,000 tokens of context."""
    line = itl_line(run)
    return None if line is None else line.slope * PER_TOKENS


def itl_growth(run: RunTiming) -> float | None:
    """The line's ITL at the end of the run over that at its beginning: 1 is flat."""
    line = itl_line(run)
    return None if line is None else line.growth


# A pair of runs of one prompt: r(L), the ratio of the two paths' ITL at context L.


def ratio_line(slow: RunTiming, fast: RunTiming) -> Line | None:
    """r against context, from the ratio of each two gaps at the same context."""
    contexts = contexts_of(fast)
    pairs = list(zip(slow.itls_s or (), fast.itls_s or (), strict=False))
    if not contexts or contexts != contexts_of(slow) or not all(b > 0 for _, b in pairs):
        return None
    return robust_line(contexts, [a / b for a, b in pairs])


def itl_ratio(slow: RunTiming, fast: RunTiming) -> float | None:
    """r at the longest context of the pair, on its line."""
    line = ratio_line(slow, fast)
    return None if line is None or line.at(line.x_max) <= 0 else line.at(line.x_max)


def itl_ratio_slope(slow: RunTiming, fast: RunTiming) -> float | None:
    """By how much r grows per 1,000 tokens of context."""
    line = ratio_line(slow, fast)
    return None if line is None else line.slope * PER_TOKENS


def itl_ratio_growth(slow: RunTiming, fast: RunTiming) -> float | None:
    """r at the longest context over r at the shortest: 1 where both paths grow alike."""
    line = ratio_line(slow, fast)
    return None if line is None else line.growth


def speedup_of_totals(slow: RunTiming, fast: RunTiming) -> float | None:
    """E2E of the slow run over that of the fast one."""
    return speedup(slow.e2e_s, fast.e2e_s)


def speedup_if_constant(slow: RunTiming, fast: RunTiming) -> float | None:
    """What the speedup would be if every token of the slow path cost what its first eight cost on average.

    It still widens with length, because the fast path shares its prefill among more tokens: what the measured speedup
    has beyond it is the growth of the slow path's cost, which is the asymptote's share.
    """
    num = min(NUM_FIRST_TOKENS, len(slow.stamps))
    if not num or slow.itls_s is None:
        return None
    per_token_ns = (slow.stamps[num - 1].at_ns - slow.arrival_ns) / num
    return speedup(per_token_ns * slow.num_tokens / 1e9, fast.e2e_s)


# Runs of one sample, one for each length of the prompt.


def ttft_growth(runs: Sequence[RunTiming], degree: int = 1) -> float | None:
    """TTFT of the longest prompt over that of the shortest."""
    by_length = {run.num_prompt_tokens or 0: run.ttft_s for run in runs}
    return speedup(by_length[max(by_length)], by_length[min(by_length)]) if by_length else None


def _ttft_points(runs: Sequence[RunTiming]) -> list[tuple[int, float]]:
    """Length of the prompt and TTFT of each run that has both."""
    return [(run.num_prompt_tokens, run.ttft_s) for run in runs if run.num_prompt_tokens and run.ttft_s]


def ttft_coefficient(power: Power, runs: Sequence[RunTiming], degree: int = 1) -> float | None:
    """Seconds per token to this power in TTFT = a + b P + c P^2, up to this degree; None beyond it.

    Least squares on relative errors, as noise of times grows with what is timed. None with too few lengths.
    """
    points = _ttft_points(runs)
    if power > degree or len({length for length, _ in points}) <= degree:
        return None
    xs, ys = np.array(points, float).T
    design = np.vander(xs / xs.max(), degree + 1, increasing=True) / ys[:, None]
    solved = np.linalg.lstsq(design, np.ones_like(ys), rcond=None)[0]
    return float(solved[power] / xs.max() ** power)


def ttft_degree(runs: Sequence[RunTiming]) -> int:
    """2 where the runs of all samples together ask for a curvature, else 1: an affine curve is no linear one."""
    points = _ttft_points(runs)
    return 2 if is_quadratic_needed([x for x, _ in points], [y for _, y in points]) else 1


def ttft_crossover_tokens(runs: Sequence[RunTiming], degree: int = 1) -> float | None:
    """The prompt length at which what grows costs as much as the overhead: b P + c P^2 = a. None where none is."""
    a, b, c = (ttft_coefficient(power, runs, degree) or 0.0 for power in (0, 1, 2))
    roots = np.roots([c, b, -a] if c else [b, -a])
    real = [float(root.real) for root in roots if abs(root.imag) < 1e-12 and root.real > 0]
    return min(real, default=None)


def read_exponent(runs: Sequence[RunTiming], degree: int = 1) -> float | None:
    """The slope of log time on log length: 1 where twice as much takes twice as long. Least squares."""
    points = _ttft_points(runs)
    if len({length for length, _ in points}) < 2:
        return None
    xs, ys = np.log(np.array(points, float)).T
    return float(np.polyfit(xs, ys, 1)[0])


# Windows of one sample, one for each size of the batch.

Windows = Sequence[Sequence[RunTiming]]


def batch_line(windows: Windows) -> Line | None:
    """ITL in seconds against the number of requests that decode together."""
    points = [(len(window), gap) for window in windows if (gap := itl_s(window)) is not None]
    return robust_line([size for size, _ in points], [gap for _, gap in points])


def step_overhead_s(windows: Windows) -> float | None:
    """What a decode step costs for no request, on the line."""
    line = batch_line(windows)
    return None if line is None else line.intercept


def step_per_request_s(windows: Windows) -> float | None:
    """What each further request adds to a decode step."""
    line = batch_line(windows)
    return None if line is None else line.slope


def batch_knee_requests(windows: Windows) -> float | None:
    """The size at which what grows costs as much as what does not, and half of all possible throughput is reached.

    None where nothing grows: the knee lies beyond what was measured, if there is one.
    """
    line = batch_line(windows)
    return None if line is None or line.slope <= 0 or line.intercept <= 0 else line.intercept / line.slope


def batch_scaling(windows: Windows) -> float | None:
    """Decode throughput of the largest batch over that of the smallest."""
    by_size = {len(window): steady_tokens_per_s(window) for window in windows}
    return speedup(by_size[max(by_size)], by_size[min(by_size)]) if by_size else None
