"""The sampling loop on a scripted subject: what runs, in which order, on which prompt, and what is refused."""

import dataclasses
import itertools
from types import SimpleNamespace

import pytest

from benchmarks.harness.errors import InstrumentError, UndeclaredMetricError, WrongOutputError
from benchmarks.harness.measure import Measure, Plan
from benchmarks.harness.replay import replay, replayed_seconds
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


@dataclasses.dataclass
class Emitted:
    token_ids: tuple[int, ...]
    finish_reason: str | None = None


class ScriptedSubject:
    """Answers every prompt with `tokens` and keeps a log. An arm's options: time per token, other tokens, chunks."""

    vocab_size = 1000

    def __init__(self, clock, tokens=(1, 2, 3, 4), reason="length", logits=(), relative_tolerance=0.0):
        self.clock, self.tokens, self.reason = clock, tokens, reason
        self.logits, self.relative_tolerance = logits, relative_tolerance
        self.prompts, self.order, self.asked = [], [], []

    def stream(self, prompt_ids, num_new_tokens, *, name="", step_ms=1, tokens=None, at_once=False):
        assert num_new_tokens == STREAM["new_tokens"]
        self.prompts.append(prompt_ids)
        self.order.append(name)
        tokens = tokens or self.tokens
        for chunk in [tokens] if at_once else [(token,) for token in tokens]:
            self.clock.ns += step_ms * MS * self.slowness
            yield Emitted(tuple(chunk))
        yield Emitted((), self.reason)

    @property
    def slowness(self):
        """The machine slows down from prompt to prompt, for all arms alike."""
        return len(dict.fromkeys(self.prompts))

    def next_logits(self, token_ids):
        self.asked.append(list(token_ids))
        return self.logits


def measure_of(arms, quantities=("ttft_s",), num_samples=1, num_warmups=0, say=lambda text: None, **subject):
    clock = ScriptedClock()
    plan = Plan(name="growth", quantities=quantities, arms=arms, num_samples=num_samples, num_warmups=num_warmups)
    measure = Measure(plan, ScriptedSubject(clock, **subject), clock, say)
    return measure, measure._subject, clock


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
    measure, _, _ = measure_of(named("a", "b"), num_samples=2, num_warmups=1, say=said.append)
    measure.stream(**STREAM)
    assert said == ["warm-up 1", "sample 1", "sample 2"]


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
    assert (subject.asked, measure.notes) == ([], [])


def test_a_near_tie_in_low_precision_is_noted_off_the_clock():
    measure, subject, clock = two_arms(0.01, logits_with(t3=10.0, t7=9.95))
    measure.stream(**STREAM)
    assert subject.asked == [[*subject.prompts[0], 1, 2]]
    assert clock.num_reads == 2 * (1 + 4)
    assert len(measure.notes) == 1
    assert "again and kept differ at token 2: 7 and 3" in measure.notes[0]


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
    measure.speedup(slow="slow", fast="fast")
    measure.close()
    *_, found = measure.measurements
    assert (found.arm, found.samples, found.value) == ("fast over slow", pytest.approx([3.0] * 5), pytest.approx(3.0))
    e2e = next(m for m in measure.measurements if m.arm == "fast")
    assert max(e2e.samples) == pytest.approx(5 * min(e2e.samples))


def test_an_undeclared_quantity_is_refused():
    measure, _, _ = measure_of(named("a", "b"), quantities=("ttft_s", "e2e_s"))
    measure.stream(**STREAM)
    with pytest.raises(UndeclaredMetricError, match="does not declare 'speedup'; it declares ttft_s, e2e_s"):
        measure.speedup(slow="a", fast="b")


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
        measure.speedup(slow="naive", fast="a")


def test_a_second_shape_in_one_test_would_overwrite_the_first():
    measure, _, _ = measure_of(named("a"))
    measure.stream(**STREAM)
    with pytest.raises(InstrumentError, match="streamed already"):
        measure.stream(**STREAM)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"quantities": ("ttft_s", "goodput")}, "'goodput' is not declared; declared are: ttft_s"),
        ({"quantities": ()}, "at least one quantity"),
        ({"arms": {}}, "one arm"),
        ({"num_samples": 0}, "cannot take 0 samples"),
        ({"num_warmups": -1}, "after -1 warm-ups"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(changed, message):
    with pytest.raises(InstrumentError, match=message):
        Plan(
            **{"name": "growth", "quantities": ("ttft_s",), "arms": named("a"), "num_samples": 1, "num_warmups": 0}
            | changed
        )


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
