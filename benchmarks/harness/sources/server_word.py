"""What a nanoserve server says of itself at /metrics: means of its own latencies between two looks.

Knows the Prometheus text format, through its library, and the names of three histograms. Refuses to know how anything
is measured here. A client sees every token later than the server that sent it; by how much is what HTTP costs.
"""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.harness.errors import SourceError

HISTOGRAMS = {"ttft_s": "nanoserve_ttft_seconds", "itl_s": "nanoserve_itl_seconds", "e2e_s": "nanoserve_e2e_seconds"}

_PATIENCE_S = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Total:
    """The sum and the number of all observations so far."""

    sum_s: float = 0.0
    num: int = 0

    def __sub__(self, other: "Total") -> "Total":
        return Total(self.sum_s - other.sum_s, self.num - other.num)

    def __add__(self, other: "Total") -> "Total":
        return Total(self.sum_s + other.sum_s, self.num + other.num)

    @property
    def mean_s(self) -> float | None:
        return self.sum_s / self.num if self.num else None


Word = Mapping[str, Total]
"""By the name of a latency."""


def read_word(text: str) -> Word:
    """The totals of the three histograms, label sets added up; a histogram that is not there has none."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return {
        name: Total(found.get(f"{of}_sum", 0.0), round(found.get(f"{of}_count", 0.0)))
        for name, of in HISTOGRAMS.items()
    }


def look(client: Any, at_least: int = 0) -> Word:
    """The server's word now. It may hear of an end a moment after its client: wait for so many ends, not for long.

    Raises SourceError where it says nothing that could be read.
    """
    until_s = time.monotonic() + _PATIENCE_S
    while True:
        word = _ask(client)
        if word["e2e_s"].num >= at_least or time.monotonic() > until_s:
            return word
        time.sleep(0.002)


def _ask(client: Any) -> Word:
    try:
        return read_word(client.get("/metrics").raise_for_status().text)
    except Exception as error:
        raise SourceError(f"{client.base_url}/metrics: {type(error).__name__}: {error}") from error


def between(before: Word, after: Word) -> Word:
    """What came about between two looks."""
    return {name: after[name] - before[name] for name in HISTOGRAMS}
