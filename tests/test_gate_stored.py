"""What asv has stored for two commits becomes evidence, or is refused by name. asv's own code writes the folders."""

import dataclasses
import datetime
import itertools
import json
import math

import pytest
from asv.results import Results
from asv.runner import BenchmarkResult as AsvResult
from sample_results import PROVENANCE

from benchmarks.harness.asv_process import machine_name
from benchmarks.harness.errors import ArchiveError, InstrumentError
from benchmarks.harness.gate.asv_files import read_file
from benchmarks.harness.gate.evidence import Counts, Key, Pairs
from benchmarks.harness.gate.rounds import read_passes
from benchmarks.harness.gate.stored import read_stored
from benchmarks.harness.gate.verdict import Rules, judge
from benchmarks.harness.metrics import METRICS, metric
from benchmarks.harness.results import BenchmarkResult, Flag, exact_count, summarise_values
from benchmarks.harness.sidecar import keep_beside

BASE, HEAD, OTHER = "ba5e" * 10, "4ead" * 10, "0dd0" * 10
TEST = "benchmarks/bench_kv_cache.py::test_prompt_length"
ENVIRONMENT = "virtualenv-py3.11-torch2.13.0"
LAPTOP = {"machine": "laptop", "arch": "x86_64", "cpu": "A Processor", "num_cpu": "8", "ram": "16000000", "os": "Linux"}
RECORD = "asv continuous --record-samples"

ITL = Key(TEST, "16", "cached", "itl_p50_s")
TTFT = Key(TEST, "16", "cached", "ttft_s")
SPEEDUP = Key(TEST, "16", "", "speedup")
FLOPS = Key(TEST, "16", "cached", "flops")
CASE = ITL.of_case

EIGHT = [0.010, 0.011, 0.012, 0.013, 0.014, 0.015, 0.016, 0.017]


def series_of(key):
    """The name and the parameters that the bridge gives to the series of one quantity."""
    test = key.benchmark.removeprefix("benchmarks/").replace(".py::", ".").replace("::", ".").replace("/", ".")
    axes = ([key.arm] if key.arm else []) + ([key.case] if key.case else [])
    return f"{test}.track_{metric(key.metric).asv_name}", [[repr(axis)] for axis in axes]


@dataclasses.dataclass
class Folder:
    """A results folder of asv's, filled as asv fills it: round by round, each appended to the ones before."""

    root: object

    def add(self, commit, series, params, rounds, *, version="v1", environment=ENVIRONMENT, record=True, **machine):
        """Each round: a number for a sample, [] for a disturbed pass, None for a failure, NaN for a skip, Count."""
        told = LAPTOP | machine
        results = Results(told, {}, commit, 0, "3.11", environment, {})
        results.load_data(self.root)
        benchmark = {"name": series, "version": version, "params": params}
        sets = list(itertools.product(*params))
        for number, once in enumerate(rounds):
            each = once if isinstance(once, dict) else dict.fromkeys(sets, once)
            rows = [as_asv(each[place]) for place in sets]
            result, samples, num = (list(column) for column in zip(*rows, strict=True))
            results.add_result(
                benchmark, AsvResult(result, samples, num, 0, "", None), record_samples=record,
                append_samples=number > 0,
            )  # fmt: skip
        results.save(self.root)
        (self.root / told["machine"] / "machine.json").write_text(json.dumps(told | {"version": 1}))

    def put(self, commit, key, rounds, **how):
        series, params = series_of(key)
        self.add(commit, series, params, rounds, **how)

    def both(self, key, base, head, **how):
        self.put(BASE, key, base, **how)
        self.put(HEAD, key, head, **how)

    def path(self, commit, environment=ENVIRONMENT, machine="laptop"):
        return self.root / machine / f"{commit[:8]}-{environment}.json"

    def rewrite(self, commit, **changes):
        path = self.path(commit)
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def read(self, base=BASE, head=HEAD, machine=None):
        return read_stored(self.root, base, head, machine)

    def refusal(self, *commits, **how):
        with pytest.raises(ArchiveError) as caught:
            self.read(*commits, **how)
        return str(caught.value)


class Count(int):
    """A number that asv stores as it is, without samples."""


def as_asv(value):
    """What a `track_*` function gave, as asv's runner takes it: result, samples, number."""
    if value is None or isinstance(value, Count) or (isinstance(value, float) and math.isnan(value)):
        return (value if not isinstance(value, Count) else int(value)), None, None
    return True, value if isinstance(value, list) else [value], 1


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path / "results")


def sides(evidence, key):
    """The pairs as two lists; every launch has one pair."""
    assert all(len(each.base) == 1 for each in evidence.pairs_of(key))
    return [each.base[0] for each in evidence.pairs_of(key)], [each.head[0] for each in evidence.pairs_of(key)]


# What is compared.


def test_each_round_is_a_launch_with_one_pair(folder):
    slower = [2 * each for each in EIGHT]
    folder.both(ITL, EIGHT, slower)
    evidence = folder.read()
    assert sides(evidence, ITL) == (EIGHT, slower)
    assert evidence.num_launches == 8
    assert evidence.keys == (ITL,)
    assert not any((evidence.gaps, evidence.new, evidence.skipped, evidence.contaminated))


def test_the_folder_is_what_asv_reads_and_nothing_in_it_changes(folder):
    folder.both(ITL, EIGHT, EIGHT)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.root.rglob("*") if path.is_file()}
    evidence = folder.read()
    stored = Results.load(str(folder.path(HEAD)), machine_name="laptop")
    (samples,) = stored.get_result_samples(*[series_of(ITL)[0], series_of(ITL)[1]])
    assert sides(evidence, ITL)[1] == samples
    after = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.root.rglob("*") if path.is_file()}
    assert after == before


@pytest.mark.parametrize("name", METRICS)
def test_what_asv_stores_of_a_metric_is_read_back_in_the_metrics_own_unit(folder, name):
    declared = metric(name)
    key = Key(TEST, "16", "" if declared.compares_arms else "cached", name)
    if declared.is_exact:
        folder.both(key, [Count(7)], [Count(9)])
        assert folder.read().counts == {key: Counts(base=7, head=9)}
    else:
        values = [0.25, 0.5, 0.125]
        folder.both(key, [declared.cost(value) for value in values], [declared.cost(0.75)] * 3)
        base, head = sides(folder.read(), key)
        assert base == pytest.approx(values, rel=1e-14)
        assert head == pytest.approx([0.75] * 3, rel=1e-14)


@pytest.mark.parametrize("name", METRICS)
def test_a_value_costs_what_its_cost_is_worth(name):
    for value in (1e-9, 0.25, 0.999, 1.0, *([] if metric(name).unit == "share" else [3.7, 1e12])):
        assert metric(name).value_of(metric(name).cost(value)) == pytest.approx(value, rel=1e-15, abs=1e-15)


def test_no_value_costs_nothing():
    for cost in (0, -1.0):
        with pytest.raises(InstrumentError, match="speedup"):
            metric("speedup").value_of(cost)


def test_no_two_metrics_share_the_name_that_asv_knows():
    names = [each.asv_name for each in METRICS.values()]
    assert len(set(names)) == len(names)


AWKWARD = ["a/b", "é,-x", "a b", "it's", "", "[1]", "(0)", "None", "3", "日本", "a.b::c", 'say "x"', "back\\slash"]


def test_ids_survive_asv(folder):
    series, _ = series_of(ITL)
    params = [["'cached'", "'naïve, -1'"], [repr(each) for each in AWKWARD]]
    sets = list(itertools.product(*params))
    for commit in (BASE, HEAD):
        folder.add(commit, series, params, [{place: 0.01 * (1 + n) for n, place in enumerate(sets)}] * 3)
    keys = [Key(TEST, case, arm, "itl_p50_s") for arm in ("cached", "naïve, -1") for case in AWKWARD]
    evidence = folder.read()
    assert list(evidence.pairs) == keys
    assert [sides(evidence, key)[0][0] for key in keys] == [0.01 * (1 + n) for n in range(len(keys))]


@pytest.mark.parametrize(
    "test",
    [
        "benchmarks/bench_x.py::test_it",
        "benchmarks/bench_x.py::TestCache::test_it",
        "benchmarks/deep/er/bench_x.py::test_bench_it",
        "benchmarks/test_more.py::test_it",
        "benchmarks/bench_a/bench_x.py::TestA::TestB::test_é",
    ],
)
@pytest.mark.parametrize("case", ["", "16"])
def test_a_series_is_filed_under_the_test_that_it_stands_for(folder, test, case):
    for key in (Key(test, case, "cached", "ttft_s"), Key(test, case, "", "speedup")):
        folder.both(key, EIGHT, EIGHT)
        assert key in folder.read().keys


def test_commits_may_be_shortened(folder):
    folder.both(ITL, EIGHT, EIGHT)
    for length in (4, 8, 12, 40):
        assert folder.read(BASE[:length], HEAD[:length]).keys == (ITL,)


# What cannot be compared is a gap, what was not to be compared is none.


@pytest.mark.parametrize(
    ("on_head", "why"),
    [
        (None, "head failed"),
        (math.nan, "head skipped it"),
        (math.inf, "head holds inf, which is no measurement"),
        (-0.01, "head sample 0 is -0.01"),
        (0.0, "head sample 0 is 0"),
    ],
)
def test_what_is_no_number_on_head_only_is_no_data(folder, on_head, why):
    folder.both(ITL, EIGHT, [on_head] * 8)
    folder.both(TTFT, EIGHT, EIGHT)
    evidence = folder.read()
    assert why in evidence.gaps[ITL]
    assert evidence.keys == (TTFT,)
    assert not evidence.new


def test_what_is_no_number_on_base_only_has_no_baseline_or_is_no_data(folder):
    folder.both(ITL, [math.nan] * 8, EIGHT)
    folder.both(TTFT, [None] * 8, EIGHT)
    evidence = folder.read()
    assert "base skipped it" in evidence.new[ITL]
    assert "base failed" in evidence.gaps[TTFT]
    assert evidence.keys == ()


def test_what_is_skipped_on_both_sides_is_no_gap(folder):
    folder.both(ITL, [math.nan] * 8, [math.nan] * 8)
    evidence = folder.read()
    assert list(evidence.skipped) == [CASE]
    assert not any((evidence.gaps, evidence.new, evidence.keys))


def test_what_a_case_does_not_declare_is_not_skipped(folder):
    """asv has a number or NaN for each case of a file and each metric that any of them declares."""
    folder.both(ITL, EIGHT, [None] * 8)
    folder.both(TTFT, EIGHT, [None] * 8)
    folder.both(SPEEDUP, [math.nan] * 8, [math.nan] * 8)
    evidence = folder.read()
    assert not evidence.skipped
    assert list(evidence.gaps) == [CASE]


def test_a_share_that_cannot_become_better_has_no_ratio_and_is_no_data(folder):
    key = Key(TEST, "16", "cached", "hit_rate")
    folder.both(key, [0.0] * 8, [0.0] * 8)
    assert "cost is zero" in folder.read().gaps[key]


def test_a_count_that_is_no_number_on_one_side_is_no_data(folder):
    folder.both(FLOPS, [Count(5)], [None])
    assert "head failed" in folder.read().gaps[CASE]
    folder.both(FLOPS, [Count(5)], [math.nan])
    assert "head skipped it" in folder.read().gaps[CASE]


def test_a_series_on_one_side_only_is_a_gap_or_new(folder):
    renamed = ITL._replace(benchmark=TEST.replace("prompt_length", "prompt_size"))
    folder.put(BASE, ITL, EIGHT)
    folder.put(HEAD, renamed, EIGHT)
    evidence = folder.read()
    assert evidence.gaps == {CASE: "head has no such series"}
    assert evidence.new == {renamed.of_case: "base has no such series"}
    assert evidence.keys == ()
    assert any("asv rm benchmark=NAME" in note for note in evidence.notes)


def test_a_case_on_one_side_only_is_a_gap_or_new(folder):
    series, _ = series_of(ITL)
    for commit, cases in ((BASE, ("'16'", "'32'")), (HEAD, ("'32'", "'64'"))):
        folder.add(commit, series, [["'cached'"], list(cases)], EIGHT)
    evidence = folder.read()
    assert evidence.keys == (ITL._replace(case="32"),)
    assert list(evidence.gaps) == [(TEST, "16")]
    assert list(evidence.new) == [(TEST, "64")]


def test_an_edited_benchmark_is_not_comparable(folder):
    for key in (ITL, TTFT, SPEEDUP):
        folder.put(BASE, key, EIGHT)
        folder.put(HEAD, key, EIGHT, version="v2")
    evidence = folder.read()
    assert evidence.gaps == {CASE: "the benchmark's own source was edited between the two runs: not comparable"}
    assert evidence.keys == ()


def test_one_edited_series_leaves_the_others_comparable(folder):
    folder.both(TTFT, EIGHT, EIGHT)
    folder.put(BASE, ITL, EIGHT)
    folder.put(HEAD, ITL, EIGHT, version="v2")
    evidence = folder.read()
    assert list(evidence.gaps) == [ITL]
    assert evidence.keys == (TTFT,)


def test_an_edited_benchmark_that_both_sides_skip_is_skipped(folder):
    folder.put(BASE, ITL, [math.nan])
    folder.put(HEAD, ITL, [math.nan], version="v2")
    assert list(folder.read().skipped) == [CASE]


def test_counts_are_compared_without_samples(folder):
    folder.both(FLOPS, [Count(5)], [Count(6)], record=False)
    assert folder.read().counts == {FLOPS: Counts(base=5, head=6)}


def test_a_metric_that_is_not_declared_is_a_gap(folder):
    series = "bench_kv_cache.test_prompt_length.track_fast_per_slow_time"
    for commit in (BASE, HEAD):
        folder.add(commit, series, [["'16'"]], EIGHT)
    (why,) = folder.read().gaps.values()
    assert series in why
    assert f"asv rm benchmark={series}" in why


def test_series_of_somebody_else_are_told_and_not_judged(folder):
    folder.both(ITL, EIGHT, EIGHT)
    for commit in (BASE, HEAD):
        folder.add(commit, "bench_sort.TimeSort.time_it", [], [0.1])
        folder.add(commit, "bench_sort.track_ttft_s", [], [0.1])
    evidence = folder.read()
    assert evidence.keys == (ITL,)
    assert not evidence.gaps
    assert "none of this instrument's, and not judged: bench_sort.TimeSort.time_it, bench_sort.track_ttft_s" in (
        evidence.notes
    )


def test_what_the_suite_has_and_nobody_stored_is_told(folder):
    folder.both(ITL, EIGHT, EIGHT)
    suite = {series_of(key)[0]: {"name": "x"} for key in (ITL, TTFT)} | {"version": 2}
    (folder.root / "benchmarks.json").write_text(json.dumps(suite))
    assert folder.read().notes[-1] == f"in the suite, and stored for neither commit: {series_of(TTFT)[0]}"


# Samples.


def test_without_samples_it_says_how_to_record_them(folder):
    folder.both(ITL, EIGHT, EIGHT)
    folder.put(HEAD, ITL, EIGHT, record=False)
    told = folder.refusal()
    assert str(folder.path(HEAD)) in told
    assert f"{RECORD} {BASE[:8]} {HEAD[:8]}" in told
    assert f"asv run --record-samples {HEAD[:8]}^!" in told


def test_one_series_without_samples_is_a_gap(folder):
    folder.both(TTFT, EIGHT, EIGHT)
    folder.both(ITL, EIGHT, EIGHT)
    folder.put(BASE, ITL, EIGHT, record=False)
    evidence = folder.read()
    assert "base has no samples; measure it with --record-samples" in evidence.gaps[ITL]
    assert evidence.keys == (TTFT,)


def test_without_provenance_rounds_are_paired_in_their_order_and_the_rest_is_told(folder):
    folder.both(ITL, EIGHT, EIGHT[:5])
    evidence = folder.read()
    assert sides(evidence, ITL) == (EIGHT[:5], EIGHT[:5])
    assert evidence.num_launches == 5
    assert any("3 of base have no partner" in note for note in evidence.notes)
    assert any("paired in their order" in note for note in evidence.notes)


def test_a_case_of_which_every_round_was_disturbed_is_contaminated(folder):
    folder.both(ITL, EIGHT, [[]] * 8)
    folder.both(TTFT._replace(case="32"), EIGHT, EIGHT)
    evidence = folder.read()
    assert evidence.contaminated == {CASE: {1: "every round of head was disturbed"}}
    assert evidence.pairs[ITL] == ()
    assert not evidence.gaps


# Which round is which.

DISTURBED_COST = 0.5


@dataclasses.dataclass
class Turns:
    """What asv does with two commits in turns, base head, head base, ..., with the provenance that each pass leaves."""

    folder: Folder
    also: str = ""
    at: datetime.datetime = datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC)

    def take(self, base, head, *, keys=(ITL,), in_turns=True, **told):
        """One entry a round and side: a number, [] for a disturbed pass, None for a failure, "" for nothing at all."""
        turns = [(n, side) for n in range(len(base)) for side in ((0, 1) if n % 2 == 0 else (1, 0))]
        for n, side in turns if in_turns else sorted(turns, key=lambda turn: turn[1]):
            self.at += datetime.timedelta(seconds=20 if n % 2 == side else 31)
            value = (base, head)[side][n]
            if value != "":
                self._leave((BASE, HEAD)[side], f"{side} {self.at}", keys, value, told)
        for commit, rounds in ((BASE, base), (HEAD, head)):
            for key in keys:
                self.folder.put(commit, key, [as_stored(key, each) for each in rounds])

    def _leave(self, commit, name, keys, value, told):
        measured = [] if value is None else [result_of(keys, value or DISTURBED_COST, is_disturbed(value), told)]
        other = dataclasses.replace(result_of([FLOPS], 7, False, told), case="other")
        self._append(commit, name, [*measured, other])
        if self.also:
            self.at += datetime.timedelta(seconds=15)
            self._append(commit, f"{name} also", [dataclasses.replace(other, benchmark=self.also)])

    def _append(self, commit, name, results):
        path = self.folder.root / "provenance" / "laptop" / f"{commit[:12]}-{ENVIRONMENT[:100]}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        told = {"pass": name, "at": self.at.isoformat(timespec="seconds"), "name": "x"}
        with path.open("a") as file:
            file.writelines(f"{json.dumps(told | each.as_dict())}\n" for each in results)


def is_disturbed(value):
    return value == []


def as_stored(key, value):
    """What the bridge hands to asv: the cost of the best run, or of the median pair, to the last digit."""
    if not isinstance(value, float):
        return [] if is_disturbed(value) else None
    (measured,) = result_of([key], value, False, {}).measurements
    return measured.metric.cost(measured.value if measured.metric.compares_arms else measured.best)


def result_of(keys, cost, is_contaminated, told):
    """What the `measure` fixture leaves, its best run worth this cost: three runs, two of them worse."""
    measurements = []
    for key in keys:
        declared = metric(key.metric)
        if declared.is_exact:
            measurements.append(exact_count(declared, key.arm, cost))
        elif declared.compares_arms:
            value = declared.value_of(cost)
            measurements.append(summarise_values(declared, "cached over naive", [value, value * 2, value / 2]))
        else:
            values = [declared.value_of(cost * more) for more in (1.02, 1.0, 1.3)]
            measurements.append(summarise_values(declared, key.arm, values))
    flags = [Flag(kind="contaminated", arm="", what="somebody compiles")] if is_contaminated else []
    return BenchmarkResult(
        benchmark=keys[0].benchmark, case=keys[0].case, params={}, measurements=tuple(measurements),
        provenance=PROVENANCE | told, flags=tuple(flags),
    )  # fmt: skip


SLOWER = [2 * each for each in EIGHT]


def without(values, *rounds, by):
    """The values, with some rounds (from 1) replaced."""
    return [by if number in rounds else value for number, value in enumerate(values, 1)]


def test_rounds_are_known_from_provenance(folder):
    Turns(folder).take(EIGHT, SLOWER, keys=(ITL, TTFT, SPEEDUP))
    evidence = folder.read()
    assert sides(evidence, ITL) == sides(evidence, TTFT) == (EIGHT, SLOWER)
    assert sides(evidence, SPEEDUP)[1] == pytest.approx([1 / each for each in SLOWER])
    assert evidence.notes == ()
    assert evidence.provenance[0]["model"] == "tiny"


@pytest.mark.parametrize("on_base", [(), (1,), (2,), (4, 5), (8,), (1, 2, 3)])
@pytest.mark.parametrize("on_head", [(), (1,), (5,), (7, 8)])
def test_a_disturbed_round_takes_its_partner_with_it_and_moves_no_other(folder, on_base, on_head):
    Turns(folder).take(without(EIGHT, *on_base, by=[]), without(SLOWER, *on_head, by=[]))
    evidence = folder.read()
    base, head = sides(evidence, ITL)
    lost = {*on_base, *on_head}
    assert base == [value for number, value in enumerate(EIGHT, 1) if number not in lost]
    assert head == [2 * value for value in base]
    assert not evidence.gaps
    first = min(number for number in range(1, 9) if number not in on_base or number not in on_head)
    told = evidence.contaminated.get(CASE, {})
    assert list(told) == [number - first + 1 for number in sorted(lost) if number >= first]
    assert all("somebody compiles" in why for why in told.values())


def test_disturbed_rounds_are_named_by_side(folder):
    Turns(folder).take(without(EIGHT, 3, by=[]), without(SLOWER, 6, by=[]))
    evidence = folder.read()
    assert evidence.contaminated == {CASE: {3: "base: somebody compiles", 6: "head: somebody compiles"}}
    assert evidence.num_launches == 8


def test_all_rounds_disturbed_on_one_side_or_the_other_leave_nothing_to_compare(folder):
    Turns(folder).take(without(EIGHT, 1, 3, 5, 7, by=[]), without(SLOWER, 2, 4, 6, 8, by=[]))
    evidence = folder.read()
    assert evidence.pairs[ITL] == ()
    assert len(evidence.contaminated[CASE]) >= 7
    assert not evidence.gaps


@pytest.mark.parametrize("number", range(1, 9))
@pytest.mark.parametrize("side", ["base", "head"])
def test_a_case_that_fails_in_one_round_is_no_data(folder, number, side):
    """asv forgets the rounds before a failure, and would go on with the rest as if there had been none."""
    rounds = {"base": EIGHT, "head": SLOWER}
    rounds[side] = without(rounds[side], number, by=None)
    Turns(folder).take(rounds["base"], rounds["head"])
    evidence = folder.read()
    assert evidence.keys == ()
    assert side in evidence.gaps[CASE]


@pytest.mark.parametrize("number", range(2, 9))
def test_a_whole_pass_that_fails_is_no_data(folder, number):
    Turns(folder).take(EIGHT, without(SLOWER, number, by=""))
    evidence = folder.read()
    assert evidence.keys == ()
    assert "head" in evidence.gaps[CASE]


def test_an_earlier_run_moves_no_round(folder):
    """What asv has replaced still lies in the provenance."""
    turns = Turns(folder)
    turns.take([9.0 + n for n in range(8)], [[]] * 8)
    turns.take([8.0 + n for n in range(3)], [""] * 3)
    turns.take(EIGHT, without(SLOWER, 2, by=[]))
    evidence = folder.read()
    assert sides(evidence, ITL) == tuple(each[:1] + each[2:] for each in (EIGHT, SLOWER))
    assert evidence.contaminated == {CASE: {2: "head: somebody compiles"}}
    assert not evidence.gaps


def test_a_round_without_a_partner_moves_no_other(folder):
    Turns(folder).take(without(EIGHT, 2, 7, by=""), SLOWER)
    folder.put(BASE, ITL, without(EIGHT, 2, 7, by=[]))
    evidence = folder.read()
    base = [value for number, value in enumerate(EIGHT, 1) if number not in (2, 7)]
    assert sides(evidence, ITL) == (base, [2 * value for value in base])
    assert any("2 of head have no partner" in note for note in evidence.notes)


def test_passes_of_other_files_and_later_ones_of_other_cases_move_no_round(folder):
    turns, later = Turns(folder, also="benchmarks/bench_work.py::test_decode_step"), TTFT._replace(case="32")
    turns.take(EIGHT, SLOWER)
    turns.take(SLOWER, EIGHT, keys=(later,))
    evidence = folder.read()
    assert sides(evidence, ITL) == (EIGHT, SLOWER)
    assert sides(evidence, later) == (SLOWER, EIGHT)
    assert evidence.notes == ()


def test_a_disturbed_pass_gives_no_sample_though_it_measured_the_same(folder):
    base = [*EIGHT[:6], DISTURBED_COST, []]
    Turns(folder).take(base, SLOWER)
    evidence = folder.read()
    assert sides(evidence, ITL) == (base[:7], SLOWER[:7])
    assert list(evidence.contaminated[CASE]) == [8]


def test_commits_that_were_not_measured_in_turns_are_paired_in_order_and_it_is_said(folder):
    Turns(folder).take(EIGHT, SLOWER, in_turns=False)
    evidence = folder.read()
    assert sides(evidence, ITL) == (EIGHT, SLOWER)
    assert any("not measured in turns" in note for note in evidence.notes)


def test_provenance_of_other_samples_does_not_say_which_round_is_which(folder):
    Turns(folder).take(EIGHT, SLOWER)
    folder.put(HEAD, ITL, [0.5] * 8)
    evidence = folder.read()
    assert sides(evidence, ITL) == (EIGHT, [0.5] * 8)
    assert any("does not tell which rounds" in note for note in evidence.notes)


def test_another_device_under_the_same_name_is_refused(folder):
    turns = Turns(folder)
    turns.take(EIGHT, [[]] * 8, device_name="H100")
    turns.take([[]] * 8, SLOWER, device_name="H200")
    path = next((folder.root / "provenance" / "laptop").glob(f"{BASE[:12]}*"))
    path.write_text("".join(f"{line}\n" for line in path.read_text().splitlines() if "H100" in line))
    told = folder.refusal()
    assert "different device_name: H100 and H200" in told
    assert str(folder.path(BASE)) in told


def test_a_broken_line_of_provenance_is_named(folder):
    Turns(folder).take(EIGHT, SLOWER)
    path = next((folder.root / "provenance" / "laptop").glob(f"{HEAD[:12]}*"))
    whole = path.read_bytes()
    for broken in (whole[:-30], whole[:-30] + b"\xff", whole[:-30] + b"[" * 9):
        path.write_bytes(broken)
        assert folder.refusal().startswith(f"{path}, line 16")


def test_lines_of_an_older_instrument_are_passed_over(folder):
    Turns(folder).take(EIGHT, SLOWER)
    path = next((folder.root / "provenance" / "laptop").glob(f"{HEAD[:12]}*"))
    path.write_text('{"schema": 1, "pass": "old"}\n' + path.read_text())
    assert folder.read().notes == ()
    assert len(read_passes(folder.root, "laptop", HEAD, ENVIRONMENT)) == 8


def test_the_control_kernel_beside_each_side_is_handed_on(folder):
    turns = Turns(folder)
    turns.take(EIGHT, without(SLOWER, 3, by=[]), control_s=[0.3, 0.1, 0.2])
    ((_, every),) = folder.read().control.items()
    assert every == (Pairs(base=(0.2,), head=(0.2,)),) * 7


def test_what_the_sidecar_keeps_is_found_where_it_lies(folder, monkeypatch):
    for name, value in {"CONF_DIR": folder.root.parent, "COMMIT": HEAD, "ENV_NAME": ENVIRONMENT}.items():
        monkeypatch.setenv(f"ASV_{name}", str(value))
    (folder.root.parent / "asv.conf.json").write_text('{"results_dir": "results"}')
    result = result_of([ITL], 0.01, False, {})
    keep_beside("a pass", {TEST: "bench_kv_cache.test_prompt_length"}, [result])
    (one,) = read_passes(folder.root, machine_name(), HEAD, ENVIRONMENT)
    assert one.id == "a pass"
    assert one.could_have_given(ITL, 0.01)
    assert not one.could_have_given(TTFT, 0.01)


# What is concluded from it.

ONE_LOOK = Rules(looks_once=True)
JITTER = [1.0, 1.004, 0.997, 1.002, 0.995, 1.001, 1.003, 0.998]


def jittered(center, num_rounds=8, shift=0):
    return [center * JITTER[(place + shift) % 8] for place in range(num_rounds)]


def test_ten_times_slower_in_six_rounds_is_worse(folder):
    """asv's own test can never tell six rounds from six others."""
    folder.both(ITL, jittered(0.01, 6), jittered(0.1, 6, shift=3))
    judgement = judge(folder.read(), ONE_LOOK)
    assert judgement.verdict == "worse"
    assert judgement.exit_code == 1
    (row,) = judgement.rows
    assert row.change.value == pytest.approx(9, rel=0.02)


@pytest.mark.parametrize(
    ("on_head", "verdict", "change"), [(9.5, "worse", -0.05), (10, "same", 0), (10.5, "better", 0.05)]
)
def test_less_of_what_is_better_when_higher_is_worse(folder, on_head, verdict, change):
    costs = [
        [metric("speedup").cost(value) for value in jittered(at, shift=shift)] for at, shift in ((10, 0), (on_head, 3))
    ]
    folder.both(SPEEDUP, *costs)
    judgement = judge(folder.read(), ONE_LOOK)
    assert judgement.verdict == verdict
    (row,) = judgement.rows
    assert row.change.value == pytest.approx(change, abs=0.003)
    assert row.base == pytest.approx(10, rel=0.01)


def test_a_rate_that_falls_is_told_as_worse_and_fails_nothing(folder):
    rate = Key(TEST, "16", "cached", "decode_tokens_per_s")
    folder.both(rate, [1 / each for each in jittered(100)], [1 / each for each in jittered(40, shift=3)])
    folder.both(FLOPS, [Count(5)], [Count(5)])
    judgement = judge(folder.read(), ONE_LOOK)
    assert {row.key: row.verdict for row in judgement.rows} == {rate: "worse", FLOPS: "same"}
    assert judgement.exit_code == 0


def test_what_is_only_reported_fails_nothing_where_it_is_missing(folder):
    folder.put(BASE, Key(TEST, "16", "cached", "decode_tokens_per_s"), jittered(0.01))
    folder.both(FLOPS._replace(case="32"), [Count(5)], [Count(5)])
    evidence = folder.read()
    assert list(evidence.gaps) == [Key(TEST, "16", "cached", "decode_tokens_per_s")]
    assert judge(evidence, ONE_LOOK).exit_code == 0


def test_one_more_of_a_count_is_worse(folder):
    folder.both(FLOPS, [Count(5)], [Count(6)])
    assert judge(folder.read(), ONE_LOOK).exit_code == 1


@pytest.mark.parametrize(
    ("on_head", "how"),
    [
        ([math.nan] * 8, {}),
        ([None] * 8, {}),
        ([math.inf] * 8, {}),
        (jittered(0.01), {"version": "edited"}),
    ],
)
def test_what_cannot_be_compared_is_red_though_all_else_is_the_same(folder, on_head, how):
    folder.both(TTFT, jittered(0.05), jittered(0.05, shift=3))
    folder.put(BASE, ITL, jittered(0.01))
    folder.put(HEAD, ITL, on_head, **how)
    judgement = judge(folder.read(), ONE_LOOK)
    assert judgement.verdict == "no data"
    assert judgement.exit_code == 4


def test_nothing_in_common_is_no_data(folder):
    folder.put(BASE, ITL, [math.nan])
    folder.put(HEAD, ITL, [math.nan])
    assert judge(folder.read(), ONE_LOOK).exit_code == 4


def test_too_many_disturbed_rounds_are_contaminated_not_worse(folder):
    Turns(folder).take(without(jittered(0.01), 1, 2, 3, by=[]), without(jittered(0.1), 5, 6, by=[]))
    judgement = judge(folder.read(), ONE_LOOK)
    assert judgement.verdict == "contaminated"
    assert judgement.exit_code == 5


def test_a_load_beside_head_only_is_contaminated_not_worse(folder):
    """The control kernel is the same work on both sides."""
    turns = Turns(folder)
    turns.take(jittered(0.01), jittered(0.1, shift=3), control_s=[0.1])
    path = next((folder.root / "provenance" / "laptop").glob(f"{HEAD[:12]}*"))
    path.write_text(path.read_text().replace('"control_s": [0.1]', '"control_s": [0.15]'))
    evidence = folder.read()
    assert evidence.control[CASE] == (Pairs(base=(0.1,), head=(0.15,)),) * 8
    assert judge(evidence, ONE_LOOK).verdict == "contaminated"


@pytest.mark.parametrize(("on_head", "verdict"), [(0.01, "same"), (0.1, "worse")])
def test_a_first_run_tells_what_is_new_and_judges_the_rest(folder, on_head, verdict):
    folder.both(TTFT, jittered(0.01), jittered(on_head, shift=3))
    folder.put(HEAD, ITL, jittered(0.02))
    judgement = judge(folder.read(), ONE_LOOK)
    assert judgement.verdict == verdict
    assert [row.key for row in judgement.rows if row.verdict == "new"] == [ITL]


# What is refused, by name.


def test_a_commit_that_is_not_stored_is_an_error_that_says_how_to_measure_it(folder):
    folder.put(BASE, ITL, EIGHT)
    folder.put(OTHER, ITL, EIGHT)
    told = folder.refusal()
    assert HEAD in told
    assert f"asv run --record-samples {HEAD}^!" in told
    assert f"laptop: {OTHER[:8]}, {BASE[:8]}" in told


def test_a_first_run_without_any_results_says_so(folder):
    assert "asv run --record-samples" in folder.refusal()
    folder.root.mkdir()
    assert str(folder.root) in folder.refusal()


def test_the_beginning_of_several_commits_is_refused(folder):
    folder.both(ITL, EIGHT, EIGHT)
    folder.put("ba5f" * 10, ITL, EIGHT)
    told = folder.refusal("ba5", HEAD)
    assert "'ba5' is the beginning of several commits" in told
    assert "ba5eba5e" in told
    assert "ba5fba5f" in told


def test_a_commit_is_not_compared_with_itself(folder):
    folder.put(BASE, ITL, EIGHT)
    assert "are one commit" in folder.refusal(BASE, BASE)
    assert "are one commit" in folder.refusal(BASE, BASE[:7])


def test_results_of_two_machines_are_never_compared(folder):
    folder.put(BASE, ITL, EIGHT)
    folder.put(HEAD, ITL, EIGHT, machine="server")
    told = folder.refusal()
    assert f"{BASE} was measured on laptop and {HEAD} on server" in told
    assert "stored are, by machine: laptop" in folder.refusal(machine="laptop")


def test_one_of_several_machines_has_to_be_chosen(folder):
    folder.both(ITL, EIGHT, SLOWER)
    folder.both(ITL, SLOWER, EIGHT, machine="server")
    assert "laptop, server; choose one with --machine" in folder.refusal()
    assert sides(folder.read(machine="server"), ITL) == (SLOWER, EIGHT)
    assert sides(folder.read(machine="laptop"), ITL) == (EIGHT, SLOWER)
    told = folder.refusal(machine="phone")
    assert "'phone'" in told
    assert "laptop, server" in told


def test_a_machine_with_one_of_the_commits_does_not_ask_to_be_chosen(folder):
    folder.both(ITL, EIGHT, SLOWER)
    folder.put(BASE, ITL, EIGHT, machine="server")
    assert sides(folder.read(), ITL) == (EIGHT, SLOWER)


def test_a_file_of_another_machine_is_refused_by_name(folder):
    folder.both(ITL, EIGHT, EIGHT)
    for commit in (BASE, HEAD):
        folder.rewrite(commit, params=LAPTOP | {"machine": "server"})
    told = folder.refusal()
    assert str(folder.path(BASE)) in told
    assert "'server'" in told


@pytest.mark.parametrize(("name", "value"), [("cpu", "Another"), ("num_cpu", "4"), ("arch", "arm64")])
def test_a_machine_that_changed_under_its_name_is_refused(folder, name, value):
    folder.put(BASE, ITL, EIGHT)
    folder.put(HEAD, ITL, EIGHT, **{name: value})
    told = folder.refusal()
    assert f"{name} is" in told
    assert str(folder.path(BASE)) in told
    assert str(folder.path(HEAD)) in told


def test_environments_have_to_be_the_same(folder):
    folder.put(BASE, ITL, EIGHT)
    folder.put(HEAD, ITL, EIGHT, environment="virtualenv-py3.12")
    told = folder.refusal()
    assert str(folder.path(BASE)) in told
    assert str(folder.path(HEAD, "virtualenv-py3.12")) in told
    folder.put(HEAD, ITL, SLOWER)
    assert sides(folder.read(), ITL) == (EIGHT, SLOWER)
    folder.put(BASE, ITL, EIGHT, environment="virtualenv-py3.12")
    assert "several environments" in folder.refusal()


def test_a_long_name_of_an_environment_is_shortened_by_asv_and_found(folder):
    folder.both(ITL, EIGHT, SLOWER, environment="virtualenv-py3.11-" + "-".join(f"package{n}1.0" for n in range(20)))
    assert sides(folder.read(), ITL) == (EIGHT, SLOWER)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (lambda whole: whole[: len(whole) // 2], "cut off"),
        (lambda whole: whole[:-1], "cut off"),
        (lambda whole: "", "killed"),
        (lambda whole: "[" * 100_000, "nested too deeply"),
        (lambda whole: "[]", "no results file of asv"),
        (lambda whole: '{"benchmarks": [], "machine_info": {}}', "no results file of asv"),
        (lambda whole: json.dumps(json.loads(whole) | {"version": 1}), "asv update"),
        (lambda whole: json.dumps(json.loads(whole) | {"version": 3}), "format 3"),
        (lambda whole: json.dumps({k: v for k, v in json.loads(whole).items() if k != "version"}), "format None"),
        (lambda whole: json.dumps(json.loads(whole) | {"results": []}), "'results'"),
        (lambda whole: json.dumps(json.loads(whole) | {"commit_hash": None}), "'commit_hash'"),
        (lambda whole: json.dumps(json.loads(whole) | {"commit_hash": OTHER}), OTHER),
        (lambda whole: whole.replace("[[0.01,", '[["0.01",'), "no number"),
        (lambda whole: whole.replace("[[0.01,", "[[null,"), "no list of samples"),
        (lambda whole: whole.replace("[[0.01,", "[[0.01], [0.02,"), "1 parameter sets"),
    ],
)
def test_a_file_that_is_not_whole_or_not_asvs_is_named(folder, content, why):
    folder.both(ITL, EIGHT, EIGHT)
    path = folder.path(HEAD)
    whole, broken = path.read_text(), content(path.read_text())
    assert broken != whole
    path.write_text(broken)
    told = folder.refusal()
    assert str(path) in told
    assert why in told
    assert path.read_text() == broken, "nothing is repaired"


@pytest.mark.parametrize("result", [{"a": 1}, "fast", [1, 2], True, 10**400])
def test_a_result_that_is_no_number_is_named_with_its_series(folder, result):
    folder.both(FLOPS, [Count(5)], [Count(5)])
    whole = json.loads(folder.path(HEAD).read_text())
    whole["results"][series_of(FLOPS)[0]][0] = [result]
    folder.path(HEAD).write_text(json.dumps(whole))
    assert f"{folder.path(HEAD)}: series {series_of(FLOPS)[0]}" in folder.refusal()


def test_an_infinite_number_in_asvs_own_statistics_is_no_fault(folder):
    folder.both(ITL, EIGHT[:1], EIGHT[:1])
    assert "Infinity" in folder.path(BASE).read_text()
    assert folder.read().keys == (ITL,)


def test_a_series_with_other_parameters_than_the_bridges_is_refused(folder):
    for commit in (BASE, HEAD):
        folder.add(commit, series_of(ITL)[0], [["'a'"], ["'b'"], ["'c'"]], EIGHT)
    told = folder.refusal()
    assert str(folder.path(BASE)) in told
    assert "3 parameters" in told


def test_what_a_killed_run_leaves_of_another_commit_does_not_matter(folder):
    Turns(folder).take(EIGHT, SLOWER)
    folder.put(OTHER, ITL, EIGHT)
    folder.path(OTHER).write_text(folder.path(OTHER).read_text()[:100])
    (folder.root / "provenance" / "laptop" / f"{HEAD[:12]}-{ENVIRONMENT}.tmp").write_text('{"half": ')
    (folder.root / "laptop" / "machine.json").write_text("")
    assert sides(folder.read(), ITL) == (EIGHT, SLOWER)


def test_a_file_that_asv_wrote_is_read_to_the_last_digit(folder):
    folder.put(BASE, ITL, [0.1 + 1e-16, 1 / 3, math.pi])
    stored = read_file(folder.path(BASE)).series[series_of(ITL)[0]]
    assert stored.samples == ((0.1 + 1e-16, 1 / 3, math.pi),)
    assert stored.version == "v1"
