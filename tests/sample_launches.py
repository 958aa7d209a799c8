"""Launches of two builds as lock step would leave them, made by hand."""

import math
import random

from sample_results import BENCHMARK, PROVENANCE

from benchmarks.harness.gate.evidence import Key, Launch, Side
from benchmarks.harness.metrics import metric
from benchmarks.harness.results import BenchmarkResult, Flag, Measurement, exact_count, summarise_values

CASE = (BENCHMARK, "16")
ITL = ("cached", "itl_p50_s")
USUAL_S = 0.0106


def key(arm, name, case="16"):
    return Key(BENCHMARK, case, arm, name)


def result(values, *, case="16", disturbed="", **told):
    """`values` maps (arm, metric) to samples, to a count, or to None where it is undefined."""
    measured = [_measurement(metric(name), arm, each) for (arm, name), each in values.items()]
    flags = (Flag(kind="contaminated", arm="", what=disturbed),) if disturbed else ()
    return BenchmarkResult(
        benchmark=BENCHMARK, case=case, params={"new_tokens": 16}, measurements=tuple(measured),
        provenance=PROVENANCE | told, flags=flags,
    )  # fmt: skip


def _measurement(of, arm, samples):
    if of.is_exact:
        return exact_count(of, arm, samples)
    if samples is None:
        return Measurement(metric=of, arm=arm, value=None, samples=(), num_observations=0, low=None, high=None)
    return summarise_values(of, arm, samples)


def side(values=None, *, failed=None, skipped=None, **how):
    """One side of a launch with one case, or without any."""
    results = () if values is None else (result(values, **how),)
    return Side(results=results, failed=failed or {}, skipped=skipped or {})


def noisy(ratio=1.0, *, usual=USUAL_S, num_pairs=12, launch_sd=0.014, pair_sd=0.03, host_sd=0.2, seed=0):
    """Samples of base and of head, `ratio` times as large, of one launch: they share its luck, and each has its own."""
    rng = random.Random(f"{seed}")
    luck = rng.gauss(0, launch_sd)
    host = [rng.lognormvariate(0, host_sd) for _ in range(num_pairs)]
    base = [usual * each * math.exp(rng.gauss(0, pair_sd / 2**0.5)) for each in host]
    head = [usual * ratio * each * math.exp(luck + rng.gauss(0, pair_sd / 2**0.5)) for each in host]
    return base, head


def launches(num=12, ratios=None, *, counts=None, told=None, **how):
    """Launches with one case. `ratios` maps (arm, metric) to head / base, `counts` to the two counts."""
    return [_launch(number, ratios or {ITL: 1.0}, counts or {}, told or ({}, {}), how) for number in range(num)]


def _launch(number, ratios, counts, told, how):
    values = {name: noisy(ratio, **({"seed": f"{number} {name}"} | how)) for name, ratio in ratios.items()}
    values |= counts
    of_base, of_head = ({name: both[place] for name, both in values.items()} for place in (0, 1))
    return Launch(base=side(of_base, **told[0]), head=side(of_head, **told[1]))
