"""The cache study on made results: what each claim says where it is true, where it is false, and where nobody knows."""

import csv
import dataclasses
import io
import itertools
import random
import re

from sample_results import PROVENANCE
from typer.testing import CliRunner

from benchmarks.harness.metrics import metric
from benchmarks.harness.results import BenchmarkResult, Measurement, summarise_pairs, summarise_runs
from benchmarks.harness.timing import RunTiming, Stamp
from benchmarks.studies import cache_curve
from benchmarks.studies.cache_claims import claims_of
from benchmarks.studies.cache_curve import PUBLISHED, as_csv, rows_of, tell, write

FILE = "benchmarks/bench_kv_cache.py::"


def run(ttft_s, itl_of, num_tokens, prompt, noise):
    gaps = [itl_of(prompt + place) * noise for place in range(1, num_tokens)]
    times = itertools.accumulate([ttft_s * noise, *gaps])
    stamps = tuple(Stamp(round(at_s * 1e9), 1) for at_s in times)
    return RunTiming(sent_ns=0, stamps=stamps, num_prompt_tokens=prompt, finish_reason="length")


def case(test, axis, tokens, runs):
    measured = [
        summarise_runs(metric(name), arm, runs[arm]) for name in ("ttft_s", "itl_p50_s", "e2e_s") for arm in runs
    ]
    if "naive" in runs:
        pairs = [((slow,), (fast,)) for slow, fast in zip(runs["naive"], runs["cached"], strict=True)]
        measured.append(summarise_pairs(metric("speedup"), "cached over naive", pairs))
    return BenchmarkResult(
        benchmark=FILE + test, case=str(tokens), params={axis: tokens}, measurements=tuple(measured),
        provenance=PROVENANCE, runs=runs,
    )  # fmt: skip


def study(
    *, naive=lambda context: 2.0 + 0.01 * context, cached=lambda context: 0.29, prefill=lambda p: 2.2 + 0.0096 * p
):
    """Both sweeps on a machine with 1 % of noise."""
    rng = random.Random(0)

    def runs(arms, tokens, prompt):
        noises = [1 + 0.01 * rng.uniform(-1, 1) for _ in range(6)]
        return {arm: tuple(run(prefill(prompt), arms[arm], tokens, prompt, noise) for noise in noises) for arm in arms}

    both = {"cached": cached, "naive": naive}
    generation = [case("test_generation_length", "new_tokens", n, runs(both, n, 16)) for n in (8, 16, 32)]
    one = {"cached": cached}
    generation.append(case("test_long_answer", "new_tokens", 64, runs(one, 64, 16)))
    return generation + [case("test_prompt_length", "prompt_tokens", p, runs(one, 16, p)) for p in (16, 64, 128, 256)]


def verdicts(results):
    return {claim.text: claim.verdict for claim in claims_of(results)}


def test_a_machine_like_theirs_bears_out_what_is_true_of_it():
    assert verdicts(study()) == {
        "cached tokens/s rises with length": "holds",
        "naive tokens/s falls with length": "holds",
        "the widening speedup is O(n) against O(n^2)": "holds in part",
        "prefill is linear in the prompt": "does not hold",
        "decode is flat": "holds",
    }


def test_a_constant_naive_cost_widens_the_speedup_and_refutes_nothing_but_the_claim():
    found = verdicts(study(naive=lambda context: 2.3))
    assert found["naive tokens/s falls with length"] != "holds"
    assert found["the widening speedup is O(n) against O(n^2)"] != "holds in part"
    (claim,) = [each for each in claims_of(study(naive=lambda context: 2.3)) if "widening" in each.text]
    share = int(re.search(r"which is (\d+) % of it", claim.evidence)[1])
    assert 97 <= share <= 103


def test_prefill_without_an_overhead_is_linear_and_a_growing_itl_is_not_flat():
    found = verdicts(study(prefill=lambda p: 0.01 * p, cached=lambda context: 0.1 + 0.002 * context))
    assert found["prefill is linear in the prompt"] == "holds"
    assert found["decode is flat"] == "does not hold"


def test_a_case_without_values_is_no_point():
    results = study()
    lost = Measurement(
        metric=metric("ttft_s"), arm="cached", value=None, samples=(), num_observations=0, low=None, high=None
    )
    gap = dataclasses.replace(results[-1], case="512", params={"prompt_tokens": 512}, measurements=(lost,), runs={})
    assert tell([*results, gap]) == tell(results)


def test_what_was_not_measured_is_not_judged():
    assert verdicts([]) == {}
    assert verdicts(study()[:1]) == {}


def test_every_published_figure_stands_beside_ours():
    rows = list(rows_of(study()))
    beside = {
        (row.sweep, row.tokens, row.measurement.arm, row.measurement.metric.name) for row in rows if row.published
    }
    assert beside == set(PUBLISHED)
    assert PUBLISHED["generation", 32, "cached over naive", "speedup"] == 6.74
    assert ("generation", 64, "naive", "e2e_s") not in PUBLISHED
    text = tell(study())
    assert "generation 8: cached TTFT" in text
    assert 'does not hold: "prefill is linear in the prompt"' in text


def test_the_table_has_every_number_in_full():
    lines = list(csv.DictReader(io.StringIO(as_csv(list(rows_of(study()))))))
    chosen = {"sweep": "prompt", "tokens": "64", "arm": "cached", "metric": "ttft_s"}
    (one,) = [each for each in lines if each.items() >= chosen.items()]
    assert float(one["low"]) <= float(one["value"]) <= float(one["high"])
    assert (one["published"], one["runs"], one["unit"]) == ("2.77", "6", "s")


def test_csv_and_pictures_are_written(tmp_path):
    paths = write(study(), tmp_path / "study")
    assert [path.name for path in paths] == ["cache_curve.csv", "cache_curve.svg", "cache_curve.png"]
    assert all(path.stat().st_size > 1000 for path in paths)


def test_a_bad_file_is_one_line(tmp_path):
    done = CliRunner().invoke(cache_curve.app, [str(tmp_path / "missing.json"), "--output", str(tmp_path)])
    assert done.exit_code == 2
    assert "missing.json" in done.output
    assert "Traceback" not in done.output
