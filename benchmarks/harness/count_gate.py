"""The counts of two results files against each other, at zero tolerance: one more operator is a change, and red.

Knows finished results and which of their metrics are exact. How counts are compared is `exact.py`'s.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.harness.archive import read_archives
from benchmarks.harness.exact import Change, exact_changes, format_changes, histogram_changes, is_red
from benchmarks.harness.metrics import metric
from benchmarks.harness.results import BenchmarkResult

Key = tuple[str, str, str]
"""Benchmark with its case, arm, metric."""

SAME, WORSE, NO_DATA = 0, 1, 4
"""Exit codes: nothing got worse; a count did; or something could not be compared, which is never good."""


_SETUP = ("model", "dtype", "device", "attention")
"""What has to be the same for equal counts to mean equal work, torch's version beside it."""


def compare_counts(base: Path, head: Path) -> tuple[int, str]:
    """Exit code, and what to print. Raises ArchiveError for a file that cannot be read or holds something else."""
    of_base, of_head = (archive.results for archive in read_archives([base, head]))
    setups = _setups(of_base), _setups(of_head)
    if all(setups) and setups[0] != setups[1]:
        told = " and ".join("; ".join(map(", ".join, sorted(setup))) for setup in setups)
        return NO_DATA, f"no data: counts of different setups do not compare: {told}"
    before, after = _counts_of(of_base), _counts_of(of_head)
    changes = exact_changes(before, after, {key: metric(key[2]).better for key in {**before, **after}})
    lines = [_headline(changes, len({**before, **after})), format_changes(changes), *_explanations(of_base, of_head)]
    return _code(changes), "\n".join(lines)


def _headline(changes: Sequence[Change], num_counts: int) -> str:
    num = {verdict: sum(change.verdict == verdict for change in changes) for verdict in ("worse", "better", "no data")}
    same = max(num_counts - len(changes), 0)
    return f"{num['worse']} counts worse, {num['better']} better, {num['no data']} without data, {same} the same"


def _setups(results: Iterable[BenchmarkResult]) -> set[tuple[str, ...]]:
    return {
        (*(str(told.get(name)) for name in _SETUP), f"torch {told.get('versions', {}).get('torch')}")
        for told in (result.provenance for result in results)
    }


def _code(changes: Sequence[Change]) -> int:
    if any(change.verdict == "no data" for change in changes):
        return NO_DATA
    return WORSE if is_red(changes) else SAME


def _counts_of(results: Iterable[BenchmarkResult]) -> dict[Key, float | None]:
    return {
        (_name(result), m.arm, m.metric.name): m.value
        for result in results
        for m in result.measurements
        if m.metric.is_exact
    }


def _explanations(base: Sequence[BenchmarkResult], head: Sequence[BenchmarkResult]) -> Iterator[str]:
    """Which operators it was, for each arm whose histogram changed."""
    before = {_name(result): result.details.get("operators", {}) for result in base}
    for result in head:
        for arm, operators in result.details.get("operators", {}).items():
            changed = histogram_changes(before.get(_name(result), {}).get(arm, operators), operators)
            if changed:
                told = ", ".join(f"{change.key} {change.difference:+}" for change in changed)
                yield f"operators of {_name(result)} {arm}: {told}"


def _name(result: BenchmarkResult) -> str:
    return f"{result.benchmark}[{result.case}]" if result.case else result.benchmark
