"""Was all measured that a benchmark declares? A missing number is not a good one.

Knows declared names, measurements and flags. One thing excuses a number that does not exist: tokens that a server sent
in bundles, or found in bundles by their client, have no gaps between them (`BUNDLED`), however well everything went;
the flag says so instead.
"""

from collections.abc import Collection, Sequence

from benchmarks.harness.errors import UndeclaredMetricError
from benchmarks.harness.results import Flag, Measurement

_BETWEEN_TOKENS = ("itl_price", "tpot_s", "tpot_price")
"""What has no value either where all tokens of an answer came at once, beside what weighs gaps."""

BUNDLED = "bundled"
"""The kind of a flag: tokens of some answers of its arm arrived several to a message."""


def check_kept(quantities: Sequence[str], measurements: Sequence[Measurement], flags: Sequence[Flag] = ()) -> None:
    """Raise UndeclaredMetricError unless every declared quantity was measured, and is defined for every arm."""
    bundled = {flag.arm for flag in flags if flag.kind == BUNDLED}
    undefined = {each.metric.name for each in measurements if each.value is None and not _is_excused(each, bundled)}
    missing = set(quantities) - {m.metric.name for m in measurements} | undefined
    if missing:
        raise UndeclaredMetricError(f"declared but not measured: {', '.join(sorted(missing))}")


def _is_excused(measurement: Measurement, bundled: Collection[str]) -> bool:
    metric = measurement.metric
    is_of_gaps = metric.weighting == "gap" or metric.name in _BETWEEN_TOKENS
    return metric.coefficient or (is_of_gaps and any(arm in bundled for arm in measurement.arm.split(" against ")))
