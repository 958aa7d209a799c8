"""Who looked at the machine, when, and what came of it: on a scripted machine, GPU, control and clock."""

import dataclasses
import json

import pytest
from scripted_gpus import ScriptedGpu

from benchmarks.harness import band
from benchmarks.harness.control import Control
from benchmarks.harness.gpu.driver import NoGpu
from benchmarks.harness.gpu.readings import ForeignProcess, GpuState
from benchmarks.harness.machine import MachineState
from benchmarks.harness.overhead import Stopwatch
from benchmarks.harness.timing import RunTiming, Stamp
from benchmarks.harness.watch import Equipment, Watch

KEY = "a machine"
RUN = RunTiming(sent_ns=0, stamps=(Stamp(10_000_000, 1), Stamp(20_000_000, 1)))


class ScriptedMachine:
    """Time passes by what the control takes; others use as much CPU as they are told to."""

    def __init__(self, control_ms=2.0, others=0.0):
        self.now_s, self.others_s = 0.0, 0.0
        self.control_ms, self.others = control_ms, others

    def now_ns(self):
        return round(self.now_s * 1e9)

    def pass_time(self, seconds):
        self.now_s += seconds
        self.others_s += seconds * self.others

    def look(self, relatives):
        self.relatives = relatives
        return MachineState(at_s=self.now_s, num_cpus=2, busy_s=self.others_s, own_s=0.0, steal_s=0.0)


def watch_on(machine, folder, gpu=None, stopwatch=None, **options):
    equipment = Equipment(
        control=Control(machine, lambda: machine.pass_time(machine.control_ms / 1e3), sleep=machine.pass_time),
        stopwatch=stopwatch or Stopwatch(resolution_ns=40, stamp_ns=300.0),
        gpu=gpu or NoGpu(),
        key=KEY,
    )
    return Watch(lambda: equipment, folder / "control.json", machine.look, **options)


def one_pass(machine, folder, num_turns=8, runs=None, **options):
    """A pass of one case: what was seen of the case, and of the pass."""
    watch = watch_on(machine, folder, **options)
    watch.begin()
    for _ in range(num_turns):
        watch.turn()
        machine.pass_time(0.5)
    case = watch.end({"only": [RUN]} if runs is None else runs)
    return case, watch.close_pass()


def kinds(seen):
    return [flag.kind for flag in seen.flags]


def test_a_quiet_pass_is_not_flagged_and_makes_the_band(tmp_path):
    states = [one_pass(ScriptedMachine(), tmp_path)[1].facts["control"]["state"] for _ in range(5)]
    assert states == [*["no band yet"] * 3, "clean", "clean"]
    assert len(json.loads((tmp_path / "control.json").read_text())["machines"][KEY]["clean"]) == 5


def test_a_pass_beside_the_band_of_its_control_is_contaminated_and_teaches_nothing(tmp_path):
    for _ in range(3):
        one_pass(ScriptedMachine(), tmp_path)
    case, whole = one_pass(ScriptedMachine(control_ms=6.0), tmp_path)
    assert kinds(case) == []
    assert set(kinds(whole)) == {"contaminated"}
    assert "times the usual" in whole.flags[0].what
    assert whole.facts["control"]["state"] == "contaminated"
    assert one_pass(ScriptedMachine(), tmp_path)[1].flags == ()


def test_another_process_during_a_case_contaminates_it_and_teaches_nothing(tmp_path):
    case, whole = one_pass(ScriptedMachine(others=1.0), tmp_path)
    assert kinds(case) == ["contaminated"]
    assert "other processes used 50% of the CPU time" in case.flags[0].what
    assert case.facts["others_share"] == pytest.approx(0.5)
    assert whole.flags == ()
    history, _ = band.load_history(tmp_path / "control.json", KEY)
    assert history == band.History()


def test_what_was_only_counted_can_not_be_disturbed(tmp_path):
    case, _ = one_pass(ScriptedMachine(others=1.0), tmp_path, runs={})
    assert (kinds(case), case.facts["others_share"]) == ([], pytest.approx(0.5))


def test_the_turns_of_each_case_are_its_own(tmp_path):
    machine = ScriptedMachine()
    watch = watch_on(machine, tmp_path)
    watch.begin()
    watch.turn()
    assert watch.end({}).facts["control_s"] == pytest.approx([0.002])
    machine.control_ms = 3.0
    watch.begin()
    watch.turn()
    watch.turn()
    assert watch.end({}).facts["control_s"] == pytest.approx([0.003, 0.003])


@pytest.mark.parametrize("num_turns", [0, 3])
def test_a_pass_of_few_turns_is_neither_judged_nor_remembered(tmp_path, num_turns):
    _, whole = one_pass(ScriptedMachine(), tmp_path, num_turns=num_turns)
    assert (whole.facts, whole.flags) == ({}, ())
    assert not (tmp_path / "control.json").exists()


def test_before_the_first_timed_case_nothing_is_made_or_run(tmp_path):
    def never():
        raise AssertionError("made too early")

    watch = Watch(never, tmp_path / "control.json", never)
    assert watch.close_pass().facts == {}


def test_a_broken_history_is_moved_aside_and_told(tmp_path):
    (tmp_path / "control.json").write_text('{"schema": 1, "mach')
    _, whole = one_pass(ScriptedMachine(), tmp_path)
    assert "was no history of the control" in whole.facts["control"]["notes"][0]
    assert (tmp_path / "control.json.corrupt").exists()
    assert json.loads((tmp_path / "control.json").read_text())["machines"]


def test_a_gpu_that_was_held_back_contaminates_the_case(tmp_path):
    class Hot(NoGpu):
        states = iter([(), ("hardware thermal slowdown",)])

        def state(self, also_ours=()):
            return GpuState(name="A GPU", sm_clock_mhz=1900, throttle_reasons=next(self.states))

    case, _ = one_pass(ScriptedMachine(), tmp_path, gpu=Hot())
    assert "the GPU was held back: hardware thermal slowdown" in [flag.what for flag in case.flags]
    assert case.facts["gpu"]["after"]["throttle_reasons"] == ["hardware thermal slowdown"]


# What a GPU says at its turns.


WARM = GpuState(
    name="A GPU", sm_clock_mhz=1980, memory_clock_mhz=3201, temperature_c=50, power_w=400.0, power_limit_w=700.0,
    throttle_reasons=(),
)  # fmt: skip
COLD = dataclasses.replace(WARM, sm_clock_mhz=345, temperature_c=28, power_w=70.0, throttle_reasons=("idle",))
STRANGER = (ForeignProcess(pid=41, memory_bytes=2_500_000_000),)


def seen_at_turns(folder, *changes, before=COLD, after=COLD):
    """A case whose GPU is idle before and after it, and is seen with these changes at its turns."""
    turns = [dataclasses.replace(WARM, **change) for change in changes]
    gpu = ScriptedGpu(before, *turns, after)
    case, _ = one_pass(ScriptedMachine(), folder, num_turns=len(turns), gpu=gpu)
    return case


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([{}, {}, {}, {}], []),
        ([{}, {"sm_clock_mhz": 1890}, {}, {}], []),
        ([{}, {"sm_clock_mhz": 1755}, {}], ["the GPU's SM clock fell from 1980 to 1755 MHz between turns"]),
        ([{"sm_clock_mhz": 1755}, {}, {}], ["the GPU's SM clock rose from 1755 to 1980 MHz between turns"]),
        ([{}, {"memory_clock_mhz": 1593}], ["the GPU's memory clock fell from 3201 to 1593 MHz between turns"]),
        ([{}, {"sm_clock_mhz": 345, "throttle_reasons": ("idle",)}], []),
        ([{}, {"throttle_reasons": ("software power cap",)}, {}], ["the GPU was held back: software power cap"]),
        ([{}, {"throttle_reasons": ("application clocks setting",)}, {}], []),
        ([{}, {"foreign_processes": STRANGER}, {}], ["another process, 41, is on the GPU with 2.50 GB of memory"]),
        ([{}, {"power_limit_w": 500.0}], ["the GPU's power limit was changed: 700, then 500 W"]),
        ([{"temperature_c": 40}, {"temperature_c": 55}], []),
        (
            [{"temperature_c": 40}, {"temperature_c": 56}],
            ["the GPU was at 40 to 56 degrees Celsius from turn to turn, more than 15 apart"],
        ),
        ([{}], []),
        ([dict.fromkeys(("sm_clock_mhz", "temperature_c", "power_limit_w", "throttle_reasons")), {}], []),
    ],
)
def test_what_moved_at_the_turns_contaminates_the_case(tmp_path, changes, said):
    case = seen_at_turns(tmp_path, *changes)
    assert [flag.what for flag in case.flags if flag.kind == "contaminated"] == said


def test_a_gpu_that_wakes_and_warms_up_before_the_first_sample_is_no_fault(tmp_path):
    woken = dataclasses.replace(WARM, sm_clock_mhz=900, memory_clock_mhz=1593, temperature_c=30)
    slow = dataclasses.replace(WARM, throttle_reasons=("software power cap",))
    watch = watch_on(ScriptedMachine(), tmp_path, gpu=ScriptedGpu(COLD, woken, slow, WARM, WARM, COLD))
    watch.begin()
    for is_sample in (False, False, True, True):
        watch.turn(is_sample=is_sample)
    seen = watch.end({"only": [RUN]})
    assert [flag.what for flag in seen.flags] == ["the GPU was held back: software power cap"]
    assert seen.facts["gpu"]["turns"]["sm_clock_mhz"] == [900, 1980, 1980, 1980]


def test_a_power_limit_that_was_changed_between_the_last_turn_and_the_end_is_seen(tmp_path):
    case = seen_at_turns(tmp_path, {}, {}, after=dataclasses.replace(COLD, power_limit_w=350.0))
    assert [flag.what for flag in case.flags] == ["the GPU's power limit was changed: 700, then 350 W"]


def test_what_is_seen_before_and_at_turns_is_told_once(tmp_path):
    there = {"foreign_processes": STRANGER}
    case = seen_at_turns(tmp_path, there, before=dataclasses.replace(COLD, **there))
    assert len(case.flags) == 1


def test_a_gpu_that_tells_nothing_is_no_reason_for_anything(tmp_path):
    case, _ = one_pass(ScriptedMachine(), tmp_path, gpu=ScriptedGpu(GpuState(note="no NVML here")))
    assert case.flags == ()
    assert case.facts["gpu"]["turns"]["sm_clock_mhz"] == [None] * 8


def test_the_series_of_the_turns_is_kept_and_each_case_has_its_own(tmp_path):
    gpu = ScriptedGpu(COLD, WARM, dataclasses.replace(WARM, temperature_c=52), COLD)
    watch = watch_on(ScriptedMachine(), tmp_path, gpu=gpu)
    watch.begin()
    watch.turn()
    watch.turn()
    assert watch.end({"only": [RUN]}).facts["gpu"]["turns"] == {
        "sm_clock_mhz": [1980, 1980], "memory_clock_mhz": [3201, 3201], "temperature_c": [50, 52],
        "power_w": [400.0, 400.0], "throttle_reasons": ["", ""],
    }  # fmt: skip
    watch.begin()
    assert "turns" not in watch.end({}).facts["gpu"]


def test_a_gpu_is_looked_at_right_after_the_control_and_where_there_is_none_nobody_looks(tmp_path, monkeypatch):
    log = []
    machine = ScriptedMachine()
    monkeypatch.setattr(machine, "pass_time", lambda seconds: log.append(round(seconds, 3)))
    gpu = ScriptedGpu(COLD)
    gpu.state = lambda also_ours=(): log.append("look") or COLD
    watch = watch_on(machine, tmp_path, gpu=gpu)
    watch.begin()
    watch.turn()
    assert log == ["look", 0.01, 0.002, "look"]  # the pause and the kernel before the second look

    class Nobody(NoGpu):
        num_looks = 0

        def state(self, also_ours=()):
            self.num_looks += 1
            return GpuState()

    nobody = Nobody()
    one_pass(ScriptedMachine(), tmp_path, gpu=nobody)
    assert nobody.num_looks == 2


def test_relatives_are_no_strangers_to_the_cpu_and_to_the_gpu(tmp_path):
    class Gpu(NoGpu):
        def state(self, also_ours=()):
            asked.append(also_ours)
            return GpuState()

    asked = []

    machine = ScriptedMachine()
    one_pass(machine, tmp_path, gpu=Gpu(), relatives=lambda: [7, 8])
    assert (machine.relatives, asked) == ([7, 8], [[7, 8], [7, 8]])


def test_what_the_stopwatch_takes_is_reported_for_the_worst_run(tmp_path):
    short = dataclasses.replace(RUN, stamps=(Stamp(1_000_000, 1),))
    case, _ = one_pass(ScriptedMachine(), tmp_path, runs={"a": [RUN, short], "b": [RUN]})
    told = case.facts["stopwatch"]
    assert (told["stamp_ns"], told["resolution_ns"]) == (300.0, 40)
    assert told["cost_s"] == pytest.approx({"a": 3 * 300e-9, "b": 3 * 300e-9})
    assert told["share_of_run"] == pytest.approx({"a": 2 * 300 / 1e6, "b": 3 * 300 / 20e6})
    assert kinds(case) == []


@pytest.mark.parametrize(
    ("stopwatch", "words"),
    [
        (Stopwatch(resolution_ns=40, stamp_ns=1e6), "the instrument itself took 15.0% of a run"),
        (Stopwatch(resolution_ns=1_000_000, stamp_ns=300.0), "the clock resolves 1000000 ns"),
    ],
)
def test_times_too_short_for_the_instrument_are_flagged(tmp_path, stopwatch, words):
    case, _ = one_pass(ScriptedMachine(), tmp_path, stopwatch=stopwatch)
    assert kinds(case) == ["resolution"]
    assert words in case.flags[0].what


def test_everything_seen_goes_into_a_results_file(tmp_path):
    case, whole = one_pass(ScriptedMachine(), tmp_path)
    json.dumps({**case.facts, **whole.facts}, allow_nan=False)


def test_a_case_that_raised_was_not_looked_at_and_teaches_nothing(tmp_path):
    machine = ScriptedMachine()
    watch = watch_on(machine, tmp_path)
    watch.begin()
    for _ in range(8):
        watch.turn()
    watch.close_pass()
    history, _ = band.load_history(tmp_path / "control.json", KEY)
    assert history == band.History()


def test_the_next_case_remembers_that_the_one_before_raised(tmp_path):
    watch = watch_on(ScriptedMachine(), tmp_path)
    watch.begin()
    watch.begin()
    for _ in range(8):
        watch.turn()
    watch.end({})
    watch.close_pass()
    assert band.load_history(tmp_path / "control.json", KEY)[0] == band.History()
