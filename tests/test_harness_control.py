"""The control's work, and the band it is held to: scripted times, damaged files, and a real busy process."""

import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness import band
from benchmarks.harness.band import (
    MAX_PASSES,
    NUM_AGREEING,
    ControlPass,
    History,
    judge,
    learn,
    load_history,
    machine_identity,
    save_history,
    summarise,
)
from benchmarks.harness.clock import DeviceClock
from benchmarks.harness.control import SETTLE_S, Control, CpuKernel, device_kernel
from benchmarks.harness.errors import InstrumentError


def control_pass(level=1.0, *, raggedness=1.2, step=1.0):
    """A pass whose median is `level` x 2 ms."""
    return ControlPass(
        best_quartile_s=0.0019 * level, median_s=0.002 * level, slow_quartile_s=0.0019 * level * raggedness, step=step
    )


USUAL = tuple(control_pass(1 + 0.02 * (number % 3)) for number in range(6))


class TestControl:
    def test_a_turn_settles_first_and_then_reads_the_clock_twice(self):
        log, times = [], iter([100, 2_000_100, 5_000_000, 8_000_000])

        def now_ns():
            log.append("clock")
            return next(times)

        control = Control(
            SimpleNamespace(now_ns=now_ns), lambda: log.append("kernel"), sleep=lambda s: log.append(f"sleep {s}")
        )
        assert control.turn() == 0.002
        assert log == [f"sleep {SETTLE_S}", "clock", "kernel", "clock"]
        control.turn()
        assert control.durations_s == (0.002, 0.003)

    def test_a_turn_on_this_machine_takes_milliseconds_on_threads_that_end(self):
        before = threading.active_count()
        kernel = CpuKernel(2)
        assert threading.active_count() == before + 2
        assert Control(DeviceClock(), kernel).turn() > 0
        kernel.close()
        assert threading.active_count() == before

    @pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot nail threads")
    def test_each_thread_is_nailed_to_its_cpu_and_the_caller_is_free(self):
        cpus = sorted(os.sched_getaffinity(0))
        kernel = CpuKernel(len(cpus) + 1)
        nailed = [pool.submit(os.sched_getaffinity, 0).result() for pool, _ in kernel._workers]
        assert nailed == [{cpu} for cpu in (*cpus, cpus[0])]
        assert os.sched_getaffinity(0) == set(cpus)
        kernel.close()

    def test_without_affinity_the_kernel_still_runs(self, monkeypatch):
        monkeypatch.delattr(os, "sched_getaffinity", raising=False)
        kernel = CpuKernel(1)
        kernel()
        kernel.close()

    def test_every_thread_does_the_same_work_and_errors_are_not_swallowed(self, monkeypatch):
        seen = []

        def work(seed):
            return lambda: seen.append(seed)

        monkeypatch.setattr("benchmarks.harness.control._work", work)
        CpuKernel(3).close()
        assert sorted(seen) == [0, 0, 1, 1, 2, 2]
        monkeypatch.setattr("benchmarks.harness.control._work", lambda seed: lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            CpuKernel(1)

    def test_the_device_kernel_is_the_same_work_at_each_call(self, monkeypatch):
        log = []

        def tensor(*_, **options):
            log.append(("new", options["device"]))

        fake = SimpleNamespace(
            float16="float16",
            ones=tensor,
            empty_like=lambda _: None,
            inference_mode=_Nothing,
            mm=lambda *_, out: log.append("mm"),
            add=lambda *_, out: log.append("add"),
        )
        monkeypatch.setitem(sys.modules, "torch", fake)
        kernel = device_kernel("cuda:1")
        assert log[:2] == [("new", "cuda:1")] * 2
        warm = log[2:]
        log.clear()
        kernel()
        assert log + log == warm
        assert set(log) == {"mm", "add"}


class _Nothing:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


class TestSummary:
    def test_quartiles_and_step(self):
        assert summarise([4.0, 1.0, 2.0, 3.0, 5.0]) == ControlPass(
            best_quartile_s=2.0, median_s=3.0, slow_quartile_s=4.0, step=None
        )

    @pytest.mark.parametrize(
        ("durations", "step"),
        [
            ([1.0] * 4 + [2.0] * 4, 2.0),
            ([3.0] * 4 + [1.5] * 5, 0.5),
            ([1.0, 1.0, 9.0, 9.0] * 2, 1.0),
            ([1.0] * 3 + [2.0] * 3, None),
            ([1, 2, 1, 2, 1, 2, 9, 9], 1.0),  # rough turns, and halves that overlap: no step
        ],
    )
    def test_step(self, durations, step):
        assert summarise(durations).step == step

    @pytest.mark.parametrize("durations", [[], [0.0, 1.0], [-1.0]])
    def test_a_pass_without_control_times_is_refused(self, durations):
        with pytest.raises(InstrumentError, match="control times"):
            summarise(durations)


class TestJudge:
    @pytest.mark.parametrize("num_passes", [0, band.MIN_PASSES - 1])
    def test_without_enough_history_only_the_pass_itself_speaks(self, num_passes):
        history = History(clean=USUAL[:num_passes])
        assert judge(control_pass(50), history).state == "no band yet"
        verdict = judge(control_pass(raggedness=2.1), history)
        assert (verdict.state, verdict.is_unexplained) == ("contaminated", True)
        assert "slow quartile took 2.10 times its best" in verdict.reasons[0]

    @pytest.mark.parametrize(
        ("this", "state"),
        [
            (control_pass(), "clean"),
            (control_pass(1.2), "clean"),
            (control_pass(0.3), "clean"),  # faster than ever is not disturbed
            (control_pass(1.5), "contaminated"),
            (control_pass(raggedness=1.7), "clean"),
            (control_pass(raggedness=2.1), "contaminated"),
            (control_pass(step=1.6), "contaminated"),
            (control_pass(step=0.6), "contaminated"),
            (control_pass(step=None), "clean"),
        ],
    )
    def test_against_a_band(self, this, state):
        assert judge(this, History(clean=USUAL)).state == state

    def test_the_reasons_name_the_quartile_the_ratio_and_the_limit(self):
        reasons = judge(control_pass(1.5), History(clean=(control_pass(),) * 3)).reasons
        assert "the control's median took 1.50 times the usual (limit 1.35)" in reasons

    def test_what_happened_outside_is_enough(self):
        verdict = judge(control_pass(), History(clean=USUAL), ["other processes used 50% of the CPU time"])
        assert verdict.state == "contaminated"
        assert not verdict.is_unexplained

    def test_an_unsteady_history_widens_the_band_up_to_a_limit(self):
        shaky = History(clean=tuple(control_pass(level) for level in (1, 1.1, 1.2, 1.3, 1.4)))
        assert judge(control_pass(1.7), shaky).state == "clean"
        bimodal = History(clean=tuple(control_pass(level) for level in (1, 1, 1, 9, 9, 9)))
        assert judge(control_pass(3 * band.MAX_BAND + 0.1), bimodal).state == "contaminated"

    @given(st.lists(st.floats(0.5, 2), min_size=3, max_size=20), st.floats(0.1, 100))
    def test_only_ratios_matter(self, levels, unit):
        this, history = control_pass(1.4), History(clean=tuple(map(control_pass, levels)))
        scaled = History(clean=tuple(control_pass(level * unit) for level in levels))
        limit = band._band([one.median_s for one in history.clean], 1.35)[1]
        if abs(this.median_s / limit - 1) > 1e-6:
            assert judge(control_pass(1.4 * unit), scaled).state == judge(this, history).state


class TestLearn:
    def run(self, levels, history=None, happened=()):
        """Judge and learn pass by pass; the states, the notes and the last history."""
        history, states, notes = history or History(), [], []
        for level in levels:
            verdict = judge(control_pass(level), history, happened)
            history, note = learn(history, control_pass(level), verdict)
            states.append(verdict.state)
            notes += [note] if note else []
        return states, notes, history

    def test_three_passes_make_a_band_and_fifty_are_kept(self):
        states, notes, history = self.run([1] * 60)
        assert states == ["no band yet"] * 3 + ["clean"] * 57
        assert len(history.clean) == MAX_PASSES
        assert not notes

    def test_the_oldest_pass_is_the_one_forgotten(self):
        _, _, history = self.run([1.0] * MAX_PASSES + [1.1])
        assert history.clean[-1] == control_pass(1.1)

    def test_a_machine_that_has_changed_is_contaminated_for_a_while_only(self):
        states, notes, history = self.run([1] * 10 + [2] * (NUM_AGREEING + 2))
        assert states[10:] == ["contaminated"] * NUM_AGREEING + ["clean"] * 2
        assert notes == [
            "the control's band has moved: 5 passes in a row agree on a median of 4.00 ms, so the machine itself has "
            "changed"
        ]
        assert len(history.clean) == NUM_AGREEING + 2

    def test_a_clean_pass_in_between_starts_the_count_again(self):
        states, notes, _ = self.run([1] * 10 + ([2] * (NUM_AGREEING - 1) + [1]) * 4)
        assert states.count("contaminated") == 4 * (NUM_AGREEING - 1)
        assert not notes

    def test_passes_that_disagree_with_each_other_move_nothing(self):
        states, notes, history = self.run([1] * 10 + [2, 5] * 10)
        assert set(states[10:]) == {"contaminated"}
        assert not notes
        assert len(history.beside) == NUM_AGREEING

    def test_agreement_is_of_the_last_ones(self):
        states, notes, _ = self.run([1] * 10 + [9, 5] + [2] * NUM_AGREEING)
        assert set(states[10:]) == {"contaminated"}
        assert len(notes) == 1

    def test_a_disturbance_that_is_known_teaches_nothing(self):
        history = History(clean=USUAL)
        states, notes, learnt = self.run([1, 2] * 20, history, ["other processes used 50%"])
        assert set(states) == {"contaminated"}
        assert not notes
        assert learnt == history

    def test_a_step_inside_a_pass_teaches_nothing(self):
        history, this = History(clean=USUAL), control_pass(2, step=1.6)
        assert learn(history, this, judge(this, history)) == (history, None)

    def test_a_ragged_machine_gets_a_band_in_the_end(self):
        history, this = History(), control_pass(raggedness=3.0)
        for _ in range(NUM_AGREEING):
            assert judge(this, history).state == "contaminated"
            history, note = learn(history, this, judge(this, history))
        assert note
        assert judge(this, history).state == "clean"


DAMAGED = {
    "cut off": '{"schema": 1, "machines": {"a": {"cle',
    "empty": "",
    "binary": b"\xff\xfe\x00",
    "another tool's": '{"benchmarks": []}',
    "a list": "[1, 2]",
    "a number": "7",
    "another schema": '{"schema": 99, "machines": {}}',
    "no machines": '{"schema": 1, "machines": 3}',
    "a foreign entry": '{"schema": 1, "machines": {"a": []}}',
    "a foreign pass": '{"schema": 1, "machines": {"z": {"clean": [{"mean": 1}]}}}',
    "too deep": "[" * 200_000,
    "not a number": '{"schema": 1, "machines": {"a": {"clean": [{"best_quartile_s": 1, "median_s": NaN,'
    ' "slow_quartile_s": 1, "step": null}]}}}',
    "words": '{"schema": 1, "machines": {"a": {"clean": [{"best_quartile_s": "1", "median_s": 1,'
    ' "slow_quartile_s": 1, "step": null}]}}}',
}


class TestHistoryFile:
    def test_a_history_survives_the_trip_and_machines_are_kept_apart(self, tmp_path):
        path, history = tmp_path / "deep" / "control.json", History(clean=USUAL, beside=(control_pass(3, step=None),))
        assert load_history(path, "a") == (History(), None)
        assert save_history(path, "a", history) is None
        assert save_history(path, "b", History(clean=USUAL[:1])) is None
        assert load_history(path, "a") == (history, None)
        assert load_history(path, "b") == (History(clean=USUAL[:1]), None)
        assert load_history(path, "c") == (History(), None)
        assert os.listdir(path.parent) == ["control.json"]

    @pytest.mark.parametrize("what", DAMAGED)
    @pytest.mark.parametrize("by", ["load", "save"])
    def test_a_damaged_file_is_moved_aside_and_never_lost(self, tmp_path, what, by):
        path, content = tmp_path / "control.json", DAMAGED[what]
        content = content if isinstance(content, bytes) else content.encode()
        for name in ("control.json.corrupt", "control.json.corrupt2", "control.json.corrupt3"):
            path.write_bytes(content)
            note = load_history(path, "a")[1] if by == "load" else save_history(path, "a", History(clean=USUAL))
            assert "was no history of the control" in note
            assert name in note
            assert (tmp_path / name).read_bytes() == content
        assert save_history(path, "a", History(clean=USUAL)) is None
        assert load_history(path, "a") == (History(clean=USUAL), None)

    def test_a_file_that_cannot_be_read_is_not_overwritten(self, tmp_path):
        path = tmp_path / "control.json"
        path.mkdir()
        history, note = load_history(path, "a")
        assert history == History()
        assert "could not be read" in note
        assert "could not be read" in save_history(path, "a", history)
        assert path.is_dir()

    def test_a_place_that_cannot_be_written_is_a_note(self, tmp_path):
        (tmp_path / "file").write_text("")
        assert "could not be kept" in save_history(tmp_path / "file" / "control.json", "a", History())

    def test_a_failed_write_leaves_nothing_behind(self, tmp_path, monkeypatch):
        def refuse(*_):
            raise OSError("disk full")

        monkeypatch.setattr("benchmarks.harness.band.os.replace", refuse)
        assert "disk full" in save_history(tmp_path / "control.json", "a", History())
        assert os.listdir(tmp_path) == []

    def test_killed_while_writing_the_old_history_is_whole(self, tmp_path, monkeypatch):
        path = tmp_path / "control.json"
        save_history(path, "a", History(clean=USUAL))

        def die(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr("benchmarks.harness.band.os.replace", die)
        with pytest.raises(KeyboardInterrupt):
            save_history(path, "a", History())
        assert load_history(path, "a") == (History(clean=USUAL), None)

    def test_many_writers_leave_a_whole_file(self, tmp_path):
        path = tmp_path / "control.json"
        script = (
            "import sys; from pathlib import Path; from benchmarks.harness.band import *\n"
            "one = ControlPass(best_quartile_s=1.0, median_s=1.0, slow_quartile_s=1.0)\n"
            "for _ in range(50): save_history(Path(sys.argv[1]), sys.argv[2], History(clean=(one,) * 50))"
        )
        writers = [subprocess.Popen([sys.executable, "-c", script, str(path), key]) for key in "ab"]
        while any(writer.poll() is None for writer in writers):
            assert load_history(path, "a")[1] is None
        assert [writer.returncode for writer in writers] == [0, 0]
        assert [file.name for file in tmp_path.iterdir()] == ["control.json"]

    def test_the_key_names_what_can_move_the_control(self, monkeypatch):
        keys = {machine_identity(num_threads=2), machine_identity(num_threads=3)}
        keys.add(machine_identity(num_threads=2, device_name="H200"))
        for target, value in (
            ("benchmarks.harness.band.INSTRUMENT_VERSION", "0"),
            ("benchmarks.harness.band.cpu_model", lambda: "another CPU"),
            ("os.cpu_count", lambda: 999),
            ("numpy.__version__", "0.0"),
        ):
            with monkeypatch.context() as patched:
                patched.setattr(target, value)
                keys.add(machine_identity(num_threads=2))
        assert len(keys) == 7


def _measured(kernel, num_turns=16):
    control = Control(DeviceClock(), kernel)
    for _ in range(num_turns):
        control.turn()
    return summarise(control.durations_s)


def _is_seen(kernel, cpus):
    """Whether a pass beside busy processes on these CPUs stands out from the passes just before it."""
    history = History(clean=tuple(_measured(kernel) for _ in range(3)))
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in cpus]
    try:
        for process, cpu in zip(spinning, cpus, strict=True):
            psutil.Process(process.pid).cpu_affinity([cpu])
        time.sleep(0.2)
        loaded = _measured(kernel)
    finally:
        for process in spinning:
            process.kill()
            process.wait()
    return bool(list(band._beside(loaded, history.clean)))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot nail processes")
def test_busy_processes_during_head_only_are_seen():
    """Ratios to passes of the same seconds only; a host that was as busy during those gets more tries."""
    kernel = CpuKernel(2)
    cpus = (sorted(os.sched_getaffinity(0)) * 2)[:2]
    assert any(_is_seen(kernel, cpus * 2) for _ in range(5))
    kernel.close()


def test_nothing_spins_after_the_control():
    """BLAS spreads a larger product over threads that spin afterwards and slow down whatever is measured next."""
    kernel = CpuKernel(2)
    assert any(_burnt_share_after(kernel) < 0.1 for _ in range(5))
    kernel.close()


def _burnt_share_after(call, pause_s=0.05):
    """CPU time that this process's threads use while it sleeps, as a part of the sleep."""
    call()
    start_s = time.process_time()
    time.sleep(pause_s)
    return (time.process_time() - start_s) / pause_s
