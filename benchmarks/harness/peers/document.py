"""Everything that a run said, as one plain document: what is written as JSON, and what the table is made from.

Knows the pieces and puts them side by side. Refuses to know text. Holds finite numbers and null only.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.efficiency import Cost
from benchmarks.harness.peers.columns import Column
from benchmarks.harness.peers.host import Look, about_looks, shares
from benchmarks.harness.peers.registry import Peer
from benchmarks.harness.peers.rounds import Turn
from benchmarks.harness.peers.summary import Agreement, Cell, Ratio, agreements, cells, ratios

SCHEMA = 1


def document(
    *,
    about: Mapping[str, Any],
    peers: Sequence[Peer],
    said: Mapping[str, Mapping[str, Any]],
    failures: Mapping[str, str],
    columns: Sequence[Column],
    turns: Sequence[Turn],
    looks: Sequence[Look],
    cost: Cost,
) -> dict[str, Any]:
    """`said` is what each worker told when it was ready, `failures` why others never were."""
    names, ours = [peer.name for peer in peers], next((peer.name for peer in peers if peer.is_ours), "")
    same_bytes = [peer.name for peer in peers if peer.dtype == "bfloat16"]
    return {
        "schema": SCHEMA,
        "about": dict(about),
        "peers": [_peer(peer, said.get(peer.name, {}), failures.get(peer.name, "")) for peer in peers],
        "columns": [_column(column, cells(turns, column, names), peers, failures) for column in columns],
        "agreement": {name: _agreement(each) for name, each in agreements(turns, ours, names).items()},
        "shares": [each._asdict() for each in shares(turns, cost, looks, same_bytes)] if looks else [],
        "host": about_looks(looks),
    }


def _peer(peer: Peer, said: Mapping[str, Any], failure: str) -> dict[str, Any]:
    return {"name": peer.name, "what": peer.what, "dtype": peer.dtype, "failure": failure, "said": dict(said)}


def _column(
    column: Column, found: Mapping[str, Cell], peers: Sequence[Peer], failures: Mapping[str, str]
) -> dict[str, Any]:
    return {
        "name": column.name,
        "title": column.title,
        "unit": column.unit,
        "is_more_better": column.is_more_better,
        "cells": {name: _cell(cell, failures.get(name, "")) for name, cell in found.items()},
        "ratios": [_ratio(each) for each in ratios(found, peers, is_more_better=column.is_more_better)],
    }


def _cell(cell: Cell, failure: str) -> dict[str, Any]:
    return {
        "median": cell.median,
        "mad": cell.mad,
        "n": len(cell.by_round),
        "by_round": {str(number): value for number, value in cell.by_round.items()},
        "failure": failure or cell.failure,
    }


def _ratio(each: Ratio) -> dict[str, Any]:
    interval = each.estimate.interval
    return {
        "ours": each.ours,
        "best": each.best,
        "value": each.estimate.value,
        "low": interval.low,
        "high": interval.high,
        "n": each.estimate.num_samples,
    }


def _agreement(each: Agreement) -> dict[str, Any]:
    return {
        "num_runs": each.num_runs,
        "num_equal_first": each.num_equal_first,
        "num_equal_runs": each.num_equal_runs,
        "median_equal": each.median_equal,
        "num_tokens": each.num_tokens,
    }
