"""Every metric, declared once: what it is, how it is computed from an event log, which way is better, what asv stores.

A name that is not declared here is refused everywhere. Direction and unit belong to the declaration, so no report
and no gate can get them wrong on its own.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

from benchmarks.harness.errors import UndeclaredMetricError
from benchmarks.harness.stats import quantile
from benchmarks.harness.timing import RunTiming

Observations = Sequence[float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One declaration.

    `observe` turns a run into its observations (one per run, or one per token gap); `q` is the quantile that sums
    them up, pooled. A metric without `observe` compares two arms. `gate` says whether a regression of it may fail a
    build; the others are reported only. asv knows nothing but lower-is-better, so a metric that is better when it
    is higher is stored under `asv_name` as the positive cost `1 / value`.
    """

    name: str
    title: str
    unit: str
    formula: str
    better: Literal["lower", "higher"]
    gate: bool
    q: float = 0.5
    observe: Callable[[RunTiming], Observations] | None = None
    asv_name: str
    asv_unit: str

    @property
    def compares_arms(self) -> bool:
        return self.observe is None

    def cost(self, value: float) -> float:
        """The lower-is-better number that asv stores, in `asv_unit`."""
        return value if self.better == "lower" else 1 / value

    def sample(self, run: RunTiming) -> float | None:
        """This metric of a single run, or None where it is undefined."""
        assert self.observe is not None, f"{self.name} compares arms"
        return quantile(self.observe(run), self.q)


def _if_defined(value: float | None) -> Observations:
    return () if value is None else (value,)


_DECLARED = (
    Metric(
        name="ttft_s",
        title="TTFT",
        unit="s",
        formula="first token - sent; median over runs",
        better="lower",
        gate=True,
        observe=lambda run: _if_defined(run.ttft_s),
        asv_name="ttft_s",
        asv_unit="seconds",
    ),
    Metric(
        name="itl_p50_s",
        title="ITL p50",
        unit="s",
        formula="median of the gaps between consecutive output tokens, pooled over runs",
        better="lower",
        gate=True,
        observe=lambda run: run.itls_s or (),
        asv_name="itl_p50_s",
        asv_unit="seconds",
    ),
    Metric(
        name="itl_p90_s",
        title="ITL p90",
        unit="s",
        formula="90th percentile of the gaps between consecutive output tokens, pooled over runs",
        better="lower",
        gate=False,
        q=0.9,
        observe=lambda run: run.itls_s or (),
        asv_name="itl_p90_s",
        asv_unit="seconds",
    ),
    Metric(
        name="tpot_s",
        title="TPOT",
        unit="s",
        formula="(E2E - TTFT) / (tokens - 1); median over runs",
        better="lower",
        gate=False,
        observe=lambda run: _if_defined(run.tpot_s),
        asv_name="tpot_s",
        asv_unit="seconds",
    ),
    Metric(
        name="e2e_s",
        title="E2E",
        unit="s",
        formula="last token - sent; median over runs",
        better="lower",
        gate=True,
        observe=lambda run: _if_defined(run.e2e_s),
        asv_name="e2e_s",
        asv_unit="seconds",
    ),
    Metric(
        name="decode_tokens_per_s",
        title="Decode rate",
        unit="tokens/s",
        formula="(tokens - 1) / (E2E - TTFT); median over runs",
        better="higher",
        gate=False,
        observe=lambda run: _if_defined(run.decode_tokens_per_s),
        asv_name="decode_s_per_token",
        asv_unit="seconds",
    ),
    Metric(
        name="speedup",
        title="Speedup",
        unit="x",
        formula="E2E of the slow arm / E2E of the fast arm, within a pair of runs; median over pairs",
        better="higher",
        gate=True,
        asv_name="fast_per_slow_time",
        asv_unit="ratio",
    ),
)

METRICS = {metric.name: metric for metric in _DECLARED}
STREAM_METRICS = tuple(metric.name for metric in _DECLARED if not metric.compares_arms)
"""The metrics that every streamed run yields."""


def metric(name: str) -> Metric:
    """Look a metric up. Raises UndeclaredMetricError, with the declared names, for any other name."""
    if name not in METRICS:
        raise UndeclaredMetricError(f"metric {name!r} is not declared; declared are: {', '.join(METRICS)}")
    return METRICS[name]
