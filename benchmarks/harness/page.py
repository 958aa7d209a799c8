"""The report as one HTML page that needs nothing but itself: numbers, curves, work, provenance, and what to doubt.

Knows in which order people read results, and what `page.html.jinja` needs. Computes nothing that a result does not
hold, beside the fits of its curves.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.archive import Archive
from benchmarks.harness.curves import MARKERS, PALETTE, Curve, Labelled, curves_of, line_name
from benchmarks.harness.doubts import doubts
from benchmarks.harness.figures import Figure, curve_figure, gaps_figure
from benchmarks.harness.one_time import told_together
from benchmarks.harness.results import BenchmarkResult
from benchmarks.harness.tables import counter_tables, operator_counts, quantity_tables, side_by_side

_TEMPLATE = Path(__file__).with_name("page.html.jinja")

_SHAPES = {
    "o": "M6 2a4 4 0 1 0 .01 0z",
    "s": "M2.5 2.5h7v7h-7z",
    "^": "M6 1.5 10.5 10h-9z",
    "D": "M6 1l5 5-5 5-5-5z",
    "v": "M6 10.5 1.5 2h9z",
}
"""matplotlib's markers as SVG paths in a box of 12, for legends."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """An entry of a legend: the name of a line, its place in the palette, and its marker as an SVG path."""

    name: str
    colour: int
    shape: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A figure with its heading."""

    title: str
    note: str
    figure: Figure


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gallery:
    """Figures of one benchmark that share a legend: those with a gate, `further` ones, and what is a flat line."""

    title: str
    legend: tuple[Key, ...]
    panels: tuple[Panel, ...]
    further: tuple[Panel, ...] = ()
    constant: str = ""


def render_page(archives: Sequence[Archive]) -> str:
    """The whole page as text. Names are escaped, whatever they hold."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["breakable"] = _breakable
    template = environment.from_string(_TEMPLATE.read_text("utf-8"))
    labelled = label_results(archives)
    places = _Places()
    curves = list(curves_of(labelled))
    page: str = template.render(
        title=_title(archives),
        facts=_facts(archives),
        contents=_contents(labelled),
        doubts=doubts(archives),
        quantities=quantity_tables(labelled),
        counters=counter_tables(labelled),
        curves=list(_curve_galleries([curve for curve in curves if not curve.metric.is_exact], places)),
        gaps=list(_gap_galleries(labelled, places)),
        work=list(_curve_galleries([curve for curve in curves if curve.metric.is_exact], places)),
        operators=list(operator_counts(labelled)),
        provenance=side_by_side([[result.provenance for result in a.results] for a in archives]),
        machine=side_by_side([[{"machine": a.machine, "commit": a.commit_info}] for a in archives]),
        files=[archive.label for archive in archives],
        command="python -m benchmarks report " + " ".join(str(archive.path) for archive in archives),
    )
    return page.lstrip()


def _breakable(name: str) -> Any:
    """A name of many parts that a narrow page breaks where they end."""
    from markupsafe import Markup, escape

    marked = re.sub(r"(::|[/._])(?=\w)", "\\1\0", name.replace("\0", ""))
    return escape(marked).replace("\0", Markup("<wbr>"))


def label_results(archives: Sequence[Archive]) -> list[Labelled]:
    """Every result with the label of its file; "" where there is only one file to be from."""
    return [(a.label if len(archives) > 1 else "", result) for a in archives for result in a.results]


class _Places(dict[str, int]):
    """Where in the palette each line of the page is: the same name looks the same in all figures."""

    def __missing__(self, name: str) -> int:
        return self.setdefault(name, len(self))


# The first screen.


def _title(archives: Sequence[Archive]) -> str:
    models = _distinct(result.provenance.get("model") for archive in archives for result in archive.results)
    return f"Benchmarks of {', '.join(models)}"


def _facts(archives: Sequence[Archive]) -> list[tuple[str, list[str]]]:
    """What, on what, when: a row per fact, a column per file; what was paid once, where anything was."""
    facts = [(name, [_fact(archive, name) for archive in archives]) for name in _FACTS]
    once = [told_together([result.details for result in archive.results]) for archive in archives]
    return [*facts, *([("paid once", [told or "nothing" for told in once])] if any(once) else [])]


_FACTS: Mapping[str, Any] = {
    "model": lambda told: f"{told.get('model')} ({told.get('weights')}), {told.get('dtype')}, {told.get('attention')}",
    "device": lambda told: (
        f"{told.get('device')}: {told.get('device_name') or told.get('cpu')}, {told.get('num_threads')} threads"
    ),
    "commit": lambda told: _commit(told.get("commit")),
    "taken": None,
    "instrument": lambda told: f"version {told.get('instrument_version')}",
}


def _fact(archive: Archive, name: str) -> str:
    if name == "taken":
        return archive.taken_at[:16].replace("T", " ") + (" UTC" if archive.taken_at.endswith("+00:00") else "")
    return "; ".join(_distinct(_FACTS[name](result.provenance) for result in archive.results))


def _commit(commit: Any) -> str:
    if not commit:
        return "unknown"
    name, _, dirty = str(commit).partition("+")
    return f"{name[:12]}{', with uncommitted changes' if dirty else ''}"


def _contents(labelled: Sequence[Labelled]) -> list[tuple[str, str]]:
    """Each benchmark, and how many cases and runs of which arms it holds."""
    return [
        (benchmark, _extent([r for _, r in labelled if r.benchmark == benchmark])) for benchmark in _tests(labelled)
    ]


def _extent(results: Sequence[BenchmarkResult]) -> str:
    cases = _distinct(result.case for result in results)
    arms = _distinct(m.arm for result in results for m in result.measurements if not m.metric.compares_arms)
    runs = sorted({len(runs) for result in results for runs in result.runs.values()})
    words = f"{len(cases)} {'case' if len(cases) == 1 else 'cases'} of {', '.join(arms)}"
    taken = " to ".join(str(end) for end in sorted({*runs[:1], *runs[-1:]}))
    return f"{words}, {taken} {'run' if taken == '1' else 'runs'} each" if runs else words


def _tests(labelled: Sequence[Labelled]) -> list[str]:
    return _distinct(result.benchmark for _, result in labelled)


def _distinct(values: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(map(str, values)))


# Figures.


def _curve_galleries(curves: Sequence[Curve], places: dict[str, int]) -> Iterator[Gallery]:
    for (benchmark, axis), group in itertools.groupby(curves, lambda curve: (curve.benchmark, curve.axis)):
        members = list(group)
        names = _distinct(name for curve in members for name in curve.lines)
        drawn = [curve for curve in members if not _is_flat(curve)]
        yield Gallery(
            title=f"{benchmark} by {axis.replace('_', ' ')}",
            panels=tuple(_curve_panel(curve, places) for curve in drawn if curve.metric.gate),
            further=tuple(_curve_panel(curve, places) for curve in drawn if not curve.metric.gate),
            constant=", ".join(curve.metric.title for curve in members if _is_flat(curve)),
            legend=_legend(names, places),
        )


def _is_flat(curve: Curve) -> bool:
    """Whether a count of work is one number per line: a word says it better than a picture."""
    values = [{m.value for _, m in points} for points in curve.lines.values()]
    return curve.metric.is_exact and all(len(each) == 1 for each in values)


def _curve_panel(curve: Curve, places: dict[str, int]) -> Panel:
    looks = {name: places[name] for name in curve.lines}
    figure = curve_figure(curve, looks, _key(f"{curve.benchmark} {curve.axis} {curve.metric.name}"))
    unit = "" if curve.unit.lower() in curve.metric.title.lower() else f"{curve.unit}, "
    note = f"{unit}{curve.metric.better} is better"
    return Panel(title=curve.metric.title, note=note, figure=figure)


def _gap_galleries(labelled: Sequence[Labelled], places: dict[str, int]) -> Iterator[Gallery]:
    for benchmark in _tests(labelled):
        cases: dict[str, dict[str, list[float]]] = {}
        for label, result in labelled:
            if result.benchmark == benchmark:
                cases.setdefault(result.case, {}).update(_gaps(label, result))
        drawn = {case: lines for case, lines in cases.items() if lines}
        if drawn:
            names = _distinct(name for lines in drawn.values() for name in lines)
            panels = tuple(_gap_panel(benchmark, case, lines, places) for case, lines in drawn.items())
            yield Gallery(title=benchmark, legend=_legend(names, places), panels=panels)


def _gaps(label: str, result: BenchmarkResult) -> dict[str, list[float]]:
    """The gaps of all runs of an arm together. Tokens that came in chunks have none."""
    pooled = {arm: [gap for run in runs for gap in run.itls_s or ()] for arm, runs in result.runs.items()}
    return {line_name(arm, (), label): gaps for arm, gaps in pooled.items() if gaps}


def _gap_panel(benchmark: str, case: str, lines: dict[str, list[float]], places: dict[str, int]) -> Panel:
    looks = {name: places[name] for name in lines}
    count = sum(map(len, lines.values()))
    return Panel(
        title=case or name_of_test(benchmark),
        note=f"{count} gaps",
        figure=gaps_figure(lines, looks, _key(f"{benchmark} {case} gaps")),
    )


def name_of_test(benchmark: str) -> str:
    """The function's name in a node id."""
    return benchmark.rpartition("::")[2]


def _legend(names: Sequence[str], places: dict[str, int]) -> tuple[Key, ...]:
    return tuple(
        Key(name=name, colour=places[name] % len(PALETTE), shape=_SHAPES[MARKERS[places[name] % len(MARKERS)]])
        for name in names
    )


def _key(text: str) -> str:
    """A short name for a figure that no other figure of the page has."""
    import hashlib

    return "f" + hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:8]
