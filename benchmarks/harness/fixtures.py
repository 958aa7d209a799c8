"""The pytest side of the instrument: the fixtures `device`, `model` and `measure`, and what their markers mean.

    @pytest.mark.arms(name={...options of Subject.stream...}, ...)    what takes turns inside one benchmark
    @pytest.mark.quantities("ttft_s", ...)                            what it promises to measure

The only file that imports nanoserve, and only inside functions and by public names: what an older commit cannot do
is known here and nowhere else.
"""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.harness.clock import DeviceClock
from benchmarks.harness.measure import Measure, Plan
from benchmarks.harness.provenance import provenance
from benchmarks.harness.replay import replay, replayed_seconds
from benchmarks.harness.results import BenchmarkResult

if TYPE_CHECKING:
    from nanoserve.engine import Engine
    from nanoserve.weights import LoadedModel

RESULTS = pytest.StashKey[list[BenchmarkResult]]()
"""Where a session's results gather, on its config."""

_DEFAULT_MODELS = {"cpu": "smollm2-135m", "cuda": "llama-3.2-1b"}


@dataclasses.dataclass(frozen=True, slots=True)
class _Emitted:
    token_ids: tuple[int, ...]
    finish_reason: str | None


class NanoserveSubject:
    """nanoserve as something that streams tokens. Arms are told apart by the options of `Engine`, such as `cache`."""

    def __init__(self, loaded: "LoadedModel", name: str) -> None:
        self._loaded = loaded
        self._engines: dict[tuple[tuple[str, Any], ...], Engine] = {}
        self.name = name
        self.vocab_size = loaded.config.vocab_size
        self.relative_tolerance = 8 * _epsilon(loaded.dtype)

    def stream(self, prompt_ids: Sequence[int], num_new_tokens: int, **arm: Any) -> Iterator[_Emitted]:
        from nanoserve import SamplingParams

        params = SamplingParams(max_new_tokens=num_new_tokens, ignore_eos=True)
        for event in self._engine(**arm).stream(prompt_ids, params):
            yield _Emitted((event.token_id,), event.finish_reason)

    def next_logits(self, token_ids: Sequence[int]) -> Sequence[float]:
        import torch

        from nanoserve.cache.kv import NoCache

        with torch.inference_mode():
            ids = torch.tensor(token_ids, device=self._loaded.device)
            positions = torch.arange(len(token_ids), device=self._loaded.device)
            hidden = self._loaded.model(ids, positions, NoCache())
            return self._loaded.model.compute_logits(hidden[-1:])[0].tolist()

    def describe(self) -> dict[str, Any]:
        """The subject's part of the provenance."""
        import torch

        return {
            "model": self.name,
            "weights": self._loaded.weights,
            "dtype": str(self._loaded.dtype).removeprefix("torch."),
            "device": str(self._loaded.device),
            "device_name": _device_name(self._loaded.device),
            "num_threads": torch.get_num_threads(),
            "attention": "scaled_dot_product_attention",
        }

    def _engine(self, **arm: Any) -> "Engine":
        from nanoserve import Engine

        key = tuple(sorted(arm.items()))
        if key not in self._engines:
            self._engines[key] = Engine(self._loaded, **arm)
        return self._engines[key]


def _epsilon(dtype: Any) -> float:
    import torch

    return torch.finfo(dtype).eps


def _device_name(device: Any) -> str | None:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """The device that benchmarks run on, from `--device`; an impossible one ends the session with one line."""
    from nanoserve.errors import ConfigError
    from nanoserve.weights import resolve_device

    try:
        return str(resolve_device(pytestconfig.getoption("--device")))
    except ConfigError as error:
        pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)


@pytest.fixture(scope="session")
def model(pytestconfig: pytest.Config, device: str) -> NanoserveSubject:
    """The model that benchmarks run, from `--model`: by default a trained one on a CPU, a 1B shape on a GPU.

    Where the trained default cannot be fetched, its shape with random weights stands in: speed does not depend on
    the values, and every result says so.
    """
    from nanoserve.errors import FetchError, NanoserveError

    name = pytestconfig.getoption("--model") or _DEFAULT_MODELS[device.partition(":")[0]]
    try:
        return _load(pytestconfig, name, device)
    except FetchError as error:
        if pytestconfig.getoption("--model"):
            pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)
        warnings.warn(f"measuring random weights of the same shape, because: {error}", stacklevel=1)
        return _load(pytestconfig, f"{name}-random", device)
    except NanoserveError as error:
        pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)


def _load(config: pytest.Config, name: str, device: str) -> NanoserveSubject:
    from nanoserve import EngineConfig
    from nanoserve.weights import load_model

    capture = config.pluginmanager.getplugin("capturemanager")
    shown = capture.global_and_fixture_disabled() if capture else contextlib.nullcontext()
    with shown:  # a first fetch shows its progress
        return NanoserveSubject(
            load_model(EngineConfig(model=name, device=device, dtype=config.getoption("--dtype"))), name
        )


@pytest.fixture
def measure(request: pytest.FixtureRequest, model: NanoserveSubject, device: str, benchmark: Any) -> Measure:
    """The sampling loop, planned by the test's markers. Untimed, it runs every arm once and checks the output."""
    plan = plan_of(request.node, request.config.getoption("--samples"), timed=benchmark.enabled)
    return Measure(plan, model, DeviceClock(device), _progress(request, timed=benchmark.enabled))


def plan_of(item: pytest.Item, num_samples: int, *, timed: bool) -> Plan:
    """What the markers of a test declare."""
    arms, quantities = item.get_closest_marker("arms"), item.get_closest_marker("quantities")
    if arms is None or quantities is None or arms.args or "measure" not in getattr(item, "fixturenames", ()):
        raise pytest.UsageError(
            f"{item.nodeid}: a benchmark takes `measure` as an argument and carries the markers arms(name={{...}}) and "
            f"quantities(name, ...)"
        )
    sampling = {"num_samples": num_samples, "num_warmups": 1} if timed else {}
    return Plan(name=benchmark_id(item), quantities=quantities.args, arms=arms.kwargs, **sampling)


def _progress(request: pytest.FixtureRequest, *, timed: bool) -> Callable[[str], None]:
    """On a terminal, a line that follows the samples; elsewhere pytest's own dots are the progress."""
    reporter = request.config.pluginmanager.getplugin("terminalreporter")
    capture = request.config.pluginmanager.getplugin("capturemanager")
    if not timed or capture is None or reporter is None or not reporter.isatty:
        return lambda text: None

    def say(text: str) -> None:
        with capture.global_and_fixture_disabled():
            reporter.rewrite(f"{request.node.name}: {text} ", erase=True)

    return say


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each benchmark the timer that replays our samples, and a table of its own."""
    for item in items:
        if "measure" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.benchmark(timer=replayed_seconds, group=benchmark_id(item)))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """After a benchmark's own body: hold it to its declaration, then publish what it measured."""
    result = yield
    measured = pyfuncitem.funcargs.get("measure")
    if isinstance(measured, Measure):
        measured.close()
        _publish(pyfuncitem, measured, pyfuncitem.funcargs["benchmark"], pyfuncitem.funcargs["model"])
    return result


def _publish(item: pytest.Function, measured: Measure, benchmark: Any, subject: Any) -> None:
    """Untimed, nothing is kept: one run without a warm-up is a test and no measurement."""
    if benchmark.enabled:
        result = _result_of(item, measured, subject)
        item.config.stash.setdefault(RESULTS, []).append(result)
        benchmark.extra_info.update(result.as_dict())
    replay(benchmark, measured.primary_durations_s())


def _result_of(item: pytest.Function, measured: Measure, subject: Any) -> BenchmarkResult:
    return BenchmarkResult(
        benchmark=benchmark_id(item),
        case=case_id(item),
        params=dict(item.callspec.params) if hasattr(item, "callspec") else {},
        measurements=tuple(measured.measurements),
        provenance=provenance(_package(), subject.describe()),
        notes=tuple(measured.notes),
    )


def _package() -> Path:
    import nanoserve

    return Path(nanoserve.__file__).parent


def benchmark_id(item: pytest.Item) -> str:
    """A benchmark's node id without parameters: `benchmarks/bench_kv_cache.py::test_prompt_length`."""
    return item.nodeid.removesuffix(f"[{case_id(item)}]")


def case_id(item: pytest.Item) -> str:
    """The id of the parameters, "" for a test without any."""
    return item.callspec.id if hasattr(item, "callspec") else ""
