"""The prefix study's picture in five panels, ours with intervals and theirs as hollow marks.

T(n) with its curve and floor; the speedup of a hit over the prefix, real and by the proxy; breakeven over the prefix;
hit rates over slots, by policy; a conversation, turn by turn. A panel without data says so. Knows matplotlib.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.curves import PALETTE, style
from benchmarks.harness.prefill_cost import Curve
from benchmarks.harness.report import seconds_scale
from benchmarks.harness.results import BenchmarkResult
from benchmarks.harness.stats import Estimate
from benchmarks.studies.claims import median_of
from benchmarks.studies.prefix_points import (
    BATCHED,
    REUSE,
    UNLIMITED,
    ZIPF,
    Results,
    Setting,
    by_parameter,
    by_setting,
    curve_in,
    estimate,
    hit_rates,
    lengths_of,
    longest_conversation,
    measured,
    of_study,
    turns_of,
)

Published = Mapping[tuple[str, str], float]
Points = Mapping[int, Estimate]


def draw(results: Results, published: Published, folder: Path) -> Iterator[Path]:
    """Write the picture as SVG and PNG; yield their paths. Needs one result of the study at least."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(14, 8), layout="constrained")
    figure.suptitle(_title(of_study(results)), fontsize=10, parse_math=False)
    above, below = figure.subfigures(2, 1)
    panels: list[Callable[[Any, Results, Published], bool]] = [_draw_curve, _draw_speedups, _draw_breakeven]
    for axes, panel in zip(above.subplots(1, 3), panels, strict=True):
        _fill(axes, panel, results, published)
    left, right = below.subfigures(1, 2, width_ratios=[2, 1])
    _draw_hit_rates(left, results, published)
    _fill(right.subplots(), _draw_turns, results, published)
    for suffix in ("svg", "png"):
        path = folder / f"prefix_costs.{suffix}"
        figure.savefig(path, dpi=144)
        yield path


def _title(results: Results) -> str:
    told = results[0].provenance
    where = told["device_name"] or told["cpu"]
    return (
        f"{told['model']} ({told['weights']}), {told['dtype']}, {where}, {told['num_threads']} threads; "
        "bars: 95 % intervals; hollow: published (GPT-2 small, float16, RTX 2070; its hits are suffixes alone)"
    )


def _fill(axes: Any, panel: Callable[[Any, Results, Published], bool], results: Results, published: Published) -> None:
    axes.grid(alpha=0.25)
    if not panel(axes, results, published):
        _leave_empty(axes)


def _leave_empty(axes: Any) -> None:
    axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center", color="gray")
    axes.set_xticks([])
    axes.set_yticks([])


def _draw_curve(axes: Any, results: Results, published: Published) -> bool:
    """On two logarithmic axes a floor is level, and what is proportional rises by one for one."""
    axes.set_title("Prefill: T(n) = max(floor, a + b n + c n²)", fontsize=10)
    curve, lengths_s = curve_in(results), lengths_of(results)
    if curve is None:
        return False
    unit, factor = seconds_scale(max(map(max, lengths_s.values())))
    medians = {n: median_of(times) for n, times in lengths_s.items()}
    _bars(axes, medians, PALETTE[0], "o", "measured", factor=factor, linestyle="none")
    xs = np.geomspace(min(lengths_s), max(lengths_s), 200)
    fitted = curve.fit.equation("n", factor, unit) if curve.fit else ""
    axes.plot(xs, [curve.full_s(x) * factor for x in xs], color=PALETTE[0], linewidth=1.2, label=fitted)
    if curve.floor_s is not None:
        looks = {"color": PALETTE[1], "linestyle": "--", "linewidth": 1, "label": _floor(curve, unit, factor)}
        axes.axhline(curve.floor_s * factor, **looks)
    axes.set_xscale("log", base=2)
    _in_plain_digits(axes, lengths_s)
    _plain(axes, list(lengths_s), "prompt tokens, n", f"TTFT uncached, {unit}")
    axes.legend(fontsize=8, loc="upper left")
    return True


def _floor(curve: Curve, unit: str, factor: float) -> str:
    until = curve.floor_until_tokens
    reach = "" if until is None or np.isinf(until) else f" until {until:.0f} tokens"
    return f"launch floor {(curve.floor_s or 0.0) * factor:.3g} {unit}{reach}"


def _draw_speedups(axes: Any, results: Results, published: Published) -> bool:
    axes.set_title("One hit: TTFT unseen / TTFT with its prefix stored", fontsize=10)
    reused = by_setting(results)
    for place, suffix in enumerate(sorted({each.suffix for each in reused})):
        colour, marker = style(place)
        own = {setting: result for setting, result in reused.items() if setting.suffix == suffix}
        _bars(axes, _of_metric(own, "reuse_speedup"), colour, marker, f"suffix {suffix}, real", linestyle="-")
        proxy = f"suffix {suffix}, by the proxy"
        _bars(axes, _of_metric(own, "reuse_speedup_proxy"), colour, "x", proxy, linestyle="--", markersize=6)
        _hollow(axes, {each.prefix: published.get((str(each), "reuse_speedup_proxy")) for each in own}, colour, marker)
    if not reused:
        return False
    axes.axhline(1, color="gray", linewidth=0.8)
    _finish(axes, [each.prefix for each in reused], "prefix tokens", "speedup, x", "upper left")
    return True


def _draw_breakeven(axes: Any, results: Results, published: Published) -> bool:
    axes.set_title("Breakeven: requests that pay for a prefix run once", fontsize=10)
    lines = [
        (f"{how}, suffix {suffix}", {each: result for each, result in found.items() if each.suffix == suffix}, name)
        for how, test, name in (
            ("one by one", REUSE, "breakeven_requests"), ("at once", BATCHED, "batched_breakeven_requests"),
        )
        for found in (by_setting(results, test),)
        for suffix in sorted({each.suffix for each in found})
    ]  # fmt: skip
    if not lines:
        return False
    for place, (what, own, name) in enumerate(lines):
        _bars(axes, _of_metric(own, name), *style(place), what, linestyle="-")
    batches = {prefix: published.get((f"batch, prefix {prefix}", lines[-1][2])) for prefix in (128, 256, 512)}
    _hollow(axes, batches, *style(len(lines) - 1))
    axes.axhline(1, color="gray", linewidth=0.8)
    _finish(axes, [each.prefix for _, own, _ in lines for each in own], "prefix tokens", "requests", "upper right")
    missing = [f"{what}: {each.prefix}" for what, own, name in lines for each in own if not measured(own[each], name)]
    text = "\n".join(["undefined or out of range:", *missing] if missing else [])
    axes.text(0.98, 0.55, text, transform=axes.transAxes, fontsize=7, ha="right", va="top")
    return True


def _of_metric(own: Mapping[Setting, BenchmarkResult], name: str) -> Points:
    found = {each.prefix: measured(result, name) for each, result in own.items()}
    return {prefix: estimate(m) for prefix, m in found.items() if m is not None}


def _draw_hit_rates(figure: Any, results: Results, published: Published) -> None:
    """An axis for each alpha."""
    cases = {alpha: hit_rates(result) for alpha, result in by_parameter(results, ZIPF, "alpha").items()}
    cases = {alpha: rates for alpha, rates in cases.items() if rates}
    figure.suptitle("Hit rate of 200 requests for 32 prompts, over the slots of the cache", fontsize=10)
    if not cases:
        axes = figure.subplots()
        _leave_empty(axes)
        return
    row = np.atleast_1d(figure.subplots(1, len(cases), sharey=True))
    for axes, (alpha, rates) in zip(row, cases.items(), strict=True):
        axes.set_title(f"Zipf alpha {alpha:g}", fontsize=9)
        _draw_rates(axes, rates, {arm: published.get((f"alpha {alpha:g}", arm)) for arm in rates})
    row[0].set_ylabel("hit rate, % of requests")
    row[0].set_ylim(0, 100)
    row[-1].legend(fontsize=8, loc="lower right")


def _draw_rates(axes: Any, rates: Mapping[str, float], theirs: Mapping[str, float | None]) -> None:
    """The first lines are the widest: they are seen below others that run along them."""
    lines: dict[str, dict[int, float]] = {}
    for arm, rate in rates.items():
        if found := re.fullmatch(r"(\w+)_(\d+)", arm):
            lines.setdefault(found[1], {})[int(found[2])] = 100 * rate
    for place, (policy, points) in enumerate(lines.items()):
        (colour, marker), width = style(place), max(3.0 - 0.7 * place, 0.9)
        looks = {"color": colour, "marker": marker, "linewidth": width, "markersize": 3 + 1.3 * width, "label": policy}
        axes.plot(list(points), list(points.values()), **looks)
        known = {slots: theirs.get(f"{policy}_{slots}") for slots in points}
        _hollow(axes, {slots: 100 * rate for slots, rate in known.items() if rate is not None}, colour, marker, 11)
    if UNLIMITED in rates:
        axes.axhline(100 * rates[UNLIMITED], color="black", linestyle="--", linewidth=1, label="unlimited")
        ceiling, most = theirs.get(UNLIMITED), max((max(points) for points in lines.values()), default=1)
        _hollow(axes, {most: 100 * ceiling if ceiling else None}, "black", "o", 11)
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.25)
    _plain(axes, sorted({slots for points in lines.values() for slots in points}), "slots", "")


def _draw_turns(axes: Any, results: Results, published: Published) -> bool:
    axes.set_title("A conversation: off / carried, turn by turn", fontsize=10)
    result = longest_conversation(results)
    turns = list(turns_of(result)) if result is not None else []
    if result is None or not turns:
        return False
    unit, factor = seconds_scale(max(abs(each.saved_so_far_s.value or 0.0) for each in turns))
    setting = f"of {result.params['num_turns']} x {result.params['turn_tokens']}"
    second = axes.twinx()
    _bars(axes, {each.turn: each.speedup for each in turns}, PALETTE[0], "o", "speedup of the turn", linestyle="-")
    saved = {each.turn: each.saved_so_far_s for each in turns}
    _bars(second, saved, PALETTE[1], "s", "saved so far", factor=factor, linestyle="-")
    for side, name, scale, colour, marker in (
        (axes, "turn_speedup", 1.0, PALETTE[0], "o"), (second, "turn_saved_so_far_s", factor, PALETTE[1], "s"),
    ):  # fmt: skip
        values = {each.turn: published.get((f"turn {each.turn} {setting}", name)) for each in turns}
        _hollow(side, {turn: value * scale for turn, value in values.items() if value is not None}, colour, marker)
        low, high = side.get_ylim()
        side.set_ylim(min(low, 0), high * 1.1)
    axes.set_xticks([each.turn for each in turns])
    axes.set_xlabel(f"turn, {result.params['turn_tokens']} tokens each and answers of {result.params['answer_tokens']}")
    axes.set_ylabel("speedup, x")
    second.set_ylabel(f"TTFT saved so far, {unit}")
    handles = [handle for each in (axes, second) for handle in each.get_legend_handles_labels()[0]]
    axes.legend(handles, [handle.get_label() for handle in handles], fontsize=8, loc="upper left")
    return True


def _bars(
    axes: Any, points: Points, colour: str, marker: str, label: str, *, factor: float = 1.0, **looks: Any
) -> None:
    """Each value with its interval, without one where it has none."""
    if not points:
        return
    ys = [(each.value or 0.0) * factor for each in points.values()]
    ends = [(each.interval.low, each.interval.high) for each in points.values()]
    lows = [max(y - (y if low is None else low * factor), 0.0) for y, (low, _) in zip(ys, ends, strict=True)]
    highs = [max((y if high is None else high * factor) - y, 0.0) for y, (_, high) in zip(ys, ends, strict=True)]
    how = {"color": colour, "marker": marker, "label": label, "markersize": 4, "capsize": 3, "linewidth": 1.2}
    axes.errorbar(list(points), ys, yerr=[lows, highs], **how | looks)


def _hollow(axes: Any, theirs: Mapping[int, float | None], colour: str, marker: str, size: float = 7) -> None:
    known = {x: y for x, y in theirs.items() if y is not None}
    looks = {"markerfacecolor": "none", "linestyle": ":", "linewidth": 0.8, "alpha": 0.8, "markersize": size}
    axes.plot(list(known), list(known.values()), color=colour, marker=marker, **looks)


def _finish(axes: Any, xs: Sequence[int], x: str, y: str, place: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.08)
    _plain(axes, sorted(set(xs)), x, y)
    axes.legend(fontsize=8, loc=place)


def _in_plain_digits(axes: Any, lengths_s: Mapping[int, Sequence[float]]) -> None:
    """A logarithmic axis of times, with more than a label for each power of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_yscale("log")
    times = [time for each in lengths_s.values() for time in each]
    subs = (1, 2, 5) if max(times) < 1000 * min(times) else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _plain(axes: Any, ticks: Sequence[int], x: str, y: str) -> None:
    """A logarithmic axis whose ticks are the lengths that were measured, in plain digits."""
    from matplotlib.ticker import NullLocator

    axes.set_xticks(ticks, [f"{each}" for each in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(x)
    axes.set_ylabel(y)
