"""The tables under a benchmark run: one per quantity, a row per case, a column per arm, with interval and n.

Knows finished results and how people read numbers. Computes nothing that a result does not hold.
"""

import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.harness.metrics import METRICS, Metric
from benchmarks.harness.results import BenchmarkResult, Measurement

_SCALES = ((1.0, "s", 1.0), (1e-3, "ms", 1e3), (0.0, "us", 1e6))
_WIDTH = 110


def print_summary(results: Sequence[BenchmarkResult], curve_folder: Path, terminal: Any) -> None:
    """Write tables and provenance to pytest's terminal, draw the curves, and say where they are."""
    from benchmarks.harness.curves import draw_curves

    terminal.section("nanoserve: what was measured", sep="-")
    terminal.write(render(results, colour=terminal.isatty))
    for path in draw_curves(results, curve_folder):
        terminal.write_line(f"curve: {path}")


def render(results: Sequence[BenchmarkResult], *, colour: bool = False) -> str:
    """All tables and the provenance as text, quantities in the order of their declaration."""
    console = Console(
        file=io.StringIO(), width=_WIDTH, force_terminal=colour, highlight=False, markup=False, emoji=False
    )
    for metric in METRICS.values():
        rows = [(result, found) for result in results if (found := _of_metric(result, metric))]
        if rows:
            console.print(_heading(metric, rows), style="bold", soft_wrap=True)
            console.print(_table(metric, rows))
    for line in [*_notes(results), *_provenance(results)]:
        console.print(line, soft_wrap=True)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def _of_metric(result: BenchmarkResult, metric: Metric) -> list[Measurement]:
    return [measurement for measurement in result.measurements if measurement.metric is metric]


Rows = Sequence[tuple[BenchmarkResult, list[Measurement]]]


def _heading(metric: Metric, rows: Rows) -> str:
    unit, _ = scale_of(metric, [m for _, found in rows for m in found])
    return f"{metric.title} ({unit}, {metric.better} is better): {metric.formula}"


def _table(metric: Metric, rows: Rows) -> Table:
    arms = list(dict.fromkeys(m.arm for _, found in rows for m in found))
    _, factor = scale_of(metric, [m for _, found in rows for m in found])
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("benchmark")
    table.add_column("n", justify="right")
    for arm in arms:
        table.add_column(arm)
    for result, found in rows:
        by_arm = {m.arm: m for m in found}
        cells = [_cell(by_arm[arm], factor) if arm in by_arm else "" for arm in arms]
        table.add_row(_name(result), str(found[0].num_observations), *cells)
    table.add_row()
    return table


def scale_of(metric: Metric, measurements: Iterable[Measurement]) -> tuple[str, float]:
    """The unit in which a group of numbers reads best, and what to multiply them by. Only seconds are scaled."""
    values = [m.value for m in measurements if m.value]
    if metric.unit != "s" or not values:
        return metric.unit, 1.0
    largest = max(values)
    return next((unit, factor) for least, unit, factor in _SCALES if largest >= least)


def _cell(measurement: Measurement, factor: float) -> str:
    if measurement.value is None:
        return "undefined"
    text = _number(measurement.value * factor)
    if measurement.is_too_small:
        return f"{text} (n too small)"
    if measurement.low is None or measurement.high is None:
        return f"{text} (too few runs)"
    ends = (_number(end * factor) for end in (measurement.low, measurement.high))
    return f"{text} [{' .. '.join(ends)}]"


def _number(value: float) -> str:
    """Three significant digits, without an exponent."""
    return (
        f"{value:.0f}" if value >= 100 else np.format_float_positional(value, precision=3, fractional=False, trim="-")
    )


def _name(result: BenchmarkResult) -> str:
    short = result.benchmark.partition("::")[2].removeprefix("test_")
    return f"{short}[{result.case}]" if result.case else short


def _notes(results: Sequence[BenchmarkResult]) -> Iterator[str]:
    for result in results:
        for note in result.notes:
            yield f"note on {_name(result)}: {note}"


def _provenance(results: Sequence[BenchmarkResult]) -> Iterator[str]:
    told = results[0].provenance
    yield "value [95 % interval of the median run, from order statistics]; n counts observations; nothing was dropped"
    yield f"model {told['model']} ({told['weights']}), {told['dtype']}, {told['attention']}"
    where = told["device_name"] or told["cpu"]
    yield f"on {told['device']}: {where}, {told['num_threads']} threads, load {told['load_average'][0]:.2f}"
    commit, _, dirty = (told["commit"] or "no commit").partition("+")
    yield f"nanoserve at {commit[:12]}{dirty and '+dirty'}, source {told['source_sha256'][:12]}, from {told['package']}"
