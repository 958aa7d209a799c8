"""The study's picture in two panels, ours with intervals and theirs as hollow marks.

Left: tokens per second of both paths against the length of the answer, and the speedup. Right: TTFT and decode rate
against the length of the prompt. Knows matplotlib and the two sweeps.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.curves import PALETTE, Point, draw_bars
from benchmarks.harness.metrics import metric
from benchmarks.harness.results import BenchmarkResult, summarise_runs
from benchmarks.studies.cache_points import GENERATION, PROMPT, points_of

Published = Mapping[tuple[str, int, str, str], float]
Points = Sequence[tuple[int, BenchmarkResult]]


def draw(results: Sequence[BenchmarkResult], published: Published, folder: Path) -> Iterator[Path]:
    """Write the picture as SVG and PNG; yield their paths."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    told = results[0].provenance
    where = told["device_name"] or told["cpu"]
    figure.suptitle(
        f"{told['model']} ({told['weights']}), {told['dtype']}, {where}, {told['num_threads']} threads; "
        f"bars: 95 % intervals of {_num_runs(results)} runs; hollow: published, another machine",
        fontsize=9, parse_math=False,
    )  # fmt: skip
    left, right = figure.subplots(1, 2)
    _draw_generation(left, points_of(results, GENERATION), published)
    _draw_prompt(right, points_of(results, PROMPT), published)
    for suffix in ("svg", "png"):
        path = folder / f"cache_curve.{suffix}"
        figure.savefig(path, dpi=144)
        yield path


def _num_runs(results: Sequence[BenchmarkResult]) -> int:
    return max((len(runs) for result in results for runs in result.runs.values()), default=0)


def _draw_generation(axes: Any, points: Points, published: Published) -> None:
    for arm, colour in (("cached", PALETTE[0]), ("naive", PALETTE[1])):
        _draw(axes, _ours(points, arm, "e2e_tokens_per_s"), colour, f"{arm}, tokens/s")
        totals_s = _theirs(points, published, GENERATION, arm, "e2e_s")
        _hollow(axes, {n: n / e2e_s for n, e2e_s in totals_s.items()}, colour)
    second, arms = axes.twinx(), "cached over naive"
    speedups = [(n, m) for n, result in points for m in result.measurements if m.metric.name == "speedup"]
    _draw(second, speedups, PALETTE[2], "speedup", "^")
    _hollow(second, _theirs(points, published, GENERATION, arms, "speedup"), PALETTE[2], "^")
    _finish(axes, second, "output tokens", "tokens/s, prefill included", "speedup of totals", place="center right")


def _draw_prompt(axes: Any, points: Points, published: Published) -> None:
    _draw(axes, _ours(points, "cached", "ttft_s"), PALETTE[0], "TTFT, s")
    _hollow(axes, _theirs(points, published, PROMPT, "cached", "ttft_s"), PALETTE[0])
    second = axes.twinx()
    _draw(second, _ours(points, "cached", "decode_tokens_per_s"), PALETTE[3], "decode rate, tokens/s")
    itls = _theirs(points, published, PROMPT, "cached", "itl_p50_s")
    _hollow(second, {n: 1 / itl_s for n, itl_s in itls.items()}, PALETTE[3])
    _finish(axes, second, "prompt tokens", "TTFT, s", "decode tokens/s", place="lower right")


def _ours(points: Points, arm: str, name: str) -> list[Point]:
    """A metric of the runs of one arm, where it was run and is defined; a study need not have declared it."""
    found = [(n, summarise_runs(metric(name), arm, result.runs[arm])) for n, result in points if arm in result.runs]
    return [(n, measurement) for n, measurement in found if measurement.value is not None]


def _draw(axes: Any, points: Sequence[Point], colour: str, label: str, marker: str = "o") -> None:
    draw_bars(axes, points, color=colour, label=label, marker=marker)


def _theirs(points: Points, published: Published, sweep: str, arm: str, metric: str) -> dict[int, float]:
    keys = {n: (sweep, n, arm, metric) for n, _ in points}
    return {n: published[key] for n, key in keys.items() if key in published}


def _hollow(axes: Any, by_length: Mapping[int, float], colour: str, marker: str = "o") -> None:
    looks = {"markerfacecolor": "none", "markersize": 6, "linewidth": 0.8, "linestyle": ":", "alpha": 0.8}
    axes.plot(list(by_length), list(by_length.values()), color=colour, marker=marker, **looks)


def _finish(axes: Any, second: Any, x: str, left: str, right: str, *, place: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(left)
    second.set_ylabel(right)
    for each in (axes, second):
        each.set_ylim(0, each.get_ylim()[1] * 1.08)
    axes.grid(alpha=0.25)
    handles = [handle for each in (axes, second) for handle in each.get_legend_handles_labels()[0]]
    labels = [label for each in (axes, second) for label in each.get_legend_handles_labels()[1]]
    axes.legend(handles, labels, fontsize=8, loc=place)
