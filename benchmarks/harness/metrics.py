"""Every metric, declared once: name, unit, formula, weighting, direction, gate, floors.

A name that is not declared here is refused everywhere. METHODOLOGY.md has the formulas with their sources.
"""

import functools

from benchmarks.harness.declaration import Metric
from benchmarks.harness.errors import UndeclaredMetricError
from benchmarks.harness.kinds import coefficient, count, if_defined, latency, rate, ratio
from benchmarks.harness.reuse_metrics import REUSE_METRICS
from benchmarks.harness.slopes import (
    batch_knee_requests,
    batch_scaling,
    itl_growth,
    itl_ratio,
    itl_ratio_growth,
    itl_ratio_slope,
    itl_slope_s,
    read_exponent,
    speedup_if_constant,
    speedup_of_totals,
    step_overhead_s,
    step_per_request_s,
    ttft_coefficient,
    ttft_crossover_tokens,
    ttft_growth,
)
from benchmarks.harness.traffic import (
    asked_requests_per_s,
    goodput,
    hit_rate,
    itl_price,
    mean_tokens_per_s,
    peak_tokens_per_s,
    requests_per_s,
    schedule_delay_max_s,
    steady_tokens_per_s,
    tpot_by_token_s,
    tpot_price,
    window_speedup,
)

__all__ = ["METRICS", "STREAM_METRICS", "TRAFFIC_METRICS", "WORK_METRICS", "Metric", "metric"]

_LATENCIES = (
    latency(
        "ttft_s", "TTFT", "first token - arrival; median over runs",
        gate=True, floor_s=50e-6, observe=lambda run: if_defined(run.ttft_s),
    ),
    latency(
        "queue_wait_s", "Queue wait", "admitted - arrival; median over runs",
        gate=False, floor_s=50e-6, observe=lambda run: if_defined(run.queue_wait_s),
    ),
    latency(
        "schedule_delay_p50_s", "Schedule delay p50", "sent - due, of the load generator itself; median over requests",
        gate=False, floor_s=50e-6, observe=lambda run: if_defined(run.schedule_delay_s),
    ),
    latency(
        "schedule_delay_p99_s", "Schedule delay p99", "sent - due, of the load generator itself; 99th percentile",
        gate=False, floor_s=50e-6, q=0.99, observe=lambda run: if_defined(run.schedule_delay_s),
    ),
    latency(
        "schedule_delay_max_s", "Longest schedule delay", "sent - due, of the request that was sent latest",
        gate=False, floor_s=50e-6, weighting="window", over=schedule_delay_max_s,
    ),
    latency(
        "itl_p50_s", "ITL p50", "median of the gaps between consecutive output tokens, pooled over runs",
        gate=True, floor_s=5e-6, weighting="gap", observe=lambda run: run.itls_s or (),
    ),
    latency(
        "itl_p90_s", "ITL p90", "90th percentile of the gaps between consecutive output tokens, pooled over runs",
        gate=False, floor_s=5e-6, weighting="gap", q=0.9, observe=lambda run: run.itls_s or (),
    ),
    latency(
        "itl_p99_s", "ITL p99", "99th percentile of the gaps between consecutive output tokens, pooled over runs",
        gate=False, floor_s=5e-6, weighting="gap", q=0.99, observe=lambda run: run.itls_s or (),
    ),
    latency(
        "step_gap_p50_s", "Step gap", "median of the gaps between arrivals, whatever number of tokens each brought",
        gate=False, floor_s=5e-6, weighting="gap", observe=lambda run: run.step_gaps_s,
    ),
    latency(
        "tpot_s", "TPOT", "(E2E - TTFT) / (tokens - 1); median over runs, each run counts once",
        gate=False, floor_s=5e-6, observe=lambda run: if_defined(run.tpot_s),
    ),
    latency(
        "tpot_by_token_s", "TPOT by token", "sum of (E2E - TTFT) / sum of (tokens - 1) over all runs",
        gate=False, floor_s=5e-6, weighting="token", over=tpot_by_token_s,
    ),
    latency(
        "e2e_s", "E2E", "last token - arrival; median over runs",
        gate=True, floor_s=50e-6, observe=lambda run: if_defined(run.e2e_s),
    ),
)  # fmt: skip

_RATES = (
    rate(
        "prefill_tokens_per_s", "Prefill rate", "prompt positions run / (first token - admitted); median over runs",
        observe=lambda run: if_defined(run.prefill_tokens_per_s),
    ),
    rate(
        "decode_tokens_per_s", "Decode rate", "(tokens - 1) / (E2E - TTFT); median over runs",
        observe=lambda run: if_defined(run.decode_tokens_per_s),
    ),
    rate(
        "e2e_tokens_per_s", "End-to-end rate", "tokens / E2E; median over runs",
        observe=lambda run: if_defined(run.e2e_tokens_per_s),
    ),
    rate(
        "mean_tokens_per_s", "Mean throughput", "output tokens of all requests / (last token - first arrival)",
        weighting="window", over=mean_tokens_per_s,
    ),
    rate(
        "peak_tokens_per_s", "Peak throughput", "highest output token rate over any span of at least a second",
        weighting="window", over=peak_tokens_per_s,
    ),
    rate(
        "steady_tokens_per_s", "Decode throughput",
        "output tokens per second while all requests of a window decode: after the last first token, to the first end",
        weighting="window", gate=True, over=steady_tokens_per_s,
    ),
    rate(
        "asked_requests_per_s", "Asked rate", "(requests - 1) / (last due - first due)",
        weighting="window", unit="requests/s", over=asked_requests_per_s,
    ),
    rate(
        "requests_per_s", "Request rate", "finished requests / (last token - first arrival)",
        weighting="window", unit="requests/s", over=requests_per_s,
    ),
    rate(
        "goodput_requests_per_s", "Goodput", "requests that met every stated limit / (last token - first arrival)",
        weighting="window", unit="requests/s", judged=lambda runs, limits: goodput(runs, limits).good_per_s,
    ),
    rate(
        "hit_rate", "Hit rate", "prompt tokens found in a cache / prompt tokens, all requests together",
        weighting="window", unit="share", in_sequence=True, over=hit_rate,
    ),
)  # fmt: skip

_RATIOS = (
    ratio(
        "speedup", "Speedup", "E2E of the slow arm / E2E of the fast arm, within a pair of runs; median over pairs",
        paired=speedup_of_totals,
    ),
    ratio(
        "speedup_if_constant", "Speedup at constant cost",
        "the speedup if every token of the slow arm cost what its first eight cost on average; median over pairs",
        gate=False, paired=speedup_if_constant,
    ),
    ratio(
        "itl_ratio", "ITL ratio", "r(L): ITL of the slow arm / ITL of the fast arm, at the longest context L",
        paired=itl_ratio,
    ),
    ratio(
        "window_speedup", "Speedup of windows",
        "last token - first arrival of the slow arm's window / that of the fast arm's; median over pairs of windows",
        between=window_speedup,
    ),
    ratio(
        "itl_price", "ITL price",
        "median ITL of one arm / that of the arm it is held against, all requests of a window; median over pairs",
        better="lower", between=itl_price,
    ),
    ratio(
        "tpot_price", "TPOT price",
        "median TPOT of one arm / that of the arm it is held against, all requests of a window; median over pairs",
        better="lower", between=tpot_price,
    ),
    ratio(
        "itl_ratio_growth", "Growth of the ITL ratio", "r at the longest context / r at the shortest",
        paired=itl_ratio_growth,
    ),
)  # fmt: skip

_CURVES = (
    ratio(
        "itl_growth", "Growth of ITL", "ITL at the longest context / ITL at the shortest, on a line through all gaps",
        weighting="request", better="lower", observe=lambda run: if_defined(itl_growth(run)),
    ),
    ratio(
        "ttft_growth", "Growth of TTFT", "TTFT of the longest prompt / TTFT of the shortest; median over samples",
        weighting="sweep", better="lower", along=ttft_growth,
    ),
    ratio(
        "batch_scaling", "Scaling of decode throughput",
        "decode throughput of the largest batch / that of the smallest; median over samples",
        weighting="sweep", across=batch_scaling,
    ),
    coefficient(
        "batch_knee_requests", "Knee", "requests",
        "the batch at which the part of a decode step that grows with it costs as much as the rest",
        across=batch_knee_requests,
    ),
    coefficient(
        "step_overhead_s", "Step overhead", "s", "a of ITL = a + b B through the batches B of a sample",
        across=step_overhead_s,
    ),
    coefficient(
        "step_per_request_s", "Step per request", "s", "b of ITL = a + b B through the batches B of a sample",
        across=step_per_request_s,
    ),
    coefficient(
        "read_exponent", "Exponent of reading", "x",
        "slope of log time on log context: 1 where twice the context takes twice as long", along=read_exponent,
    ),
    coefficient(
        "itl_slope_s", "Slope of ITL", "s", "by how much ITL grows per 1,000 tokens of context; median over runs",
        weighting="request", shown_in="us", observe=lambda run: if_defined(itl_slope_s(run)),
    ),
    coefficient(
        "itl_ratio_slope", "Slope of the ITL ratio", "x", "by how much r(L) grows per 1,000 tokens of context",
        weighting="pair", better="higher", paired=itl_ratio_slope,
    ),
    coefficient(
        "ttft_overhead_s", "TTFT overhead", "s", "a of TTFT = a + b P + c P^2 through the prompts P of a sample",
        along=functools.partial(ttft_coefficient, 0),
    ),
    coefficient(
        "ttft_per_token_s", "TTFT per token", "s", "b of TTFT = a + b P + c P^2 through the prompts P of a sample",
        along=functools.partial(ttft_coefficient, 1),
    ),
    coefficient(
        "ttft_per_token2_s", "TTFT per token squared", "s",
        "c of TTFT = a + b P + c P^2, where the samples together ask for it",
        along=functools.partial(ttft_coefficient, 2),
    ),
    coefficient(
        "ttft_crossover_tokens", "TTFT crossover", "tokens", "the prompt length P at which b P + c P^2 = a",
        along=ttft_crossover_tokens,
    ),
)  # fmt: skip

_SHARES = (
    Metric(
        name="mbu", title="MBU", unit="share", weighting="ceiling", better="higher", gate=False,
        formula="bytes of weights, keys and values that decoding reads / its time / read bandwidth measured here",
    ),
    Metric(
        name="mfu", title="MFU", unit="share", weighting="ceiling", better="higher", gate=False,
        formula="FLOPs of the prefill / TTFT / FLOP/s of a matrix product measured here",
    ),
)  # fmt: skip

_COUNTS = (
    count("flops", "FLOP", "floating-point operations of matrix products and attention, a multiply-add counts two"),
    count("num_operators", "operators", "operators that reached a device backend, views and copies included"),
    count("allocated_bytes", "bytes", "sum of the sizes of all tensor storages that operators made"),
    count("peak_bytes", "bytes", "most bytes of such storages alive at once, above the level before"),
    count("num_kernel_launches", "launches", "kernels launched on the CUDA device"),
    count("num_graph_breaks", "breaks", "places where a compiled graph fell back to Python"),
    count("num_forwards", "forwards", "runs of the model, one per step and request"),
    count("num_tokens_prefilled", "tokens", "prompt positions that were run for the first time"),
    count("num_tokens_recomputed", "tokens", "positions that were run again"),
    count("num_tokens_decoded", "tokens", "positions of output tokens that were run for the first time"),
    count("kv_bytes", "bytes", "bytes of keys and values held after the step, reserved positions included"),
    count("num_kv_blocks", "blocks", "KV blocks that the request holds after the step"),
    count("kv_waste_bytes", "bytes", "bytes inside the blocks that it holds in which no position lies"),
    count("kv_unused_bytes", "bytes", "bytes of the pool's blocks that nobody holds after the step"),
    count("num_steps", "steps", "scheduler decisions that ran something, until all requests had ended"),
    count("num_positions", "tokens", "positions that ran in all steps together, those of padding among them"),
    count("num_padding", "tokens", "positions that ran for requests that had ended already"),
    count("num_preemptions", "preemptions", "requests that had to give their blocks back"),
    count("num_steps_to_first_answer", "steps", "steps until a first request was released, as a batch or alone"),
    count("num_missed_requests", "requests", "requests whose prompt a prefix cache did not find, first uses included"),
    count("num_missed_blocks", "blocks", "blocks of prompts that a prefix cache did not find, first uses included"),
)

METRICS = {each.name: each for each in (*_LATENCIES, *_RATES, *_RATIOS, *_CURVES, *_SHARES, *REUSE_METRICS, *_COUNTS)}

STREAM_METRICS = tuple(name for name, each in METRICS.items() if each.is_of_runs)
"""The metrics that runs yield that were sent one after another, each in a window of its own."""

TRAFFIC_METRICS = tuple(name for name, each in METRICS.items() if each.weighting == "window")
"""The metrics that ask for all requests of one window."""

WORK_METRICS = tuple(name for name, each in METRICS.items() if each.is_exact)


def metric(name: str) -> Metric:
    """Look a metric up. Raises UndeclaredMetricError, with the declared names, for any other name."""
    if name not in METRICS:
        raise UndeclaredMetricError(f"metric {name!r} is not declared; declared are: {', '.join(METRICS)}")
    return METRICS[name]
