"""asv's own files of results, read back: one commit's series on one machine.

Knows asv's format and how it names its files. Refuses to write, to repair and to guess: a file that is cut off, of
another tool, of another format or of another machine is refused by its name.
"""

import dataclasses
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.errors import ArchiveError

FORMAT = 2
"""The version of asv's results files that this reads, as asv 0.6 writes it."""

_NAME = re.compile(r"([0-9a-f]{8})-.+\.json")
_SAME_MACHINE = ("machine", "arch", "cpu", "num_cpu")
"""What asv says of a machine that has to be the same on both sides; memory and kernel may change their last digit."""

_MAX_LISTED = 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One series of one commit, its results and samples in the order of its parameter sets.

    A result of None failed, NaN was skipped or not asked for. Samples are None where asv has recorded none.
    """

    params: tuple[tuple[str, ...], ...]
    version: str | None
    results: tuple[float | None, ...]
    samples: tuple[tuple[float, ...] | None, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommitFile:
    """What asv has stored for one commit in one environment of one machine."""

    path: Path
    commit: str
    env_name: str
    machine: Mapping[str, Any]
    series: Mapping[str, Series]


def read_pair(results: Path, base: str, head: str, machine: str | None = None) -> tuple[CommitFile, CommitFile]:
    """The files of two commits, each given by its hash or the beginning of it, that can stand side by side.

    Same machine, same environment. Raises ArchiveError, which says what there is and what to run, without such a
    pair, with several of them, and for a file that cannot be read as a whole.
    """
    found = _files_by_machine(results)
    chosen = _choose_machine(found, base, head, machine)
    every = [[read_file(path) for path in _files_of(found[chosen], commit)] for commit in (base, head)]
    for commit, files in zip((base, head), every, strict=True):
        for file in files:
            _check_place(file, commit, chosen)
    pair = _same_environment(*every)
    _check_pair(*pair)
    return pair


def read_file(path: Path) -> CommitFile:
    """One results file. Raises ArchiveError, which names it, unless all of it is what asv writes."""
    try:
        whole = _parse(path.read_bytes())
        return CommitFile(
            path=path,
            commit=_field(whole, "commit_hash", str),
            env_name=_field(whole, "env_name", str),
            machine=_field(whole, "params", dict),
            series=_all_series(_field(whole, "result_columns", list), _field(whole, "results", dict)),
        )
    except OSError as error:
        raise ArchiveError(f"{path} cannot be read: {error.strerror}") from error
    except ArchiveError as error:
        raise ArchiveError(f"{path}: {error}") from error


def names_of_series(results: Path) -> tuple[str, ...]:
    """The series of the suite as asv found it last; none where asv keeps no list. Raises ArchiveError like the rest."""
    path = results / "benchmarks.json"
    if not path.is_file():
        return ()
    try:
        whole = _load(path.read_bytes())
    except ArchiveError as error:
        raise ArchiveError(f"{path}: {error}; to write it anew: asv run --bench just-discover") from error
    return tuple(name for name, told in whole.items() if isinstance(told, dict)) if isinstance(whole, dict) else ()


def run_command(commit: str) -> str:
    """What measures one commit so that it can be judged later."""
    return f"asv run --record-samples {commit}^!"


# Which files there are.


def _files_by_machine(results: Path) -> dict[str, list[Path]]:
    folders = sorted(folder for folder in results.iterdir() if folder.is_dir()) if results.is_dir() else []
    found = {folder.name: sorted(p for p in folder.iterdir() if _NAME.fullmatch(p.name)) for folder in folders}
    with_files = {name: paths for name, paths in found.items() if paths}
    if not with_files:
        raise ArchiveError(f"asv has stored no results below {results}; measure first: {run_command('COMMIT')}")
    return with_files


def _short(path: Path) -> str:
    return path.name[:8]


def _files_of(paths: Iterable[Path], commit: str) -> list[Path]:
    """The files of the one commit whose hash begins like this."""
    found = [path for path in paths if _short(path).startswith(commit[:8])]
    commits = dict.fromkeys(map(_short, found))
    if len(commits) > 1:
        raise ArchiveError(f"{commit!r} is the beginning of several commits: {', '.join(commits)}")
    return found


def _choose_machine(found: Mapping[str, list[Path]], base: str, head: str, asked: str | None) -> str:
    if asked is not None and asked not in found:
        raise ArchiveError(f"no results of machine {asked!r}; there are those of: {', '.join(found)}")
    among = {name: paths for name, paths in found.items() if asked in (None, name)}
    has_base, has_head = ([name for name, paths in among.items() if _files_of(paths, c)] for c in (base, head))
    for commit, having in ((base, has_base), (head, has_head)):
        if not having:
            raise ArchiveError(_nothing_of(commit, among))
    both = [name for name in has_base if name in has_head]
    if not both:
        raise ArchiveError(
            f"{base} was measured on {', '.join(has_base)} and {head} on {', '.join(has_head)}: results of two "
            f"machines are never compared; measure both on one: asv continuous --record-samples {base} {head}"
        )
    if len(both) > 1:
        raise ArchiveError(
            f"several machines have results of both commits: {', '.join(both)}; choose one with --machine"
        )
    return both[0]


def _nothing_of(commit: str, among: Mapping[str, list[Path]]) -> str:
    there = "; ".join(f"{name}: {_listed(dict.fromkeys(map(_short, paths)))}" for name, paths in among.items())
    return f"nothing is stored of commit {commit}; measure it: {run_command(commit)}\nstored are, by machine: {there}"


def _listed(commits: Iterable[str]) -> str:
    every = list(commits)
    more = [f"and {len(every) - _MAX_LISTED} more"] if len(every) > _MAX_LISTED else []
    return ", ".join([*every[:_MAX_LISTED], *more])


# Whether they can stand side by side.


def _check_place(file: CommitFile, commit: str, machine: str) -> None:
    """Raise ArchiveError for a file that says something else than its name and its folder."""
    if not (file.commit.startswith(commit) and file.commit.startswith(_short(file.path))):
        raise ArchiveError(f"{file.path} holds results of commit {file.commit}, not of {commit}")
    if file.machine.get("machine") != machine:
        raise ArchiveError(
            f"{file.path} was measured on machine {file.machine.get('machine')!r} and lies among the results of "
            f"{machine!r}; results of two machines are never compared"
        )


def _same_environment(base: Sequence[CommitFile], head: Sequence[CommitFile]) -> tuple[CommitFile, CommitFile]:
    pairs = [(b, h) for b in base for h in head if b.env_name == h.env_name]
    paths = ", ".join(str(file.path) for file in (*base, *head))
    if not pairs:
        raise ArchiveError(f"measured in different environments, and so not comparable: {paths}")
    if len(pairs) > 1:
        raise ArchiveError(
            f"both commits were measured in several environments; move the files of all but one out of the way: {paths}"
        )
    return pairs[0]


def _check_pair(base: CommitFile, head: CommitFile) -> None:
    if base.commit == head.commit:
        raise ArchiveError(
            f"base and head are one commit, {base.commit[:8]}: there is nothing to compare {base.path} with"
        )
    for name in _SAME_MACHINE:
        said = base.machine.get(name), head.machine.get(name)
        if said[0] != said[1]:
            raise ArchiveError(
                f"the machine is not the same any more: {name} is {said[0]!r} in {base.path} and {said[1]!r} in "
                f"{head.path}; results of two machines are never compared"
            )


# What is in them.


def _parse(content: bytes) -> Any:
    whole = _load(content)
    if not isinstance(whole, dict) or not {"commit_hash", "result_columns", "results"} & whole.keys():
        raise ArchiveError("no results file of asv")
    version = whole.get("version")
    if version != FORMAT:
        older = isinstance(version, int) and version < FORMAT
        remedy = "to bring it up to date: asv update" if older else "another asv than this wrote it"
        raise ArchiveError(f"written in asv's results format {version!r}, this reads {FORMAT}; {remedy}")
    return whole


def _load(content: bytes) -> Any:
    """JSON as asv writes it: NaN and infinities are let through, and judged where they stand."""
    try:
        return json.loads(content.decode())
    except RecursionError as error:
        raise ArchiveError("nested too deeply for a file of asv") from error
    except ValueError as error:
        if not content.strip():
            raise ArchiveError("the file is empty: was the run that wrote it killed?") from error
        raise ArchiveError(f"no complete JSON, perhaps cut off while it was written: {error}") from error


def _field(whole: Mapping[str, Any], name: str, kind: type) -> Any:
    if not isinstance(whole.get(name), kind):
        raise ArchiveError(f"no results file of asv: {name!r} is {str(whole.get(name))[:40]!r}")
    return whole[name]


def _all_series(columns: list[Any], rows: Mapping[str, Any]) -> dict[str, Series]:
    found = {}
    for name, row in rows.items():
        try:
            found[name] = _series(columns, row)
        except (TypeError, AttributeError, ArchiveError) as error:
            raise ArchiveError(f"series {name}: {error}") from error
    return found


def _series(columns: list[Any], row: list[Any]) -> Series:
    told = dict(zip(columns, row, strict=False))  # asv leaves empty columns at the end of a row out
    params = tuple(tuple(map(str, axis)) for axis in told.get("params") or ())
    num_sets = math.prod(map(len, params))
    return Series(
        params=params,
        version=told.get("version"),
        results=tuple(map(_number, _per_set(told.get("result"), num_sets))),
        samples=tuple(map(_samples, _per_set(told.get("samples"), num_sets))),
    )


def _per_set(column: Any, num_sets: int) -> list[Any]:
    """A column with an entry per parameter set; asv writes null for one that is all null."""
    if column is None:
        return [None] * num_sets
    if not isinstance(column, list) or len(column) != num_sets:
        raise ArchiveError(f"{str(column)[:40]!r} stands where {num_sets} parameter sets need an entry each")
    return column


def _number(value: Any) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ArchiveError(f"{str(value)[:40]!r} is no number")
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        raise ArchiveError(f"{str(value)[:40]}... is more than any measurement")
    return value


def _samples(value: Any) -> tuple[float, ...] | None:
    if value is None:
        return None
    numbers = [_number(each) for each in value]
    if not isinstance(value, list) or None in numbers:
        raise ArchiveError(f"{str(value)[:40]!r} is no list of samples")
    return tuple(number for number in numbers if number is not None)
