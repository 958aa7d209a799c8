"""A calibration as a table for people.

Knows how its numbers read. Refuses to choose among them.
"""

import io
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from benchmarks.harness.gate.calibration import Calibration, Level, Proportion, effect_text, name_of_quantity
from benchmarks.harness.metrics import metric

WIDTH = 118
"""Columns where the terminal does not say how many it has."""


def render(calibration: Calibration, *, width: int = WIDTH, colour: bool = False) -> str:
    """What was compared, false alarms, the smallest effects found, and what became of the planted slowdowns."""
    console = Console(
        file=io.StringIO(), width=width, force_terminal=colour, highlight=False, markup=False, emoji=False
    )
    for line in _about(calibration):
        console.print(line, soft_wrap=True)
    for title, table in (
        ("\nby metric; effects are those of its worst quantity, with nothing else slower", _metrics(calibration)),
        ("\nplanted slowdowns of everything", _levels(calibration)),
    ):
        if table.row_count:
            console.print(title, style="bold", soft_wrap=True)
            console.print(table)
    for note in calibration.notes:
        console.print(f"! {note}", soft_wrap=True)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def _about(calibration: Calibration) -> Iterator[str]:
    rules, sampling, whole = calibration.rules, calibration.sampling, calibration.whole
    yield f"calibration of {calibration.key}"
    yield (
        f"commit {calibration.commit[:12]} against itself, {calibration.num_launches} launches, {calibration.at}, "
        f"{calibration.taken_s / 60:.0f} min, instrument version {calibration.instrument_version}"
    )
    yield (
        f"comparisons of up to {rules.max_launches} launches and {sampling.budget_s:g} s a case, alpha "
        f"{100 * rules.alpha:g} %, same within {100 * rules.margin:g} %"
    )
    yield (
        f"false alarms: {whole.false_alarms} comparisons that share no launch, "
        f"{_share(whole.drawn_false_alarms)} of {whole.drawn_false_alarms.n} drawn from the same launches"
    )
    num = sum(calibration.endings.values())
    ends = ", ".join(f"{verdict} {100 * each / num:.1f} %" for verdict, each in calibration.endings.items())
    yield f"those drawn end: {ends}, after {whole.mean_launches:.1f} launches on average"
    yield (
        f"a slowdown of everything turns them red 80 times in 100 from {effect_text(whole.effect80)} on, 95 times from "
        f"{effect_text(whole.effect95)} on"
    )


def _metrics(calibration: Calibration) -> Table:
    table = _table("metric", "quantities", "false alarms", "of drawn", "80 of 100 from", "95 of 100 from", "worst")
    for score in calibration.metrics:
        num = sum(each.key.metric == score.key.metric for each in calibration.quantities)
        table.add_row(
            metric(score.key.metric).title, str(num), str(score.false_alarms), _share(score.drawn_false_alarms),
            effect_text(score.effect80), effect_text(score.effect95),
            name_of_quantity(calibration.worst(score.key.metric).key),
        )  # fmt: skip
    return table


def _levels(calibration: Calibration) -> Table:
    table = _table("planted", "metric", "measured", "found of drawn", "for real")
    named = [(metric(score.key.metric).title, score) for score in calibration.metrics]
    for number, of_whole in enumerate(calibration.whole.levels):
        for title, score in [*named, ("anything: red", calibration.whole)]:
            level = score.levels[number]
            really = str(level.found_for_real) if level.found_for_real.n else ""
            table.add_row(f"{100 * of_whole.planted:.3g} %", title, _measured(level), _share(level.found), really)
    return table


def _table(*headings: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _measured(level: Level) -> str:
    value, low, high = level.measured.value, level.measured.interval.low, level.measured.interval.high
    told = "" if value is None else f"{100 * value:+.2f} %"
    return told if low is None or high is None else f"{told} [{100 * low:+.2f} .. {100 * high:+.2f}]"


def _share(proportion: Proportion) -> str:
    return "" if proportion.value is None else f"{100 * proportion.value:.1f} %"
