"""Windows against windows: two arms on the same requests, and a curve through the sizes of a batch."""

import pytest
from sample_windows import found, measuring

from benchmarks.harness.arrivals import together
from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.metrics import metric
from benchmarks.harness.results import summarise_pairs
from benchmarks.harness.stats import paired_ratio
from benchmarks.harness.timing import RunTiming, Stamp

# Two arms.


def test_compare_takes_what_is_better_when_higher_and_price_what_is_better_when_lower():
    """Three times as long a step for all, whatever the machine does meanwhile."""
    names = ("itl_price", "window_speedup", "speedup", "itl_ratio_slope")
    arms = {"dear": {"step_ms": 30}, "plain": {"step_ms": 10}}
    measure, _ = measuring(arms, *names, num_samples=3, speeds=(1, 5, 2))
    measure.serve(together(2, prompt_tokens=8, new_tokens=4))
    measure.compare(slow="dear", fast="plain")
    measure.price(of="dear", against="plain")
    measure.close()
    assert {key: (m.value, len(m.samples), m.num_observations) for key, m in found(measure).items()} == {
        ("itl_price", "dear against plain"): (pytest.approx(3), 3, 3),
        ("window_speedup", "plain over dear"): (pytest.approx(3), 3, 3),
        ("speedup", "plain over dear"): (pytest.approx(3), 3, 6),
        ("itl_ratio_slope", "plain over dear"): (pytest.approx(0), 3, 6),
    }
    with pytest.raises(InstrumentError, match="has compared already"):
        measure.price(of="plain", against="dear")


def test_pairs_of_one_window_share_its_luck_and_are_one_sample():
    """Three pairs in each of six windows are worth six: ratios of k, 2 k and 4 k in the k-th window."""

    def window(*times_s):
        return [RunTiming(sent_ns=0, stamps=(Stamp(round(at_s * 1e9), 1),)) for at_s in times_s]

    pairs = [(window(k, 2 * k, 4 * k), window(1, 1, 1)) for k in (1, 5, 2, 4, 3, 6)]
    each = summarise_pairs(metric("speedup"), "arm", pairs)
    assert each.samples == pytest.approx((2, 10, 4, 8, 6, 12))
    by_window = paired_ratio(each.samples, [1.0] * 6)
    assert (each.low, each.high) == pytest.approx((by_window.interval.low, by_window.interval.high))
    assert (each.num_observations, each.value) == (18, pytest.approx(by_window.value))


# A curve through sizes.

CURVE = ("step_overhead_s", "step_per_request_s", "batch_knee_requests", "batch_scaling")


def test_steps_of_a_plus_b_for_each_request_have_their_knee_at_a_over_b():
    """12 ms, and 3 ms for each request: half of all throughput at 4 requests, on a machine half as fast as well."""
    arms = {"a": {"step_ms": 12, "each_ms": 3}}
    measure, _ = measuring(arms, *CURVE, num_samples=2, speeds=(1, 1, 1, 1, 2))
    measure.batches([1, 2, 8, 4], prompt_tokens=8, new_tokens=5)
    measure.close()
    assert {name: m.samples for (name, _), m in found(measure).items()} == {
        "step_overhead_s": pytest.approx((0.012, 0.024)),
        "step_per_request_s": pytest.approx((0.003, 0.006)),
        "batch_knee_requests": pytest.approx((4.0, 4.0)),
        "batch_scaling": pytest.approx([8 * 15 / 36] * 2),
    }
    assert len(measure.runs["a"]) == 2 * 15


def test_steps_that_cost_the_same_for_any_batch_have_no_knee_and_scale_with_it():
    measure, _ = measuring({"a": {}}, *CURVE)
    measure.batches([1, 2, 4], prompt_tokens=8, new_tokens=5)
    measure.close()
    values = {name: m.value for (name, _), m in found(measure).items()}
    assert (values["batch_knee_requests"], values["batch_scaling"]) == (None, pytest.approx(4.0))


def test_an_odd_series_tells_which_size_it_is_of():
    measure, _ = measuring({"a": {}}, "batch_scaling", num_samples=6, speeds=(20, 20, 20, *[1] * 15))
    measure.batches([2, 3, 4], prompt_tokens=8, new_tokens=2)
    whats = {flag.what.partition(", with ")[2] for flag in measure.flags}
    assert whats == {"2 requests", "3 requests", "4 requests"}
