"""Which round of base goes with which round of head, from the provenance that each pass leaves beside asv's results.

Knows the sidecar's lines and that asv takes the two commits in turns. Refuses to know asv's files and verdicts. asv
keeps samples without saying which round they are from, and a failed or disturbed round leaves it one sample less.
"""

import dataclasses
import itertools
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.harness.archive import read_result
from benchmarks.harness.errors import ArchiveError
from benchmarks.harness.gate.evidence import SIDES, Key, key_of
from benchmarks.harness.metrics import metric
from benchmarks.harness.results import SCHEMA, BenchmarkResult

Round = tuple["Pass", "Pass"]
"""One pass of base and the pass of head that was taken next to it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One process that measured, and everything it left."""

    id: str
    at: datetime
    results: tuple[BenchmarkResult, ...]

    def result_of(self, key: Key) -> BenchmarkResult | None:
        return next((each for each in self.results if (each.benchmark, each.case) == key.of_case), None)

    def could_have_given(self, key: Key, cost: float) -> bool:
        """Whether asv's sample may come from this pass: its anchored cost, or that of its best run or its median."""
        result = self.result_of(key)
        if result is None or result.is_contaminated:
            return False
        measured = next((m for m in result.measurements if key_of(result, m) == key), None)
        values = (measured.best, measured.value) if measured else ()
        anchored = result.details.get("anchored", {}).get("costs", {}).get(f"{key.arm} {key.metric}".strip(), {})
        costs = [metric(key.metric).cost(value) for value in values if value is not None]
        return cost in (*costs, anchored.get("stored"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What one commit has of one quantity: asv's samples in order, which are costs, and all passes of the commit."""

    samples: tuple[float, ...]
    passes: tuple[Pass, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """Costs of base and head by round.

    `disturbed` says what was wrong, by number of the round, from 1; those rounds give no costs. `lost` says which round
    failed, "" for none. `control_s` are the control kernel's median seconds beside each side, of the rounds that tell.
    `why_in_order` says why the rounds are not known, "" where they are: then the samples were taken in their order.
    """

    costs: tuple[tuple[float, float], ...]
    disturbed: Mapping[int, str] = dataclasses.field(default_factory=dict)
    lost: str = ""
    control_s: tuple[tuple[float, float], ...] = ()
    why_in_order: str = ""


def read_passes(results: Path, machine: str, commit: str, env_name: str) -> tuple[Pass, ...]:
    """What the passes of a commit left beside asv's results, oldest first; nothing where they left none.

    Raises ArchiveError, which names file and line, for a line that cannot be read. Lines of an older instrument are
    passed over.
    """
    path = results / "provenance" / machine / f"{commit[:12]}-{env_name[:100]}.jsonl"
    lines = path.read_bytes().splitlines() if path.is_file() else []
    by_id: dict[str, tuple[datetime, list[BenchmarkResult]]] = {}
    for number, line in enumerate(lines, 1):
        try:
            _add(by_id, json.loads(line))
        except (ValueError, KeyError, TypeError, ArchiveError) as error:
            raise ArchiveError(f"{path}, line {number}: no line of provenance: {error}") from error
    passes = [Pass(id=name, at=at, results=tuple(every)) for name, (at, every) in by_id.items()]
    return tuple(sorted(passes, key=lambda each: each.at))


def _add(by_id: dict[str, tuple[datetime, list[BenchmarkResult]]], told: dict[str, Any]) -> None:
    if told["schema"] == SCHEMA:
        at = datetime.fromisoformat(told["at"])
        by_id.setdefault(told["pass"], (at, []))[1].append(read_result(told))


def pair_up(key: Key, base: Stored, head: Stored) -> Paired:
    """Pair the samples of one quantity by round, or by their order where the passes do not say which round is which."""
    origins = [_origins(key, side) for side in (base, head)]
    if None in origins:
        return _in_order(base, head, "the provenance beside asv's results does not tell which rounds they are from")
    from_base, from_head = used = tuple(origin or {} for origin in origins)
    rounds = _rounds(*(_passes_of(key.benchmark, side.passes) for side in (base, head)))
    fewer = min(used, key=len)
    if 2 * sum(b.id in fewer or h.id in fewer for b, h in rounds) < len(fewer):
        return _in_order(base, head, "the two commits were not measured in turns")
    ids = frozenset(from_base) | frozenset(from_head)
    recent = _since_first_used(rounds, ids)
    whole = [(b, h) for b, h in rounds if b.id in from_base and h.id in from_head]
    return Paired(
        costs=tuple((from_base[b.id], from_head[h.id]) for b, h in whole),
        disturbed=_disturbed(key, recent),
        lost=_lost(key, _since_first_used(recent[::-1], ids)[::-1], used),
        control_s=tuple(_control_s(key, whole)),
    )


def _since_first_used(rounds: Sequence[Round], ids: frozenset[str]) -> list[Round]:
    """Rounds before it belong to an earlier run, whose samples asv has replaced."""
    return list(itertools.dropwhile(lambda both: ids.isdisjoint(each.id for each in both), rounds))


def _in_order(base: Stored, head: Stored, why: str) -> Paired:
    return Paired(costs=tuple(zip(base.samples, head.samples, strict=False)), why_in_order=why)


def _passes_of(benchmark: str, passes: Sequence[Pass]) -> list[Pass]:
    return [each for each in passes if any(result.benchmark == benchmark for result in each.results)]


def _rounds(base: Sequence[Pass], head: Sequence[Pass]) -> list[Round]:
    """Passes of the two sides that follow each other directly, the closest first, each once; in order of time.

    asv takes turns as base head, head base, base head: inside a round nothing lies between the two, and a round that
    lacks a side must not move the others.
    """
    line = sorted([*((each, 0) for each in base), *((each, 1) for each in head)], key=lambda place: place[0].at)
    neighbours = [pair for pair in itertools.pairwise(line) if pair[0][1] != pair[1][1]]
    found: list[Round] = []
    taken: set[str] = set()
    for pair in sorted(neighbours, key=lambda pair: pair[1][0].at - pair[0][0].at):
        (first, side), (second, _) = pair
        if not {first.id, second.id} & taken:
            taken |= {first.id, second.id}
            found.append((second, first) if side else (first, second))
    return sorted(found, key=lambda each: each[0].at)


def _origins(key: Key, stored: Stored) -> dict[str, float] | None:
    """The samples by the pass they come from, or None where one comes from none: the newest passes first."""
    passes = iter(reversed(stored.passes))
    found = {}
    for cost in reversed(stored.samples):
        origin = next((each for each in passes if each.could_have_given(key, cost)), None)
        if origin is None:
            return None
        found[origin.id] = cost
    return found


def _disturbed(key: Key, rounds: Sequence[Round]) -> dict[int, str]:
    told = {number: _disturbance(key, both) for number, both in enumerate(rounds, 1)}
    return {number: why for number, why in told.items() if why}


def _disturbance(key: Key, both: Round) -> str:
    whats = (
        f"{name}: {flag.what}"
        for name, each in zip(SIDES, both, strict=True)
        if (result := each.result_of(key))
        for flag in result.flags
        if flag.kind == "contaminated"
    )
    return "; ".join(dict.fromkeys(whats))


def _control_s(key: Key, rounds: Sequence[Round]) -> Iterator[tuple[float, float]]:
    for both in rounds:
        base, head = (result.provenance.get("control_s") if (result := each.result_of(key)) else None for each in both)
        if base and head:
            yield statistics.median(base), statistics.median(head)


def _lost(key: Key, rounds: Sequence[Round], used: Sequence[Mapping[str, float]]) -> str:
    """The first round of which a side has no sample though nothing disturbed it: one failed, there or later."""
    for number, both in enumerate(rounds, 1):
        for name, each, costs in zip(SIDES, both, used, strict=True):
            result = each.result_of(key)
            if each.id not in costs and not (result and result.is_contaminated):
                why = "asv drops those before a failure" if result else "it was not measured"
                return f"{name} has no sample of round {number}: {why}"
    return ""
