"""A calibration: launches in mixed order, numbers of known noise, what is quoted and refused, and a distrusted file."""

import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from sample_launches import ITL, noisy, result
from sample_results import BENCHMARK

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.gate.builds import Build
from benchmarks.harness.gate.calibrating import calibrate
from benchmarks.harness.gate.calibration import Proportion, check_threshold, machine_key
from benchmarks.harness.gate.calibration_file import (
    calibration_file,
    load_calibration,
    newest_here,
    save_calibration,
)
from benchmarks.harness.gate.calibration_text import render
from benchmarks.harness.gate.comparison import Plan, Sampling
from benchmarks.harness.gate.evidence import Key, Launch, Side
from benchmarks.harness.gate.gathering import Effort, gather, schedule
from benchmarks.harness.gate.lockstep import Led
from benchmarks.harness.gate.progress import Progress
from benchmarks.harness.gate.revisions import Revision
from benchmarks.harness.gate.rules import Rules

ROOT = Path("/a/checkout")
TTFT = ("cached", "ttft_s")
SPEEDUP = ("cached over naive", "speedup")
RULES = Rules(alpha=0.01, margin=0.02, threshold=0.0, confidence=0.95, max_launches=12)
BUILD = Build(revision=Revision(name="HEAD", commit="c0ffee" * 6 + "c0ff"), folder=Path("/b"), source_sha256="0" * 64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Machine(Plan):
    """A plan whose launches are made up: `sd` by metric is what launches scatter by, `plants` what a plant becomes.

    It remembers what was asked for in `asked`, and lets `spoil(number, launch)` have its way.
    """

    base: Build = BUILD
    head: Build = BUILD
    root: Path = ROOT
    rules: Rules = RULES
    sd: dict = dataclasses.field(default_factory=lambda: {ITL: 0.008, TTFT: 0.02})
    plants: float = 1.0
    spoil: object = lambda number, launch: launch
    asked: list = dataclasses.field(default_factory=list)

    def launch(self, number, targets, say):
        self.asked.append((number, targets, self.head_options))
        say("somewhere")
        percents = [float(each.partition("=")[2]) for each in self.head_options if each.startswith("--planted")]
        cases = [self._case(case, number, 1 + self.plants * sum(percents) / 100) for case in ("16", "32")]
        sides = [Side(results=tuple(case[place] for case in cases)) for place in (0, 1)]
        return Led(self.spoil(number, Launch(base=sides[0], head=sides[1])), {})

    def _case(self, case, number, slower):
        both = {
            name: noisy(
                1.0 if name == SPEEDUP else slower,
                launch_sd=sd,
                pair_sd=0.002,
                num_pairs=3,
                seed=f"{number} {case} {name}",
            )
            for name, sd in self.sd.items()
        }
        others = {("cached", "itl_p90_s"): ([0.02], [0.02]), ("cached", "num_operators"): (592, 592)}
        return [result({name: each[place] for name, each in (both | others).items()}, case=case) for place in (0, 1)]


SMALL = Effort(num_launches=36, num_planted=6, levels=(0.03, 0.1), num_draws=100)


@pytest.fixture(scope="module")
def calibration():
    return calibrate(Machine(), SMALL)


# Launches.


def test_each_level_is_spread_over_the_whole_time():
    counts = {0.0: 48, 0.01: 8, 0.1: 8}
    order = schedule(counts, 1)
    assert {level: order.count(level) for level in counts} == counts
    for start in range(0, 64, 16):
        assert all(1 <= order[start : start + 16].count(level) <= 3 for level in (0.01, 0.1))
    assert order == schedule(counts, 1) != schedule(counts, 2)


def test_the_planted_launches_are_slowed_on_head_and_the_others_are_not():
    steps, now = [], []
    plan = Machine(selection=("-k", "growth"), options=("--model=tiny",), head_options=("-s",))
    effort = Effort(num_launches=3, num_planted=2, levels=(0.01, 0.025))
    found = gather(plan, effort, Progress(now.append, steps.append))
    assert [number for number, _, _ in plan.asked] == list(range(7))
    assert sorted(options for _, _, options in plan.asked) == [
        ("-s",), ("-s",), ("-s",),
        ("-s", "--planted-slowdown=1"), ("-s", "--planted-slowdown=1"),
        ("-s", "--planted-slowdown=2.5"), ("-s", "--planted-slowdown=2.5"),
    ]  # fmt: skip
    assert {level: len(launches) for level, launches in found.launches.items()} == {0.0: 3, 0.01: 2, 0.025: 2}
    assert len(steps) == len(now) == 7
    assert steps[0].startswith("launch 1 of 7")
    assert "2.5 % planted" in "".join(steps)
    assert "about 0 min left" in steps[-1]


def test_the_first_launch_measures_everything_and_the_others_what_has_times_that_gate():
    def no_times_in_32(number, launch):
        only_counts = [
            dataclasses.replace(r, measurements=r.measurements[-1:]) if r.case == "32" else r
            for r in launch.base.results
        ]
        return Launch(base=Side(results=tuple(only_counts)), head=Side(results=tuple(only_counts)))

    plan = Machine(selection=("-k", "growth"), spoil=no_times_in_32)
    gather(plan, Effort(num_launches=2, num_planted=1, levels=()))
    assert [targets for _, targets, _ in plan.asked] == [
        ["-k", "growth", f"{ROOT}/benchmarks"],
        [f"{ROOT}/{BENCHMARK}[16]"],
    ]


DIED = Side(failed={("", ""): "a worker was ended by SIGKILL\nand so on"})


def spoilt(numbers, how):
    return lambda number, launch: how(launch) if number in numbers else launch


def test_a_launch_in_which_a_worker_died_is_left_out_and_told():
    plan = Machine(spoil=spoilt({5}, lambda launch: dataclasses.replace(launch, head=DIED)))
    found = gather(plan, Effort(num_launches=8, num_planted=1, levels=()))
    assert len(found.launches[0.0]) == 7
    (note,) = found.notes
    assert note == "launch 6 left nothing: head failed: a worker was ended by SIGKILL and so on"
    assert len(found.keys) == 4
    assert not found.left_out


def test_when_the_first_launch_leaves_nothing_no_other_is_tried():
    plan = Machine(spoil=spoilt({0}, lambda launch: dataclasses.replace(launch, base=DIED)))
    with pytest.raises(InstrumentError, match="nothing was measured that a calibration could use: base failed"):
        gather(plan, SMALL)
    assert len(plan.asked) == 1


def test_a_case_or_a_quantity_that_one_launch_lacks_is_left_out_and_named():
    def fails(launch):
        head = Side(results=launch.head.results[:1], failed={(BENCHMARK, "32"): "E assert\n  False"})
        return dataclasses.replace(launch, head=head)

    def undefined(launch):
        first, second = launch.head.results
        odd = dataclasses.replace(first.measurements[0], value=None, samples=(), low=None, high=None)
        return dataclasses.replace(
            launch, head=Side(results=(dataclasses.replace(first, measurements=(odd, *first.measurements[1:])), second))
        )

    plan = Machine(
        spoil=lambda number, launch: fails(launch) if number == 3 else undefined(launch) if number == 5 else launch
    )
    found = gather(plan, Effort(num_launches=12, num_planted=1, levels=()))
    assert found.keys == (Key(BENCHMARK, "16", *TTFT),)
    assert found.left_out == {
        f"{BENCHMARK}[32]": "head failed in launch 1: E assert\n  False",
        f"{BENCHMARK}[16] cached itl_p50_s": "it is undefined on head in launch 1",
    }


def test_two_builds_are_no_calibration():
    with pytest.raises(InstrumentError, match="compares a build with itself, not HEAD"):
        gather(Machine(head=dataclasses.replace(BUILD, source_sha256="1" * 64)), SMALL)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ({"num_launches": 0}, "num_launches is 1 or more, not 0"),
        ({"num_draws": 0}, "num_draws"),
        ({"levels": (0.0,)}, "a share above 0, such as 0.03, not 0.0"),
        ({"levels": (math.nan,)}, "not nan"),
        ({"levels": (0.03, 0.03)}, "planted twice"),
    ],
)
def test_an_effort_that_means_nothing_is_refused(what, why):
    with pytest.raises(InstrumentError, match=why):
        Effort(**what)


def test_too_few_launches_are_refused_before_any_runs():
    plan = Machine()
    with pytest.raises(InstrumentError, match="11 launches make no comparison of up to 12"):
        calibrate(plan, dataclasses.replace(SMALL, num_launches=11))
    assert not plan.asked


def test_too_few_launches_that_are_left_say_why_the_others_are_not():
    plan = Machine(spoil=spoilt({5}, lambda launch: dataclasses.replace(launch, head=DIED)))
    with pytest.raises(InstrumentError, match=r"11 launches make no comparison.*launch 6 left nothing: .*SIGKILL"):
        calibrate(plan, Effort(num_launches=12, num_planted=1, levels=()))


# Numbers.


def test_of_known_noise_the_numbers_are_known(calibration):
    ttft, itl = calibration.metrics
    assert [each.key for each in (itl, ttft)] == [Key("", "", "", "itl_p50_s"), Key("", "", "", "ttft_s")]
    assert calibration.num_launches == 36
    assert calibration.whole.false_alarms.num == 0
    assert calibration.whole.false_alarms.n >= 3
    assert calibration.whole.drawn_false_alarms.value <= 0.02
    assert sum(calibration.endings.values()) == 100
    assert 0.01 < itl.effect80 < itl.effect95 < 0.024  # the margin, within which a slowdown is the same
    assert 0.025 < ttft.effect80 < ttft.effect95 < 0.06
    assert 4 <= itl.mean_launches == ttft.mean_launches <= calibration.whole.mean_launches <= 12
    assert calibration.notes == ()


def test_a_metric_is_as_good_as_its_worst_quantity_and_has_the_alarms_of_all(calibration):
    for score in calibration.metrics:
        each = [quantity for quantity in calibration.quantities if quantity.key.metric == score.key.metric]
        assert len(each) == 2
        assert (
            score.effect95
            == max(quantity.effect95 for quantity in each)
            == calibration.worst(score.key.metric).effect95
        )
        assert score.effect80 == max(quantity.effect80 for quantity in each)
        for number, level in enumerate(score.levels):
            assert level.found.num == min(quantity.levels[number].found.num for quantity in each)
        assert score.drawn_false_alarms.num >= max(quantity.drawn_false_alarms.num for quantity in each)


def test_false_alarms_are_those_of_anything():
    def slower(number, launch):
        """Case 16 in launches 0 to 9, case 32 in 2 to 11."""
        slow = [1.1 if number < 10 else 1.0, 1.1 if number >= 2 else 1.0]
        return Launch(base=launch.base, head=Side(results=tuple(map(times, launch.head.results, slow))))

    rules = dataclasses.replace(RULES, max_launches=4)
    found = calibrate(
        Machine(rules=rules, sd={ITL: 1e-4}, spoil=slower), Effort(num_launches=12, levels=(), num_draws=400)
    )
    one, other = found.quantities
    assert [str(each.false_alarms).partition(" (")[0] for each in (one, other)] == ["2 of 3"] * 2
    for whole in (found.metrics[0], found.whole):
        assert whole.false_alarms == Proportion(num=3, n=3)
        assert whole.drawn_false_alarms.num > max(one.drawn_false_alarms.num, other.drawn_false_alarms.num) + 50
    assert found.endings["worse"] == found.whole.drawn_false_alarms.num


def times(result, factor):
    """The first metric's samples, multiplied."""
    first, *others = result.measurements
    slow = dataclasses.replace(first, samples=tuple(factor * sample for sample in first.samples))
    return dataclasses.replace(result, measurements=(slow, *others))


def test_a_planted_slowdown_is_measured_as_what_it_is(calibration):
    for score in (*calibration.metrics, *calibration.quantities, calibration.whole):
        assert [level.planted for level in score.levels] == [0.03, 0.1]
        for level in score.levels:
            assert level.measured.num_samples == 6
            assert level.measured.value == pytest.approx(level.planted, abs=0.02)
    _, itl = calibration.metrics
    assert itl.levels[0].measured.interval.low < 0.03 < itl.levels[0].measured.interval.high
    assert itl.levels[1].found == Proportion(num=100, n=100)
    assert [level.found.num for level in calibration.whole.levels] == [100, 100]
    assert itl.levels[1].found_for_real.n == 0  # six launches make no comparison of up to twelve


def test_enough_planted_launches_are_comparisons_of_their_own():
    effort = Effort(num_launches=12, num_planted=12, levels=(0.1,), num_draws=50)
    found = calibrate(Machine(rules=dataclasses.replace(RULES, max_launches=6)), effort)
    assert found.whole.levels[0].found_for_real.num == found.whole.levels[0].found_for_real.n >= 2


@pytest.mark.parametrize(("plants", "told"), [(0.5, "(4.9|5|5.1)"), (1.6, "1[56]")])
def test_a_plant_that_is_measured_as_something_else_is_told(plants, told):
    found = calibrate(Machine(plants=plants, sd={ITL: 0.004}), dataclasses.replace(SMALL, num_draws=10))
    assert len(found.notes) == 2
    assert re.search(f"10 % planted were measured as {told} % .* in ITL p50", found.notes[1])
    assert found.notes[1].endswith("in ITL p50: the plant or the instrument is off")
    assert found.metrics[0].levels[0].found.num == 10


def test_a_twentieth_of_a_plant_may_be_missing():
    found = calibrate(Machine(plants=0.95, sd={ITL: 0.0001}), dataclasses.replace(SMALL, num_draws=10))
    assert found.metrics[0].levels[1].measured.interval.high < 0.0995
    assert found.notes == ()


def test_a_ratio_of_two_arms_is_not_meant_to_be_slower():
    found = calibrate(Machine(sd={ITL: 0.004, SPEEDUP: 0.004}), dataclasses.replace(SMALL, num_draws=50))
    assert found.notes == ()
    speedup = next(score for score in found.metrics if score.key.metric == "speedup")
    assert abs(speedup.levels[1].measured.value) < 0.01
    assert speedup.levels[1].found.num == 0
    assert found.whole.levels[1].measured.value == pytest.approx(0.1, abs=0.01)


def test_a_slowdown_of_everything_is_not_one_of_the_ratio():
    found = calibrate(Machine(sd={ITL: 0.04, SPEEDUP: 0.001}), dataclasses.replace(SMALL, levels=(), num_draws=100))
    assert found.whole.effect95 > 0.05
    assert next(score for score in found.metrics if score.key.metric == "speedup").effect95 < 0.03


def test_what_was_lost_on_the_way_is_told():
    plan = Machine(spoil=spoilt({5}, lambda launch: dataclasses.replace(launch, base=DIED)))
    found = calibrate(plan, dataclasses.replace(SMALL, levels=(), num_draws=10))
    assert found.num_launches == 35
    assert found.notes == ("launch 6 left nothing: base failed: a worker was ended by SIGKILL and so on",)


def test_a_loud_quantity_has_no_effect_that_is_found():
    found = calibrate(Machine(sd={ITL: 0.5}), dataclasses.replace(SMALL, levels=(), num_draws=50))
    assert (found.metrics[0].effect80, found.metrics[0].effect95) == (None, None)
    assert "95 of 100 slowdowns of more than 20 % in ITL p50 are found" in found.line()
    with pytest.raises(InstrumentError, match=r"only from more than 20 % on in ITL p50") as error:
        check_threshold(0.5, found)
    assert "take a threshold" not in str(error.value)


def test_disturbed_launches_are_set_aside_and_told():
    def disturbed(launch):
        from benchmarks.harness.results import Flag

        flag = Flag(kind="contaminated", arm="", what="somebody")
        first, second = launch.head.results
        return dataclasses.replace(launch, head=Side(results=(dataclasses.replace(first, flags=(flag,)), second)))

    found = calibrate(Machine(spoil=spoilt({3, 9, 20}, disturbed)), dataclasses.replace(SMALL, levels=(), num_draws=50))
    assert found.num_launches == 36
    assert found.notes == (f"{BENCHMARK}[16]: 3 of 36 launches were disturbed and set aside",)


def test_a_threshold_of_the_rules_hides_nothing():
    one, other = (
        calibrate(Machine(rules=dataclasses.replace(RULES, threshold=t)), dataclasses.replace(SMALL, num_draws=50))
        for t in (0.0, 0.1)
    )
    assert one.metrics == other.metrics
    assert other.rules.threshold == 0


# What is quoted, and what is refused.


@pytest.fixture
def made(calibration):
    """The same with round numbers."""
    effects = {"itl_p50_s": (0.021, 0.029), "ttft_s": (0.03, 0.0361)}

    def rounded(score):
        effect80, effect95 = effects[score.key.metric]
        better = 0.01 if score.key.case == "16" else 0.0
        return dataclasses.replace(score, effect80=effect80 - better, effect95=effect95 - better)

    whole = dataclasses.replace(
        calibration.whole, false_alarms=Proportion(num=0, n=48), drawn_false_alarms=Proportion(num=2, n=500)
    )
    return dataclasses.replace(
        calibration, whole=whole, metrics=tuple(map(rounded, calibration.metrics)),
        quantities=tuple(map(rounded, calibration.quantities)),
    )  # fmt: skip


ALARMS = "on this machine: 0 of 48 comparisons of equal builds were false alarms (0 to 7 %; 0.4 % of 500 drawn ones)"


def test_one_sentence_says_what_the_machine_can_see(made):
    keys = [Key(BENCHMARK, "16", *TTFT), Key(BENCHMARK, "16", "cached", "itl_p99_s")]
    assert made.line("itl_p50_s") == f"{ALARMS}, 95 of 100 slowdowns of 2.9 % in ITL p50 are found"
    assert made.line() == f"{ALARMS}, 95 of 100 slowdowns of 3.6 % in TTFT, of 2.9 % in ITL p50 are found"
    assert made.line(keys) == f"{ALARMS}, 95 of 100 slowdowns of 2.6 % in TTFT are found"
    assert made.line([*keys, Key(BENCHMARK, "32", *TTFT)]).endswith("95 of 100 slowdowns of 3.6 % in TTFT are found")
    assert made.line("e2e_s") == f"{ALARMS}, these quantities were not calibrated"


def test_a_table_for_people(made):
    text = render(dataclasses.replace(made, notes=("a note",)))
    for part in (
        f"calibration of {made.key}",
        "commit c0ffeec0ffee against itself, 36 launches",
        "false alarms: 0 of 48 (0 to 7 %) comparisons that share no launch, 0.4 % of 500 drawn from the same launches",
        "! a note",
    ):
        assert part in text
    (itl,) = [line for line in text.splitlines() if line.startswith("ITL p50") and "growth[32] cached" in line]
    assert itl.split()[:3] == ["ITL", "p50", "2"]
    assert "2.1 %" in itl
    assert "2.9 %" in itl
    assert sum(line.startswith(("3 %", "10 %")) for line in text.splitlines()) == 6
    assert max(map(len, text.splitlines())) < 140


def test_a_threshold_tighter_than_the_machine_can_hold_is_refused(made):
    with pytest.raises(InstrumentError) as error:
        check_threshold(0.02, made)
    assert str(error.value) == (
        "a threshold of 2 % is tighter than this machine can hold. A slowdown is found 95 times in 100 only from 3.6 % "
        "on in TTFT (growth[32] cached), from 2.9 % on in ITL p50 (growth[32] cached). Take more launches than 12, a "
        "larger budget than 60 s a case, or a quieter machine, and calibrate again; or take a threshold of at least "
        "3.7 %"
    )
    with pytest.raises(InstrumentError, match=r"threshold of 3 % is tighter .* only from 3.6 % on in TTFT"):
        check_threshold(0.03, made)
    with pytest.raises(InstrumentError, match=r"or a quieter machine, and a smaller margin than 2 %, within half"):
        check_threshold(0.005, made)


def test_a_threshold_that_the_machine_can_hold_is_not_refused(made):
    for threshold in (0.0, 0.0361, 0.037, 0.5):
        check_threshold(threshold, made)


def test_a_comparison_that_differs_from_the_calibrated_ones_is_told(made):
    assert made.unlike(dataclasses.replace(RULES, threshold=0.05), Sampling()) == ""
    assert (
        made.unlike(dataclasses.replace(RULES, max_launches=20), Sampling(budget_s=10))
        == "max_launches 12 (here 20), budget_s 60.0 (here 10)"
    )


def test_more_of_a_proportion_than_there_is_is_refused():
    with pytest.raises(InstrumentError, match="3 of 2 is no proportion"):
        Proportion(num=3, n=2)


# The file.


def heard(function, *arguments):
    said = []
    found = function(*arguments, said.append)
    return found, "; ".join(said)


@pytest.fixture
def stored(made, tmp_path):
    """A file with the calibration and one of another machine."""
    path = calibration_file(tmp_path)
    save_calibration(path, dataclasses.replace(made, machine={**made.machine, "cpu": "Another"}))
    save_calibration(path, made)
    return path


def test_what_was_kept_comes_back_as_it_was(made, stored):
    assert stored == stored.parents[1] / ".benchmarks" / "calibration.json"
    assert heard(load_calibration, stored, made.key) == (made, "")
    assert made.key == machine_key(model="tiny", dtype="float32", device="cpu")
    assert list(stored.parent.iterdir()) == [stored]


def test_only_on_a_gpu_it_is_part_of_the_machine(made):
    def key(device, gpu):
        return dataclasses.replace(made, device=device, machine={**made.machine, "gpu": gpu}).key

    assert key("cuda:0", "an A100") != key("cuda:0", "an H100")
    assert key("cpu", "an A100") == key("cpu", "an H100")


def test_other_machines_and_models_have_their_own(made, stored):
    other, _ = heard(load_calibration, stored, made.key.replace(made.machine["cpu"], "Another"))
    assert other.machine["cpu"] == "Another"
    for changes in ({"model": "small"}, {"dtype": "bfloat16"}, {"device": "cuda:0"}):
        key = machine_key(**{"model": "tiny", "dtype": "float32", "device": "cpu", **changes})
        assert heard(load_calibration, stored, key) == (None, "")
    again = dataclasses.replace(made, taken_s=1.0)
    save_calibration(stored, again)
    assert load_calibration(stored, made.key) == again
    assert load_calibration(stored, other.key) == other


def test_the_newest_of_this_machine_is_found_without_knowing_the_model(made, stored):
    newer = dataclasses.replace(made, model="small", at="2999-01-01T00:00:00+00:00")
    save_calibration(stored, newer)
    assert newest_here(stored) == newer
    assert newest_here(stored, model="tiny") == newest_here(stored, model="tiny", device="cpu") == made
    assert newest_here(stored, model="large") is newest_here(stored, device="cuda") is None


def test_without_a_file_there_is_nothing_to_say(tmp_path):
    assert heard(load_calibration, tmp_path / "no.json", "key") == (None, "")
    assert newest_here(tmp_path / "no.json") is None


def change(stored, made, edit):
    """Edit the JSON of the calibration."""
    whole = json.loads(stored.read_text())
    edit(whole["calibrations"][made.key])
    stored.write_text(json.dumps(whole))


def test_another_instrument_version_is_not_used_and_said_so(made, stored):
    change(stored, made, lambda told: told.update(instrument_version="1", rules="of another kind"))
    found, said = heard(load_calibration, stored, made.key)
    assert found is None
    assert f"the calibration of {made.at} was made with instrument version 1, this is" in said
    assert "calibrate again" in said


EDITS = {
    "lacks a field": lambda told: told.pop("rules"),
    "a rule that means nothing": lambda told: told["rules"].update(alpha=2),
    "a rule of another kind": lambda told: told["rules"].update(alpha="0.01"),
    "an unknown rule": lambda told: told["rules"].update(beta=1),
    "a text for a number": lambda told: told["metrics"][0].update(effect95="3 %"),
    "true for a number": lambda told: told["metrics"][0].update(mean_launches=True),
    "NaN": lambda told: told["metrics"][0].update(effect95=math.nan),
    "infinite": lambda told: told["metrics"][0].update(effect95=1e999),
    "a number for a text": lambda told: told.update(commit=1),
    "no list": lambda told: told.update(metrics=None),
    "more than all": lambda told: told["whole"]["false_alarms"].update(num=99),
    "no count": lambda told: told["whole"]["false_alarms"].update(num=0.5),
    "below zero": lambda told: told.update(num_launches=-1),
    "an unknown metric": lambda told: told.update(json.loads(json.dumps(told).replace("ttft_s", "latency"))),
    "beyond all bounds": lambda told: told["metrics"][0].update(effect95=10**400),
    "a short key": lambda told: told["quantities"][0]["key"].pop(),
    "no such verdict": lambda told: told["endings"].update(fine=1),
    "metrics without quantities": lambda told: told.update(quantities=[]),
    "a level too few": lambda told: told["metrics"][0]["levels"].pop(),
    "of another machine": lambda told: told["machine"].update(cpu="Another"),
    "a machine without a name": lambda told: told.update(machine={}),
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_a_damaged_calibration_is_told_and_takes_no_other_along(made, stored, edit):
    change(stored, made, edit)
    found, said = heard(load_calibration, stored, made.key)
    assert found is None
    assert str(stored) in said
    assert "calibrate again" in said
    if "which is no number" not in said:
        other, said = heard(load_calibration, stored, made.key.replace(made.machine["cpu"], "Another"))
        assert (other.machine["cpu"], said) == ("Another", "")
    save_calibration(stored, made)
    assert load_calibration(stored, made.key) == made


FILES = {
    "empty": b"",
    "a number beyond all": b'{"schema": 1, "calibrations": {"another": {"effect95": 1e999}}}',
    "no number": b'{"schema": 1, "calibrations": {"another": {"effect95": NaN}}}',
    "cut off": None,
    "no JSON": b"hello",
    "no text": b"\xff\xfe\x00",
    "a list": b"[]",
    "a number": b"1",
    "another tool's": b'{"machines": {}}',
    "an older one": b'{"schema": 0, "calibrations": {}}',
    "a newer one": b'{"schema": 2, "calibrations": {}}',
    "no calibrations": b'{"schema": 1, "calibrations": 7}',
    "nested too deeply": b"[" * 100_000,
}


@pytest.mark.parametrize("content", FILES.values(), ids=FILES)
def test_a_file_of_something_else_is_told_and_moved_aside_before_the_next_is_kept(made, stored, content):
    content = stored.read_bytes()[:1000] if content is None else content
    stored.write_bytes(content)
    found, said = heard(load_calibration, stored, made.key)
    assert found is None
    assert said.startswith(f"{stored} holds no calibrations that can be read")
    assert stored.read_bytes() == content
    for number in ("", "2"):
        stored.write_bytes(content)
        _, said = heard(save_calibration, stored, made)
        assert f"it is now calibration.json.corrupt{number}" in said
        assert stored.with_name(f"calibration.json.corrupt{number}").read_bytes() == content
        assert load_calibration(stored, made.key) == made


def test_a_folder_in_its_place_is_told(made, tmp_path):
    (tmp_path / "calibration.json").mkdir()
    found, said = heard(load_calibration, tmp_path / "calibration.json", made.key)
    assert found is None
    assert "holds no calibrations that can be read" in said
    _, said = heard(save_calibration, tmp_path / "calibration.json", made)
    assert said.startswith("the calibration could not be kept: ")


def test_a_full_disk_is_told_and_leaves_the_old_one(made, stored, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    before = stored.read_bytes()
    _, said = heard(save_calibration, stored, dataclasses.replace(made, taken_s=1.0))
    assert "could not be kept: [Errno 28]" in said
    assert stored.read_bytes() == before
    assert list(stored.parent.iterdir()) == [stored]


KILLED = """
import dataclasses, json, os, signal, sys
from pathlib import Path
from benchmarks.harness.gate.calibration_file import load_calibration, save_calibration
path, key, where = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
found = load_calibration(path, key)
die = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
if where == "in the middle":
    whole = json.dumps
    def dump(whole, file, **how):
        file.write(json.dumps(whole)[:500])
        file.flush()
        die()
    json.dump = dump
else:
    os.replace = die
save_calibration(path, dataclasses.replace(found, taken_s=1.0))
"""


@pytest.mark.parametrize("where", ["in the middle", "at the end"])
def test_killed_while_writing_the_old_one_is_whole_and_the_next_is_kept(made, stored, where):
    before = stored.read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", KILLED, stored, made.key, where], cwd=Path(__file__).parents[1], check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert stored.read_bytes() == before
    again = dataclasses.replace(made, taken_s=2.0)
    save_calibration(stored, again)
    assert load_calibration(stored, made.key) == again
