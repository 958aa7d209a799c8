"""The reference: one fixed build per checkout and machine, beside which every pass of asv is measured.

A shared machine has states, and a time follows them. So a pass measures the reference in lock step with the build under
test, and what is stored is the *anchored* cost: the reference's nominal cost times how much more the build costs now.
Knows the file that says which build that is and what it nominally costs. Refuses to measure.
"""

import dataclasses
import datetime
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.errors import ArchiveError, InstrumentError
from benchmarks.harness.files import write_whole
from benchmarks.harness.gate.evidence import Evidence, Key, Pairs
from benchmarks.harness.metrics import metric
from benchmarks.harness.stats import hodges_lehmann

SCHEMA = 1

SET_COMMAND = "python -m benchmarks reference set COMMIT"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Which build, and what each quantity nominally costs with it (`Metric.cost`, so lower is better).

    `generation` counts changes of the build: numbers anchored to different ones are not comparable.
    """

    commit: str
    source_sha256: str
    generation: int
    set_at: str
    nominal: Mapping[Key, float] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.commit[:12]}, generation {self.generation}"

    def with_nominal(self, costs: Mapping[Key, float]) -> "Reference":
        """The reference that also knows these costs. What it knew before stays: a nominal cost is set once."""
        return dataclasses.replace(self, nominal={**costs, **self.nominal})


def successor(before: Reference | None, commit: str, source_sha256: str) -> Reference:
    """The reference after a choice: the same one if its source is the same, else a new generation without costs."""
    if before is not None and before.source_sha256 == source_sha256:
        return before
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    generation = 1 if before is None else before.generation + 1
    return Reference(commit=commit, source_sha256=source_sha256, generation=generation, set_at=now)


def file_of(root: Path) -> Path:
    """Where the checkout `root` keeps its reference."""
    return root / ".benchmarks" / "reference.json"


def load_reference(root: Path) -> Reference | None:
    """The reference of the checkout, None where none is set. Raises ArchiveError for a file that is none."""
    path = file_of(root)
    try:
        return _read(json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ArchiveError(
            f"{path} is no reference ({error}); set one anew: {SET_COMMAND}, which begins a new generation"
        ) from error


def _read(told: Any) -> Reference:
    if told["schema"] != SCHEMA:
        raise ValueError(f"schema {told['schema']!r}, not {SCHEMA}")
    nominal = {Key(*key): _positive(cost) for key, cost in told["nominal"]}
    facts = {name: str(told[name]) for name in ("commit", "source_sha256", "set_at")}
    return Reference(generation=int(told["generation"]), nominal=nominal, **facts)


def _positive(cost: Any) -> float:
    if not 0 < cost < math.inf:
        raise ValueError(f"a nominal cost of {cost!r}")
    return float(cost)


def save_reference(root: Path, reference: Reference) -> None:
    """Write it, all or nothing."""
    told = {"schema": SCHEMA, **dataclasses.asdict(reference)}
    told["nominal"] = [[list(key), cost] for key, cost in reference.nominal.items()]
    write_whole(file_of(root), json.dumps(told, indent=1, allow_nan=False))


def costs_of_base(evidence: Evidence) -> dict[Key, float]:
    """What each timed quantity cost on the side of base: the median of its launches' medians."""
    return {
        key: statistics.median(statistics.median(map(metric(key.metric).cost, each.base)) for each in pairs)
        for key, pairs in evidence.pairs.items()
        if pairs
    }


def anchored_costs(evidence: Evidence, reference: Reference) -> dict[Key, float]:
    """The cost of head of each timed quantity, with the reference as base: nominal cost x typical ratio of the pairs.

    Raises InstrumentError for a quantity whose nominal cost is not known.
    """
    unknown = [key for key, pairs in evidence.pairs.items() if pairs and key not in reference.nominal]
    if unknown:
        raise InstrumentError(f"no nominal cost is known of {unknown[0]}; calibrate: {SET_COMMAND}")
    return {
        key: reference.nominal[key] * math.exp(_log_ratio(key, pairs)) for key, pairs in evidence.pairs.items() if pairs
    }


def _log_ratio(key: Key, pairs: Sequence[Pairs]) -> float:
    found = hodges_lehmann([log for each in pairs for log in each.logs(metric(key.metric))])
    assert found is not None
    return found
