"""Sorts what launches leave behind: which quantities both sides measured, and why the others cannot be compared.

Knows finished results and what is missing among them. Refuses to know statistics and verdicts: a gap is named here and
judged in `verdict.py`.
"""

import statistics
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.gate.evidence import (
    SETUP,
    SIDES,
    Case,
    Counts,
    Evidence,
    Key,
    Launch,
    Pairs,
    Side,
    SideName,
    key_of,
    name_of_case,
)
from benchmarks.harness.metrics import metric
from benchmarks.harness.results import BenchmarkResult, Measurement


def collect(launches: Sequence[Launch]) -> Evidence:
    """Sort what launches say. A case may be missing from a launch if both sides miss it: it was not asked for.

    Raises InstrumentError when two results were not measured in the same way: other model, machine or instrument.
    """
    _check_same_setup(launches)
    kinds: dict[str, dict[Any, Any]] = {
        name: {} for name in ("pairs", "set_aside", "counts", "gaps", "new", "skipped", "contaminated", "control")
    }
    for case in dict.fromkeys(case for launch in launches for side in launch.sides for case in side.cases):
        for kind, key, found in _sorted_case(case, launches):
            kinds[kind][key] = found
    told = [[result.provenance for result in side] for side in _results_by_side(launches)]
    provenance = tuple(each[0] if each else {} for each in told)
    return Evidence(num_launches=len(launches), provenance=provenance, **kinds)  # type: ignore[arg-type]


_Found = Iterator[tuple[str, Key | Case, Any]]
"""A field of Evidence, the key in it, and what belongs there."""

_Measured = Mapping[int, tuple[BenchmarkResult, BenchmarkResult]]
"""Number of a launch, from 1, to what base and head measured in it."""

_Whole = Mapping[int, tuple[Measurement, Measurement]]
"""The same for one quantity, which neither side lacks."""


def _results_by_side(launches: Iterable[Launch]) -> tuple[list[BenchmarkResult], list[BenchmarkResult]]:
    sides = [launch.sides for launch in launches]
    return [r for base, _ in sides for r in base.results], [r for _, head in sides for r in head.results]


def _check_same_setup(launches: Iterable[Launch]) -> None:
    every = [result.provenance for side in _results_by_side(launches) for result in side]
    for name in SETUP:
        said = dict.fromkeys(str(told[name]) for told in every if name in told)
        if len(said) > 1:
            raise InstrumentError(f"not comparable, measured with different {name}: {' and '.join(said)}")


def _sorted_case(case: Case, launches: Sequence[Launch]) -> _Found:
    """Everything about a case; one entry alone where it cannot be compared as a whole."""
    asked = {n: launch for n, launch in enumerate(launches, 1) if any(case in side.cases for side in launch.sides)}
    state = _state_of_case(case, asked)
    if state is not None:
        yield state
        return
    measured = {n: (_result(case, launch.base), _result(case, launch.head)) for n, launch in asked.items()}
    disturbed = {n: why for n, both in measured.items() if (why := _disturbance(both))}
    if disturbed:
        yield "contaminated", case, disturbed
    quiet = measured.keys() - disturbed.keys()
    yield "control", case, tuple(pairs for n in measured if n in quiet and (pairs := _control(measured[n])))
    every = [each for both in measured.values() for each in both]
    compared = (key_of(result, m) for result in every for m in result.measurements if m.metric.has_ratio)
    for key in dict.fromkeys(compared):
        yield from _sorted_key(key, measured, quiet)


def _result(case: Case, side: Side) -> BenchmarkResult:
    found = side.result_of(case)
    assert found is not None, f"{name_of_case(case)} was measured"
    return found


def _state_of_case(case: Case, asked: Mapping[int, Launch]) -> tuple[str, Case, str] | None:
    """Why a case cannot be compared as a whole, or None where both sides measured it in every launch."""
    for number, launch in asked.items():
        for name, side in zip(SIDES, launch.sides, strict=True):
            if case in side.failed:
                return "gaps", case, f"{name} failed in launch {number}: {side.failed[case]}"
    has_base, has_head = (
        {n for n, launch in asked.items() if launch.sides[place].result_of(case) is not None} for place in (0, 1)
    )
    if not has_base:
        first = next(iter(asked.values()))
        if not has_head:
            return "skipped", case, first.head.skipped.get(case) or first.base.skipped.get(case, "")
        return "new", case, _absence(case, "base", asked.values())
    if not has_head:
        return "gaps", case, _absence(case, "head", asked.values())
    for number, launch in asked.items():
        for name, numbers in zip(SIDES, (has_base, has_head), strict=True):
            if number not in numbers:
                return "gaps", case, f"{_absence(case, name, [launch])} in launch {number}, and measured it in others"
    return None


def _absence(case: Case, name: SideName, launches: Iterable[Launch]) -> str:
    whys = (getattr(launch, name).skipped.get(case) for launch in launches)
    why = next(filter(None, whys), None)
    return f"{name} skipped it: {why}" if why else f"{name} did not measure it"


def _disturbance(both: Sequence[BenchmarkResult]) -> str:
    """What disturbed either side of one launch, "" for nothing."""
    whats = (
        f"{name}: {flag.what}"
        for name, result in zip(SIDES, both, strict=True)
        for flag in result.flags
        if flag.kind == "contaminated"
    )
    return "; ".join(dict.fromkeys(whats))


def _control(both: Sequence[BenchmarkResult]) -> Pairs | None:
    """The control kernel's median beside each side, or None where it did not run."""
    base, head = (result.provenance.get("control_s") for result in both)
    if not base or not head:
        return None
    return Pairs(base=(statistics.median(base),), head=(statistics.median(head),))


def _sorted_key(key: Key, measured: _Measured, quiet: Container[int]) -> _Found:
    """One quantity of a case that both sides measured. What is missing in a disturbed launch is missing, too."""
    found = {n: (_measurement(key, base), _measurement(key, head)) for n, (base, head) in measured.items()}
    missing = next((f"{why} in launch {n}" for n, both in found.items() if (why := _what_is_missing(both))), None)
    if all(base is None for base, _ in found.values()):
        yield "new", key, "base did not measure it"
    elif missing:
        yield "gaps", key, missing
    else:
        whole = {n: (base, head) for n, (base, head) in found.items() if base is not None and head is not None}
        yield from _counts(key, whole) if metric(key.metric).is_exact else _pairs(key, whole, quiet)


def _measurement(key: Key, result: BenchmarkResult) -> Measurement | None:
    return next((m for m in result.measurements if key_of(result, m) == key), None)


def _what_is_missing(both: Sequence[Measurement | None]) -> str:
    """Why one launch cannot be compared, "" where it can."""
    for name, measured in zip(SIDES, both, strict=True):
        if measured is None:
            return f"{name} did not measure it"
        if measured.value is None or not measured.samples:
            return f"it is undefined on {name}"
    num_base, num_head = (len(each.samples) if each else 0 for each in both)
    return "" if num_base == num_head else f"base has {num_base} samples and head {num_head}"


def _counts(key: Key, whole: _Whole) -> _Found:
    by_side = [dict.fromkeys(value for m in side for value in m.samples) for side in zip(*whole.values(), strict=True)]
    for name, values in zip(SIDES, by_side, strict=True):
        if len(values) > 1:
            yield "gaps", key, f"the count varies on {name}: {', '.join(f'{value:,.15g}' for value in values)}"
            return
    base, head = (next(iter(values)) for values in by_side)
    yield "counts", key, Counts(base=base, head=head, num_launches=len(whole))


def _pairs(key: Key, whole: _Whole, quiet: Container[int]) -> _Found:
    used: list[Pairs] = []
    set_aside: list[Pairs] = []
    for number, (base, head) in whole.items():
        try:
            pairs = Pairs(base=base.samples, head=head.samples)
            pairs.logs(metric(key.metric))
        except InstrumentError as error:
            yield "gaps", key, f"{error} (launch {number})"
            return
        (used if number in quiet else set_aside).append(pairs)
    yield "pairs", key, tuple(used)
    if set_aside:
        yield "set_aside", key, tuple(set_aside)
