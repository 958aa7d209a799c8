"""The sampling loop on a scripted subject: what runs, in which order, on which prompt, and what is refused."""

import contextlib
import gc
import itertools
from types import SimpleNamespace

import pytest

from benchmarks.harness.errors import InstrumentError, UndeclaredMetricError, WrongOutputError
from benchmarks.harness.loop import Enough, Plan, WarmUp
from benchmarks.harness.measure import Measure
from benchmarks.harness.replay import replay, replayed_seconds
from benchmarks.harness.timing import Emission
from benchmarks.harness.verify import check_same_tokens, first_difference
from benchmarks.harness.workload import Workload

STREAM = {"prompt_tokens": 8, "new_tokens": 4}
MS = 1_000_000


class ScriptedClock:
    def __init__(self):
        self.ns = 0
        self.num_reads = 0

    def now_ns(self):
        self.num_reads += 1
        return self.ns


class ScriptedSubject:
    """Answers every prompt with `tokens` and keeps a log. An arm's options: time per token, other tokens, chunks."""

    vocab_size = 1000

    def __init__(self, clock, *, tokens=(1, 2, 3, 4), reason="length", logits=(), relative_tolerance=0.0, speeds=()):
        self.clock, self.tokens, self.reason = clock, tokens, reason
        self.logits, self.relative_tolerance = logits, relative_tolerance
        self.speeds = speeds
        self.prompts, self.order, self.asked = [], [], []

    def forget(self, **arm):
        pass

    def stream(self, prompt_ids, num_new_tokens, *, name="", step_ms=1, tokens=None, at_once=False):
        assert num_new_tokens == STREAM["new_tokens"]
        self.prompts.append(prompt_ids)
        self.order.append(name)
        tokens = tokens or self.tokens
        for chunk in [tokens] if at_once else [(token,) for token in tokens]:
            self.clock.ns += step_ms * MS * self.slowness
            yield Emission(token_ids=tuple(chunk))
        yield Emission(finish_reason=self.reason)

    @property
    def slowness(self):
        """How the machine does from prompt to prompt, for all arms alike: as told, else slower and slower."""
        number = len(dict.fromkeys(self.prompts))
        return self.speeds[min(number, len(self.speeds)) - 1] if self.speeds else number

    def next_logits(self, token_ids):
        self.asked.append(list(token_ids))
        return self.logits


def measure_of(
    arms,
    quantities=("ttft_s",),
    *,
    num_samples=1,
    num_warmups=0,
    max_warmup_s=60.0,
    say=lambda phase, number, total: None,
    turn=lambda arm, number: contextlib.nullcontext(),
    **subject,
):
    clock = ScriptedClock()
    warm_up = WarmUp(max_runs=num_warmups, max_s=max_warmup_s)
    plan = Plan(name="growth", quantities=quantities, arms=arms, num_samples=num_samples, warm_up=warm_up)
    measure = Measure(plan, ScriptedSubject(clock, **subject), clock, say, turn)
    return measure, measure._loop._subject, clock


def named(*arms):
    return {arm: {"name": arm} for arm in arms}


# What runs.


def test_all_arms_of_a_sample_get_one_prompt_and_no_prompt_is_used_twice():
    measure, subject, _ = measure_of(named("a", "b", "c"), num_samples=6, num_warmups=2)
    measure.stream(**STREAM)
    assert len(subject.prompts) == 3 * (2 + 6)
    turns = [subject.prompts[i : i + 3] for i in range(0, len(subject.prompts), 3)]
    assert all(len(set(turn)) == 1 for turn in turns)
    assert len({turn[0] for turn in turns}) == 2 + 6  # so warm-up prompts are disjoint from measured ones


def test_warm_ups_leave_no_sample():
    measure, _, clock = measure_of(named("a", "b"), num_samples=3, num_warmups=2)
    measure.stream(**STREAM)
    assert [(m.arm, m.num_observations) for m in measure.measurements] == [("a", 3), ("b", 3)]
    assert min(m.samples[0] for m in measure.measurements) * 1e3 == 3.0  # the third prompt is the first one measured
    assert clock.num_reads == 2 * (2 + 3) * (1 + 4)


def warmed_up(speeds, *, arms=1, **limits):
    """Warm up where prompt n takes `speeds[n]` ms a token, the last one for ever; return the number of runs as well."""
    measure, subject, _ = measure_of(named(*"abc"[:arms]), num_samples=6, speeds=speeds, **limits)
    measure.stream(**STREAM)
    return measure, len(subject.prompts) - 6 * arms


def test_warming_up_ends_once_two_runs_agree():
    measure, num_runs = warmed_up([50, 9, 5, 5, 5], num_warmups=10)
    assert num_runs == 4
    assert measure.details["warm_up"] == {"num_runs": 4, "is_settled": True}
    assert measure.flags == []


@pytest.mark.parametrize(
    ("limits", "num_runs"),
    [({"num_warmups": 3}, 3), ({"num_warmups": 99, "max_warmup_s": 0.5}, 2)],  # 4 tokens of 100 ms, then of 80
)
def test_warming_up_ends_at_the_first_of_two_limits_and_says_so(limits, num_runs):
    measure, found = warmed_up([100, 80, 60, 45, 30, 20, 10, 5, 5, 5], **limits)
    assert found == num_runs
    flag = next(flag for flag in measure.flags if flag.kind == "warm-up")
    assert (flag.arm, flag.what[:39]) == ("a", f"was still changing after {num_runs} warm-up runs")


def test_one_warm_up_can_not_tell_whether_it_settled():
    measure, num_runs = warmed_up([5], num_warmups=1)
    assert (num_runs, measure.details["warm_up"]["is_settled"]) == (1, None)


def test_all_arms_warm_up_until_the_last_has_settled():
    _, num_runs = warmed_up([50, 20, 5, 5, 5], arms=2, num_warmups=10)
    assert num_runs == 2 * 4


@pytest.mark.parametrize(
    ("speeds", "kind"),
    [
        ([5, 5, 90, 10, 10, 10, 10, 10], "first"),
        ([5, 5, 10, 10, 10, 10, 10, 10, 30, 30, 30, 30, 30, 30], "step"),
    ],
)
def test_what_is_odd_about_a_series_is_flagged(speeds, kind):
    measure, *_ = measure_of(named("a"), num_samples=len(speeds) - 2, num_warmups=2, speeds=speeds)
    measure.stream(**STREAM)
    assert kind in {flag.kind for flag in measure.flags}


def test_a_turn_is_taken_around_every_run_off_the_clock():
    turns = []

    @contextlib.contextmanager
    def turn(arm, number):
        turns.append((arm, number, clock.num_reads))
        yield
        turns.append((arm, number, clock.num_reads))

    measure, subject, clock = measure_of(named("a", "b"), num_samples=2, num_warmups=1, turn=turn)
    measure.stream(**STREAM)
    assert [arm for arm, *_ in turns[::2]] == subject.order
    assert [number for _, number, _ in turns[::2]] == [None, None, 0, 0, 1, 1]
    assert [reads for *_, reads in turns] == [0, 5, 5, 10, 10, 15, 15, 20, 20, 25, 25, 30]
    assert clock.num_reads == 2 * 3 * 5


@pytest.mark.parametrize("broken_off_at", [2, 3])
def test_when_it_is_enough_the_whole_samples_before_are_kept(broken_off_at):
    """Also when it becomes enough between the arms of one sample."""
    turns = []

    def turn(arm, number):
        turns.append(number)
        if len(turns) > broken_off_at:
            raise Enough
        return contextlib.nullcontext()

    measure, *_ = measure_of(named("a", "b"), num_samples=9, turn=turn)
    measure.stream(**STREAM)
    assert {arm: len(runs) for arm, runs in measure.runs.items()} == {"a": 1, "b": 1}


def test_enough_before_the_first_sample_measures_nothing_and_says_so():
    def turn(arm, number):
        raise Enough

    measure, *_ = measure_of(named("a"), turn=turn)
    measure.stream(**STREAM)
    with pytest.raises(UndeclaredMetricError, match="declared but not measured: ttft_s"):
        measure.close()


def test_no_garbage_is_collected_while_a_case_runs():
    seen = []

    def turn(arm, number):
        seen.append(gc.isenabled())
        return contextlib.nullcontext()

    measure, *_ = measure_of(named("a"), num_samples=2, turn=turn)
    measure.stream(**STREAM)
    assert (seen, gc.isenabled()) == ([False, False], True)
    broken, *_ = measure_of(named("a"), tokens=(1, 2))
    with pytest.raises(WrongOutputError):
        broken.stream(**STREAM)
    assert gc.isenabled()


@pytest.mark.parametrize("name", ["goodput_requests_per_s", "num_operators"])
def test_a_stream_yields_neither_goodput_nor_counts_of_work(name):
    measure, *_ = measure_of(named("a"), quantities=(name,))
    with pytest.raises(InstrumentError, match=f"{name} does not come about by"):
        measure.stream(**STREAM)


def test_a_stream_that_raises_in_the_middle_leaves_no_number_and_the_earlier_results():
    """The second case of a session breaks; the first one's numbers are finished values and stay as they are."""
    first, *_ = measure_of(named("a"))
    first.stream(**STREAM)
    kept = list(first.measurements)

    class Breaking(ScriptedSubject):
        def stream(self, *args, **options):
            yield from itertools.islice(super().stream(*args, **options), 2)
            raise RuntimeError("device lost")

    second, _, clock = measure_of(named("a"))
    second._loop._subject = Breaking(clock)
    with pytest.raises(RuntimeError, match="device lost"):
        second.stream(**STREAM)
    assert (second.measurements, first.measurements) == ([], kept)
    with pytest.raises(UndeclaredMetricError, match="not measured: ttft_s"):
        second.close()


def turns_of(arms, num_samples):
    measure, subject, _ = measure_of(named(*arms), num_samples=num_samples)
    measure.stream(**STREAM)
    return [tuple(subject.order[i : i + len(arms)]) for i in range(0, len(subject.order), len(arms))]


def test_the_order_of_the_arms_varies_and_comes_again():
    orders = turns_of("abc", 12)
    assert len(set(orders)) > 3
    assert all(set(order) == set("abc") for order in orders)
    assert orders == turns_of("abc", 12)


@pytest.mark.parametrize("arms", ["ab", "abc"])
@pytest.mark.parametrize("num_samples", [2, 6])
def test_no_arm_has_the_earlier_turn_more_often(arms, num_samples):
    orders = turns_of(arms, num_samples)
    for one, other in itertools.pairwise(arms):
        assert sum(order.index(one) < order.index(other) for order in orders) == num_samples / 2


def test_it_says_how_far_it_has_come():
    said = []
    measure, _, _ = measure_of(named("a", "b"), num_samples=2, num_warmups=1, say=lambda *told: said.append(told))
    measure.stream(**STREAM)
    assert said == [("warm-up", 1, 1), ("sample", 1, 2), ("sample", 2, 2)]


# A sweep.

SWEEP = {"prompt_tokens": (8, 16, 32), "new_tokens": 4}
COEFFICIENTS = ("ttft_overhead_s", "ttft_per_token_s", "ttft_per_token2_s", "ttft_crossover_tokens")


def swept(quantities, **options):
    """Each prompt makes the machine slower, so that the curve of a sample is the order of its prompts."""
    measure, subject, _ = measure_of(named("a", "b"), quantities=quantities, **options)
    measure.sweep(**SWEEP)
    return measure, subject


def test_a_sweep_runs_every_length_in_each_sample_and_no_prompt_twice():
    measure, subject = swept(("ttft_growth",), num_samples=3, num_warmups=1)
    assert sorted(map(len, subject.prompts)) == sorted([8, 16, 32] * 2 * (1 + 3))
    assert len(set(subject.prompts)) == 3 * (1 + 3)
    lengths = [len(prompt) for prompt in dict.fromkeys(subject.prompts)]
    assert len({tuple(lengths[start : start + 3]) for start in range(0, len(lengths), 3)}) > 1
    assert [len(measure.runs[arm]) for arm in "ab"] == [9, 9]


def test_each_sample_of_a_sweep_gives_one_number():
    measure, _ = swept(("ttft_growth", *COEFFICIENTS), num_samples=4)
    measure.close()
    found = {(m.metric.name, m.arm): m for m in measure.measurements}
    assert len(found["ttft_growth", "a"].samples) == 4
    assert len(found["ttft_per_token_s", "b"].samples) == 4
    assert len(measure.primary_durations_s()) == 4


def test_a_coefficient_that_the_points_leave_open_is_no_missing_number():
    measure, _ = swept(("ttft_per_token2_s",), num_samples=1)
    assert measure.details["degree"] == {"a": 1, "b": 1}
    assert [m.value for m in measure.measurements] == [None, None]
    measure.close()


@pytest.mark.parametrize(
    ("way", "quantity", "message"),
    [
        ("sweep", "ttft_s", "ttft_s does not come about by `measure.sweep`: first token - arrival"),
        ("stream", "ttft_growth", "ttft_growth does not come about by `measure.stream`: TTFT of the longest"),
        ("stream", "flops", "flops does not come about by `measure.stream`"),
    ],
)
def test_a_quantity_that_does_not_come_about_so_is_refused(way, quantity, message):
    measure, _, _ = measure_of(named("a"), quantities=(quantity,))
    with pytest.raises(InstrumentError, match=message):
        getattr(measure, way)(**(SWEEP if way == "sweep" else STREAM))


def test_two_lengths_are_no_curve():
    measure, subject, _ = measure_of(named("a"), quantities=("ttft_growth",))
    with pytest.raises(InstrumentError, match=r"three lengths at least, not \[8, 16, 8\]"):
        measure.sweep(prompt_tokens=(8, 16, 8), new_tokens=4)
    assert subject.prompts == []


# What a run has to produce.


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tokens": (1, 2, 3)}, "a produced 3 tokens where the workload asks for 4"),
        ({"tokens": (1, 2, 3, 4, 5)}, "a produced 5 tokens"),
        ({"tokens": ()}, "a produced 0 tokens"),
        ({"reason": "stop"}, "a ended with 'stop'"),
        ({"reason": None}, "a ended with None"),
    ],
)
def test_a_run_that_did_other_work_is_an_error(wrong, message):
    measure, _, _ = measure_of(named("a"), **wrong)
    with pytest.raises(WrongOutputError, match=message):
        measure.stream(**STREAM)
    assert measure.measurements == []


def two_arms(relative_tolerance, logits, ours=(1, 2, 7, 4), theirs=(1, 2, 3, 4)):
    """Two arms that differ at the third token, 3 against 7."""
    arms = {"kept": {"tokens": theirs}, "again": {"tokens": ours}}
    return measure_of(arms, logits=logits, relative_tolerance=relative_tolerance)


def logits_with(**by_token):
    return [by_token.get(f"t{token}", 0.0) for token in range(10)]


def test_equal_tokens_ask_for_no_logits():
    measure, subject, _ = two_arms(0.1, (), ours=(1, 2, 3, 4))
    measure.stream(**STREAM)
    assert (subject.asked, measure.flags) == ([], [])


def test_a_near_tie_in_low_precision_is_noted_off_the_clock():
    measure, subject, clock = two_arms(0.01, logits_with(t3=10.0, t7=9.95))
    measure.stream(**STREAM)
    assert subject.asked == [[*subject.prompts[0], 1, 2]]
    assert clock.num_reads == 2 * (1 + 4)
    (flag,) = measure.flags
    assert flag.kind == "near-tie"
    assert "again and kept differ at token 2: 7 and 3" in flag.what


@pytest.mark.parametrize(
    ("relative_tolerance", "logits"),
    [
        (0.01, logits_with(t3=10.0, t7=9.8)),  # too far apart
        (0.0, logits_with(t3=10.0, t7=9.9999)),  # exact arithmetic explains no difference
        (0.01, logits_with(t3=1.0, t7=1.0, t5=10.0)),  # a tie, but neither is what greedy decoding would choose
        (0.01, logits_with(t3=float("nan"), t7=9.95)),
        (0.01, [float("nan")] * 10),
    ],
)
def test_other_differences_are_errors(relative_tolerance, logits):
    measure, _, _ = two_arms(relative_tolerance, logits)
    with pytest.raises(WrongOutputError, match="again and kept differ at token 2"):
        measure.stream(**STREAM)


def test_every_arm_is_compared_with_the_first():
    outputs = {"a": (1, 2), "b": (1, 2), "c": (1, 3)}
    with pytest.raises(WrongOutputError, match="c and a differ at token 1"):
        check_same_tokens((5,), outputs, lambda ids: [0.0, 0.0, 9.0, 1.0], 0.01)
    assert first_difference((1, 2), (1, 2)) is None


# What is declared.


def test_the_declared_and_nothing_else_is_measured():
    measure, _, _ = measure_of(named("a", "b"), quantities=("e2e_s", "tpot_s"))
    measure.stream(**STREAM)
    measure.close()
    assert [(m.metric.name, m.arm) for m in measure.measurements] == [
        ("e2e_s", "a"), ("e2e_s", "b"), ("tpot_s", "a"), ("tpot_s", "b"),
    ]  # fmt: skip


def test_a_speedup_is_paired_within_each_sample():
    """The machine slows down steadily: the times vary fivefold, their ratio does not."""
    arms = {"slow": {"step_ms": 3}, "fast": {"step_ms": 1}}
    measure, _, _ = measure_of(arms, quantities=("e2e_s", "speedup"), num_samples=5)
    measure.stream(**STREAM)
    measure.compare(slow="slow", fast="fast")
    measure.close()
    *_, found = measure.measurements
    assert (found.arm, found.samples, found.value) == ("fast over slow", pytest.approx([3.0] * 5), pytest.approx(3.0))
    e2e = next(m for m in measure.measurements if m.arm == "fast")
    assert max(e2e.samples) == pytest.approx(5 * min(e2e.samples))


def test_an_undeclared_quantity_is_refused():
    measure, _, _ = measure_of(named("a", "b"), quantities=("ttft_s", "e2e_s"))
    measure.stream(**STREAM)
    with pytest.raises(
        UndeclaredMetricError,
        match="declares nothing that compares arms in this way, such as 'speedup'; it declares ttft_s, e2e_s",
    ):
        measure.compare(slow="a", fast="b")


def test_a_declared_quantity_that_was_not_measured_is_an_error():
    measure, _, _ = measure_of(named("a", "b"), quantities=("ttft_s", "speedup"))
    with pytest.raises(UndeclaredMetricError, match="not measured: speedup, ttft_s"):
        measure.close()
    measure.stream(**STREAM)
    with pytest.raises(UndeclaredMetricError, match=r"not measured: speedup$"):
        measure.close()


def test_a_quantity_that_one_arm_leaves_undefined_is_not_measured():
    """Tokens that arrive at once have no gaps: the other arm's gaps do not make up for it."""
    arms = {"streams": {}, "answers": {"at_once": True}}
    measure, _, _ = measure_of(arms, quantities=("ttft_s", "itl_p50_s"))
    measure.stream(**STREAM)
    with pytest.raises(UndeclaredMetricError, match=r"not measured: itl_p50_s$"):
        measure.close()


@pytest.mark.parametrize(("streamed", "known"), [(False, "nothing yet"), (True, "a, b")])
def test_an_arm_that_was_not_streamed_cannot_be_compared(streamed, known):
    measure, _, _ = measure_of(named("a", "b"), quantities=("speedup",))
    if streamed:
        measure.stream(**STREAM)
    with pytest.raises(InstrumentError, match=f"no arm 'naive' was streamed, only: {known}"):
        measure.compare(slow="naive", fast="a")


def test_a_second_shape_in_one_test_would_overwrite_the_first():
    measure, _, _ = measure_of(named("a"))
    measure.stream(**STREAM)
    with pytest.raises(InstrumentError, match="run already"):
        measure.stream(**STREAM)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"quantities": ("ttft_s", "goodput")}, "'goodput' is not declared; declared are: ttft_s"),
        ({"quantities": ()}, "at least one quantity"),
        ({"arms": {}}, "one arm"),
        ({"num_samples": 0}, "cannot take 0 samples"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(changed, message):
    with pytest.raises(InstrumentError, match=message):
        Plan(**{"name": "growth", "quantities": ("ttft_s",), "arms": named("a"), "num_samples": 1} | changed)


# What it is measured on.


@pytest.mark.parametrize("changed", [{"prompt_tokens": 0}, {"new_tokens": 0}, {"new_tokens": -1}])
def test_a_workload_without_work_is_refused(changed):
    with pytest.raises(InstrumentError, match=f"{next(iter(changed))} must be at least 1"):
        Workload(**STREAM | changed)


def test_a_prompt_is_fixed_by_its_seed_words():
    """To the last token: next year's run has to read the same prompt."""
    workload = Workload(prompt_tokens=5, new_tokens=1)
    assert workload.prompt(1000, "sample", 0) == (818, 829, 994, 878, 223)
    assert workload.prompt(1000, "sample", 1) == (323, 675, 361, 115, 325)
    assert workload.prompt(1000, "warm-up", 0) == (18, 353, 632, 477, 371)
    assert workload.prompt(1000) != Workload(prompt_tokens=5, new_tokens=2).prompt(1000)
    assert all(0 <= token < 3 for token in Workload(prompt_tokens=99, new_tokens=1).prompt(3))


# Where it goes.


def test_pytest_benchmark_records_our_durations_to_the_last_bit():
    durations = [0.1, 1e-9, 123.456, 0.1 + 0.2]
    recorded = []

    def pedantic(target, *, setup, rounds, iterations):
        """pytest-benchmark's loop."""
        assert iterations == 1
        for _ in range(rounds):
            setup()
            start = replayed_seconds()
            target()
            recorded.append(replayed_seconds() - start)

    replay(SimpleNamespace(pedantic=pedantic), durations)
    assert recorded == durations


def test_the_first_arm_is_what_pytest_benchmark_shows():
    measure, _, _ = measure_of({"first": {"step_ms": 2}, "second": {}}, num_samples=3, quantities=("e2e_s",))
    measure.stream(**STREAM)
    first, _ = measure.measurements
    assert (first.arm, tuple(measure.primary_durations_s())) == ("first", first.samples)


@pytest.mark.parametrize("arm", ["first", "second"])
def test_every_arm_has_to_do_the_work(arm):
    arms = {name: {"tokens": (1, 2, 3)} if name == arm else {} for name in ("first", "second")}
    measure, *_ = measure_of(arms)
    with pytest.raises(WrongOutputError, match=f"{arm} produced 3 tokens"):
        measure.stream(**STREAM)


def test_every_run_is_held_to_the_invariants(monkeypatch):
    held = []
    monkeypatch.setattr("benchmarks.harness.loop.check_run", held.append)
    measure, *_ = measure_of(named("a", "b"), num_samples=2, num_warmups=1)
    measure.stream(**STREAM)
    assert len(held) == 2 * (1 + 2)


def test_warming_up_waits_for_the_slowest_arm_to_settle():
    """One arm is steady from the start, the other follows the machine."""

    class Mixed(ScriptedSubject):
        def stream(self, *args, **options):
            self.is_steady = options["name"] == "steady"
            yield from super().stream(*args, **options)

        @property
        def slowness(self):
            return 5 if self.is_steady else ScriptedSubject.slowness.fget(self)

    measure, _, clock = measure_of(named("steady", "other"), num_warmups=10, num_samples=6)
    measure._loop._subject = Mixed(clock, speeds=[50, 20, 5, 5, 5])
    measure.stream(**STREAM)
    assert measure.details["warm_up"] == {"num_runs": 4, "is_settled": True}


def test_the_seconds_of_all_arms_count_against_the_limit():
    measure, *_ = measure_of(named("a", "b", "c"), num_warmups=99, max_warmup_s=0.9, speeds=[100, 80, 60, 40, 20])
    measure.stream(**STREAM)
    assert measure.details["warm_up"]["num_runs"] == 1  # 3 arms of 0.4 s


def test_two_tests_of_one_shape_share_no_prompt():
    prompts = []
    for name in ("one", "other"):
        clock = ScriptedClock()
        subject = ScriptedSubject(clock)
        Measure(Plan(name=name, quantities=("ttft_s",), arms=named("a")), subject, clock).stream(**STREAM)
        prompts += subject.prompts
    assert len(set(prompts)) == 2


def test_collections_stay_off_where_they_were_off():
    gc.disable()
    try:
        measure, *_ = measure_of(named("a"))
        measure.stream(**STREAM)
        assert not gc.isenabled()
    finally:
        gc.enable()
