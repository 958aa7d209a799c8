"""From what a benchmark measured to what is kept of it: held to its declaration, filed with provenance, judged, stored.

Knows pytest's hooks around a test and a session, and pytest-benchmark's JSON. Refuses to know how anything is measured
and how results are shown.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.archive import GAPS
from benchmarks.harness.ceilings import Ceilings
from benchmarks.harness.efficiency import Cost, shares_of
from benchmarks.harness.fixtures import CLAIM, LED, WATCH, benchmark_id, case_id, declaration_of, measured_of
from benchmarks.harness.gpu.choice import Worker, claim_of
from benchmarks.harness.http_fixtures import endpoint_of
from benchmarks.harness.measure import Measure
from benchmarks.harness.metrics import Metric, metric
from benchmarks.harness.provenance import provenance
from benchmarks.harness.replay import replay
from benchmarks.harness.results import BenchmarkResult, Measurement
from benchmarks.harness.sources.nanoserve import package_folder
from benchmarks.harness.stash import PUBLISHED, RESUMED, Published
from benchmarks.harness.timing import RunTiming
from benchmarks.harness.watch import Seen
from benchmarks.harness.work import CountWork

RESULTS = pytest.StashKey[list[BenchmarkResult]]()
"""Where a session's results gather, on its config."""

_KEPT = pytest.StashKey[list[dict[str, Any]]]()
"""For each of them the dictionary that pytest-benchmark stores with it."""

Costs = Mapping[str, Cost | None]

_COSTS = pytest.StashKey[list[Costs | None]]()
"""For each of them what its arms have to do; None for what another session measured."""

_CEILINGS = pytest.StashKey[Ceilings]()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """After a benchmark's own body: hold it to its declaration, then publish what it measured."""
    result = yield
    if RESUMED in pyfuncitem.stash:
        _keep(pyfuncitem, pyfuncitem.stash[RESUMED])
        return result
    measured = measured_of(pyfuncitem)
    if measured is not None:
        measured.close()
        _publish(pyfuncitem, measured, pyfuncitem.funcargs["benchmark"])
    return result


def _publish(item: pytest.Function, measured: Measure | CountWork, benchmark: Any) -> None:
    """Untimed, nothing is kept: one run without a warm-up is a test and no measurement."""
    durations_s = tuple(measured.primary_durations_s())
    if benchmark.enabled:
        seen = item.config.stash[WATCH].end(measured.runs)
        _keep(item, Published(_result_of(item, measured, seen, measured.runs), durations_s))
    else:
        replay(benchmark, durations_s)


def _keep(item: pytest.Function, published: Published) -> None:
    benchmark: Any = item.funcargs["benchmark"]
    costs = None if RESUMED in item.stash else _costs_of(item)
    item.stash[PUBLISHED] = published
    item.config.stash.setdefault(RESULTS, []).append(published.result)
    item.config.stash.setdefault(_KEPT, []).append(benchmark.extra_info)
    item.config.stash.setdefault(_COSTS, []).append(costs)
    benchmark.extra_info.update(published.result.as_dict())
    replay(benchmark, published.durations_s)


def publish_undefined(item: pytest.Function, measured: Measure | CountWork) -> None:
    """Keep a case that could not be measured: all that it declares is undefined, and its flags say why.

    pytest-benchmark has no place for a case without a time; such results stand beside its own in the file.
    """
    measured.measurements[:] = _undefined(item)
    stash, seen = item.config.stash, item.config.stash[WATCH].end({})
    stash.setdefault(RESULTS, []).append(_result_of(item, measured, seen, {}))
    stash.setdefault(_KEPT, []).append({})
    stash.setdefault(_COSTS, []).append({})


def _undefined(item: pytest.Function) -> Iterator[Measurement]:
    arms, quantities = declaration_of(item)
    for each in map(metric, quantities):
        for arm in [_label(each, item)] if each.compares_arms else arms:
            yield Measurement(metric=each, arm=arm, value=None, samples=(), num_observations=0, low=None, high=None)


def _label(of: Metric, item: pytest.Function) -> str:
    """What a metric of several arms is told of: as in the other cases of the benchmark, if any was measured."""
    others = [each for each in item.config.stash.get(RESULTS, []) if each.benchmark == benchmark_id(item)]
    told = (m.arm for each in others for m in each.measurements if m.metric is of)
    return next(told, of.label or of.title)


def take_results(config: pytest.Config) -> list[BenchmarkResult]:
    """Take what has values out of a session, so that nothing is printed or drawn. The rest is told by its failure."""
    results, config.stash[RESULTS] = config.stash.get(RESULTS, []), []
    return [each for each in results if not each.is_gap]


def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    """What has no values goes beside pytest-benchmark's own, which cannot do without a time."""
    gaps = [result for result in config.stash.get(RESULTS, []) if result.is_gap]
    if gaps:
        output_json[GAPS] = [{"fullname": each.benchmark, "extra_info": each.as_dict()} for each in gaps]


def _result_of(
    item: pytest.Function, measured: Measure | CountWork, seen: Seen, runs: Mapping[str, Sequence[RunTiming]]
) -> BenchmarkResult:
    subject: Any = item.funcargs["model"]
    return BenchmarkResult(
        benchmark=benchmark_id(item),
        case=case_id(item),
        params=dict(item.callspec.params) if hasattr(item, "callspec") else {},
        measurements=tuple(measured.measurements),
        provenance=provenance(_package(item.config), subject.describe() | seen.facts | _told_of(item.config)),
        flags=(*measured.flags, *seen.flags),
        runs=runs,
        details=measured.details,
    )


def _package(config: pytest.Config) -> Path | None:
    return None if endpoint_of(config) else package_folder()


def _costs_of(item: pytest.Function) -> Costs:
    """What the arms of a benchmark have to read and compute; the ceilings are looked at again beside it.

    Nothing beside another session: both compute meanwhile, and each would take the other's share for a ceiling. Nothing
    of requests that shared their steps: none alone tells what these cost.
    """
    measure, subject, config = item.funcargs.get("measure"), item.funcargs["model"], item.config
    if not isinstance(measure, Measure) or LED in config.stash or measure.shares_steps or endpoint_of(config):
        return {}
    told: Any = subject
    config.stash.setdefault(_CEILINGS, Ceilings(str(item.funcargs["device"]), told.dtype)).look()
    return {arm: told.cost(**options) for arm, options in measure.arms.items()}


def _told_of(config: pytest.Config) -> dict[str, Any]:
    """The session: a planted slowdown says so, for it is no measurement of the engine; and a GPU says which it is."""
    percent, claim = config.getoption("--planted-slowdown"), config.stash.get(CLAIM, None)
    planted = {} if percent is None else {"planted_slowdown_percent": percent}
    return planted if claim is None else planted | {"claim": claim_of(claim, Worker.of())}


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Judge the whole pass before anybody stores or prints its results."""
    stash = session.config.stash
    if WATCH in stash and stash.get(RESULTS, []):
        seen, ceilings = stash[WATCH].close_pass(), stash.get(_CEILINGS, None)
        every_result: list[BenchmarkResult] = stash[RESULTS]
        every_costs: list[Costs | None] = stash[_COSTS]
        told = zip(every_result, every_costs, strict=True)
        results = stash[RESULTS] = [_finished(result, costs, seen, ceilings) for result, costs in told]
        every_kept: list[dict[str, Any]] = stash[_KEPT]
        for number, kept in enumerate(every_kept):
            kept.update(results[number].as_dict())
    return (yield)


def _finished(result: BenchmarkResult, costs: Costs | None, seen: Seen, ceilings: Ceilings | None) -> BenchmarkResult:
    """What is of this session, judged by its control and its ceilings. The rest says that nobody has judged it."""
    return result if costs is None else _with_shares(_judged(result, seen), costs, ceilings)


def _judged(result: BenchmarkResult, seen: Seen) -> BenchmarkResult:
    """The result with what was seen of its whole pass."""
    facts = {**result.provenance, **seen.facts}
    return dataclasses.replace(result, flags=(*result.flags, *seen.flags), provenance=facts)


def _with_shares(result: BenchmarkResult, costs: Costs, ceilings: Ceilings | None) -> BenchmarkResult:
    """With how near its arms came to the highest ceilings of the session."""
    if ceilings is None or not costs:
        return result
    shares, flags = shares_of(result.runs, costs, ceilings)
    return dataclasses.replace(
        result,
        measurements=(*result.measurements, *shares),
        flags=(*result.flags, *flags),
        provenance={**result.provenance, "ceilings": ceilings.as_dict()},
    )
