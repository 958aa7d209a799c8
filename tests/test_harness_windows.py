"""Windows of requests through `measure`, on a scripted subject: one number a window, arms in turns, what is refused."""

import contextlib

import pytest
from sample_windows import TWO, found, measuring, named

from benchmarks.harness.arrivals import Arrival, together
from benchmarks.harness.errors import InstrumentError, UndeclaredMetricError, WrongOutputError
from benchmarks.harness.loop import Enough
from benchmarks.harness.stats import quantile_interval
from benchmarks.harness.traffic import Limits

# One number a window.


def test_a_window_gives_one_number_and_only_tails_are_taken_over_all_of_them():
    """Steps of 10, 20, then 40 ms: each window has two requests of three tokens."""
    names = ("ttft_s", "itl_p90_s", "itl_p50_s", "e2e_s", "mean_tokens_per_s", "requests_per_s", "steady_tokens_per_s")
    measure, _ = measuring({"a": {}}, *names, num_samples=3, speeds=(1, 2, 4))
    measure.serve(TWO)
    measure.close()
    told = {name: (m.samples, m.value, m.num_observations) for (name, _), m in found(measure).items()}
    assert told == {
        "ttft_s": (pytest.approx((0.01, 0.02, 0.04)), pytest.approx(0.02), 6),
        "itl_p90_s": (pytest.approx((0.01, 0.02, 0.04)), pytest.approx(0.04), 12),
        "itl_p50_s": (pytest.approx((0.01, 0.02, 0.04)), pytest.approx(0.02), 12),
        "e2e_s": (pytest.approx((0.03, 0.06, 0.12)), pytest.approx(0.06), 6),
        "mean_tokens_per_s": (pytest.approx((200, 100, 50)), pytest.approx(100), 3),
        "requests_per_s": (pytest.approx((2 / 0.03, 2 / 0.06, 2 / 0.12)), pytest.approx(2 / 0.06), 3),
        "steady_tokens_per_s": (pytest.approx((200, 100, 50)), pytest.approx(100), 3),
    }
    assert measure.details["num_requests"] == 2
    assert measure.primary_durations_s() == pytest.approx([0.03, 0.06, 0.12])
    assert (len(measure.runs["a"]), measure.shares_steps) == (6, True)


def test_the_interval_is_that_of_the_median_window():
    speeds = (1, 4, 2, 3, 6, 5)
    measure, _ = measuring({"a": {}}, "ttft_s", "mean_tokens_per_s", num_samples=6, speeds=speeds)
    measure.serve(together(5, prompt_tokens=4, new_tokens=2))
    for each in measure.measurements:
        expected = quantile_interval(each.samples, 0.5)
        assert len(each.samples) == 6
        assert (each.low, each.high) == (expected.low, expected.high)
        assert each.low is not None


def test_latencies_count_from_when_a_request_was_due():
    """Two in a hurry, one after a pause: the second waits 5 ms for the step that runs."""
    arrivals = [Arrival(due_s=due_s, prompt_tokens=4, new_tokens=2) for due_s in (0.0, 0.005, 0.0505)]
    measure, _ = measuring({"a": {}}, "ttft_s", "asked_requests_per_s", "goodput_requests_per_s")
    measure.serve(arrivals, limits=Limits(ttft_s=0.012))
    assert [run.ttft_s for run in measure.runs["a"]] == pytest.approx([0.01, 0.015, 0.01])
    values = {name: m.value for (name, _), m in found(measure).items()}
    assert values["asked_requests_per_s"] == pytest.approx(2 / 0.0505)
    assert values["goodput_requests_per_s"] == pytest.approx(2 / 0.0705)


def test_an_odd_window_is_flagged():
    measure, _ = measuring(named("a", "b"), "ttft_s", num_samples=8, speeds=(9, 1, 1, 1, 1, 1, 1, 1))
    measure.serve(TWO)
    assert {(flag.kind, flag.arm) for flag in measure.flags} == {("first", "a"), ("first", "b")}
    assert all(flag.what == "the first sample is 9 times the median of the rest" for flag in measure.flags)


# In turns.


def test_arms_take_turns_on_the_same_prompts_and_no_two_requests_have_one():
    measure, subject = measuring(named("a", "b", "c"), "ttft_s", num_samples=6, num_warmups=2)
    measure.serve(TWO)
    turns = [subject.windows[start : start + 3] for start in range(0, len(subject.windows), 3)]
    assert len(turns) == 2 + 6
    assert all(sorted(name for name, _ in turn) == ["a", "b", "c"] for turn in turns)
    assert all(turn[0][1] == turn[1][1] == turn[2][1] for turn in turns)
    assert len({tuple(name for name, _ in turn) for turn in turns}) > 2
    assert len({prompt for turn in turns for prompt in turn[0][1]}) == 2 * (2 + 6)


def test_no_prompt_of_a_batch_is_one_of_another_size():
    measure, subject = measuring({"a": {}}, "step_overhead_s", num_samples=2)
    measure.batches([1, 2, 4], prompt_tokens=8, new_tokens=3)
    assert sorted(len(prompts) for _, prompts in subject.windows) == [1, 1, 2, 2, 4, 4]
    assert len({prompt for _, prompts in subject.windows for prompt in prompts}) == 2 * 7


def test_a_turn_is_taken_around_each_window_and_whole_samples_are_kept_when_it_is_enough():
    taken = []

    def turn(arm, number):
        taken.append((arm, number))
        if len(taken) == 6:
            raise Enough
        return contextlib.nullcontext()

    measure, subject = measuring(named("a", "b"), "ttft_s", num_samples=9, num_warmups=1, turn=turn)
    measure.serve(TWO)
    assert [arm for arm, _ in taken[:5]] == [name for name, _ in subject.windows]
    assert [number for _, number in taken] == [None, None, 0, 0, 1, 1]
    assert [len(each.samples) for each in measure.measurements] == [1, 1]


# What has to come out.


def test_a_wrong_token_names_the_request_and_the_arm():
    measure, _ = measuring({"a": {}, "b": {"wrong": 1}}, "ttft_s")
    with pytest.raises(WrongOutputError, match="b's request 1 and a's request 1 differ at token 1"):
        measure.serve(TWO)
    assert measure.measurements == []


def test_arms_that_need_not_agree_are_not_compared():
    measure, subject = measuring({"a": {}, "b": {"wrong": 1}}, "ttft_s")
    measure.serve(TWO, same_tokens=False)
    assert (len(measure.measurements), measure.flags, subject.asked) == (2, [], [])


@pytest.mark.parametrize("same_tokens", [True, False])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lacks": 1}, "b's request 1 produced 2 tokens where the workload asks for 3"),
        ({"reason": "stop"}, "b's request 0 ended with 'stop'"),
    ],
)
def test_every_request_has_to_do_the_work_whether_arms_agree_or_not(wrong, message, same_tokens):
    measure, _ = measuring({"a": {}, "b": wrong}, "ttft_s")
    with pytest.raises(WrongOutputError, match=message):
        measure.serve(TWO, same_tokens=same_tokens)


def test_every_window_is_held_to_the_invariants(monkeypatch):
    runs, windows = [], []
    monkeypatch.setattr("benchmarks.harness.loop.check_run", runs.append)
    monkeypatch.setattr("benchmarks.harness.loop.check_window", windows.append)
    measure, _ = measuring(named("a", "b"), "ttft_s", num_samples=2, num_warmups=1)
    measure.serve(TWO)
    assert (len(runs), [len(window) for window in windows]) == (12, [2] * 6)


# What is refused, before anything runs.


@pytest.mark.parametrize(
    ("way", "quantity", "message"),
    [
        ("stream", "goodput_requests_per_s", "does not come about by `measure.stream`"),
        ("stream", "steady_tokens_per_s", "does not come about by `measure.stream`"),
        ("stream", "batch_scaling", "does not come about by `measure.stream`"),
        ("serve", "ttft_growth", "does not come about by `measure.serve`: TTFT of the longest prompt"),
        ("serve", "batch_scaling", "does not come about by `measure.serve`"),
        ("serve", "num_steps", "does not come about by `measure.serve`"),
        ("batches", "ttft_s", "does not come about by `measure.batches`: first token - arrival"),
        ("batches", "read_exponent", "does not come about by `measure.batches`"),
        ("sweep", "batch_knee_requests", "does not come about by `measure.sweep`"),
        ("serve", "goodput_requests_per_s", "means nothing without stated limits"),
    ],
)
def test_a_quantity_that_cannot_come_about_so_is_refused(way, quantity, message):
    measure, subject = measuring({"a": {}}, quantity)
    calls = {
        "stream": lambda: measure.stream(prompt_tokens=8, new_tokens=3),
        "serve": lambda: measure.serve(TWO),
        "batches": lambda: measure.batches([1, 2, 4], prompt_tokens=8, new_tokens=3),
        "sweep": lambda: measure.sweep(prompt_tokens=[8, 16, 32], new_tokens=3),
    }
    with pytest.raises(InstrumentError, match=f"{quantity}.*{message}"):
        calls[way]()
    assert subject.windows == []


def test_two_sizes_are_no_curve():
    measure, subject = measuring({"a": {}}, "batch_scaling")
    with pytest.raises(InstrumentError, match=r"three sizes at least, not \[1, 4, 1\]"):
        measure.batches([1, 4, 1], prompt_tokens=8, new_tokens=3)
    assert subject.windows == []


@pytest.mark.parametrize("again", ["serve", "batches"])
def test_a_second_shape_in_one_test_would_overwrite_the_first(again):
    measure, subject = measuring({"a": {}}, "ttft_s" if again == "serve" else "batch_scaling")
    calls = {
        "serve": lambda: measure.serve(TWO),
        "batches": lambda: measure.batches([1, 2, 4], prompt_tokens=8, new_tokens=3),
    }
    calls[again]()
    num_windows = len(subject.windows)
    with pytest.raises(InstrumentError, match="run already"):
        calls[again]()
    assert len(subject.windows) == num_windows


@pytest.mark.parametrize(
    ("declared", "way", "example"), [("window_speedup", "price", "itl_price"), ("itl_price", "compare", "speedup")]
)
def test_what_compares_the_other_way_round_is_not_declared(declared, way, example):
    measure, _ = measuring(named("a", "b"), "ttft_s", declared)
    measure.serve(TWO)
    pair = {"of": "a", "against": "b"} if way == "price" else {"slow": "a", "fast": "b"}
    with pytest.raises(UndeclaredMetricError, match=f"such as '{example}'; it declares ttft_s, {declared}"):
        getattr(measure, way)(**pair)
    with pytest.raises(UndeclaredMetricError, match=f"not measured: {declared}$"):
        measure.close()


def test_what_a_window_leaves_undefined_is_not_measured():
    """Requests that come at once have no rate at which they come; of one token there is no gap."""
    measure, _ = measuring({"a": {}}, "ttft_s", "asked_requests_per_s", "itl_p50_s", "steady_tokens_per_s")
    measure.serve(together(2, prompt_tokens=8, new_tokens=1))
    with pytest.raises(
        UndeclaredMetricError, match=r"not measured: asked_requests_per_s, itl_p50_s, steady_tokens_per_s$"
    ):
        measure.close()
