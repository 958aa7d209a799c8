"""How near a run came to the machine's ceilings: MBU of its decoding, MFU of its prefill.

Knows event logs, what a step has to read and compute, and ceilings. Refuses to know how either was found out.

MBU and MFU are shares of what was *measured* here, never of a data sheet, and never above 1: a share above it says that
the ceiling was not one (weights that fit into a cache are read faster than memory), and is told instead of shown.
MBU is Databricks' "LLM inference performance engineering" (2023), MFU that of PaLM (arXiv:2204.02311, appendix B).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from benchmarks.harness.metrics import metric
from benchmarks.harness.results import Flag, Measurement, summarise_values
from benchmarks.harness.slopes import contexts_of
from benchmarks.harness.timing import RunTiming


class Cost(Protocol):
    """What steps of one arm need at least. Both take counts of positions."""

    def read_bytes(self, context: int) -> float:
        """Bytes of weights, keys and values that a decode step reads, at this context."""
        ...

    def prefill_flops(self, num_tokens: int) -> float:
        """Floating-point operations of a prefill, attention to later positions not counted."""
        ...


class Limits(Protocol):
    """What the machine can do at most."""

    @property
    def read_bytes_per_s(self) -> float | None: ...

    @property
    def flops_per_s(self) -> float | None: ...


class Shares(NamedTuple):
    """What there is to show, and what is told instead of what cannot be true."""

    measurements: list[Measurement]
    flags: list[Flag]


def shares_of(runs: Mapping[str, Sequence[RunTiming]], costs: Mapping[str, Cost | None], limits: Limits) -> Shares:
    """MBU and MFU of every arm whose cost is known and whose runs had one length of prompt, a sample per run."""
    found = Shares([], [])
    for arm, cost in costs.items():
        if cost is not None and len({run.num_prompt_tokens for run in runs[arm]}) == 1:
            _add(found, "mbu", arm, [mbu(run, cost, limits.read_bytes_per_s) for run in runs[arm]])
            _add(found, "mfu", arm, [mfu(run, cost, limits.flops_per_s) for run in runs[arm]])
    return found


def _add(found: Shares, name: str, arm: str, shares: Sequence[float | None]) -> None:
    values = [share for share in shares if share is not None]
    if any(value > 1 for value in values):
        what = f"{metric(name).title} came out at {max(values):.2f}: the ceiling measured here is none for it"
        found.flags.append(Flag(kind="ceiling", arm=arm, what=what))
    elif values:
        found.measurements.append(summarise_values(metric(name), arm, values))


def mbu(run: RunTiming, cost: Cost, read_bytes_per_s: float | None) -> float | None:
    """The bytes that all decode steps of a run had to read, over the time they took, over the ceiling."""
    contexts = contexts_of(run)
    if not contexts or not run.decode_s or not read_bytes_per_s:
        return None
    return sum(map(cost.read_bytes, contexts)) / run.decode_s / read_bytes_per_s


def mfu(run: RunTiming, cost: Cost, flops_per_s: float | None) -> float | None:
    """The operations that the prefill needed, over TTFT, over the ceiling."""
    if not run.num_prompt_tokens or not run.ttft_s or not flops_per_s:
        return None
    return cost.prefill_flops(run.num_prompt_tokens) / run.ttft_s / flops_per_s
