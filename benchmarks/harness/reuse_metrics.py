"""What a prefix cache saves: the metrics of reuse, from the windows of a sample by the state of the cache.

Knows event logs by state (`scenes.py` says what each is), the windows of two arms, and where a curve leaves its floor.
Refuses to know how anything is stored and in which order things run.

A saving is taken against a prompt that nobody has seen, asked as late in the process as the one that hits: the first
prompt ever, which pays for everything that is cold, is no baseline. What leaving out the prefix altogether would save
is told as what it is, a bound that no cache reaches.
"""

from collections.abc import Iterator, Sequence

from benchmarks.harness.breakeven import batched_breakeven, breakeven, expected_ttft_s
from benchmarks.harness.declaration import ByState, Pooled
from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.fits import Fit, Root, fit_floor_limited
from benchmarks.harness.kinds import coefficient, latency, ratio
from benchmarks.harness.prefill_cost import derived_over_direct
from benchmarks.harness.stats import quantile
from benchmarks.harness.timing import RunTiming, speedup
from benchmarks.harness.traffic import duration_s

Runs = Sequence[RunTiming]

_UNCACHED = ("cold", "unseen", "suffix", "prefix")
"""The states in which nothing is found."""

# One sample, by state.


def reuse_speedup(by_state: ByState) -> float | None:
    """TTFT of an unseen prompt over that of one whose prefix is stored."""
    return speedup(_ttft_s(by_state, "unseen"), _ttft_s(by_state, "primed"))


def reuse_speedup_proxy(by_state: ByState) -> float | None:
    """TTFT of an unseen prompt over that of the suffix alone, which attends to no prefix."""
    return speedup(_ttft_s(by_state, "unseen"), _ttft_s(by_state, "suffix"))


def cold_over_unseen(by_state: ByState) -> float | None:
    """1 where it does not matter what was served before, as long as it is nothing of this prompt."""
    return speedup(_ttft_s(by_state, "cold"), _ttft_s(by_state, "unseen"))


def ttft_saved_s(by_state: ByState) -> float | None:
    """Unseen less primed."""
    return _difference(_ttft_s(by_state, "unseen"), _ttft_s(by_state, "primed"))


def prefill_removed_s(by_state: ByState) -> float | None:
    """Unseen less the suffix alone: what is saved, were stored keys and values read for nothing."""
    return _difference(_ttft_s(by_state, "unseen"), _ttft_s(by_state, "suffix"))


def kv_read_added_s(by_state: ByState) -> float | None:
    """Primed less the suffix alone: what it costs to find the prefix and to attend to it."""
    return _difference(_ttft_s(by_state, "primed"), _ttft_s(by_state, "suffix"))


# All samples.


def breakeven_requests(pooled: Pooled) -> Root:
    """See `breakeven.breakeven`; of one length of the prefix."""
    (load,) = pooled
    return breakeven(*(_ttfts_s(load[state]) for state in ("prefix", "unseen", "primed")))


def batched_breakeven_requests(pooled: Pooled) -> Root:
    """See `breakeven.batched_breakeven`; W is the time from sending N requests to their last token."""
    sizes = [len(load["primed"][0]) for load in pooled]
    unshared, shared, prefix = ([_seconds(load[state]) for load in pooled] for state in ("cold", "primed", "prefix"))
    return batched_breakeven(sizes, unshared, shared, prefix)


def derived_over_direct_saving(pooled: Pooled) -> Root:
    """See `prefill_cost.derived_over_direct`; T(n) goes through every prompt that ran uncached, from all loads."""
    lengths_s: dict[int, list[float]] = {}
    for load in pooled:
        for state in [state for state in _UNCACHED if state in load]:
            lengths_s.setdefault(_length(load[state]), []).extend(_ttfts_s(load[state]))
    suffix_tokens = _length(pooled[0]["suffix"])
    prefix_tokens = [_length(load["primed"]) - suffix_tokens for load in pooled]
    full_s, hit_s = ([_ttfts_s(load[state]) for load in pooled] for state in ("unseen", "primed"))
    return derived_over_direct(dict(sorted(lengths_s.items())), prefix_tokens, suffix_tokens, full_s, hit_s)


# The lengths of a sweep.


def ttft_floor_s(runs: Runs, degree: int = 1) -> float | None:
    """What the shortest prompts cost, whatever their length; None where the lengths of a sample show no floor."""
    fit = _floor_limited(runs, degree)
    return None if fit is None else fit["floor"].value


def ttft_floor_until_tokens(runs: Runs, degree: int = 1) -> float | None:
    """The length up to which a prompt costs no more than the shortest; None where the lengths show no floor."""
    fit = _floor_limited(runs, degree)
    return None if fit is None or fit.knot is None else fit.knot.value


def _floor_limited(runs: Runs, degree: int) -> Fit | None:
    """A curve with a floor that the data do not leave open: on a straight line the first point looks like one."""
    points = [(run.num_prompt_tokens, run.ttft_s) for run in runs if run.num_prompt_tokens and run.ttft_s]
    if len({length for length, _ in points}) < 2 + degree:
        return None
    fit = fit_floor_limited([x for x, _ in points], [y for _, y in points], is_quadratic=degree == 2)
    return None if fit["floor"].low is None else fit


# Windows of two arms.


def turns_speedup(off: Runs, carried: Runs) -> float | None:
    """TTFT of the last turn without a cache over that with it."""
    return speedup(off[-1].ttft_s, carried[-1].ttft_s)


def turns_saved_s(off: Runs, carried: Runs) -> float | None:
    """What all turns of a conversation waited less for their first tokens."""
    return _difference(_sum_s(off), _sum_s(carried))


def mean_ttft_s(runs: Runs) -> float | None:
    """The mean over requests; None where one has no token."""
    total = _sum_s(runs)
    return None if total is None else total / len(runs)


def effective_speedup(off: Runs, on: Runs) -> float | None:
    """Mean TTFT without a cache over that with it, hits and misses together."""
    return speedup(mean_ttft_s(off), mean_ttft_s(on))


def ttft_over_expected(on: Runs, off: Runs) -> float | None:
    """Mean TTFT with a cache over what it should be, were lookup, storing and eviction free."""
    full_s, hits = mean_ttft_s(off), [run for run in on if run.num_cached]
    if full_s is None or any(run.num_cached is None for run in on):
        return None
    return speedup(mean_ttft_s(on), expected_ttft_s(len(hits) / len(on), full_s, mean_ttft_s(hits) or 0.0))


def ttft_price(dear: Runs, plain: Runs) -> float | None:
    """The median TTFT of one window over that of another."""
    return speedup(_median_s(dear), _median_s(plain))


# What they have in common.


def _ttft_s(by_state: ByState, state: str) -> float | None:
    (run,) = by_state[state]
    return run.ttft_s


def _difference(more_s: float | None, less_s: float | None) -> float | None:
    return None if more_s is None or less_s is None else more_s - less_s


def _sum_s(runs: Runs) -> float | None:
    known = [run.ttft_s for run in runs if run.ttft_s is not None]
    return sum(known) if runs and len(known) == len(runs) else None


def _median_s(runs: Runs) -> float | None:
    return quantile([run.ttft_s for run in runs if run.ttft_s is not None], 0.5)


def _ttfts_s(windows: Sequence[Runs]) -> list[float]:
    return list(_known(run.ttft_s for (run,) in windows))


def _seconds(windows: Sequence[Runs]) -> list[float]:
    return list(_known(map(duration_s, windows)))


def _known(times_s: Iterator[float | None]) -> Iterator[float]:
    """Samples are paired by place: none may be missing."""
    for place, time_s in enumerate(times_s):
        if time_s is None:
            raise InstrumentError(f"sample {place} took no time that is known, and cannot be paired with the others")
        yield time_s


def _length(windows: Sequence[Runs]) -> int:
    return windows[0][0].num_prompt_tokens or 0


# The declarations.

REUSE_METRICS = (
    ratio(
        "reuse_speedup", "Speedup of reuse",
        "TTFT of a prompt never seen / TTFT of one as long whose prefix was served before; median over samples",
        states=("unseen", "primed"), label="primed over unseen", among=reuse_speedup,
    ),
    ratio(
        "reuse_speedup_proxy", "Speedup by the proxy",
        "TTFT of a prompt never seen / TTFT of the suffix alone, which leaves out attention over the prefix",
        gate=False, states=("unseen", "suffix"), label="suffix over unseen", among=reuse_speedup_proxy,
    ),
    ratio(
        "cold_over_unseen", "Cold over unseen",
        "TTFT with nothing served before / TTFT of a prompt never seen: 1, or a speedup over cold is warm-up",
        gate=False, better="lower", states=("cold", "unseen"), label="cold against unseen", among=cold_over_unseen,
    ),
    coefficient(
        "ttft_saved_s", "TTFT saved", "s", "TTFT of a prompt never seen - TTFT of one whose prefix was served before",
        weighting="pair", better="higher", states=("unseen", "primed"), label="unseen less primed", among=ttft_saved_s,
    ),
    coefficient(
        "prefill_removed_s", "Prefill removed", "s",
        "TTFT of a prompt never seen - TTFT of the suffix alone: what would be saved if stored positions cost nothing",
        weighting="pair", better="higher", states=("unseen", "suffix"), label="unseen less suffix",
        among=prefill_removed_s,
    ),
    coefficient(
        "kv_read_added_s", "KV reads added", "s",
        "TTFT of a prompt whose prefix was served before - TTFT of the suffix alone: saved = removed - added",
        weighting="pair", states=("primed", "suffix"), label="primed less suffix", among=kv_read_added_s,
    ),
    coefficient(
        "breakeven_requests", "Breakeven", "requests",
        "T(P) / (T(P + S) - T(S | P)): from so many requests, one after another, a prefix run once apart has paid",
        weighting="pair", states=("prefix", "unseen", "primed"), label="primed against unseen",
        pooled=breakeven_requests,
    ),
    coefficient(
        "batched_breakeven_requests", "Breakeven of a batch", "requests",
        "zero of D(N) = W(N, not shared) - W(N, shared) - T(P): so many requests at once pay for a prefix run before",
        weighting="pair", states=("cold", "primed", "prefix"), label="primed against cold", spans_loads=True,
        of_sizes=True, pooled=batched_breakeven_requests,
    ),
    coefficient(
        "derived_over_direct", "Derived over direct", "x",
        "saving that follows from one curve T(n) / saving measured directly, all lengths of the prefix together",
        weighting="pair", states=("unseen", "primed", "suffix"), label="T(n) against unseen less primed",
        spans_loads=True, pooled=derived_over_direct_saving,
    ),
    coefficient(
        "ttft_floor_s", "TTFT floor", "s",
        "the floor of TTFT = max(floor, a + b P + c P^2) through the prompts P of a sample", along=ttft_floor_s,
    ),
    coefficient(
        "ttft_floor_until_tokens", "End of the TTFT floor", "tokens",
        "the prompt length P at which TTFT = max(floor, a + b P + c P^2) leaves its floor",
        along=ttft_floor_until_tokens,
    ),
    ratio(
        "turns_speedup", "Speedup of the last turn",
        "TTFT of a conversation's last turn, slow arm / fast arm; median over pairs of conversations",
        between=turns_speedup,
    ),
    coefficient(
        "turns_saved_s", "TTFT saved by all turns", "s",
        "sum of a conversation's TTFTs, slow arm - fast arm; median over pairs of conversations",
        weighting="pair", better="higher", between=turns_saved_s,
    ),
    latency(
        "mean_ttft_s", "Mean TTFT", "mean TTFT of all requests of a window; median over windows",
        gate=False, floor_s=50e-6, weighting="window", in_sequence=True, over=mean_ttft_s,
    ),
    ratio(
        "effective_speedup", "Effective speedup",
        "mean TTFT of the slow arm's window / that of the fast arm's, hits and misses together; median over pairs",
        between=effective_speedup,
    ),
    ratio(
        "ttft_over_expected", "TTFT over expected",
        "mean TTFT / ((1 - h) mean TTFT of the arm it is held against + h mean TTFT of its hits), h the share that hit",
        gate=False, better="lower", between=ttft_over_expected,
    ),
    ratio(
        "ttft_price", "TTFT price", "median TTFT of one arm / that of the arm it is held against; median over pairs",
        better="lower", between=ttft_price,
    ),
)  # fmt: skip
