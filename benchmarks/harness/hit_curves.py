"""How often a trace finds its blocks again, by the size of the cache and by who leaves it first: a table and a picture.

Knows rich, matplotlib and how people read shares. Refuses to simulate: `replacement.py` does, and nanoserve's cache.
"""

import io
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.curves import style
from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.prefix_traces import read_trace
from benchmarks.harness.replacement import OPTIMUM, HitRates, hit_rates

_QUIET_S, _EVERY_S = 2.0, 10.0
_MAX_FAULTS = 20
_MOST_OF_IT = 0.9
_SUFFIXES = (".png", ".svg", ".pdf")


def replay_trace(
    path: Path, capacities: Sequence[int], policies: Sequence[str], block_tokens: int, picture: Path | None
) -> tuple[str, list[str]]:
    """The table of a trace, and what is wrong with it; every policy of this build where none is given.

    Draws the picture. Raises InstrumentError for what cannot be read or drawn, before anything is replayed.
    """
    from benchmarks.harness.gate.progress import progress_on_stderr
    from benchmarks.harness.sources.nanoserve_prefix import policies_among, replay

    if picture is not None and picture.suffix not in _SUFFIXES:
        raise InstrumentError(f"a picture ends in {', '.join(_SUFFIXES)}, not as {picture.name!r} does")
    names = policies_among(policies)
    requests, faults = read_trace(path, block_tokens=block_tokens)
    keys = [request.hash_ids for request in requests]
    with progress_on_stderr() as progress:
        rates = hit_rates(keys, capacities, [*names, OPTIMUM], replay, _patient(progress.now, progress.step))
    told = render(path.name, rates)
    if picture is not None:
        draw(path.name, rates, picture)
        told += f"picture: {picture}\n"
    more = [f"{len(faults) - _MAX_FAULTS} lines more"] if len(faults) > _MAX_FAULTS else []
    return told, [*faults[:_MAX_FAULTS], *more]


def _patient(now: Callable[[str], None], step: Callable[[str], None]) -> Callable[[str], None]:
    """Says what is being done once that takes long, and leaves a line of it now and then."""
    began_s = told_s = time.monotonic()

    def say(text: str) -> None:
        nonlocal told_s
        at_s = time.monotonic()
        if at_s - began_s > _QUIET_S:
            now(text)
        if at_s - told_s > (_QUIET_S if told_s == began_s else _EVERY_S):
            told_s = at_s
            step(f"{text}, after {at_s - began_s:.0f} s")

    return say


def render(name: str, rates: HitRates) -> str:
    """The table, and what bounds it."""
    from rich.console import Console
    from rich.table import Table

    title = f"{name}: hit rate, % of {rates.num_blocks:,} blocks that {rates.num_requests:,} requests ask for"
    table = Table()
    for heading in ("capacity, blocks", *rates.by_policy):
        table.add_column(heading, justify="right")
    for place, capacity in enumerate(rates.capacities):
        table.add_row(f"{capacity:,}", *(_percent(found[place]) for found in rates.by_policy.values()))
    table.add_row("unlimited", *[_percent(rates.unlimited)] * len(rates.by_policy))
    console = Console(file=io.StringIO(), width=110, highlight=False, markup=False, emoji=False)
    for line in (title, table, *_bounds(rates)):
        console.print(line, soft_wrap=isinstance(line, str))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _bounds(rates: HitRates) -> list[str]:
    misses = f"the first use of each of {rates.num_distinct:,} blocks is a miss, whoever leaves first"
    lines = [f"unlimited: {misses}", "optimum: Belady's, which knows what comes; who admits all finds no more"]
    if "lru" in rates.by_policy:
        lines.append("lru: every capacity from one pass over its stack distances; it never falls")
    if rates.unlimited:
        sizes = ", ".join(f"{policy} {_enough(rates, found)}" for policy, found in rates.by_policy.items())
        lines.append(f"blocks that are enough for {_MOST_OF_IT:.0%} of what unlimited finds: {sizes}")
    return lines


def _enough(rates: HitRates, found: Sequence[float]) -> str:
    """The smallest capacity from which on most of it is found: some policies find less with more."""
    short = [place for place, share in enumerate(found) if share < _MOST_OF_IT * rates.unlimited]
    place = max(short, default=-1) + 1
    return f"{rates.capacities[place]:,}" if place < len(found) else "more"


def draw(name: str, rates: HitRates, path: Path) -> None:
    """A curve for each policy over the logarithm of the capacity, and what bounds them. Makes the folder."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes: Any = figure.add_subplot()
    for place, (policy, found) in enumerate(rates.by_policy.items()):
        axes.plot(rates.capacities, [100 * share for share in found], label=policy, **_looks(policy, place))
    axes.axhline(100 * rates.unlimited, color="grey", linestyle=":", label="unlimited")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda capacity, _: f"{capacity:,.0f}")
    axes.set_ylim(0, 100)
    axes.set_xlabel("capacity, blocks")
    axes.set_ylabel("hit rate, % of blocks asked for")
    axes.set_title(f"{name}: {rates.num_requests:,} requests", fontsize=10, parse_math=False)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=144)


def _looks(policy: str, place: int) -> dict[str, Any]:
    """The first lines are the widest: they are seen below others that run along them."""
    if policy == OPTIMUM:
        return {"color": "black", "linestyle": "--", "linewidth": 1.0}
    colour, marker = style(place)
    width = max(3.5 - 0.8 * place, 1.0)
    return {"color": colour, "marker": marker, "markersize": 3 + 1.2 * width, "linewidth": width}
