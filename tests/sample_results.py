"""Results files as a real run would write them, made by hand: any number of cases, arms, runs, flags and counters."""

import json
import random

from benchmarks.harness import INSTRUMENT_VERSION
from benchmarks.harness.metrics import METRICS, metric
from benchmarks.harness.results import BenchmarkResult, exact_count, summarise_runs, summarise_values
from benchmarks.harness.timing import RunTiming, Stamp

PROVENANCE = {
    "instrument_version": INSTRUMENT_VERSION,
    "package": "/somewhere/nanoserve",
    "source_sha256": "0123456789abcdef" * 4,
    "commit": "c0ffee0123456789c0ffee0123456789c0ffee01",
    "model": "tiny",
    "weights": "random, seed 0",
    "dtype": "float32",
    "device": "cpu",
    "device_name": None,
    "num_threads": 2,
    "attention": "scaled_dot_product_attention",
    "cpu": "A Processor",
    "num_cpus": 2,
    "load_average": [0.5, 0.4, 0.3],
    "python": "3.11.7",
    "versions": {"torch": "2.13.0", "numpy": "2.4.6"},
}
STREAMED = ("ttft_s", "itl_p50_s", "itl_p90_s", "tpot_s", "e2e_s", "decode_tokens_per_s")
BENCHMARK = "benchmarks/bench_x.py::test_growth"


def run(rng, num_tokens, *, ttft_s=0.005, itl_s=0.002, noise=0.05):
    """One request whose gaps scatter around `itl_s`."""
    at_ns, stamps = 0, []
    for place in range(num_tokens):
        at_ns += int((itl_s if place else ttft_s) * 1e9 * rng.lognormvariate(0, noise))
        stamps.append(Stamp(at_ns=at_ns, num_tokens=1))
    return RunTiming(sent_ns=0, stamps=tuple(stamps), finish_reason="length")


def streamed_case(x=8, *, axis="new_tokens", arms=("cached", "naive"), num_runs=6, seed=0, **changes):
    """A benchmark case as `measure.stream` and `measure.compare` leave it; each further arm is slower at length."""
    rng = random.Random(f"{seed} {x}")
    runs = {
        arm: tuple(run(rng, x, itl_s=0.002 + 0.0001 * x * place) for _ in range(num_runs))
        for place, arm in enumerate(arms)
    }
    measured = [summarise_runs(metric(name), arm, runs[arm]) for name in STREAMED for arm in arms]
    if len(arms) > 1:
        pairs = zip(*(runs[arm] for arm in (arms[-1], arms[0])), strict=True)
        ratios = [slow.e2e_s / fast.e2e_s for slow, fast in pairs if slow.e2e_s and fast.e2e_s]
        measured.append(summarise_values(metric("speedup"), f"{arms[0]} over {arms[-1]}", ratios))
    counted = [m for arm in arms for m in counts(arm, x)]
    fields = {
        "benchmark": BENCHMARK, "case": str(x), "params": {axis: x}, "measurements": (*measured, *counted),
        "provenance": PROVENANCE, "runs": runs,
        "details": {"operators": {arm: {"aten.mm.default": 30 * x, "aten.add.Tensor": 7} for arm in arms}},
    }  # fmt: skip
    return BenchmarkResult(**(fields | changes))


def counts(arm, x):
    numbers = {"flops": 1_000_000 * x, "num_operators": 37 * x, "peak_bytes": 4096 * x * x, "num_graph_breaks": 0}
    return [exact_count(metric(name), arm, value) for name, value in numbers.items() if name in METRICS]


def sweep(at=(8, 16, 32, 64), **changes):
    return [streamed_case(x, **changes) for x in at]


def as_json(results, **changes):
    """What pytest-benchmark would have written."""
    entries = [
        {"fullname": f"{each.benchmark}[{each.case}]", "params": dict(each.params), "extra_info": each.as_dict()}
        for each in results
    ]
    whole = {
        "machine_info": {"node": "laptop", "cpu": {"brand_raw": "A Processor", "flags": ["sse", "avx"]}},
        "commit_info": {"id": "c0ffee", "dirty": False},
        "benchmarks": entries,
        "datetime": "2026-11-29T17:33:58.216145+00:00",
        "version": "5.3.1",
    }
    return json.loads(json.dumps(whole | changes))


def write(path, results, **changes):
    """Write results to a file and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(as_json(results, **changes)))
    return path
