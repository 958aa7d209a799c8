"""What stays from night to night on one machine: which hardware its name stands for, and where the next night begins.

Knows two files of the results folder. Refuses to know how a verdict comes about.
"""

import dataclasses
import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.errors import ArchiveError, InstrumentError
from benchmarks.harness.files import write_whole
from benchmarks.harness.identity import differences
from benchmarks.harness.nightly.folder import as_json, nights_folder, read_json

IDENTITY, STATE = "machine.json", "state.json"

MAX_LEFT = 50
"""Commits that nights ran out of time for; older ones are given up."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """`last_good` is what the next night compares with, `last_measured` what new commits come after.

    `left` are older commits that asv has not come to yet, the newest first. `at` tells which of two states is newer.
    """

    last_good: str | None = None
    last_measured: str | None = None
    left: tuple[str, ...] = ()
    at: str = ""


def load_state(results: Path, machine: str) -> State:
    """An empty one before the first night. Raises ArchiveError for a file that is cut off."""
    path = nights_folder(results, machine) / STATE
    if not path.exists():
        return State()
    told = read_json(path)
    try:
        return State(**{**told, "left": tuple(told["left"])})
    except (KeyError, TypeError) as error:
        raise ArchiveError(f"{path} is no state of a nightly run: {error}; remove it: rm {path}") from error


def save_state(results: Path, machine: str, state: State) -> None:
    """The whole file or none of it."""
    kept = dataclasses.replace(state, left=state.left[:MAX_LEFT])
    write_whole(nights_folder(results, machine) / STATE, as_json(dataclasses.asdict(kept)))


def accept(results: Path, machine: str, commit: str, now: datetime.datetime) -> State:
    """Declare a commit good, whatever its nights said. Raises InstrumentError for a machine that had no night."""
    before = load_state(results, machine)
    if before == State():
        raise InstrumentError(f"{results} holds no finished night of machine {machine!r}: there is nothing to accept")
    state = dataclasses.replace(before, last_good=commit, at=now.isoformat(timespec="seconds"))
    save_state(results, machine, state)
    return state


def sku_of(identity: Mapping[str, Any]) -> str:
    """What makes two machines alike enough to stand in one group: the GPU's kind, or the processor and its CPUs."""
    gpu, cpu = identity.get("gpu"), identity.get("cpu")
    return str(gpu) if gpu else f"{cpu or 'unknown processor'}, {identity.get('num_cpus')} CPUs"


def claim_name(results: Path, machine: str, identity: Mapping[str, Any], options: Mapping[str, str]) -> str:
    """Hold this machine against the one that owns the name in the folder, and return its SKU; the first one owns it.

    `options` are what is measured there: a model, a selection. Raises InstrumentError, which says what to type, when
    machine or options differ.
    """
    path, sku = nights_folder(results, machine) / IDENTITY, sku_of(identity)
    if not path.exists():
        told = {"machine": machine, "sku": sku, "identity": dict(identity), "options": dict(options)}
        write_whole(path, as_json(told))
        return sku
    found = [("is of another machine", each) for each in differences(read_identity(path), identity)]
    found += [("measures with other options", each) for each in differences(read_options(path), options)]
    if found:
        raise InstrumentError(
            f"{path.parent} {found[0][0]}: {'; '.join(each for _, each in found)}. These never share a history, so "
            f"nothing was measured. Give this one a name of its own:\n"
            f"    python -m benchmarks nightly --results {results} --machine {_free_name(results, machine)}\n"
            f"or a folder of its own: --results {results}-2"
        )
    return str(read_json(path)["sku"])


def read_options(path: Path) -> dict[str, Any]:
    """What is measured under the name."""
    return dict(read_json(path).get("options", {}))


def read_identity(path: Path) -> dict[str, Any]:
    """Raises ArchiveError for a file that does not say which machine it is of."""
    told = read_json(path).get("identity")
    if not isinstance(told, dict):
        raise ArchiveError(f"{path} does not say which machine it is of; remove it: rm {path}")
    return told


def _free_name(results: Path, machine: str) -> str:
    number = 2
    while nights_folder(results, f"{machine}-{number}").exists():
        number += 1
    return f"{machine}-{number}"
