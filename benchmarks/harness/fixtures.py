"""The pytest side of the instrument: the fixtures `gpu`, `device`, `model`, `measure` and `count_work`, and markers.

    @pytest.mark.arms(name={...options of Subject.stream...}, ...)    what takes turns inside one benchmark
    @pytest.mark.quantities("ttft_s", ...)                            what it promises to measure

Knows pytest and its options. Refuses to know how anything is measured, and nanoserve beyond its adapter.
"""

import dataclasses
import os
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NoReturn

import pytest

from benchmarks.harness.claim import claim_gpu, shown
from benchmarks.harness.clock import DeviceClock
from benchmarks.harness.errors import DeviceError
from benchmarks.harness.gpu.choice import Claim, Worker
from benchmarks.harness.gpu.driver import Gpu, NoGpu
from benchmarks.harness.http_fixtures import (
    endpoint_of,
    kept_arms,
    leave_out,
    name_for_prompts,
    reach_endpoint,
    route,
    teller,
    why_left_out,
)
from benchmarks.harness.loop import Nap, Plan, Say, Subject, Turn, WarmUp
from benchmarks.harness.machine import family_of
from benchmarks.harness.measure import Measure
from benchmarks.harness.opening import looked_at, opened
from benchmarks.harness.progress import follow
from benchmarks.harness.replay import replayed_seconds
from benchmarks.harness.serving import SkippingClock
from benchmarks.harness.slowed import Slowed
from benchmarks.harness.sources.nanoserve import NanoserveSubject, UnusableSubjectError
from benchmarks.harness.stash import RESUMED
from benchmarks.harness.stepwise import Stepwise, StoppableClock
from benchmarks.harness.timing import Clock
from benchmarks.harness.watch import Equipment, Watch
from benchmarks.harness.work import CountWork

WATCH = pytest.StashKey[Watch]()
"""What looks at the machine in this session, on its config."""

CLAIM = pytest.StashKey[Claim]()
"""The GPU that this session has taken, on its config; not there where it runs on a CPU."""


@dataclasses.dataclass(frozen=True, slots=True)
class Led:
    """This session takes turns with another.

    `take` surrounds what opens a run, `begin` and `end` each of its steps; `relatives` are processes that are no
    strangers. Sessions with the same `leader`, a process, share a GPU.
    """

    take: Turn
    begin: Callable[[], None]
    end: Callable[[], None]
    relatives: Callable[[], Collection[int]]
    leader: int = dataclasses.field(default_factory=os.getpid)


LED = pytest.StashKey[Led]()
"""On the config of a session that a leader leads."""

_DEFAULT_MODELS = {"cpu": "smollm2-135m", "cuda": "llama-3.2-1b"}
_UNTIMED_MODEL = "tiny"
MEASURING = ("measure", "count_work")
"""The fixtures that a benchmark takes."""


@pytest.fixture(scope="session")
def gpu(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> Iterator[Gpu]:
    """The GPU that benchmarks run on, from `--device`, nobody else's until the session ends; `NoGpu` for a CPU.

    An impossible one ends the session with one line.
    """
    if endpoint_of(pytestconfig):
        yield NoGpu("cpu")
        return
    try:
        led = pytestconfig.stash.get(LED, None)
        leader, relatives = led.leader if led else os.getpid(), _relatives(pytestconfig)
        found = claim_gpu(pytestconfig, timed=is_timed(pytestconfig), leader=leader, relatives=relatives)
    except (DeviceError, UnusableSubjectError) as error:
        _end_session(request, error)
    if isinstance(found, Claim):
        pytestconfig.stash[CLAIM] = found
        found.gpu.make_current()
        yield found.gpu
        found.release()
    else:
        yield found


def _end_session(request: pytest.FixtureRequest, error: Exception) -> NoReturn:
    """With one line. A worker of xdist that leaves by itself would look like a crash: it fails, and stops the rest."""
    if Worker.of() is None:
        pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)
    request.session.shouldstop = str(error)
    raise pytest.fail.Exception(str(error), pytrace=False) from None


def _relatives(config: pytest.Config) -> Callable[[], Collection[int]]:
    """Processes that are no strangers: the other session of two that take turns, the workers beside this one."""
    led = config.stash.get(LED, None)
    if led is None and Worker.of():
        return lambda: family_of(os.getppid())
    return led.relatives if led else tuple


@pytest.fixture(scope="session")
def device(gpu: Gpu) -> str:
    """What torch calls the device that benchmarks run on."""
    return gpu.device


@pytest.fixture(scope="session")
def model(request: pytest.FixtureRequest, pytestconfig: pytest.Config, device: str) -> Any:
    """The model that benchmarks run, from `--model`: by default a trained one on a CPU, a 1B shape on a GPU.

    Where the trained default cannot be fetched, its shape with random weights stands in: speed does not depend on
    the values, and every result says so. Untimed, the default is the smallest shape: whether a benchmark works does
    not depend on the size of a model. With `--endpoint` it is what serves there.
    """
    if endpoint_of(pytestconfig):
        return reach_endpoint(pytestconfig)
    asked = pytestconfig.getoption("--model")
    usual = _DEFAULT_MODELS[device.partition(":")[0]] if is_timed(pytestconfig) else _UNTIMED_MODEL
    name = asked or usual
    try:
        return _load(pytestconfig, name, device)
    except UnusableSubjectError as error:
        if asked or not error.is_fetch:
            _end_session(request, error)
        warnings.warn(f"measuring random weights of the same shape, because: {error}", stacklevel=1)
        return _load(pytestconfig, f"{name}-random", device)


def is_timed(config: pytest.Config) -> bool:
    """Whether this session measures, and does not just run every benchmark once."""
    return not config.getoption("benchmark_disable", False)


def _load(config: pytest.Config, name: str, device: str) -> NanoserveSubject:
    with shown(config):  # a first fetch shows its progress
        return NanoserveSubject.load(name, device, config.getoption("--dtype"))


@pytest.fixture(scope="session")
def watch(pytestconfig: pytest.Config, device: str) -> Watch:
    """What looks at the machine while cases run; its control kernel's history lies below `.benchmarks`."""
    worker = Worker.of()
    beside = "-led" if LED in pytestconfig.stash else f"-{worker.number}" if worker else ""
    history = pytestconfig.rootpath / ".benchmarks" / f"control{beside}.json"
    pytestconfig.stash[WATCH] = Watch(lambda: Equipment.on(device), history, relatives=_relatives(pytestconfig))
    return pytestconfig.stash[WATCH]


@pytest.fixture
def measure(request: pytest.FixtureRequest, model: Any, device: str, watch: Watch, benchmark: Any) -> Measure:
    """The sampling loop, planned by the test's markers. Untimed, it runs every arm once and checks the output."""
    plan, say = plan_of(request.node, timed=benchmark.enabled), _progress(request, timed=benchmark.enabled)
    clock, wait = _clock(request.config, device, timed=benchmark.enabled)
    over = route(request, plan, model, clock)
    subject = _subject(request.config, over or model, clock)
    left_out = tuple(name for name in declaration_of(request.node)[0] if name not in plan.arms)
    tell = teller(over, left_out, tuple(model.notes() if endpoint_of(request.config) else ()))
    if not benchmark.enabled:
        return Measure(plan, subject, clock, say, looked_at(over, plan), nap=wait, tell=tell)
    if RESUMED not in request.node.stash:
        watch.begin()
    led = request.config.stash.get(LED, None)
    turn = opened(watch, plan, over or model, take=led.take if led else None, over=over)
    return Measure(plan, subject, clock, say, turn, tell=tell)


def _clock(config: pytest.Config, device: str, *, timed: bool) -> tuple[Clock, Nap]:
    """The session's clock and how to wait by it: untimed without waiting, and stoppable where sessions take turns."""
    clock = DeviceClock(device)
    if not timed:
        skipping = SkippingClock(clock)
        return skipping, skipping.nap
    return (StoppableClock(clock) if LED in config.stash else clock), time.sleep


def _subject(config: pytest.Config, model: Subject, clock: Clock) -> Subject:
    """The model, slowed down if that is asked for, step by step if another session is to take turns with this one."""
    percent, led = config.getoption("--planted-slowdown"), config.stash.get(LED, None)
    subject: Subject = model if percent is None else Slowed(model, percent / 100, clock)
    return Stepwise(subject, clock, led.begin, led.end) if led and isinstance(clock, StoppableClock) else subject


@pytest.fixture
def count_work(
    request: pytest.FixtureRequest, model: NanoserveSubject, device: str, watch: Watch, benchmark: Any
) -> CountWork:
    """Counts what a step makes the machine do, for each arm of the test's markers; untimed just the same."""
    if benchmark.enabled and RESUMED not in request.node.stash:
        watch.begin()
    return CountWork(plan_of(request.node, timed=False), model, DeviceClock(device), device)


def declaration_of(item: pytest.Item) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The arms and the quantities that the markers of a benchmark declare. Raises UsageError where either lacks."""
    arms, quantities = item.get_closest_marker("arms"), item.get_closest_marker("quantities")
    if arms is None or quantities is None or arms.args or not is_benchmark(item):
        raise pytest.UsageError(
            f"{item.nodeid}: a benchmark takes {' or '.join(MEASURING)} as an argument and carries the markers "
            f"arms(name={{...}}) and quantities(name, ...)"
        )
    return arms.kwargs, quantities.args


def plan_of(item: pytest.Item, *, timed: bool) -> Plan:
    """What the markers of a test declare, sampled as the options say."""
    arms, quantities = declaration_of(item)
    arms = kept_arms(arms) if endpoint_of(item.config) else arms
    option = item.config.getoption
    limits = WarmUp(max_runs=option("--max-warmups"), max_s=option("--max-warmup-s"))
    sampling: dict[str, Any] = {"num_samples": option("--samples"), "warm_up": limits} if timed else {}
    return Plan(name=name_for_prompts(item, benchmark_id(item), arms), quantities=quantities, arms=arms, **sampling)


def _progress(request: pytest.FixtureRequest, *, timed: bool) -> Say:
    """Where a session shows how far it has come: nowhere if it is led, or tells nobody."""
    manager = request.config.pluginmanager
    reporter, capture = manager.getplugin("terminalreporter"), manager.getplugin("capturemanager")
    is_silent = LED in request.config.stash or RESUMED in request.node.stash
    if not timed or capture is None or reporter is None or is_silent:
        return lambda phase, number, total: None
    return follow(request, reporter, capture)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each benchmark the timer that replays our samples, and a table of its own."""
    for item in items:
        if is_benchmark(item):
            item.add_marker(pytest.mark.benchmark(timer=replayed_seconds, group=benchmark_id(item)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out what cannot be asked of somebody else's endpoint, before anything is prepared."""
    if is_benchmark(item) and endpoint_of(item.config):
        why = why_left_out(*declaration_of(item), tuple(getattr(item, "fixturenames", ())))
        if why is not None:
            leave_out(item, why)


def pytest_itemcollected(item: pytest.Item) -> None:
    """A benchmark can be chosen by what it does: `-k count_work` are those that count work."""
    item.extra_keyword_matches.update(set(MEASURING) & set(getattr(item, "fixturenames", ())))


def is_benchmark(item: pytest.Item) -> bool:
    """Whether a test measures something, by the fixtures that it takes."""
    return any(name in getattr(item, "fixturenames", ()) for name in MEASURING)


def measured_of(item: pytest.Function) -> Measure | CountWork | None:
    """What a running benchmark measures with; None for another test."""
    found = (item.funcargs.get(name) for name in MEASURING)
    return next((each for each in found if isinstance(each, Measure | CountWork)), None)


def benchmark_id(item: pytest.Item) -> str:
    """A benchmark's node id without parameters: `benchmarks/bench_kv_cache.py::test_prompt_length`."""
    return item.nodeid.removesuffix(f"[{case_id(item)}]")


def case_id(item: pytest.Item) -> str:
    """The id of the parameters, "" for a test without any."""
    return item.callspec.id if hasattr(item, "callspec") else ""
