"""What a verdict can be, and what it asks for.

Knows words, exit codes and limits. Refuses to know evidence and how it is weighed.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.gate.paired import MIN_LAUNCHES
from benchmarks.harness.stats import CONFIDENCE

Verdict = Literal["worse", "better", "same", "cannot tell", "no data", "contaminated", "new", "skipped"]
"""Of a quantity. The last two are never red, and no verdicts of a whole comparison."""

EXIT_CODES: Mapping[Verdict, int] = {
    "same": 0, "better": 0, "worse": 1, "cannot tell": 3, "no data": 4, "contaminated": 5,
}  # fmt: skip
"""Of a whole comparison. 2 is left for what was asked for wrongly."""

GRAVITY: tuple[Verdict, ...] = ("worse", "no data", "contaminated", "cannot tell", "better", "same")
"""Of several verdicts the first one here is that of the whole."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a verdict asks for. Raises InstrumentError for a value that means nothing.

    `alpha` bounds the false alarms of a whole comparison, all looks and all gated times together. A time is the same
    when its interval of `confidence` lies within `margin` on both sides of no change. A change below `threshold`, or
    below the metric's own floors, is neither worse nor better. Launches are spared only where it is the same within
    half the margin: a small change that is more than noise may yet show. A look is taken after every launch from the
    fourth to `max_launches`, unless `looks_once`: then there is a single one, whatever number of launches there is.

    "The same" is not adjusted for looks. Simulated, 12 launches, sd of launches 0.3 to 3 %: a change as large as the
    margin is called the same in at most 8 of 100 comparisons, one of 1.25 times the margin in 3, of 1.5 times in 1.
    """

    alpha: float = 0.01
    margin: float = 0.03
    threshold: float = 0.0
    confidence: float = CONFIDENCE
    max_launches: int = 12
    looks_once: bool = False

    @property
    def early_margin(self) -> float:
        """Within which a time is so surely the same that no more launches are needed."""
        return self.margin / 2

    def __post_init__(self) -> None:
        _check("alpha", self.alpha, 0 < self.alpha < 1, "above 0 and below 1")
        _check("margin", self.margin, 0 < self.margin < math.inf, "a share above 0, such as 0.03")
        _check("threshold", self.threshold, 0 <= self.threshold < math.inf, "0 or a share above it, such as 0.05")
        _check("confidence", self.confidence, 0 < self.confidence < 1, "above 0 and below 1")
        is_enough = isinstance(self.max_launches, int) and self.max_launches >= MIN_LAUNCHES
        _check("max_launches", self.max_launches, is_enough, f"a whole number of at least {MIN_LAUNCHES}")


def _check(name: str, value: float, is_good: bool, choices: str) -> None:
    if not is_good:
        raise InstrumentError(f"the gate's {name} is {value!r}; choose {choices}")
