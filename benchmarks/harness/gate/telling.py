"""Tells a verdict: as a table for people, as Markdown for a pull request, as JSON for whatever comes next.

Knows how a verdict reads: raw values always stand beside a change, in the unit of the metric. Refuses to judge.
"""

import dataclasses
import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness.gate.evidence import Key
from benchmarks.harness.gate.rows import Row
from benchmarks.harness.gate.rules import GRAVITY, Verdict
from benchmarks.harness.gate.verdict import Judgement
from benchmarks.harness.markdown import escaped, table
from benchmarks.harness.metrics import metric
from benchmarks.harness.report import name_of, number_text, seconds_scale
from benchmarks.harness.stats import Estimate

SCHEMA = 1
"""The version of what `as_dict` returns."""

WIDTH = 118
"""Columns where the terminal does not say how many it has."""

_MOST_ROWS = 200
"""A comment on a pull request may be 64 KiB long."""

_ORDER: tuple[Verdict, ...] = (*GRAVITY, "new", "skipped")
_HEADINGS = ("verdict", "benchmark", "metric", "base -> head", "change [interval]", "p", "n")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a reader has to know beside the verdict. `base` and `head` name the two commits, as people would."""

    base: str
    head: str
    taken_s: float | None = None
    calibration: str = ""
    notes: tuple[str, ...] = ()


def headline(judgement: Judgement) -> str:
    """The verdict in one sentence."""
    gated, verdict = judgement.gated, judgement.verdict
    if not gated:
        return f"no data: {_why_nothing(judgement)}"
    num = Counter(row.verdict for row in gated)
    rest = "".join(f"; {num[each]} {each}" for each in GRAVITY if num[each] and each != verdict)
    of_all = f"{num[verdict]} of {len(gated)} gated quantities"
    return f"{verdict}: {_SENTENCES[verdict].format(of_all)}{_most_of_all(gated, verdict)}{rest}"


_SENTENCES: Mapping[Verdict, str] = {
    "worse": "{} got worse",
    "no data": "{} could not be compared",
    "contaminated": "{} were measured while something else ran on the machine",
    "cannot tell": "{} neither surely changed nor surely stayed",
    "better": "{} got better",
    "same": "{} did not change by anything that matters",
}


def _most_of_all(rows: Iterable[Row], verdict: Verdict) -> str:
    """Which quantity changed most, by what it costs."""
    moved = {
        row: abs(math.log(row.ratio.value)) for row in rows if row.verdict == verdict and row.ratio and row.ratio.value
    }
    if verdict not in ("worse", "better") or not moved:
        return ""
    row = max(moved, key=lambda each: moved[each])
    return f", most of all {name_of(row.key)} {_metric_text(row.key)} ({_change_text(row.change)})"


def _why_nothing(judgement: Judgement) -> str:
    if any(row.verdict == "new" for row in judgement.rows):
        return "base has none of what head measured; this is a first run, and there is no baseline yet"
    if judgement.rows:
        return "nothing that gates was measured"
    return "nothing was compared"


def as_text(judgement: Judgement, about: About, *, width: int = WIDTH, colour: bool = False) -> str:
    """A table of every quantity, the gravest first, then the reasons, then where the numbers come from."""
    console = Console(
        file=io.StringIO(), width=width, force_terminal=colour, highlight=False, markup=False, emoji=False
    )
    console.print(headline(judgement), style="bold", soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in _HEADINGS:
        table.add_column(heading, overflow="fold")
    rows = in_order(judgement.rows)
    shown = [row for row in rows if not _is_unchanged_count(row)]
    for row in shown:
        table.add_row(*_cells(row))
    if shown:
        console.print(table)
    for line in [*_unchanged_counts(rows), *_reasons(rows), *_origin(judgement, about)]:
        console.print(line, soft_wrap=True)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def _is_unchanged_count(row: Row) -> bool:
    return row.verdict == "same" and bool(row.key.metric) and metric(row.key.metric).is_exact


def _unchanged_counts(rows: Iterable[Row]) -> Iterator[str]:
    """Dozens of equal numbers are one line; the JSON has them all."""
    num = Counter(name_of(row.key) for row in rows if _is_unchanged_count(row))
    if num:
        yield f"same: {', '.join(f'{count} counts of {name}' for name, count in num.items())}"


def in_order(rows: Iterable[Row]) -> list[Row]:
    """The rows that gate before the others, and in each part the gravest verdict first."""
    return sorted(rows, key=lambda row: (not row.is_gated, _ORDER.index(row.verdict)))


def _cells(row: Row) -> tuple[str, ...]:
    verdict = row.verdict if row.is_gated else f"({row.verdict})"
    p = "" if row.p is None else "<.0001" if row.p < 1e-4 else f"{row.p:.2g}"
    n = f"{row.num_launches} x {row.num_pairs // row.num_launches}" if row.num_pairs else ""
    return verdict, name_of(row.key), _metric_text(row.key), _values(row), _change_text(row.change), p, n


def _metric_text(key: Key) -> str:
    return " ".join(filter(None, (key.arm, metric(key.metric).title))) if key.metric else "(the whole case)"


def _values(row: Row) -> str:
    """Both raw values in one unit. Counts are shown to the last digit."""
    if row.base is None or row.head is None:
        return ""
    of = metric(row.key.metric)
    if of.is_exact:
        return f"{row.base:,.15g} -> {row.head:,.15g}"
    unit, factor = seconds_scale(max(row.base, row.head)) if of.unit == "s" else (of.unit, 1.0)
    return f"{number_text(row.base * factor)} -> {number_text(row.head * factor)} {unit}"


def _change_text(change: Estimate | None) -> str:
    if change is None or change.value is None:
        return ""
    value, low, high = f"{100 * change.value:+.1f} %", change.interval.low, change.interval.high
    return value if low is None or high is None or low == high else f"{value} [{100 * low:+.1f} .. {100 * high:+.1f}]"


def _reasons(rows: Iterable[Row]) -> Iterator[str]:
    """Why, where the numbers do not say it: a line per reason, with all that it holds for."""
    named: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.verdict not in ("worse", "better", "same"):
            name = f"{name_of(row.key)} {_metric_text(row.key)}" if row.key.metric else name_of(row.key)
            named.setdefault((row.verdict, _error_of(row.why)), []).append(name)
    for (verdict, why), names in named.items():
        yield f"{verdict}: {', '.join(names)}: {why}"


def _error_of(why: str) -> str:
    """Of a reason that ends in pytest's traceback, who failed and the error; the JSON has all of it."""
    first, *lines = why.splitlines() or [""]
    errors = [line.removeprefix("E").strip() for line in lines if line.startswith("E ")]
    return (f"{first.partition(': ')[0]}: {errors[0]}" if errors else first)[:300]


def _origin(judgement: Judgement, about: About) -> Iterator[str]:
    """Provenance: which commits, on what, how much was measured, and by which rules."""
    evidence, rules = judgement.evidence, judgement.rules
    yield f"base {about.base}, head {about.head}"
    yield from filter(None, [_machine(evidence.provenance)])
    num_pairs = sum(len(pairs.base) for every in evidence.pairs.values() for pairs in every)
    took = "" if about.taken_s is None else f", {about.taken_s:.0f} s"
    yield f"{judgement.num_launches_done} launches, {num_pairs} pairs{took}; n is launches x pairs in each"
    looks = "one look" if rules.looks_once else f"looks up to launch {rules.max_launches}"
    yield (
        f"false alarms at most {100 * rules.alpha:g} % over all times and {looks}; "
        f"same within {100 * rules.margin:g} %, {100 * rules.confidence:g} % intervals; in brackets: report only"
    )
    for case, disturbed in evidence.contaminated.items():
        first, why = next(iter(disturbed.items()))
        yield f"disturbed: {len(disturbed)} launches of {name_of(Key(*case, '', ''))}, launch {first} by: {why}"
    yield from filter(None, (about.calibration, *evidence.notes, *about.notes))


def _machine(provenance: Sequence[Mapping[str, Any]]) -> str:
    """Model and machine; the sides of one comparison share both."""
    told = provenance[1] or provenance[0]
    names = ("model", "weights", "dtype", "device_name", "cpu", "num_threads")
    named = {
        name: f"{told[name]} threads" if name == "num_threads" else str(told[name]) for name in names if told.get(name)
    }
    version = told.get("instrument_version")
    return ", ".join([*named.values(), *([f"instrument version {version}"] if version else [])])


# Markdown.


def as_markdown(judgement: Judgement, about: About) -> str:
    """For a pull request: the verdict, what changed, everything else folded away, and where it comes from."""
    rows = in_order(judgement.rows)
    moved = [row for row in rows if row.verdict not in ("same", "skipped", "new")]
    parts = [f"### Benchmarks: {escaped(headline(judgement))}"]
    if moved:
        parts.append(_markdown_table(moved))
        parts.append("\n".join(f"- {escaped(reason)}" for reason in list(_reasons(moved))[:_MOST_ROWS]))
    parts.append(f"<details><summary>All {len(rows)} rows</summary>\n\n{_markdown_table(rows)}\n\n</details>")
    parts.append("\n".join(f"- {escaped(line)}" for line in _origin(judgement, about)))
    return "\n\n".join(filter(None, parts)) + "\n"


def _markdown_table(rows: Sequence[Row]) -> str:
    text = table(_HEADINGS, map(_cells, rows[:_MOST_ROWS]))
    num_left = len(rows) - _MOST_ROWS
    return f"{text}\n\n{num_left} more rows are in the JSON." if num_left > 0 else text


# JSON.


def as_json(judgement: Judgement, about: About) -> str:
    """`as_dict` as strict JSON: no NaN and no infinity."""
    return json.dumps(as_dict(judgement, about), allow_nan=False, ensure_ascii=False, indent=1)


def as_dict(judgement: Judgement, about: About) -> dict[str, Any]:
    """Everything that the verdict rests on, samples included."""
    evidence = judgement.evidence
    return {
        "schema": SCHEMA,
        "verdict": judgement.verdict,
        "exit_code": judgement.exit_code,
        "headline": headline(judgement),
        **dataclasses.asdict(about),
        "notes": [*evidence.notes, *about.notes],
        "rules": dataclasses.asdict(judgement.rules),
        "launches": judgement.num_launches_done,
        "rows": [_row_as_dict(row, judgement) for row in judgement.rows],
        "disturbed": [
            {"benchmark": case[0], "case": case[1], "launch": number, "why": why}
            for case, disturbed in evidence.contaminated.items()
            for number, why in disturbed.items()
        ],
        "control_s": [
            {"benchmark": case[0], "case": case[1], "launches": [dataclasses.asdict(each) for each in every]}
            for case, every in evidence.control.items()
        ],
        "provenance": dict(zip(("base", "head"), map(dict, evidence.provenance), strict=True)),
    }


def _row_as_dict(row: Row, judgement: Judgement) -> dict[str, Any]:
    of, evidence = metric(row.key.metric) if row.key.metric else None, judgement.evidence
    unit = {"unit": of.unit, "better": of.better, "exact": of.is_exact} if of else {}
    return {
        **row.key._asdict(), **unit, "gate": row.is_gated, "verdict": row.verdict, "why": row.why,
        "base": row.base, "head": row.head, "cost_ratio": _estimate_as_dict(row.ratio),
        "change": _estimate_as_dict(row.change), "p": row.p, "launches": row.num_launches, "pairs": row.num_pairs,
        "samples": [dataclasses.asdict(pairs) for pairs in evidence.pairs_of(row.key)],
        "disturbed_samples": [dataclasses.asdict(pairs) for pairs in evidence.set_aside.get(row.key, ())],
    }  # fmt: skip


def _estimate_as_dict(estimate: Estimate | None) -> dict[str, float | None] | None:
    if estimate is None:
        return None
    return {"value": estimate.value, "low": estimate.interval.low, "high": estimate.interval.high}
