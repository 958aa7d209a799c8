"""Tables of results as data: one per quantity, a row per case and file, cells that say how sure they are.

Knows how a result reads in a row. Refuses to know whether the row becomes HTML or Markdown.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.harness.curves import Labelled
from benchmarks.harness.doubts import doubts_of_cell
from benchmarks.harness.metrics import METRICS, Metric
from benchmarks.harness.report import name_of, number_text, of_metric, scale_of
from benchmarks.harness.results import BenchmarkResult, Measurement

_MANY = 4
"""So many different values of one provenance key are shown; the rest is counted."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One number as people read it. `doubt` says in a few words why to look twice, "" for no reason."""

    value: str
    interval: str = ""
    n: str = ""
    doubt: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case in one file, of one `arm` where arms are no columns. A cell is None where the case lacks the column."""

    case: str
    file: str
    arm: str = ""
    cells: tuple[Cell | None, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under the benchmark that they belong to; `columns` are arms, or counters with their units."""

    title: str
    note: str
    formula: str
    columns: tuple[str, ...]
    groups: tuple[tuple[str, tuple[Row, ...]], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operators:
    """The operators of one case: how often each ran in each arm, and that count as a share of the largest."""

    title: str
    arms: tuple[str, ...]
    rows: tuple[tuple[str, tuple[tuple[int, float], ...]], ...]


def quantity_tables(labelled: Sequence[Labelled]) -> list[Table]:
    """A table per quantity that is no count of work, in the order of declaration; its columns are arms."""
    wanted = [metric for metric in METRICS.values() if not metric.is_exact]
    return [_quantity_table(metric, labelled) for metric in wanted if any(of_metric(r, metric) for _, r in labelled)]


def counter_tables(labelled: Sequence[Labelled]) -> list[Table]:
    """One table for all counts of work: a row per case, file and arm, a column per count; none without counts."""
    counted = [m for _, result in labelled for m in result.measurements if m.metric.is_exact]
    columns = [metric for metric in METRICS.values() if any(m.metric is metric for m in counted)]
    if not columns:
        return []
    groups = tuple((test, rows) for test, each in _by_test(labelled) if (rows := tuple(_counter_rows(each, columns))))
    return [
        Table(
            title="Counts of work",
            note=_common_note(columns),
            formula="; ".join(f"{metric.title}: {metric.formula}" for metric in columns),
            columns=tuple(named_with_unit(metric) for metric in columns),
            groups=groups,
        )
    ]


def _quantity_table(metric: Metric, labelled: Sequence[Labelled]) -> Table:
    found = [m for _, result in labelled for m in of_metric(result, metric)]
    unit, factor = scale_of(metric, found)
    arms = tuple(dict.fromkeys(m.arm for m in found))
    groups = tuple(
        (test, rows)
        for test, results in _by_test(labelled)
        if (rows := tuple(_row(label, r, metric, arms, factor) for label, r in results if of_metric(r, metric)))
    )
    note = f"{unit}, {metric.better} is better"
    return Table(title=metric.title, note=note, formula=metric.formula, columns=arms, groups=groups)


def _row(label: str, result: BenchmarkResult, metric: Metric, arms: Sequence[str], factor: float) -> Row:
    by_arm = {m.arm: _cell(m, result, factor) for m in of_metric(result, metric)}
    return Row(case=case_text(result), file=label, cells=tuple(by_arm.get(arm) for arm in arms))


def _cell(measurement: Measurement, result: BenchmarkResult, factor: float) -> Cell:
    doubt = doubts_of_cell(result, measurement)
    n = str(measurement.num_observations)
    if measurement.value is None:
        return Cell(value="undefined", n=n, doubt=doubt)
    low, high = measurement.low, measurement.high
    interval = "" if low is None or high is None else f"{_digits(low * factor)} .. {_digits(high * factor)}"
    return Cell(value=_digits(measurement.value * factor), interval=interval, n=n, doubt=doubt)


def _digits(value: float) -> str:
    """Three significant digits, zeros at the end included, so that numbers in a column line up."""
    if abs(value) >= 100 or not value:
        return f"{value:.0f}"
    return f"{value:#.3g}" if abs(value) >= 1e-4 else number_text(value)


def _counter_rows(results: Sequence[Labelled], columns: Sequence[Metric]) -> Iterator[Row]:
    for label, result in results:
        for arm in dict.fromkeys(m.arm for m in result.measurements if m.metric.is_exact):
            counts = {m.metric.name: m.value for m in result.measurements if m.arm == arm}
            cells = tuple(_count(counts[metric.name]) if metric.name in counts else None for metric in columns)
            yield Row(case=case_text(result), file=label, arm=arm, cells=cells)


def _common_note(columns: Sequence[Metric]) -> str:
    directions = {metric.better for metric in columns}
    direction = f"; {directions.pop()} is better" if len(directions) == 1 else ""
    return f"exact: the same on every run, so any change is a change{direction}"


def named_with_unit(metric: Metric) -> str:
    """A count's title, with its unit unless the title says it."""
    return metric.title if metric.unit.lower() in metric.title.lower() else f"{metric.title}, {metric.unit}"


def _count(value: float | None) -> Cell:
    if value is None:
        return Cell(value="undefined")
    return Cell(value=f"{int(value):,}" if value == int(value) else number_text(value))


def _by_test(labelled: Sequence[Labelled]) -> list[tuple[str, list[Labelled]]]:
    """Results by benchmark, each case beside the same case of the other files."""
    tests: dict[str, dict[str, list[Labelled]]] = {}
    for label, result in labelled:
        tests.setdefault(result.benchmark, {}).setdefault(result.case, []).append((label, result))
    return [(test, [each for of_case in cases.values() for each in of_case]) for test, cases in tests.items()]


def case_text(result: BenchmarkResult) -> str:
    """A case under its benchmark's heading."""
    return result.case or "(one case)"


def labelled_name(label: str, result: BenchmarkResult) -> str:
    """A case as people say it, with its file where there are several."""
    return f"{name_of(result)} in {label}" if label else name_of(result)


def operator_counts(labelled: Sequence[Labelled]) -> Iterator[Operators]:
    """The histogram of every case that has one, the most frequent operator first."""
    for label, result in labelled:
        counts: Mapping[str, Mapping[str, int]] = result.details.get("operators", {})
        names = {name: max(each.get(name, 0) for each in counts.values()) for each in counts.values() for name in each}
        most = max(names.values(), default=0) or 1
        if names:
            rows = tuple(
                (name, tuple((each.get(name, 0), each.get(name, 0) / most) for each in counts.values()))
                for name in sorted(names, key=lambda name: (-names[name], name))
            )
            yield Operators(title=labelled_name(label, result), arms=tuple(counts), rows=rows)


def side_by_side(told: Sequence[Sequence[Mapping[str, Any]]]) -> list[tuple[str, list[str]]]:
    """Every key that any file tells, and per file what it says; several values where its results differ."""
    flat = [[dict(_flatten(each)) for each in of_file] for of_file in told]
    keys = dict.fromkeys(key for of_file in flat for each in of_file for key in each)
    return [(key, [_values([each[key] for each in of_file if key in each]) for of_file in flat]) for key in keys]


def _flatten(told: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in told.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + str(key), " ".join(map(_plain, value)) if isinstance(value, list) else _plain(value)


def _plain(value: Any) -> str:
    if value is None:
        return "not known"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _values(values: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(values))
    rest = f"; and {len(distinct) - _MANY} more" if len(distinct) > _MANY else ""
    return "; ".join(distinct[:_MANY]) + rest
