"""What holds for every run whatever was measured, asserted on each real one: a broken one is the instrument's fault.

Knows event logs and the arithmetic of `timing.py` and `traffic.py`. A formula that goes wrong breaks one of these
before it becomes a number that somebody believes.
"""

import math
from collections.abc import Sequence

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.timing import RunTiming
from benchmarks.harness.traffic import (
    Limits,
    goodput,
    hit_rate,
    mean_tokens_per_s,
    peak_tokens_per_s,
    requests_per_s,
    utilisation,
)


def check_run(run: RunTiming) -> None:
    """Raise InstrumentError unless the sums, the counts and the orders within one request are consistent."""
    _demand(run.ttft_s is None or run.ttft_s >= 0, f"a TTFT of {run.ttft_s} s")
    if run.decode_s is not None and run.tpot_s is not None:
        _demand(_equal(sum(run.step_gaps_s), run.decode_s), "gaps do not sum to last token - first token")
        e2e_s = (run.ttft_s or 0) + (run.num_tokens - 1) * run.tpot_s
        _demand(_equal(e2e_s, run.e2e_s), f"TTFT + (N - 1) TPOT is {e2e_s} s, E2E is {run.e2e_s} s")
        _demand(_is_mean_of(run.tpot_s, run.itls_s), f"a TPOT of {run.tpot_s} s is not the mean of the gaps")
    if None not in (run.num_cached, run.num_prefilled, run.num_prompt_tokens):
        parts = (run.num_cached or 0) + (run.num_prefilled or 0)
        _demand(parts == run.num_prompt_tokens, f"{parts} tokens cached or prefilled of {run.num_prompt_tokens}")
    check_window([run])


def check_window(runs: Sequence[RunTiming], limits: Limits | None = None, num_slots: int | None = None) -> None:
    """Raise InstrumentError unless the figures of one window of requests can be true together."""
    mean, peak = mean_tokens_per_s(runs), peak_tokens_per_s(runs)
    if mean is not None and peak is not None:
        _demand(peak >= mean, f"a peak of {peak} tokens/s is below the mean of {mean}")
    if limits is not None:
        judged = goodput(runs, limits)
        _demand(judged.num_sent == len(runs), f"{judged.num_sent} of {len(runs)} requests were judged")
        _demand((judged.good_per_s or 0) <= (requests_per_s(runs) or 0), "goodput is above throughput")
    rate, longest = hit_rate(runs), max((run.num_prompt_tokens or 0 for run in runs), default=0)
    if rate is not None:
        _demand(0 <= rate <= 1 - 1 / longest, f"a hit rate of {rate} for prompts of at most {longest} tokens")
    if num_slots is not None:
        _demand((utilisation(runs, num_slots) or 0) <= 1 + 1e-9, f"more than {num_slots} slots were busy")


def _demand(holds: bool, broken: str) -> None:
    if not holds:
        raise InstrumentError(f"an invariant of the measurement is broken: {broken}")


def _equal(a: float | None, b: float | None) -> bool:
    return a is not None and b is not None and math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)


def _is_mean_of(tpot_s: float, itls_s: tuple[float, ...] | None) -> bool:
    """Of one token per arrival the mean gap is the TPOT; of chunks nothing of the kind holds."""
    return itls_s is None or _equal(tpot_s, sum(itls_s) / len(itls_s))
