"""The prefix study on made results: what each claim says where it is true, and how a fault in the numbers flips it."""

import csv
import io
import itertools

import numpy as np
import pytest
from sample_results import PROVENANCE
from typer.testing import CliRunner

from benchmarks.harness.metrics import metric
from benchmarks.harness.popularity import zipf_order
from benchmarks.harness.prefill_cost import Curve
from benchmarks.harness.results import (
    BenchmarkResult,
    exact_count,
    root_of_pool,
    summarise_pairs,
    summarise_runs,
    summarise_states,
    summarise_windows,
)
from benchmarks.harness.timing import RunTiming, Stamp
from benchmarks.studies import prefix_costs
from benchmarks.studies.prefix_claims import claims_of
from benchmarks.studies.prefix_costs import PUBLISHED, as_csv, rows_of, tell, write
from benchmarks.studies.prefix_points import turns_of

FILE, COUNTS = "benchmarks/bench_prefix_cache.py::", "benchmarks/bench_hit_rate.py::"
ARMS = {"cold": "cold", "primed": "primed", "unseen": "unseen", "suffix_only": "suffix", "prefix_only": "prefix"}
OF_REUSE = (
    "reuse_speedup", "reuse_speedup_proxy", "cold_over_unseen", "ttft_saved_s", "prefill_removed_s", "kv_read_added_s",
)  # fmt: skip
SETTINGS = ((128, 64), (256, 64), (512, 64), (512, 128))

NO_FLOOR = Curve(floor_s=None, overhead_s=0.02, per_token_s=2e-4, per_token2_s=5e-8)
FLOOR = Curve(floor_s=0.04, overhead_s=0.01, per_token_s=2e-4, per_token2_s=5e-8)

NUM = 8


class Machine:
    """Serves by the law of its curve, with 1 % of noise; each fault is a number that is not 1 or 0."""

    def __init__(self, curve=NO_FLOOR, *, warm_up=1.0, kept=0.0, finds=True, free_hits=False, proxy_is_hit=False):
        self.curve, self.warm_up, self.kept, self.finds = curve, warm_up, kept, finds
        self.free_hits, self.proxy_is_hit = free_hits, proxy_is_hit
        self._rng = np.random.default_rng(0)

    def ttft_s(self, prompt, cached=0):
        """`kept` is the share of the saving that the store eats."""
        if cached and self.free_hits:
            return 1e-6
        suffix_s = self.curve.full_s(prompt - cached) if self.proxy_is_hit else None
        hit_s = suffix_s if suffix_s is not None else self.curve.hit_s(cached, prompt - cached)
        return hit_s + (self.kept * (self.curve.full_s(prompt) - hit_s) if cached else 0.0)

    def run(self, prompt, cached=0, factor=1.0, name=""):
        at_ns = round(self.ttft_s(prompt, cached) * factor * (1 + 0.01 * self._rng.uniform(-1, 1)) * 1e9)
        return RunTiming(
            request_id=name, sent_ns=0, stamps=(Stamp(at_ns, 1),), num_prompt_tokens=prompt, num_cached=cached,
            num_prefilled=prompt - cached, finish_reason="length",
        )  # fmt: skip

    def in_state(self, state, prefix, suffix):
        prompt = {"suffix": suffix, "prefix": prefix}.get(state, prefix + suffix)
        if state == "primed":
            return self.run(prompt, prefix if self.finds else 0)
        return self.run(prompt, factor=self.warm_up if state == "cold" else 1.0)


def result(test, params, runs, measured, file=FILE, **more):
    case = "-".join(map(str, params.values()))
    return BenchmarkResult(
        benchmark=file + test, case=case, params=params, measurements=tuple(measured), provenance=PROVENANCE,
        runs={arm: tuple(each) for arm, each in runs.items()}, **more,
    )  # fmt: skip


def flat(windows):
    return {arm: list(itertools.chain.from_iterable(each)) for arm, each in windows.items()}


def pooled(name, loads):
    return root_of_pool(metric(name), metric(name).pooled(loads), NUM)


def load_of(machine, prefix, suffix, size=1):
    """The windows of all samples, by state; a batch of cold ones costs what all of them cost."""
    return {
        state: [
            [machine.in_state(state, prefix, suffix)] * (1 if state == "prefix" else size) for _ in range(NUM)
        ]
        for state in ARMS.values()
    }  # fmt: skip


def reuse(machine, prefix, suffix):
    load = load_of(machine, prefix, suffix)
    samples = [{state: windows[place] for state, windows in load.items()} for place in range(NUM)]
    runs = {arm: [window[0] for window in load[state]] for arm, state in ARMS.items()}
    measured = [summarise_runs(metric("ttft_s"), arm, runs[arm]) for arm in runs]
    measured += [summarise_states(metric(name), samples) for name in OF_REUSE]
    measured.append(pooled("breakeven_requests", [load]))
    return result("test_reuse", {"prefix_tokens": prefix, "suffix_tokens": suffix}, runs, measured)


def sweep(machine, longest=2048):
    lengths = [2**power for power in range(4, 12) if 2**power <= longest]
    runs = {"uncached": [machine.run(length) for _ in range(NUM) for length in lengths]}
    return result("test_prefill_curve", {"longest": longest}, runs, [])


def derived(machine):
    loads = [load_of(machine, prefix, 64) for prefix in (32, 64, 128, 256, 512)]
    return result("test_derived_against_direct", {"suffix_tokens": 64}, {}, [pooled("derived_over_direct", loads)])


def conversation(machine, num_turns=10, turn_tokens=64, answer_tokens=4, eaten=1.0):
    """`eaten` makes every carried turn slower than the machine's own law."""
    prompts = [turn * (turn_tokens + answer_tokens) + turn_tokens for turn in range(num_turns)]
    cached = [0, *((prompt + answer_tokens - 1) // 16 * 16 for prompt in prompts[:-1])]
    windows = {
        "carried": [
            [machine.run(prompt, hit, eaten) for prompt, hit in zip(prompts, cached, strict=True)] for _ in range(NUM)
        ],
        "off": [[machine.run(prompt) for prompt in prompts] for _ in range(NUM)],
    }
    pairs = list(zip(windows["off"], windows["carried"], strict=True))
    measured = [summarise_windows(metric("mean_ttft_s"), arm, windows[arm]) for arm in windows]
    of_turns = ("turns_speedup", "turns_saved_s")
    measured += [summarise_pairs(metric(name), "carried over off", pairs) for name in of_turns]
    params = {"num_turns": num_turns, "turn_tokens": turn_tokens, "answer_tokens": answer_tokens}
    return result("test_conversation", params, flat(windows), measured)


def batched(machine, prefix, suffix=64):
    """N requests at once take N times as long, less what one forward shares."""

    def window(state, size):
        ttft_s = machine.in_state(state, prefix, suffix).ttft_s * (1 if state == "prefix" else 0.8 * size + 0.2)
        stamp = Stamp(round(ttft_s * 1e9), 1)
        return [RunTiming(sent_ns=0, stamps=(stamp,), finish_reason="length")] * (1 if state == "prefix" else size)

    loads = [
        {state: [window(state, size) for _ in range(NUM)] for state in ("cold", "primed", "prefix")}
        for size in (1, 2, 4, 8)
    ]
    params = {"prefix_tokens": prefix, "suffix_tokens": suffix}
    return result("test_batched_sharing", params, {}, [pooled("batched_breakeven_requests", loads)])


def served(machine, alpha=1.0):
    order = zipf_order(40, 32, alpha, 1)
    hits = [64 if prefix in order[:place] else 0 for place, prefix in enumerate(order)]
    windows = {
        "lru": [[machine.run(80, hit) for hit in hits] for _ in range(NUM)],
        "off": [[machine.run(80) for _ in hits] for _ in range(NUM)],
    }
    pairs = list(zip(windows["off"], windows["lru"], strict=True))
    measured = [summarise_pairs(metric("effective_speedup"), "lru over off", pairs)]
    return result("test_zipf_served", {"alpha": alpha}, flat(windows), measured)


def counted(alpha, extra=0):
    """The unlimited arm misses the first uses, and `extra` more; the others have rates that look like such rates."""
    missed = sum(len(set(zipf_order(200, 32, alpha, seed))) for seed in range(4)) + extra
    ceiling = 1 - missed / 800
    rates = {
        f"{policy}_{slots}": ceiling * (1 - 0.6 * share * (4 / slots) ** 0.6)
        for policy, share in (("lru", 1.0), ("lfu", 0.85), ("fifo", 1.1), ("size", 0.85))
        for slots in (4, 8, 16)
    }
    told = {arm: {"mean": rate, "sd": 0.03, "num_seeds": 4} for arm, rate in {**rates, "unlimited": ceiling}.items()}
    counts = [exact_count(metric("num_missed_requests"), "unlimited", missed)]
    return result("test_zipf", {"alpha": alpha}, {}, counts, COUNTS, details={"hit_rate": told})


def study(machine=None):
    machine = machine or Machine()
    return [
        sweep(machine), *(reuse(machine, *each) for each in SETTINGS), derived(machine), conversation(machine),
        *(batched(machine, prefix) for prefix in (128, 256, 512)), served(machine),
        *(counted(alpha) for alpha in (0.5, 1.0, 2.0)),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def whole():
    return study()


def verdicts(results):
    return {claim.text: claim.verdict for claim in claims_of(results)}


def claim(results, word):
    (found,) = [each for each in claims_of(results) if word in each.text]
    return found


def test_what_is_true_of_every_prefix_cache_holds_and_what_made_the_figures_is_named(whole):
    assert verdicts(whole) == {
        "a cached prompt computes what a cold one does": "holds",
        "a cold prompt costs what an unseen one does": "holds",
        "prefill of the suffix alone measures a hit": "does not hold",
        "a larger prefix fraction is a higher speedup": "does not hold",
        "short prompts save little": "holds in part",
        "one request never wins (one after another)": "holds",
        "breakeven falls as the prefix grows (one after another)": "holds",
        "one request never wins (at once)": "holds",
        "breakeven falls as the prefix grows (at once)": "holds",
        "savings over turns follow from the savings curve": "holds",
        "with more slots the hit rate converges to 84-91 %": "holds in part",
        "a hit rate is a speedup": "does not hold",
    }
    assert {each.text: each.artefact.split()[0].rstrip(":") for each in claims_of(whole) if each.artefact} == {
        "prefill of the suffix alone measures a hit": "the",
        "a larger prefix fraction is a higher speedup": "lengths",
        "with more slots the hit rate converges to 84-91 %": "compulsory",
        "a hit rate is a speedup": "a",
    }


# Each claim the other way round.


def test_a_store_that_returns_nothing_is_found():
    found = claim([reuse(Machine(finds=False), 256, 64)], "computes")
    assert found.verdict == "does not hold"
    assert "0 of 8 runs found their prefix, 0 of 2,048 tokens" in found.evidence


def test_a_slow_first_prompt_is_warm_up():
    found = claim([reuse(Machine(warm_up=1.3), 256, 64)], "unseen")
    assert (found.verdict, found.artefact) == ("does not hold", "a speedup over the first, cold run is warm-up")
    assert claim([reuse(Machine(warm_up=1.05), 256, 64)], "unseen").verdict == "cannot tell"


def test_a_proxy_that_costs_what_a_hit_does_measures_one():
    found = claim([reuse(Machine(proxy_is_hit=True), 512, 64)], "alone measures")
    assert (found.verdict, found.artefact) == ("holds", "")


def test_without_an_overhead_the_fraction_is_all_there_is():
    machine = Machine(Curve(floor_s=None, overhead_s=0.0, per_token_s=1e-4, per_token2_s=0.0))
    both = [reuse(machine, *each) for each in ((256, 64), (512, 128))]
    assert claim(both, "fraction").verdict == "holds"
    assert [each for each in claims_of(both[:1]) if "fraction" in each.text] == []


def test_a_launch_floor_is_told_with_its_end():
    found = claim([sweep(Machine(FLOOR))], "short prompts")
    assert found.verdict == "holds"
    assert "a launch floor of 40" in found.evidence
    assert "until 14" in found.evidence
    assert found.artefact.startswith("the launch floor")
    flat = Machine(Curve(floor_s=0.04, overhead_s=0.04, per_token_s=0.0, per_token2_s=0.0))
    assert "nothing measured leaves it" in claim([sweep(flat)], "short prompts").evidence
    straight = Machine(Curve(floor_s=None, overhead_s=0.02, per_token_s=2e-4, per_token2_s=0.0))
    assert claim([sweep(straight)], "short prompts").verdict == "does not hold"


def test_a_store_that_saves_more_than_the_prefix_costs_is_no_store():
    found = verdicts([reuse(Machine(free_hits=True), 256, 64)])
    assert found["one request never wins (one after another)"] == "does not hold"


def test_a_breakeven_that_rises_with_the_prefix_is_found():
    short, long = reuse(Machine(), 128, 64), reuse(Machine(kept=0.9), 512, 64)
    assert verdicts([short, long])["breakeven falls as the prefix grows (one after another)"] == "does not hold"
    assert "breakeven falls as the prefix grows (one after another)" not in verdicts([short])


def test_savings_that_do_not_follow_from_the_curve_are_found():
    assert claim([derived(Machine(kept=0.3))], "over turns").verdict == "does not hold"
    machine = Machine()
    both = [sweep(machine), conversation(machine, eaten=1.5)]
    assert claim(both, "over turns").verdict == "does not hold"
    assert [each for each in claims_of(both[1:]) if "over turns" in each.text] == []


def test_misses_beyond_first_uses_are_found():
    found = claim([counted(1.0, extra=1)], "converges")
    assert (found.verdict, found.artefact) == ("does not hold", "")


def test_free_hits_would_make_a_hit_rate_a_speedup(whole):
    found = claim([served(Machine(free_hits=True))], "hit rate is")
    assert (found.verdict, found.artefact) == ("holds", "")
    assert "1 / ((1 - h) + h / s)" in claim(whole, "hit rate is").evidence


# What people see.


def test_every_published_figure_stands_beside_ours(whole):
    rows = [row for row in rows_of(whole) if row.published is not None]
    assert {(row.setting, row.quantity) for row in rows} == set(PUBLISHED)
    text = tell(whole)
    assert "prefix 512 + suffix 128: Speedup of reuse" in text
    assert "artefact: compulsory misses" in text
    assert PUBLISHED["prefix 512 + suffix 64", "prefill_removed_s"] == 6675e-6


def test_the_table_has_every_number_in_full(whole):
    lines = list(csv.DictReader(io.StringIO(as_csv(list(rows_of(whole))))))
    (one,) = [each for each in lines if (each["setting"], each["quantity"]) == ("turn 10 of 10 x 64", "turn_speedup")]
    assert float(one["low"]) <= float(one["value"]) <= float(one["high"])
    assert (one["published"], one["n"], one["unit"]) == ("2.06", "8", "x")


def test_the_first_turn_saves_nothing_and_the_last_the_most(whole):
    (talk,) = [each for each in whole if each.benchmark.endswith("conversation")]
    turns = list(turns_of(talk))
    assert turns[0].speedup.value == pytest.approx(1, abs=0.02)
    saved = [turn.saved_so_far_s.value for turn in turns]
    assert saved == sorted(saved)


@pytest.mark.parametrize("place", range(len(study())))
def test_any_single_result_can_be_told(whole, place):
    one = [whole[place]]
    assert tell(one)
    assert as_csv(list(rows_of(one))).startswith("setting,quantity,unit")


@pytest.mark.slow
def test_csv_and_picture_are_written_even_of_one_result(whole, tmp_path):
    talk = [each for each in whole if each.benchmark.endswith("conversation")]
    others = [each for each in whole if each not in talk and each.params.get("alpha") not in (0.5, 2.0)]
    for some in (others, talk):
        paths = write(some, tmp_path / "study")
        assert [path.name for path in paths] == ["prefix_costs.csv", "prefix_costs.svg", "prefix_costs.png"]
        assert all(path.stat().st_size > 1000 for path in paths)


def test_nothing_measured_is_no_picture_and_no_claim(tmp_path):
    assert [path.name for path in write([], tmp_path)] == ["prefix_costs.csv"]
    assert verdicts([]) == {}


def test_a_bad_file_is_one_line(tmp_path):
    done = CliRunner().invoke(prefix_costs.app, [str(tmp_path / "missing.json"), "--output", str(tmp_path)])
    assert done.exit_code == 2
    assert "missing.json" in done.output
    assert "Traceback" not in done.output
