"""Timers against a fake device whose work takes time that nobody waits for, and the stopwatch's own cost."""

import sys
from types import SimpleNamespace

import pytest

from benchmarks.harness import overhead
from benchmarks.harness.clock import DeviceClock, EventTimer, timer_resolution_ns
from benchmarks.harness.overhead import is_cheap, read_cost_ns, stamp_cost_ns
from benchmarks.harness.timing import measure_call, measure_stream


class FakeDevice:
    """A host and a device with their own time, in ns: the host moves on while the device works through its queue."""

    def __init__(self):
        self.host_ns, self.device_ns, self.devices = 0, 0, []

    def enqueue(self, milliseconds):
        self.host_ns += 1000  # what a launch costs
        self.device_ns = max(self.device_ns, self.host_ns) + round(milliseconds * 1e6)

    def synchronize(self, device=None):
        self.devices.append(device)
        self.host_ns = max(self.host_ns, self.device_ns)

    def device(self, name):
        self.devices.append(name)
        return _Nothing()

    def Event(self, enable_timing):  # noqa: N802 (torch's name)
        assert enable_timing
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, device):
        self._device = device

    def record(self):
        self.at_ns = max(self._device.device_ns, self._device.host_ns)

    def synchronize(self):
        self._device.host_ns = max(self._device.host_ns, self.at_ns)
        self.is_reached = True

    def elapsed_time(self, end):
        assert end.is_reached, "read before the device came to it"
        return (end.at_ns - self.at_ns) / 1e6


class _Nothing:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.fixture
def gpu(monkeypatch):
    fake = FakeDevice()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=fake))
    monkeypatch.setattr("benchmarks.harness.clock.time", SimpleNamespace(perf_counter_ns=lambda: fake.host_ns))
    return fake


def test_a_sleep_of_20_ms_on_the_device_is_not_nothing(gpu):
    def call():
        gpu.enqueue(20)

    assert measure_call(call, DeviceClock("cuda")) == pytest.approx(0.020, rel=1e-3)
    assert EventTimer("cuda").seconds(call) == pytest.approx(0.020, rel=1e-3)
    assert measure_call(call, SimpleNamespace(now_ns=lambda: gpu.host_ns)) < 1e-5  # what a clock that waits not sees


def test_events_leave_out_what_was_queued_before_and_host_work_behind_it(gpu):
    gpu.enqueue(500)

    def call():
        gpu.enqueue(3)
        gpu.host_ns += 2_000_000  # the device is busy meanwhile

    assert EventTimer("cuda").seconds(call) == pytest.approx(0.003, rel=1e-3)


@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_events_belong_to_the_device_that_was_named(gpu, device):
    EventTimer(device).seconds(lambda: gpu.enqueue(1))
    assert gpu.devices == [device]


def test_on_a_cpu_the_same_interface_gives_host_seconds(gpu):
    def call():
        gpu.host_ns += 7_000_000

    assert EventTimer("cpu").seconds(call) == 0.007
    assert EventTimer().seconds(call) == 0.007
    assert gpu.devices == []


@pytest.mark.parametrize(
    ("reads", "resolution"),
    [
        ([0, 0, 0, 40, 40, 90, 90, 120], 30),
        ([5, 5, 5, 5], None),
        ([0, 1_000], 1_000),
        ([0, 10, 4, 30], 10),  # a clock that goes backwards has no step there
        ([3], None),
    ],
)
def test_the_resolution_is_the_smallest_step_that_was_seen(reads, resolution):
    ticking = iter(reads)
    clock = SimpleNamespace(now_ns=lambda: next(ticking))
    assert timer_resolution_ns(clock, max_reads=len(reads)) == resolution
    assert next(ticking, None) is None


def test_the_real_clock_moves():
    assert 0 < timer_resolution_ns(DeviceClock(), max_reads=10_000) < 1e9


class CostlyClock:
    """Each read takes 100 ns, and somebody else can spend time, too."""

    def __init__(self):
        self.at_ns = 0

    def now_ns(self):
        self.at_ns += 100
        return self.at_ns


def test_a_stamp_costs_what_the_measuring_loop_adds_to_the_bare_one(monkeypatch):
    def slow_measure_stream(stream, clock):
        for _ in stream:
            clock.at_ns += 250

    clock = CostlyClock()
    assert stamp_cost_ns(clock, num_emissions=50) == 100  # one read per emission, and none per emission without
    monkeypatch.setattr(overhead, "measure_stream", slow_measure_stream)
    assert stamp_cost_ns(clock, num_emissions=50) == 250
    assert read_cost_ns(clock) == pytest.approx(100, rel=1e-2)


def test_the_least_disturbed_try_counts(monkeypatch):
    clock, tries = CostlyClock(), iter([9_000, 0, 5_000])

    def with_a_pause(stream, pause_ns):
        for number, emission in enumerate(stream):
            clock.at_ns += pause_ns if number == 3 else 0
            yield emission

    def disturbed(stream, clock):
        measure_stream(with_a_pause(stream, next(tries)), clock)
        clock.at_ns += 10**9  # what comes after the last token costs the run nothing

    monkeypatch.setattr(overhead, "measure_stream", disturbed)
    assert stamp_cost_ns(clock, num_emissions=10, num_tries=3) == 100


def test_a_stamp_costs_few_looks_at_the_clock_on_this_machine():
    clock = DeviceClock()
    assert any(stamp_cost_ns(clock) < 10 * read_cost_ns(clock) for _ in range(5))


@pytest.mark.parametrize(("cost_ns", "cheap"), [(0.0, True), (1999.0, True), (2000.0, False), (1e6, False)])
def test_cheap_is_below_two_microseconds(cost_ns, cheap):
    assert is_cheap(cost_ns) is cheap
