"""A pass with the reference beside it: from the two sides' results to the anchored costs that asv stores.

Knows the reference, its build and what a pass leaves. Refuses to know how turns are taken (`beside.py`) and what asv
does with a cost.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.gate.beside import Beside, plain_id
from benchmarks.harness.gate.builds import build
from benchmarks.harness.gate.evidence import Case, Evidence, Key, Launch, Side
from benchmarks.harness.gate.lockstep import PATIENCE_S, Package, Share, Worker
from benchmarks.harness.gate.reference import Reference, anchored_costs, costs_of_base, save_reference
from benchmarks.harness.gate.revisions import Revision
from benchmarks.harness.gate.sorting import collect
from benchmarks.harness.metrics import metric
from benchmarks.harness.results import BenchmarkResult

SHARE = Share(min_samples=2, max_s=3.0)
"""Of one case in one pass, both builds together."""

MAX_SAMPLES = 30


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Anchored:
    """What a pass leaves once it is anchored: costs by quantity, and cases without any, with the reason.

    `reference` is what the same quantities cost the reference in this very pass.
    """

    costs: Mapping[Key, float]
    reference: Mapping[Key, float]
    contaminated: Mapping[Case, str]
    lacking: Mapping[Case, str]


@contextlib.contextmanager
def reference_beside(
    reference: Reference, root: Path, arguments: Sequence[str], index_of: Callable[[pytest.Item], int]
) -> Iterator[Beside]:
    """Start the reference's worker; a plugin for the session that is measured. The worker ends with the block."""
    built = build(Revision(name=reference.commit, commit=reference.commit), root, root / ".benchmarks" / "builds")
    package = Package(built.folder, reference.source_sha256)
    with contextlib.closing(Worker(package, root, arguments, PATIENCE_S)) as worker:
        yield Beside(worker, index_of, SHARE, seed=os.getpid())


def anchor(reference: Reference, root: Path, beside: Side, results: Sequence[BenchmarkResult]) -> Anchored:
    """Anchor a pass. A quantity that the reference has never met before gets its nominal cost here, once.

    `results` name their cases as the pass does; the reference's are matched by their ids.
    """
    names = {(each.benchmark, plain_id(each.case)): each.case for each in results}
    renamed = (_renamed(each, names) for each in beside.results)
    base = Side(results=tuple(each for each in renamed if each is not None))
    evidence = _gated(collect([Launch(base=base, head=Side(results=tuple(results)))]))
    now = costs_of_base(evidence)
    if not now.keys() <= reference.nominal.keys():
        reference = reference.with_nominal(now)
        save_reference(root, reference)
    return Anchored(
        costs=anchored_costs(evidence, reference),
        reference=now,
        contaminated={case: "; ".join(why.values()) for case, why in evidence.contaminated.items()},
        lacking=_lacking(evidence, results, beside),
    )


def _gated(evidence: Evidence) -> Evidence:
    """What asv follows; the others are reported only."""
    pairs = {key: each for key, each in evidence.pairs.items() if _is_anchored(key.metric)}
    return dataclasses.replace(evidence, pairs=pairs)


def _renamed(result: BenchmarkResult, names: Mapping[Case, str]) -> BenchmarkResult | None:
    name = names.get((result.benchmark, plain_id(result.case)))
    return None if name is None else dataclasses.replace(result, case=name)


def _lacking(evidence: Evidence, results: Sequence[BenchmarkResult], beside: Side) -> dict[Case, str]:
    """Cases with times that nothing can be anchored to, and why."""
    timed = {(r.benchmark, r.case) for r in results if any(_is_anchored(m.metric.name) for m in r.measurements)}
    anchored = {key.of_case for key, pairs in evidence.pairs.items() if pairs}
    why = {(node, plain_id(case)): text for (node, case), text in {**beside.skipped, **beside.failed}.items()}
    return {
        case: f"the reference has not measured it: {why.get((case[0], plain_id(case[1])), 'no such case')}. Choose a "
        f"newer one (python -m benchmarks reference set COMMIT), or do without: NANOSERVE_BENCH_ARGS=--raw"
        for case in timed - anchored - evidence.contaminated.keys()
    }


def _is_anchored(name: str) -> bool:
    return metric(name).gate and not metric(name).is_exact


def with_anchors(results: Sequence[BenchmarkResult], anchored: Anchored, reference: Reference) -> list[BenchmarkResult]:
    """The results; the details of each say what is stored of it, what the reference cost, and which one that is."""
    return [
        dataclasses.replace(each, details={**each.details, "anchored": _told(each, anchored, reference)})
        for each in results
    ]


def _told(result: BenchmarkResult, anchored: Anchored, reference: Reference) -> dict[str, Any]:
    costs = {
        f"{key.arm} {key.metric}".strip(): {"stored": cost, "reference": anchored.reference[key]}
        for key, cost in anchored.costs.items()
        if key.of_case == (result.benchmark, result.case)
    }
    return {"reference": str(reference), "costs": costs}


def told_anchored(told: Mapping[str, Any], anchored: Anchored) -> dict[str, Any]:
    """The fields of a pass, with anchored costs in the place of raw ones; counts stay as they are."""
    raw = {place: cost for place, cost in told["values"].items() if metric(place[1]).is_exact}
    costs = {(key.benchmark, key.metric, key.arm or None, key.case): cost for key, cost in anchored.costs.items()}
    return {
        **told,
        "values": raw | costs,
        "failed": {**told["failed"], **anchored.lacking},
        "contaminated": told["contaminated"] | anchored.contaminated.keys(),
    }
