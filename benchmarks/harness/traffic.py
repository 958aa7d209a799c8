"""Many requests in one window of time: throughput, goodput, weighting, and how full the engine was.

Knows finished event logs and stated limits; every function here is pure. A request that was sent and did not finish
is counted against the result, never left out of it. Undefined is None.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.harness.arrivals import mean_rate_per_s
from benchmarks.harness.errors import InstrumentError, WrongOutputError
from benchmarks.harness.timing import NS_PER_S, RunTiming, speedup

Runs = Sequence[RunTiming]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a request has to keep to be called good; a limit of None does not count. At least one is stated."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def __post_init__(self) -> None:
        stated = {name: limit for name, limit in dataclasses.asdict(self).items() if limit is not None}
        if not stated:
            raise InstrumentError("goodput needs a limit: ttft_s, tpot_s or e2e_s")
        for name, limit in stated.items():
            if not limit > 0:
                raise InstrumentError(f"the limit {name} must be positive, not {limit}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Every request that was sent, in exactly one of four counts; and the good ones per second of the window."""

    num_good: int
    num_slow: int
    num_failed: int
    num_not_evaluable: int
    good_per_s: float | None

    @property
    def num_sent(self) -> int:
        return self.num_good + self.num_slow + self.num_failed + self.num_not_evaluable

    @property
    def share_good(self) -> float | None:
        """Good requests among those sent, finished or not."""
        return self.num_good / self.num_sent if self.num_sent else None


def goodput(runs: Runs, limits: Limits) -> Goodput:
    """Judge every request. One token has no TPOT: against a limit on TPOT it is neither good nor slow."""
    verdicts = [_verdict(run, limits) for run in runs]
    window_s = duration_s(runs)
    num_good = verdicts.count("good")
    return Goodput(
        num_good=num_good,
        num_slow=verdicts.count("slow"),
        num_failed=verdicts.count("failed"),
        num_not_evaluable=verdicts.count("not evaluable"),
        good_per_s=num_good / window_s if window_s else None,
    )


def _verdict(run: RunTiming, limits: Limits) -> str:
    if not run.is_finished:
        return "failed"
    stated = [(getattr(run, name), limit) for name, limit in dataclasses.asdict(limits).items() if limit is not None]
    if any(value is not None and value > limit for value, limit in stated):
        return "slow"
    return "not evaluable" if any(value is None for value, _ in stated) else "good"


def check_all_finished(runs: Runs) -> None:
    """Raise WrongOutputError unless every request sent has finished: the latency of the one that did is no result."""
    failed = [run for run in runs if not run.is_finished]
    if failed or not runs:
        why = next((run.error for run in failed if run.error), "no token came")
        raise WrongOutputError(f"{len(failed)} of {len(runs)} requests did not finish ({why})")


def duration_s(runs: Runs) -> float | None:
    """The window: first arrival of a request to the last end of any, be it a token or where it broke off.

    None when no time passed, and when a request failed at a time that nobody knows: it may have waited for hours.
    """
    ends = [_end_ns(run) for run in runs]
    known = [end for end in ends if end is not None]
    if len(known) < len(ends) or not known:
        return None
    return (max(known) - min(run.arrival_ns for run in runs)) / NS_PER_S or None


def _end_ns(run: RunTiming) -> int | None:
    if run.error is not None:
        return run.broke_off_ns
    return run.stamps[-1].at_ns if run.stamps else None


def requests_per_s(runs: Runs) -> float | None:
    """Finished requests per second of the window."""
    window_s, num_finished = duration_s(runs), sum(run.is_finished for run in runs)
    return num_finished / window_s if window_s and num_finished else None


def asked_requests_per_s(runs: Runs) -> float | None:
    """The rate at which requests were due: gaps between the first and the last, over their time."""
    first_ns = min((run.arrival_ns for run in runs), default=0)
    return mean_rate_per_s([(run.arrival_ns - first_ns) / NS_PER_S for run in runs])


def schedule_delay_max_s(runs: Runs) -> float | None:
    """The longest time by which a request was sent later than it was due; None where nothing was due."""
    return max((delay for run in runs if (delay := run.schedule_delay_s) is not None), default=None)


def steady_tokens_per_s(runs: Runs) -> float | None:
    """Output tokens per second while every request was decoding: after the last first token, up to the first end."""
    stamped = [run.stamps for run in runs if run.stamps]
    if not stamped:
        return None
    start_ns, end_ns = max(stamps[0].at_ns for stamps in stamped), min(stamps[-1].at_ns for stamps in stamped)
    num = sum(stamp.num_tokens for stamps in stamped for stamp in stamps if start_ns < stamp.at_ns <= end_ns)
    return num / ((end_ns - start_ns) / NS_PER_S) if end_ns > start_ns else None


def itl_s(runs: Runs) -> float | None:
    """The median gap between consecutive output tokens, all requests together."""
    gaps = [gap for run in runs for gap in run.itls_s or ()]
    return float(np.median(gaps)) if gaps else None


def window_speedup(slow: Runs, fast: Runs) -> float | None:
    """How many times longer the slow window took."""
    return speedup(duration_s(slow), duration_s(fast))


def itl_price(dear: Runs, plain: Runs) -> float | None:
    """The median gap of one window over that of another."""
    return speedup(itl_s(dear), itl_s(plain))


def tpot_price(dear: Runs, plain: Runs) -> float | None:
    """The median TPOT of one window over that of another."""
    return speedup(_median_tpot_s(dear), _median_tpot_s(plain))


def _median_tpot_s(runs: Runs) -> float | None:
    values = [run.tpot_s for run in runs if run.tpot_s is not None]
    return float(np.median(values)) if values else None


def mean_tokens_per_s(runs: Runs) -> float | None:
    """Output tokens of all requests per second of the window."""
    window_s = duration_s(runs)
    return sum(run.num_tokens for run in runs) / window_s if window_s else None


def peak_tokens_per_s(runs: Runs, least_s: float = 1.0) -> float | None:
    """The highest rate over any span of at least `least_s` that begins with an arrival and ends with a token.

    A span counts the tokens after its beginning. In a window shorter than `least_s` it is the mean. Not the fullest
    bucket of a fixed grid: that can lie below the mean of the whole window, and moves with the grid's origin.
    """
    mean = mean_tokens_per_s(runs)
    if mean is None:
        return None
    start_ns = min(run.arrival_ns for run in runs)
    arrived: Counter[int] = Counter({start_ns: 0})
    for stamp in (stamp for run in runs for stamp in run.stamps):
        arrived[stamp.at_ns] += stamp.num_tokens
    at_s = np.array([(at_ns - start_ns) / NS_PER_S for at_ns in sorted(arrived)])
    so_far = np.cumsum([arrived[at_ns] for at_ns in sorted(arrived)])
    return max(mean, *(_best_from(i, at_s, so_far, least_s) for i in range(len(at_s))))


def _best_from(first: int, at_s: "np.ndarray[Any, Any]", so_far: "np.ndarray[Any, Any]", least_s: float) -> float:
    """The best of the spans that begin at one arrival."""
    low = np.searchsorted(at_s, at_s[first] + least_s)
    rates = (so_far[low:] - so_far[first]) / (at_s[low:] - at_s[first])
    return float(np.max(rates, initial=0.0))


def tpot_by_token_s(runs: Runs) -> float | None:
    """Decode time over decoded tokens, all requests together: a long answer weighs more than a short one."""
    spread = [run for run in runs if run.decode_s is not None]
    num_decoded = sum(run.num_tokens - 1 for run in spread)
    return sum(run.decode_s or 0 for run in spread) / num_decoded if num_decoded else None


def hit_rate(runs: Runs) -> float | None:
    """Prompt tokens found in a cache among all prompt tokens; never 1, because the last token has to be run."""
    told = [run for run in runs if run.num_cached is not None and run.num_prompt_tokens]
    num_prompt = sum(run.num_prompt_tokens or 0 for run in told)
    return sum(run.num_cached or 0 for run in told) / num_prompt if num_prompt else None


def utilisation(runs: Runs, num_slots: int) -> float | None:
    """Slot-seconds in which a request was running, of those that the window had; None without admission times."""
    if num_slots < 1:
        raise InstrumentError(f"an engine has at least 1 slot, not {num_slots}")
    window_s = duration_s(runs)
    if window_s is None or any(run.admitted_ns is None for run in runs if run.stamps):
        return None
    busy_ns = sum(run.stamps[-1].at_ns - (run.admitted_ns or 0) for run in runs if run.stamps)
    return busy_ns / NS_PER_S / (num_slots * window_s)
