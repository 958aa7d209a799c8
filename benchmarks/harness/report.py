"""The tables under a benchmark run: one per quantity, a row per case, a column per arm, with interval and n.

Knows finished results and how people read numbers. Computes nothing that a result does not hold.
"""

import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.harness.metrics import METRICS, Metric
from benchmarks.harness.one_time import told_together
from benchmarks.harness.results import BenchmarkResult, Measurement

_SCALES = ((1.0, "s", 1.0), (1e-3, "ms", 1e3), (0.0, "us", 1e6))
_WIDTH = 110
_MANY_COLUMNS = 8


def print_summary(results: Sequence[BenchmarkResult], curve_folder: Path, terminal: Any) -> None:
    """Write tables and provenance to pytest's terminal, draw the curves, and say where they are."""
    from benchmarks.harness.curves import draw_curves

    terminal.section("nanoserve: what was measured", sep="-")
    terminal.write(render(results, colour=terminal.isatty))
    try:
        for path in draw_curves(results, curve_folder):
            terminal.write_line(f"curve: {path}")
    except OSError as error:
        terminal.write_line(f"the curves could not be written: {error}")


def render(results: Sequence[BenchmarkResult], *, colour: bool = False) -> str:
    """All tables and the provenance as text, quantities in the order of their declaration."""
    console = Console(
        file=io.StringIO(), width=_WIDTH, force_terminal=colour, highlight=False, markup=False, emoji=False
    )
    for metric in [metric for metric in METRICS.values() if not metric.is_exact]:
        rows = [(result, found) for result in results if (found := of_metric(result, metric))]
        if rows:
            console.print(_heading(metric, rows), style="bold", soft_wrap=True)
            factor = scale_of(metric, [m for _, found in rows for m in found])[1]
            for same in _by_arms(rows):
                console.print(_table(metric, same, factor))
            console.print()
    counted = [result for result in results if any(m.metric.is_exact for m in result.measurements)]
    for benchmark in dict.fromkeys(result.benchmark for result in counted):
        group = [result for result in counted if result.benchmark == benchmark]
        console.print(f"{_short(benchmark)}: work, counted exactly (lower is better)", style="bold", soft_wrap=True)
        console.print(_table_of_counts(group))
    for line in [*_doubts(results), *_provenance(results)]:
        console.print(line, soft_wrap=True)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def of_metric(result: BenchmarkResult, metric: Metric) -> list[Measurement]:
    """What a result holds of one metric, an arm each; a coefficient that the points leave open is nothing to tell."""
    of = [measurement for measurement in result.measurements if measurement.metric is metric]
    return [measurement for measurement in of if measurement.value is not None or not metric.coefficient]


Rows = Sequence[tuple[BenchmarkResult, list[Measurement]]]


def _heading(metric: Metric, rows: Rows) -> str:
    unit, _ = scale_of(metric, [m for _, found in rows for m in found])
    return f"{metric.title} ({unit}, {metric.better} is better): {metric.formula}"


def _by_arms(rows: Rows) -> list[Rows]:
    """Rows with the same arms stand in one table: none has columns for the arms of others."""
    groups: dict[tuple[str, ...], list[tuple[BenchmarkResult, list[Measurement]]]] = {}
    for result, found in rows:
        groups.setdefault(tuple(m.arm for m in found), []).append((result, found))
    return list(groups.values())


def _table(metric: Metric, rows: Rows, factor: float) -> Table:
    arms = list(dict.fromkeys(m.arm for _, found in rows for m in found))
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("benchmark")
    table.add_column("n", justify="right")
    for arm in arms:
        table.add_column(arm)
    for result, found in rows:
        by_arm = {m.arm: m for m in found}
        cells = [_cell(by_arm[arm], factor) if arm in by_arm else "" for arm in arms]
        table.add_row(name_of(result), str(found[0].num_observations), *cells)
    return table


def _table_of_counts(results: Sequence[BenchmarkResult]) -> Table:
    """A row per count, a column per case and arm, or the other way round where these are many."""
    found: dict[str, dict[Metric, float | None]] = {}
    for result in results:
        for m in result.measurements:
            if m.metric.is_exact:
                found.setdefault(f"{result.case} {m.arm}".strip(), {})[m.metric] = m.value
    counts = [metric for metric in METRICS.values() if any(metric in each for each in found.values())]
    rows = [["count", *found], *([of.title, *(_count_text(each.get(of)) for each in found.values())] for of in counts)]
    if len(found) > _MANY_COLUMNS:
        rows = [list(row) for row in zip(*rows, strict=True)]
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in rows[0]:
        table.add_column(heading, justify="left" if heading == rows[0][0] else "right")
    for row in rows[1:]:
        table.add_row(*row)
    table.add_row()
    return table


def _count_text(value: float | None) -> str:
    return "undefined" if value is None else f"{value:,.0f}"


def scale_of(metric: Metric, measurements: Iterable[Measurement]) -> tuple[str, float]:
    """The unit in which a group of numbers reads best, and what to multiply them by. Only seconds are scaled."""
    if metric.shown_in:
        return next((unit, factor) for _, unit, factor in _SCALES if unit == metric.shown_in)
    values = [m.value for m in measurements if m.value]
    if metric.unit != "s" or not values:
        return metric.unit, 1.0
    return seconds_scale(max(map(abs, values)))


def seconds_scale(largest_s: float) -> tuple[str, float]:
    """The unit in which times up to `largest_s` read best, and what to multiply seconds by."""
    return next((unit, factor) for least, unit, factor in _SCALES if largest_s >= least)


def _cell(measurement: Measurement, factor: float) -> str:
    if measurement.value is None:
        return "undefined"
    text = number_text(measurement.value * factor)
    if measurement.is_too_small:
        return f"{text} (n too small)"
    if measurement.low is None or measurement.high is None:
        return f"{text} (too few runs)"
    ends = (number_text(end * factor) for end in (measurement.low, measurement.high))
    return f"{text} [{' .. '.join(ends)}]"


def number_text(value: float) -> str:
    """Three significant digits, without an exponent."""
    return (
        f"{value:.0f}"
        if abs(value) >= 100
        else np.format_float_positional(value, precision=3, fractional=False, trim="-")
    )


class OfCase(Protocol):
    """Whatever belongs to one case of a benchmark: a result, or one quantity of it."""

    @property
    def benchmark(self) -> str: ...

    @property
    def case(self) -> str: ...


def name_of(of: OfCase) -> str:
    """A case as people say it: `growth[16]`."""
    return f"{_short(of.benchmark)}[{of.case}]" if of.case else _short(of.benchmark)


def _short(benchmark: str) -> str:
    return (benchmark.partition("::")[2] or benchmark).removeprefix("test_")


def _doubts(results: Sequence[BenchmarkResult]) -> Iterator[str]:
    """What is not to be trusted without a second look."""
    for result in results:
        for flag in result.flags:
            yield f"! {flag.kind}: {' '.join(filter(None, (name_of(result), flag.arm)))}: {flag.what}"
    if any(flag.kind in ("step", "outlier") for result in results for flag in result.flags):
        yield "  samples count from 0"


def _served(results: Sequence[BenchmarkResult]) -> Iterator[str]:
    """What a server says of itself, beside its client."""
    for result in results:
        for arm, beside in result.details.get("server", {}).items():
            means = {name: (each["server_mean_s"], each["client_mean_s"]) for name, each in beside.items()}
            told = [
                f"{name.removesuffix('_s').upper()} {number_text(server_s * 1e3)} and {number_text(client_s * 1e3)} ms"
                for name, (server_s, client_s) in means.items()
                if server_s is not None and client_s is not None
            ]
            yield f"means of the server, and of its client: {name_of(result)} {arm}: {', '.join(told)}"


def _watched(results: Sequence[BenchmarkResult]) -> Iterator[str]:
    """What the instrument cost, and what its control says of the machine."""
    watches = [result.provenance["stopwatch"] for result in results if result.runs and "stopwatch" in result.provenance]
    if watches:
        cost_s = max((cost for watch in watches for cost in watch["cost_s"].values()), default=0.0)
        share = max((share for watch in watches for share in watch["share_of_run"].values()), default=0.0)
        stamp_ns, resolution_ns = watches[0]["stamp_ns"], watches[0]["resolution_ns"]
        most = f"{cost_s * 1e6:.2g} us or {share * 100:.1g} %"
        yield f"instrument: {stamp_ns:.0f} ns a stamp, at most {most} of a run; the clock resolves {resolution_ns} ns"
    ceilings = next((told for result in results if (told := result.provenance.get("ceilings"))), None)
    if ceilings:
        read, flops = ceilings["read_bytes_per_s"] / 1e9, ceilings["flops_per_s"] / 1e9
        yield f"ceilings measured here: {number_text(read)} GB/s read, {number_text(flops)} GFLOP/s"
    once = told_together([result.details for result in results])
    if once:
        yield f"paid once: {once}"
    control = results[0].provenance.get("control")
    if control:
        known = f"undisturbed passes known: {control['num_clean']}; 3 make a band"
        yield f"control kernel: median {control['median_s'] * 1e3:.2f} ms, {control['state']} ({known})"
        yield from (f"note: {note}" for note in control["notes"])


def _provenance(results: Sequence[BenchmarkResult]) -> Iterator[str]:
    told = results[0].provenance
    yield from _served(results)
    yield "value [95 % interval of the median run, from order statistics]; n counts observations; nothing was dropped"
    if told.get("endpoint"):
        yield f"model {told['model']} at {told['endpoint']['url']}; asked from: {told['cpu']}"
        yield from _watched(results)
        return
    yield f"model {told['model']} ({told['weights']}), {told['dtype']}, {told['attention']}"
    where = told["device_name"] or told["cpu"]
    load = f", load {told['load_average'][0]:.2f}" if told.get("load_average") else ""
    yield f"on {told['device']}: {where}, {told['num_threads']} threads{load}"
    yield from _watched(results)
    commit, _, dirty = (told["commit"] or "no commit").partition("+")
    yield f"nanoserve at {commit[:12]}{dirty and '+dirty'}, source {told['source_sha256'][:12]}, from {told['package']}"
