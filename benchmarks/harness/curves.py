"""Pictures of what was measured against the one number that was varied: points, medians and intervals per arm.

Knows results whose cases differ in a number, and how they are drawn on a pair of axes. Fits nothing: `figures.py`
adds that. A run that lies far off the others is named instead of drawn, so that the rest can be read.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.metrics import METRICS, Metric
from benchmarks.harness.report import number_text, scale_of
from benchmarks.harness.results import BenchmarkResult, Measurement

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
"""Okabe and Ito's colours, told apart by colour-blind readers; lines differ by marker as well."""

MARKERS = ("o", "s", "^", "D", "v")
"""As many as have no common divisor with the colours: thirty lines look different."""

_FAR_OFF = 5 * 1.4826
"""Median absolute deviations beyond which a run does not stretch the axis: five standard deviations of normal noise."""

_WORTH_CUTTING = 1.5
"""An axis is cut only where it would be this much longer with every run on it."""

_MOST_INSIDE = 5
"""A legend of more lines stands beside its panel, or it would hide what it explains."""

_DOT_PT, _SIDE_PT, _MAX_COLUMNS = 2.4, 6.0, 6

Labelled = tuple[str, BenchmarkResult]
"""A result and the file it is from, "" where there is only one."""

Point = tuple[float, Measurement]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One metric of one benchmark over the parameter `axis`.

    `lines` maps a name, which is an arm at fixed other parameters, to its points in the order of the axis. A number
    times `factor` is in `unit`. `gaps` says where there is no point, and why.
    """

    benchmark: str
    metric: Metric
    axis: str
    lines: dict[str, list[Point]]
    unit: str
    factor: float
    gaps: tuple[str, ...] = ()

    @property
    def points(self) -> list[Point]:
        return [point for points in self.lines.values() for point in points]


def curves_of(labelled: Sequence[Labelled]) -> Iterator[Curve]:
    """Every curve in some results: benchmarks in order, then the numbers that vary, then metrics as declared."""
    for benchmark in dict.fromkeys(result.benchmark for _, result in labelled):
        group = [each for each in labelled if each[1].benchmark == benchmark]
        for axis in _numeric_axes([result for _, result in group]):
            for metric in METRICS.values():
                lines = _lines(group, axis, metric)
                if lines:
                    unit, factor = scale_of(metric, [m for points in lines.values() for _, m in points])
                    yield Curve(
                        benchmark=benchmark, metric=metric, axis=axis, lines=lines, unit=unit, factor=factor,
                        gaps=_gaps(group, axis),
                    )  # fmt: skip


def _numeric_axes(group: Sequence[BenchmarkResult]) -> list[str]:
    """The parameters that are numbers everywhere, never flags, and take more than one value."""
    return [name for name in group[0].params if _varies([result.params.get(name) for result in group])]


def _varies(values: Sequence[Any]) -> bool:
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return numeric and len(set(values)) > 1


def _lines(group: Sequence[Labelled], axis: str, metric: Metric) -> dict[str, list[Point]]:
    """The lines of one metric; none when no line has two points."""
    lines: dict[str, list[Point]] = {}
    for label, result in sorted(group, key=lambda each: each[1].params[axis]):
        others = [f"{name}={value}" for name, value in result.params.items() if name != axis]
        for measurement in result.measurements:
            if measurement.metric is metric and measurement.value is not None:
                name = line_name(measurement.arm, others, label)
                lines.setdefault(name, []).append((result.params[axis], measurement))
    return lines if any(len({x for x, _ in points}) > 1 for points in lines.values()) else {}


def _gaps(group: Sequence[Labelled], axis: str) -> tuple[str, ...]:
    """The cases for which the memory did not suffice."""
    return tuple(
        f"nothing at {line_name(f'{axis}={result.params[axis]}', (), label)}: {flag.kind}"
        for label, result in group
        for flag in result.flags
        if flag.kind == "out of memory"
    )


def line_name(arm: str, others: Sequence[str], label: str) -> str:
    """What a line is called: the arm, then what else tells it from the others."""
    return ", ".join([arm, *others, *([label] if label else [])])


def draw_curves(results: Sequence[BenchmarkResult], folder: Path) -> Iterator[Path]:
    """Write an SVG and a PNG for each benchmark that was run at two or more values of a number; yield their paths."""
    gated = [curve for curve in curves_of([("", result) for result in results]) if curve.metric.gate]
    for benchmark, axis in dict.fromkeys((curve.benchmark, curve.axis) for curve in gated):
        panels = [curve for curve in gated if (curve.benchmark, curve.axis) == (benchmark, axis)]
        first = next(curve.axis for curve in gated if curve.benchmark == benchmark)
        stem = benchmark.replace(".py::", "-").replace("/", "-") + ("" if axis == first else f"-{axis}")
        told = next(result for result in results if result.benchmark == benchmark)
        yield from _save(_figure(panels, _title(benchmark, told)), folder, stem)


def _figure(panels: Sequence[Curve], title: str) -> Any:
    """The panels below each other in two columns, each with a legend."""
    from matplotlib.figure import Figure

    columns = 2 if len(panels) > 1 else 1
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5 * columns, 3.4 * rows), layout="constrained")
    figure.suptitle(title, fontsize=10, parse_math=False)
    for number, curve in enumerate(panels):
        axes = figure.add_subplot(rows, columns, number + 1)
        draw_points(axes, curve, {name: place for place, name in enumerate(curve.lines)}, joined=True)
        axes.set_title(f"{curve.metric.title}, {curve.metric.better} is better", fontsize=9)
        axes.annotate(off_scale(curve), (0.98, 0.98), xycoords="axes fraction", ha="right", va="top", fontsize=8)
        legend = axes.legend(axes.containers, list(curve.lines), fontsize=8)
        for text in legend.get_texts():
            text.set_parse_math(False)
        if len(curve.lines) > _MOST_INSIDE:
            legend.set_loc("upper left")
            legend.set_bbox_to_anchor((1.0, 1.0))
    return figure


def _save(figure: Any, folder: Path, stem: str) -> Iterator[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for suffix in ("svg", "png"):
        path = folder / f"{stem}.{suffix}"
        figure.savefig(path, dpi=144)
        yield path


def draw_points(axes: Any, curve: Curve, places: Mapping[str, int], *, joined: bool) -> None:
    """Medians with their intervals, every run beside them, the scale from zero. `places` picks colours and markers."""
    bottom, top = visible_range(curve)
    axes.set_ylim(bottom, top)
    axes.set_xmargin(0.1)
    for side, (name, points) in enumerate(curve.lines.items()):
        colour, marker = style(places[name])
        how = {"color": colour, "marker": marker, "label": name, "linestyle": "-" if joined else "none"}
        draw_bars(axes, points, factor=curve.factor, **how)
        for x, measurement in points:
            _draw_runs(axes, x, _scaled(measurement, curve, bottom, top), colour, -1 if side % 2 else 1)
    axes.set_xlabel(_drawable(curve.axis.replace("_", " ")), parse_math=False)
    axes.set_ylabel(curve.unit)
    axes.grid(alpha=0.25)


def _drawable(text: str) -> str:
    """A text in letters that every font has; the others by their number."""
    return "".join(each if each.isascii() and each.isprintable() else f"\\u{ord(each):04x}" for each in text)


def style(place: int) -> tuple[str, str]:
    """Colour and marker of the line at a place."""
    return PALETTE[place % len(PALETTE)], MARKERS[place % len(MARKERS)]


def draw_bars(axes: Any, points: Sequence[Point], *, factor: float = 1.0, **looks: Any) -> None:
    """Each value with its interval, without one where it has none. A number times `factor` is drawn."""
    ys = [(m.value or 0.0) * factor for _, m in points]
    lows = [y - (y if m.low is None else m.low * factor) for y, (_, m) in zip(ys, points, strict=True)]
    highs = [(y if m.high is None else m.high * factor) - y for y, (_, m) in zip(ys, points, strict=True)]
    ends = [[max(end, 0.0) for end in side] for side in (lows, highs)]
    axes.errorbar([x for x, _ in points], ys, yerr=ends, markersize=4, capsize=3, linewidth=1.2, **looks)


def _draw_runs(axes: Any, x: float, ys: Sequence[float], colour: str, side: int) -> None:
    """Runs as dots beside their bar, in as many columns as it takes to see each one."""
    from matplotlib.transforms import offset_copy

    height_pt = axes.get_window_extent().height * 72 / axes.figure.dpi
    bottom, top = axes.get_ylim()
    for column, y in columns_of(ys, (top - bottom) * _DOT_PT / height_pt):
        place = offset_copy(axes.transData, axes.figure, x=side * (_SIDE_PT + column * _DOT_PT), units="points")
        axes.plot([x], [y], ".", color=colour, alpha=0.6, markersize=4, markeredgewidth=0, transform=place)


def columns_of(ys: Sequence[float], gap: float) -> list[tuple[int, float]]:
    """The column of each dot: the first in which it lies at least `gap` above the one below, the last when all do."""
    tops: list[float] = []
    placed = []
    for y in sorted(ys):
        free = next((column for column, top in enumerate(tops) if y - top >= gap), len(tops))
        column = min(free, _MAX_COLUMNS - 1)
        tops[column : column + 1] = [y]
        placed.append((column, y))
    return placed


def _scaled(measurement: Measurement, curve: Curve, bottom: float, top: float) -> list[float]:
    """The runs on the scale. A count is the same in every run: one number says it."""
    ys = [] if measurement.metric.is_exact else [sample * curve.factor for sample in measurement.samples]
    return [y for y in ys if bottom <= y <= top]


def visible_range(curve: Curve) -> tuple[float, float]:
    """The ends of the vertical axis: from zero, and over every run unless a few far ones would flatten the rest."""
    everything = [y for _, m in curve.points for y in (m.value, m.low, m.high, *m.samples) if y is not None]
    near = [y for _, m in curve.points for y in (m.value, *_near(m)) if y is not None]
    top, bottom = max(*everything, 0.0), min(*everything, 0.0)
    cut = max(*near, 0.0)
    top = cut if top > _WORTH_CUTTING * cut > 0 else top
    return bottom * 1.06 * curve.factor, top * 1.06 * curve.factor or 1.0


def _near(measurement: Measurement) -> list[float]:
    """The runs that are no stalled ones."""
    if not measurement.samples:
        return []
    middle = float(np.median(measurement.samples))
    spread = float(np.median([abs(sample - middle) for sample in measurement.samples]))
    return [sample for sample in measurement.samples if abs(sample - middle) <= _FAR_OFF * spread]


def off_scale(curve: Curve) -> str:
    """What the picture does not show, runs above a cut axis and gaps, in words; "" when it shows everything."""
    return "; ".join(filter(None, (_runs_above(curve), *curve.gaps)))


def _runs_above(curve: Curve) -> str:
    _, top = visible_range(curve)
    runs = [sample * curve.factor for _, m in curve.points for sample in m.samples]
    far = [y for y in runs if y > top and not math.isclose(y, top)]
    if not far:
        return ""
    return f"{len(far)} {'run' if len(far) == 1 else 'runs'} off the scale, up to {number_text(max(far))} {curve.unit}"


def _title(benchmark: str, result: BenchmarkResult) -> str:
    told = result.provenance
    where = told["device_name"] or told["cpu"]
    return f"{benchmark}\n{told['model']}, {told['dtype']}, {where}; bars: 95 % intervals, dots: single runs"
