"""Counting a step of a scripted subject: the right step, the right numbers, and what is refused."""

import pytest
import torch

from benchmarks.harness.errors import InstrumentError, UndeclaredMetricError, WrongOutputError
from benchmarks.harness.loop import Plan
from benchmarks.harness.timing import Emission
from benchmarks.harness.work import CountWork

QUANTITIES = ("num_operators", "flops", "num_forwards", "num_tokens_prefilled", "num_tokens_decoded", "kv_bytes")


class CountingClock:
    ns = 0

    def now_ns(self):
        self.ns += 1000
        return self.ns


class ScriptedSubject:
    """Each step multiplies as many rows as it runs positions; `extra` operators more; one request at a time."""

    vocab_size = 50
    relative_tolerance = 0.0
    open_streams = 0

    def forget(self, **arm):
        pass

    def stream(self, prompt_ids, num_new_tokens, *, cached=True, extra=0, wrong=False):
        assert self.open_streams == 0, "the request before was not ended"
        self.open_streams += 1
        num_stored = 0
        try:
            for index in range(num_new_tokens):
                context = len(prompt_ids) + index
                num_run = context - num_stored
                rows = torch.ones(num_run, 8) @ torch.ones(8, 4)
                for _ in range(extra):
                    rows = rows + 0
                token = int(rows[-1, 0]) + index + (wrong and index > 0)
                yield Emission(token_ids=(token,), num_cached=num_stored, num_prefilled=num_run)
                num_stored = context if cached else 0
        finally:
            self.open_streams -= 1

    def next_logits(self, token_ids):
        return [float(token) for token in range(self.vocab_size)]

    def held(self, **arm):
        return {"kv_bytes": 64 if arm.get("cached", True) else 0, "num_kv_blocks": None}

    def count_schedule(self, prompt_tokens, new_tokens, *, rows):
        self.scheduled = [*getattr(self, "scheduled", []), (prompt_tokens, tuple(new_tokens), rows)]
        return {"num_steps": -(-sum(new_tokens) // rows), "num_padding": 0}


def counting(arms, quantities=QUANTITIES):
    plan = Plan(name="work", quantities=quantities, arms=arms)
    return CountWork(plan, ScriptedSubject(), CountingClock(), "cpu")


def counted(work, arm):
    return {m.metric.name: m.value for m in work.measurements if m.arm == arm}


BOTH = {"cached": {}, "naive": {"cached": False}}


def test_a_decode_step_runs_one_position_with_a_cache_and_all_of_them_without():
    work = counting(BOTH, (*QUANTITIES, "num_tokens_recomputed"))
    work.decode_step(context_tokens=16)
    work.close()
    cached, naive = counted(work, "cached"), counted(work, "naive")
    assert cached["flops"] == 2 * 1 * 8 * 4
    assert naive["flops"] == 2 * 17 * 8 * 4
    told = ("num_forwards", "num_tokens_prefilled", "num_tokens_recomputed", "num_tokens_decoded", "kv_bytes")
    assert [cached[name] for name in told] == [1, 0, 0, 1, 64]
    assert [naive[name] for name in told] == [1, 0, 16, 1, 0]


def test_a_prefill_runs_the_prompt():
    work = counting(BOTH)
    work.prefill(prompt_tokens=16)
    assert counted(work, "cached") == counted(work, "naive") | {"kv_bytes": 64}
    assert (counted(work, "cached")["num_tokens_prefilled"], counted(work, "cached")["num_tokens_decoded"]) == (16, 0)


def test_one_operator_more_is_counted_and_named():
    work = counting({"as it was": {}, "planted": {"extra": 1}})
    work.decode_step(context_tokens=16)
    before, after = counted(work, "as it was"), counted(work, "planted")
    assert after["num_operators"] == before["num_operators"] + 1
    assert after["flops"] == before["flops"]
    operators = work.details["operators"]
    assert operators["planted"]["aten.add.Tensor"] == operators["as it was"].get("aten.add.Tensor", 0) + 1


def test_every_request_is_ended_and_the_first_arm_gives_a_duration():
    work = counting(BOTH)
    work.decode_step(context_tokens=4)
    assert work._subject.open_streams == 0
    assert len(work.primary_durations_s()) == 1
    assert work.runs == {}


def test_arms_that_do_not_agree_are_no_comparison_of_work():
    work = counting({"right": {}, "wrong": {"wrong": True}})
    with pytest.raises(WrongOutputError, match="wrong and right differ at token 1"):
        work.decode_step(context_tokens=4)


def test_a_second_count_in_one_test_is_refused():
    work = counting(BOTH)
    work.prefill(prompt_tokens=4)
    with pytest.raises(InstrumentError, match="counted already"):
        work.decode_step(context_tokens=4)


def test_a_time_is_no_count():
    with pytest.raises(InstrumentError, match="ttft_s is not a count of work; counts are: flops, num_operators"):
        counting(BOTH, ("ttft_s",))


@pytest.mark.parametrize("name", ["num_kernel_launches", "num_kv_blocks"])
def test_a_count_that_does_not_exist_here_is_not_zero(name):
    work = counting(BOTH, (name,))
    work.prefill(prompt_tokens=4)
    with pytest.raises(UndeclaredMetricError, match=f"not measured: {name}"):
        work.close()


def test_a_schedule_is_counted_for_each_arm_and_once_more_for_a_duration():
    work = counting({"one": {"rows": 1}, "four": {"rows": 4}}, ("num_steps", "num_padding"))
    work.schedule(prompt_tokens=5, new_tokens=[4, 3, 1])
    work.close()
    assert counted(work, "one") == {"num_steps": 8, "num_padding": 0}
    assert counted(work, "four") == {"num_steps": 2, "num_padding": 0}
    assert work._subject.scheduled == [(5, (4, 3, 1), rows) for rows in (1, 1, 4, 4)]
    assert work.primary_durations_s() == [1e-6]
    with pytest.raises(InstrumentError, match="counted already"):
        work.schedule(prompt_tokens=5, new_tokens=[1])


@pytest.mark.parametrize(
    ("quantities", "missing"),
    [(("num_steps", "flops"), "flops"), (("num_steps", "kv_bytes", "num_forwards"), "kv_bytes, num_forwards")],
)
def test_what_no_schedule_gives_is_not_zero(quantities, missing):
    work = counting({"one": {"rows": 1}}, quantities)
    work.schedule(prompt_tokens=5, new_tokens=[2])
    with pytest.raises(UndeclaredMetricError, match=f"not measured: {missing}$"):
        work.close()


def test_a_step_has_no_schedule():
    work = counting(BOTH, ("num_operators", "num_steps"))
    work.decode_step(context_tokens=4)
    with pytest.raises(UndeclaredMetricError, match=r"not measured: num_steps$"):
        work.close()
