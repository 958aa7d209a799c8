"""What asv has stored for two commits, by quantity: its series carry the names that the bridge gave them.

Knows those names, and what makes two commits comparable as a whole. Refuses to know how asv's files look
(`asv_files.py`), and what becomes of the quantities (`stored.py`).
"""

import ast
import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.errors import ArchiveError
from benchmarks.harness.gate.asv_files import CommitFile, read_pair
from benchmarks.harness.gate.evidence import SETUP, Key
from benchmarks.harness.gate.rounds import Pass, read_passes
from benchmarks.harness.metrics import METRICS, Metric, metric

_SERIES = re.compile(r"(?P<file>(?:[^.]+\.)*(?:bench|test)_[^.]+)\.(?P<test>(?:\w+\.)*test\w*)\.track_(?P<metric>\w+)")
"""How the bridge names series: `bench_kv_cache.test_prompt_length.track_itl_p50_s`."""

_BY_ASV_NAME = {each.asv_name: each for each in METRICS.values()}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What asv has of one quantity of one commit. Samples are costs, one per round; None where asv kept none."""

    result: float | None
    samples: tuple[float, ...] | None
    version: str | None

    @property
    def is_all_contaminated(self) -> bool:
        """Whether no round could be used: each added an empty list."""
        return self.samples == ()

    @property
    def has_failed(self) -> bool:
        return self.result is None and not self.is_all_contaminated

    @property
    def is_skipped(self) -> bool:
        """Whether asv has NaN: the test skipped the case, or asv was asked for others only."""
        return self.result is not None and math.isnan(self.result)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """One commit: its quantities, its passes where they left provenance, and the series that are none of ours.

    `undeclared` are series of the bridge's whose metric is not declared, with the benchmark that each is of.
    """

    file: CommitFile
    entries: Mapping[Key, Entry]
    passes: tuple[Pass, ...]
    undeclared: Mapping[str, str]
    foreign: tuple[str, ...]

    @property
    def provenance(self) -> Mapping[str, Any]:
        """What the newest pass says of itself."""
        return self.passes[-1].results[0].provenance if self.passes else {}


def read_commits(results: Path, base: str, head: str, machine: str | None = None) -> tuple[Commit, Commit]:
    """What is stored of two commits, each given by its hash or the beginning of it.

    Raises ArchiveError where they cannot be compared as a whole: see `stored.read_stored`.
    """
    of_base, of_head = (_commit(results, file) for file in read_pair(results, base, head, machine))
    for commit in (of_base, of_head):
        _check_samples(commit, of_base.file.commit[:8], of_head.file.commit[:8])
    _check_same_setup(of_base, of_head)
    return of_base, of_head


def _commit(results: Path, file: CommitFile) -> Commit:
    places = {name: _SERIES.fullmatch(name) for name in file.series}
    ours = {name: place for name, place in places.items() if place is not None}
    passes = read_passes(results, file.path.parent.name, file.commit, file.env_name)
    try:
        return Commit(
            file=file,
            entries=dict(_entries(file, ours)),
            passes=passes,
            undeclared={n: _benchmark(place) for n, place in ours.items() if place["metric"] not in _BY_ASV_NAME},
            foreign=tuple(name for name, place in places.items() if place is None),
        )
    except ArchiveError as error:
        raise ArchiveError(f"{file.path}: {error}") from error


def _entries(file: CommitFile, places: Mapping[str, re.Match[str]]) -> Iterator[tuple[Key, Entry]]:
    for name, place in places.items():
        series, declared = file.series[name], _BY_ASV_NAME.get(place["metric"])
        if declared is not None:
            sets = itertools.product(*series.params)
            for parameters, result, samples in zip(sets, series.results, series.samples, strict=True):
                arm, case = _arm_and_case(name, declared, [_id(text) for text in parameters])
                entry = Entry(result=result, samples=samples, version=series.version)
                yield Key(_benchmark(place), case, arm, declared.name), entry


def _benchmark(place: re.Match[str]) -> str:
    """The node id of the test that a series stands for."""
    return f"benchmarks/{place['file'].replace('.', '/')}.py::{place['test'].replace('.', '::')}"


def _id(text: str) -> str:
    """asv stores parameters as they look in Python."""
    try:
        return str(ast.literal_eval(text))
    except (ValueError, SyntaxError):
        return text


def _arm_and_case(name: str, of: Metric, parameters: Sequence[str]) -> tuple[str, str]:
    """The axes of a series are arm and case: no arm where arms are compared, no case for a test without parameters."""
    arms = [] if of.compares_arms else list(parameters[:1])
    cases = list(parameters[len(arms) :])
    if len(cases) > 1 or not (arms or of.compares_arms):
        raise ArchiveError(f"series {name} has {len(parameters)} parameters, and is none of this instrument")
    return "".join(arms), "".join(cases)


def _check_samples(commit: Commit, base: str, head: str) -> None:
    """Raise ArchiveError where asv has kept no sample of any time: medians alone cannot be judged."""
    timed = [each for key, each in commit.entries.items() if not metric(key.metric).is_exact]
    measured = [each for each in timed if not (each.has_failed or each.is_skipped)]
    if measured and all(each.samples is None for each in measured):
        raise ArchiveError(
            f"{commit.file.path} has no samples, which asv keeps only when asked to; measure with: "
            f"asv continuous --record-samples {base} {head}, or asv run --record-samples {commit.file.commit[:8]}^!"
        )


def _check_same_setup(base: Commit, head: Commit) -> None:
    """Raise ArchiveError where the provenance beside the results, as far as there is any, tells of two setups."""
    told = base.provenance, head.provenance
    for name in SETUP:
        said = [each[name] for each in told if name in each]
        if len(said) == 2 and said[0] != said[1]:
            paths = f"{base.file.path} and {head.file.path}"
            raise ArchiveError(f"not comparable, measured with different {name}: {said[0]} and {said[1]} in {paths}")
