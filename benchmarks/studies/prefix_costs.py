"""A published study of prefix caches beside the same settings measured here: figures, claims, a CSV file, a picture.

    pytest --benchmark-only --profile study --benchmark-autosave    # measures, and ends with this
    python -m benchmarks.studies.prefix_costs FILE.json             # the same of a results file

The study: "Real prefix-cache costs" (GPT-2 small, float16, RTX 2070; medians of 15 runs). Its machine is not ours: its
seconds are context, its shapes are what is compared. Its hits are prefills of the suffix alone, so that its speedups
and savings stand beside both ours: the real ones, and those by that proxy. Works with whatever part was measured. Knows
its figures and our results; `prefix_claims.py` judges its claims. Refuses to measure.
"""

import csv
import dataclasses
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.harness.report import seconds_scale
from benchmarks.harness.results import BenchmarkResult
from benchmarks.harness.stats import Estimate, Interval
from benchmarks.studies.claims import told
from benchmarks.studies.commands import command
from benchmarks.studies.prefix_claims import claims_of
from benchmarks.studies.prefix_points import (
    BATCHED,
    CONVERSATION,
    DERIVED,
    PREFILL_CURVE,
    REUSE,
    SERVED,
    UNLIMITED,
    ZIPF,
    Results,
    Setting,
    by_parameter,
    estimate,
    hit_rates,
    of_study,
    of_test,
    turns_of,
)

NAME = "real prefix-cache costs"

PUBLISHED: Mapping[tuple[str, str], float] = {
    **{
        (str(Setting(suffix, prefix)), name): value
        for prefix, suffix, speedup, saved_s in (
            (512, 128, 2.41, 8816e-6), (512, 64, 2.08, 6675e-6), (256, 64, 1.26, 1679e-6),
        )
        for name, value in (
            ("reuse_speedup", speedup), ("reuse_speedup_proxy", speedup),
            ("ttft_saved_s", saved_s), ("prefill_removed_s", saved_s),
        )
    },
    **{
        (f"turn {turn} of 10 x 64", name): value
        for turn, speedup, saved_s in ((4, 1.41, 3.5e-3), (8, 1.59, 13.5e-3), (10, 2.06, 25.9e-3))
        for name, value in (("turn_speedup", speedup), ("turn_saved_so_far_s", saved_s))
    },
    **{
        (f"alpha {alpha:g}", arm): rate
        for alpha, arm, rate in (
            (0.5, "lfu_4", 0.14), (1.0, "lfu_4", 0.39), (2.0, "lfu_4", 0.82),
            (0.5, UNLIMITED, 0.84), (2.0, UNLIMITED, 0.91),
        )
    },
    **{
        (f"batch, prefix {prefix}", "batched_breakeven_requests"): num
        for prefix, num in ((128, 12), (256, 3), (512, 2))
    },
}  # fmt: skip
"""The study's figures, by setting and quantity. Its "84-91 %" without a limit are the ends over its alphas."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure: ours with its interval, and theirs where they published it. `unit` is "s" for every time."""

    setting: str
    quantity: str
    title: str
    unit: str
    ours: Estimate
    published: float | None = None

    def __str__(self) -> str:
        name = f"{self.setting}: {self.title}"
        unit, factor = seconds_scale(abs(self.ours.value or 0.0)) if self.unit == "s" else (self.unit, 1.0)
        theirs = "" if self.published is None else f"{self.published * factor:.3g}"
        return f"{name:60}{told(self.ours, factor):>28}{theirs:>10} {unit}"


def rows_of(results: Results) -> Iterator[Row]:
    """Every measured quantity of the study, test by test."""
    for test in (PREFILL_CURVE, REUSE, DERIVED):
        for result in of_test(results, test):
            yield from _measured(result, _setting(test, result))
    for result in of_test(results, CONVERSATION):
        yield from _measured(result, _setting(CONVERSATION, result))
        yield from _turns(result)
    for test in (BATCHED, SERVED):
        for result in of_test(results, test):
            yield from _measured(result, _setting(test, result))
    for alpha, result in by_parameter(results, ZIPF, "alpha").items():
        for arm, rate in hit_rates(result).items():
            exact = Estimate(value=rate, interval=Interval(None, None), num_samples=1)
            yield _row(f"alpha {alpha:g}", arm, f"hit rate {arm}", "share", exact)


def _setting(test: str, result: BenchmarkResult) -> str:
    """What people call a case; a batch's breakeven was published without its suffix."""
    params = result.params
    if test == REUSE:
        return str(Setting(params["suffix_tokens"], params["prefix_tokens"]))
    if test == BATCHED:
        return f"batch, prefix {params['prefix_tokens']}"
    if test == CONVERSATION:
        return f"{params['num_turns']} turns x {params['turn_tokens']}"
    names = {PREFILL_CURVE: "prefill up to", DERIVED: "derived, suffix", SERVED: "served, alpha"}
    return f"{names[test]} {next(iter(params.values()), '')}".strip()


def _measured(result: BenchmarkResult, setting: str) -> Iterator[Row]:
    for m in result.measurements:
        quantity = m.metric.name if m.metric.compares_arms else f"{m.metric.name} {m.arm}"
        title = m.metric.title if m.metric.compares_arms else f"{m.metric.title} {m.arm}"
        yield _row(setting, quantity, title, m.metric.unit, estimate(m))


def _turns(result: BenchmarkResult) -> Iterator[Row]:
    setting = f"of {result.params['num_turns']} x {result.params['turn_tokens']}"
    for each in turns_of(result):
        name = f"turn {each.turn} {setting}"
        yield _row(name, "turn_speedup", "speedup", "x", each.speedup)
        yield _row(name, "turn_saved_so_far_s", "saved so far", "s", each.saved_so_far_s)


def _row(setting: str, quantity: str, title: str, unit: str, ours: Estimate) -> Row:
    theirs = PUBLISHED.get((setting, quantity))
    return Row(setting=setting, quantity=quantity, title=title, unit=unit, ours=ours, published=theirs)


def as_csv(rows: Sequence[Row]) -> str:
    """A line per figure, numbers in full, in seconds and other plain units."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["setting", "quantity", "unit", "value", "low", "high", "n", "published"])
    for row in rows:
        ours = row.ours
        told_of = (ours.value, ours.interval.low, ours.interval.high, ours.num_samples, row.published)
        writer.writerow([row.setting, row.quantity, row.unit, *told_of])
    return out.getvalue()


def tell(results: Results) -> str:
    """What people read: ours beside theirs, then each claim with what speaks for or against it."""
    rows = [row for row in rows_of(results) if row.published is not None]
    head = [f"{'':60}{'ours [95 % interval]':>28}{'published':>10}"] if rows else []
    return "\n".join([*head, *map(str, rows), "", *map(str, claims_of(results)), ""])


def write(results: Results, folder: Path) -> list[Path]:
    """The CSV file and, where anything of it was measured, the picture; returns their paths."""
    from benchmarks.studies.prefix_picture import draw

    folder.mkdir(parents=True, exist_ok=True)
    table = folder / "prefix_costs.csv"
    table.write_text(as_csv(list(rows_of(results))), "utf-8")
    return [table, *(draw(results, PUBLISHED, folder) if of_study(results) else ())]


app = command(__doc__, tell, write)

if __name__ == "__main__":
    app()
