"""Pictures of what was measured against the one number that was varied: points, medians and intervals per arm.

Knows results whose cases differ in a number. Draws what they hold and fits nothing.
"""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.metrics import METRICS, Metric
from benchmarks.harness.report import scale_of
from benchmarks.harness.results import BenchmarkResult, Measurement

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
"""Okabe and Ito's palette, told apart by colour-blind readers."""

Point = tuple[float, Measurement]


def draw_curves(results: Sequence[BenchmarkResult], folder: Path) -> Iterator[Path]:
    """Write an SVG and a PNG for each benchmark that was run at two or more values of a number; yield their paths."""
    for benchmark in dict.fromkeys(result.benchmark for result in results):
        group = [result for result in results if result.benchmark == benchmark]
        axis = _numeric_axis(group)
        if axis is not None:
            yield from _draw(benchmark, axis, group, folder)


def _numeric_axis(group: Sequence[BenchmarkResult]) -> str | None:
    """The parameter that is a number everywhere, never a flag, and takes more than one value."""
    for name in group[0].params:
        values = [result.params.get(name) for result in group]
        numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        if numeric and len(set(values)) > 1:
            return name
    return None


def _draw(benchmark: str, axis: str, group: Sequence[BenchmarkResult], folder: Path) -> Iterator[Path]:
    from matplotlib.figure import Figure

    gated = [metric for metric in METRICS.values() if metric.gate and any(_points(group, axis, metric).values())]
    if not gated:
        return
    columns = 2 if len(gated) > 1 else 1
    rows = -(-len(gated) // columns)
    figure = Figure(figsize=(5 * columns, 3.4 * rows), layout="constrained")
    figure.suptitle(_title(benchmark, group[0]), fontsize=10)
    for number, metric in enumerate(gated):
        _draw_panel(figure.add_subplot(rows, columns, number + 1), metric, axis, _points(group, axis, metric))
    folder.mkdir(parents=True, exist_ok=True)
    stem = benchmark.replace(".py::", "-").replace("/", "-")
    for suffix in ("svg", "png"):
        path = folder / f"{stem}.{suffix}"
        figure.savefig(path, dpi=144)
        yield path


def _points(group: Sequence[BenchmarkResult], axis: str, metric: Metric) -> dict[str, list[Point]]:
    """Per line, which is an arm at fixed other parameters, the measurements of one metric in the order of the axis."""
    by_line: dict[str, list[Point]] = {}
    for result in sorted(group, key=lambda result: result.params[axis]):
        others = [f"{name}={value}" for name, value in result.params.items() if name != axis]
        for measurement in result.measurements:
            if measurement.metric is metric and measurement.value is not None:
                line = ", ".join([measurement.arm, *others])
                by_line.setdefault(line, []).append((result.params[axis], measurement))
    return by_line


def _draw_panel(axes: Any, metric: Metric, axis: str, by_line: dict[str, list[Point]]) -> None:
    unit, factor = scale_of(metric, [m for points in by_line.values() for _, m in points])
    for colour, (line, points) in zip(itertools.cycle(_COLOURS), by_line.items(), strict=False):
        xs = [x for x, _ in points]
        ys = [(m.value or 0) * factor for _, m in points]
        lows = [
            y - (m.low if m.low is not None else m.value or 0) * factor for y, (_, m) in zip(ys, points, strict=True)
        ]
        highs = [
            (m.high if m.high is not None else m.value or 0) * factor - y for y, (_, m) in zip(ys, points, strict=True)
        ]
        axes.errorbar(xs, ys, yerr=(lows, highs), color=colour, marker="o", markersize=4, capsize=3, label=line)
        for x, m in points:
            axes.plot(
                [x] * len(m.samples), [s * factor for s in m.samples], ".", color=colour, alpha=0.35, markersize=3
            )
    axes.set_title(f"{metric.title}, {metric.better} is better", fontsize=9)
    axes.set_xlabel(axis.replace("_", " "))
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)


def _title(benchmark: str, result: BenchmarkResult) -> str:
    told = result.provenance
    where = told["device_name"] or told["cpu"]
    return f"{benchmark}\n{told['model']}, {told['dtype']}, {where}; bars: 95 % intervals, dots: single runs"
