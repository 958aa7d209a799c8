"""Results files, read back: pytest-benchmark's JSON with our `extra_info` becomes `BenchmarkResult`s again.

Knows what a file of this instrument has to hold, and refuses every other with one line that names the file and the
fault. Refuses to repair, to skip and to merge: a file is good as a whole or not at all.
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import INSTRUMENT_VERSION
from benchmarks.harness.errors import ArchiveError, InstrumentError
from benchmarks.harness.metrics import metric
from benchmarks.harness.results import SCHEMA, BenchmarkResult, Flag, Measurement
from benchmarks.harness.timing import RunTiming, Stamp

GAPS = "cases_without_values"
"""Where a file keeps results that have no values, beside pytest-benchmark's own."""

MEASURE_COMMAND = "pytest --benchmark-only --benchmark-autosave"

_TEXTS = ("request_id", "finish_reason", "error")
_RUN_FIELDS = {
    field.name: str if field.name in _TEXTS else int
    for field in dataclasses.fields(RunTiming)
    if field.name not in ("stamps", "token_ids")
}
"""What is read of a run beside its stamps. Its token ids are not kept in a file."""

_KINDS: dict[type, str] = {str: "text", list: "a list", dict: "an object", int: "a whole number", bool: "true or false"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """One results file: what it measured, on which machine (pytest-benchmark's own words), and when.

    `label` tells it from the other files that were read with it.
    """

    label: str
    path: Path
    taken_at: str
    machine: Mapping[str, Any]
    commit_info: Mapping[str, Any]
    results: tuple[BenchmarkResult, ...]


def read_results(paths: Sequence[Path]) -> list[BenchmarkResult]:
    """All results of the files, in order. Raises ArchiveError like `read_archives`."""
    return [result for archive in read_archives(paths) for result in archive.results]


def read_archives(paths: Sequence[Path]) -> list[Archive]:
    """Read files that can stand side by side.

    Raises ArchiveError, which names the file and the fault, for a file that cannot be read, holds something else, or
    was written by another version of the instrument than this one or than the other files.
    """
    twice = [str(path) for path, count in Counter(map(_resolved, paths)).items() if count > 1]
    if twice:
        raise ArchiveError(f"given twice: {', '.join(twice)}")
    archives = [_read(path, label) for path, label in zip(paths, _labels(paths), strict=True)]
    _check_versions(archives)
    return archives


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:  # a loop of links
        raise ArchiveError(f"{path} cannot be read: {error}") from error


def newest_file(folder: Path) -> Path:
    """The results file below `folder` that was written last. Raises ArchiveError, with what to run, without any."""
    files = [path for path in folder.rglob("*.json") if path.is_file() and _is_candidate(path)]
    if not files:
        raise ArchiveError(f"no results file below {folder}; measure first: {MEASURE_COMMAND}")
    return max(files, key=lambda path: (path.stat().st_mtime_ns, str(path)))


def _is_candidate(path: Path) -> bool:
    """Whether a file was begun as a results file: pytest-benchmark writes the machine first. Others may lie there."""
    with path.open("rb") as file:
        start = file.read(200)
    return not start.strip() or b'"machine_info"' in start


def _labels(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that differ, without their suffix."""
    whole = [path.resolve().with_suffix("").parts for path in paths]
    for length in range(1, max(map(len, whole), default=0) + 1):
        short = ["/".join(parts[-length:]) for parts in whole]
        if len(set(short)) == len(short):
            return short
    return [str(path) for path in paths]


def _check_versions(archives: Sequence[Archive]) -> None:
    """Raise ArchiveError unless every result was measured by the instrument that reads it."""
    found: dict[str, Path] = {}
    for archive in archives:
        for result in archive.results:
            found.setdefault(result.provenance["instrument_version"], archive.path)
    if len(found) > 1:
        said = " and ".join(f"{version!r} ({path})" for version, path in found.items())
        raise ArchiveError(f"results of different instrument versions are not comparable: {said}; measure again")
    for version, path in found.items():
        if version != INSTRUMENT_VERSION:
            raise ArchiveError(
                f"{path} was measured by instrument version {version!r}, this is {INSTRUMENT_VERSION!r}; read it with "
                f"the commit that wrote it, or measure again: {MEASURE_COMMAND}"
            )


def _read(path: Path, label: str) -> Archive:
    try:
        whole = _parse(path.read_bytes())
        entries = _entries(whole)
        return Archive(
            label=label,
            path=path,
            taken_at=_field(whole, "datetime", str),
            machine=_field(whole, "machine_info", dict),
            commit_info=_field(whole, "commit_info", dict),
            results=tuple(_results(entries)),
        )
    except OSError as error:
        raise ArchiveError(f"{path} cannot be read: {error.strerror}") from error
    except InstrumentError as error:
        raise ArchiveError(f"{path}: {error}") from error


def _parse(content: bytes) -> Any:
    """JSON in the strict sense: pytest-benchmark and Python would also take NaN and infinities."""
    try:
        return json.loads(
            content.decode(),
            parse_constant=_refuse_number,
            parse_float=_finite,
            parse_int=_whole,
        )
    except RecursionError as error:
        raise ArchiveError("nested too deeply for a results file") from error
    except ValueError as error:
        if not content.strip():
            raise ArchiveError("the file is empty: was the run that wrote it killed?") from error
        raise ArchiveError(f"no complete JSON, perhaps cut off while it was written: {error}") from error


def _refuse_number(text: str) -> float:
    raise ArchiveError(f"holds {text}, which is no measurement")


def _finite(text: str) -> float:
    return number if math.isfinite(number := float(text)) else _refuse_number(text)


def _whole(text: str) -> int:
    return int(text) if len(text) < 300 else int(_refuse_number(f"a number of {len(text)} digits"))


def _entries(whole: Any) -> list[Any]:
    """pytest-benchmark's benchmarks."""
    if isinstance(whole, dict) and {"commit_hash", "env_name"} & whole.keys():
        raise ArchiveError(f"a results file of asv, not of pytest-benchmark; measure with: {MEASURE_COMMAND}")
    if not isinstance(whole, dict) or not {"benchmarks", "machine_info"} <= whole.keys():
        raise ArchiveError(f"no results file of pytest-benchmark; measure with: {MEASURE_COMMAND}")
    entries: list[Any] = [*_field(whole, "benchmarks", list), *_field({GAPS: [], **whole}, GAPS, list)]
    if not entries:
        raise ArchiveError("holds no benchmark: nothing was measured, or everything failed")
    return entries


def _results(entries: Iterable[Any]) -> Iterator[BenchmarkResult]:
    seen: set[tuple[str, str]] = set()
    for entry in entries:
        name = str(entry.get("fullname", "?")) if isinstance(entry, dict) else "?"
        try:
            result = _result(_extra_info(entry))
        except InstrumentError as error:
            raise ArchiveError(f"benchmark {name}: {error}") from error
        if (result.benchmark, result.case) in seen:
            raise ArchiveError(f"benchmark {name} is there twice")
        seen.add((result.benchmark, result.case))
        yield result


def read_result(told: Any) -> BenchmarkResult:
    """What `BenchmarkResult.as_dict` gave, however it came here. Raises ArchiveError for anything else."""
    return _result(_extra_info({"extra_info": told}))


def _extra_info(entry: Any) -> dict[str, Any]:
    extra = entry.get("extra_info") if isinstance(entry, dict) else None
    if not isinstance(extra, dict) or "measurements" not in extra:
        raise ArchiveError("not measured by the `measure` fixture: it lacks our extra_info")
    schema = extra.get("schema", 1)
    if schema != SCHEMA:
        raise ArchiveError(f"written in schema {schema!r}, this reads {SCHEMA}; measure again: {MEASURE_COMMAND}")
    return extra


def _result(extra: dict[str, Any]) -> BenchmarkResult:
    runs = _field(extra, "runs", dict)
    measurements = tuple(_measurement(each) for each in _field(extra, "measurements", list))
    twice = [key for key, count in Counter((m.metric.name, m.arm) for m in measurements).items() if count > 1]
    if twice:
        raise ArchiveError(f"{' of '.join(twice[0])} is there twice")
    provenance = _field(extra, "provenance", dict)
    _field(provenance, "instrument_version", str)
    return BenchmarkResult(
        benchmark=_field(extra, "benchmark", str),
        case=_field(extra, "case", str),
        params=_field(extra, "params", dict),
        measurements=measurements,
        provenance=provenance,
        flags=tuple(_flag(each) for each in _field(extra, "flags", list)),
        runs={arm: tuple(_run(run) for run in _field(runs, arm, list)) for arm in runs},
        details=_details(_field(extra, "details", dict)),
    )


def _measurement(stored: Any) -> Measurement:
    """One measurement. Its metric's unit and direction have to be what the name means here."""
    declared = metric(_field(stored, "metric", str))
    for key in ("unit", "better"):
        if _field(stored, key, str) != getattr(declared, key):
            raise ArchiveError(f"{declared.name} has {key} {stored[key]!r}, declared is {getattr(declared, key)!r}")
    read = _any_number if declared.coefficient else _number
    samples = [read(sample) for sample in _field(stored, "samples", list)]
    if None in samples:
        raise ArchiveError(f"{declared.name} has a sample without a value")
    return Measurement(
        metric=declared,
        arm=_field(stored, "arm", str),
        samples=tuple(sample for sample in samples if sample is not None),
        num_observations=_field(stored, "n", int),
        **{end: read(_field(stored, end, object)) for end in ("value", "low", "high")},
    )


def _flag(stored: Any) -> Flag:
    return Flag(**{name: _field(stored, name, str) for name in ("kind", "arm", "what")})


def _run(stored: Any) -> RunTiming:
    _field(stored, "sent_ns", int)
    fields = {name: _field(stored, name, _RUN_FIELDS[name]) for name in _RUN_FIELDS if stored.get(name) is not None}
    return RunTiming(**fields, stamps=tuple(_stamp(pair) for pair in _field(stored, "stamps", list)))


def _stamp(pair: Any) -> Stamp:
    if not isinstance(pair, list) or [type(each) for each in pair] != [int, int]:
        raise ArchiveError(f"a stamp is [at_ns, num_tokens], not {pair!r}")
    return Stamp(at_ns=pair[0], num_tokens=pair[1])


def _details(stored: dict[str, Any]) -> dict[str, Any]:
    """What a result tells beyond numbers; the operators are counted, the rest is kept as it is."""
    for arm, counts in _object(stored.get("operators", {})).items():
        for name in _object(counts):
            if _field(counts, name, int) < 0:
                raise ArchiveError(f"{arm} ran the operator {name} {counts[name]} times")
    return stored


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ArchiveError(f"{str(value)[:40]!r} stands where an object should")
    return value


def _any_number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        raise ArchiveError(f"{str(value)[:40]!r} is no number")
    return value


def _number(value: Any) -> float | None:
    number = _any_number(value)
    if number is not None and number < 0:
        raise ArchiveError(f"holds {value}, and nothing but a coefficient is below 0")
    return number  # a count stays a whole number: as a float it would lose its last digits


def _field(mapping: Any, name: str, kind: type) -> Any:
    """A field that has to be there, of the right type; a bool is no number."""
    if name not in _object(mapping):
        raise ArchiveError(f"lacks {name!r}")
    value = mapping[name]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ArchiveError(f"{name!r} is {str(value)[:40]!r}, which is not {_KINDS.get(kind, kind.__name__)}")
    return value
