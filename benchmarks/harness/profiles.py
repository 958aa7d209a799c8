"""How much a session measures: the profiles that `--profile` chooses from, and the options that each one implies.

Knows names, numbers and markers. An option that is given on the command line stands against any profile.
"""

import dataclasses
from collections.abc import Collection, Mapping

from benchmarks.harness.errors import InstrumentError

TRACKED = "not desk and not full"
"""pytest's -m for the cases that asv and the gate measure again and again."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """`only` names a marker that cases must have, `without` one that they must not have; None asks for none."""

    purpose: str
    samples: int = 6
    max_warmups: int = 5
    max_warmup_s: float = 10.0
    model: str | None = None
    dtype: str = "auto"
    only: str | None = None
    without: str | None = None

    def wants(self, markers: Collection[str]) -> bool:
        return (self.only is None or self.only in markers) and self.without not in markers

    @property
    def options(self) -> Mapping[str, int | float | str | None]:
        """By the name of pytest's option, what holds where the command line says nothing."""
        return {
            "samples": self.samples, "max_warmups": self.max_warmups, "max_warmup_s": self.max_warmup_s,
            "model": self.model, "dtype": self.dtype,
        }  # fmt: skip


PROFILES = {
    "default": Profile(purpose="the points that matter, in three minutes", without="full"),
    "full": Profile(purpose="every point of every curve"),
    "study": Profile(
        purpose="two published studies of caches on one model shape, beside their figures; two hours",
        only="study", model="llama-3.2-1b", dtype="float32", max_warmups=1, max_warmup_s=60.0,
    ),
}  # fmt: skip


def profile(name: str) -> Profile:
    """Raises InstrumentError, with the choices, for a name that is none."""
    if name not in PROFILES:
        raise InstrumentError(f"--profile must be one of {', '.join(PROFILES)}, not {name!r}")
    return PROFILES[name]
