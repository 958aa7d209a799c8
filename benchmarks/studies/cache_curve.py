"""A published study of a KV cache beside the same settings measured here: figures, claims, a CSV file and a picture.

    pytest --benchmark-only --profile study --benchmark-autosave    # measures, and ends with this
    python -m benchmarks.studies.cache_curve FILE.json              # the same of a results file

The study: "The cache as a curve, not a number" (Llama-3.2-1B, float32, an unnamed CPU, one run per point). Its machine
is not ours, so that its seconds are context and its shapes are what is compared. Knows its figures and our results;
`cache_claims.py` judges its claims. Refuses to measure.
"""

import csv
import dataclasses
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.harness.results import BenchmarkResult, Measurement
from benchmarks.studies.cache_claims import claims_of
from benchmarks.studies.cache_points import GENERATION, PROMPT, Sweep, points_of
from benchmarks.studies.commands import command

NAME = "the cache as a curve, not a number"

PUBLISHED: Mapping[tuple[str, int, str, str], float] = {
    **{
        (GENERATION, tokens, arm, metric): value
        for tokens, cached_s, ttft_s, itl_s, naive_s, speedup in (
            (8, 4.27, 2.20, 0.296, 17.19, 4.02),
            (16, 6.35, 2.04, 0.285, 35.39, 5.57),
            (32, 11.34, 2.39, 0.288, 76.41, 6.74),
            (64, 20.66, 2.09, 0.294, None, None),
        )
        for arm, metric, value in (
            ("cached", "e2e_s", cached_s), ("cached", "ttft_s", ttft_s), ("cached", "itl_p50_s", itl_s),
            ("naive", "e2e_s", naive_s), ("cached over naive", "speedup", speedup),
        )
        if value is not None
    },
    **{
        (PROMPT, tokens, "cached", metric): value
        for tokens, ttft_s, itl_s in ((16, 2.49, 0.298), (64, 2.77, 0.301), (128, 3.42, 0.304), (256, 4.74, 0.313))
        for metric, value in (("ttft_s", ttft_s), ("itl_p50_s", itl_s))
    },
}  # fmt: skip
"""The study's figures, by sweep, tokens, arm and metric; it did not run the naive path at 64 tokens."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure: ours with its interval, and theirs where they published it."""

    sweep: Sweep
    tokens: int
    measurement: Measurement
    published: float | None


def rows_of(results: Sequence[BenchmarkResult]) -> Iterator[Row]:
    """Every measured quantity of both sweeps, in the order of the sweeps."""
    for sweep in (GENERATION, PROMPT):
        for tokens, result in points_of(results, sweep):
            for m in result.measurements:
                theirs = PUBLISHED.get((sweep, tokens, m.arm, m.metric.name))
                yield Row(sweep=sweep, tokens=tokens, measurement=m, published=theirs)


def as_csv(rows: Sequence[Row]) -> str:
    """A line per figure, numbers in full, in the metric's own unit."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["sweep", "tokens", "arm", "metric", "unit", "value", "low", "high", "runs", "published"])
    for row in rows:
        m = row.measurement
        told = (row.sweep, row.tokens, m.arm, m.metric.name, m.metric.unit, m.value, m.low, m.high, len(m.samples))
        writer.writerow([*told, row.published])
    return out.getvalue()


def tell(results: Sequence[BenchmarkResult]) -> str:
    """What people read: ours beside theirs, then each claim with what speaks for or against it."""
    rows = [row for row in rows_of(results) if row.published is not None]
    lines = [f"{'':24}{'ours [95 % interval]':>32}{'published':>12}"]
    for row in rows:
        m = row.measurement
        name = f"{row.sweep} {row.tokens}: {m.arm} {m.metric.title}"
        lines.append(f"{name:44}{_ours(m):>28}{row.published:>10g} {m.metric.unit}")
    return "\n".join([*lines, "", *map(str, claims_of(results)), ""])


def _ours(m: Measurement) -> str:
    if m.value is None:
        return "undefined"
    return f"{m.value:.3g}" if m.low is None or m.high is None else f"{m.value:.3g} [{m.low:.3g}, {m.high:.3g}]"


def write(results: Sequence[BenchmarkResult], folder: Path) -> list[Path]:
    """The CSV file and the picture; returns their paths."""
    from benchmarks.studies.cache_picture import draw

    folder.mkdir(parents=True, exist_ok=True)
    table = folder / "cache_curve.csv"
    table.write_text(as_csv(list(rows_of(results))), "utf-8")
    return [table, *draw(results, PUBLISHED, folder)]


app = command(__doc__, tell, write)


if __name__ == "__main__":
    app()
