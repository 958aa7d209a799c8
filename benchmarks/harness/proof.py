"""Does a cache find what it should, and is what it finds right? Asked off the clock.

Knows what a run said of its hits, and two rows of logits. Refuses to know how anything is stored.

Before anything is timed, the logits behind a prompt whose prefix was served before have to equal those of the same
prompt without any cache: within 1e-4 in single precision, where positions that begin at 0, or a mask over the suffix
alone, move a random Llama's by as little as 0.0036; elsewhere within what rounding explains. And no position may have
run but those that were not found: two prefills that agree are no hit.
"""

from collections.abc import Sequence
from typing import Protocol

from benchmarks.harness.errors import WrongOutputError
from benchmarks.harness.timing import RunTiming

_SINGLE_PRECISION = 1e-5
"""A relative tolerance below it belongs to single precision, or to exact numbers."""

_MOST_APART = 1e-4


class Reuse(Protocol):
    """Logits at the last position of a prompt: without any cache, and with a part served before; how many ran then."""

    @property
    def cold(self) -> Sequence[float]: ...

    @property
    def cached(self) -> Sequence[float]: ...

    @property
    def num_run(self) -> int: ...


def check_reuse(reuse: Reuse, num_expected: int, relative_tolerance: float, whose: str) -> None:
    """Raise WrongOutputError unless the logits agree and exactly the positions ran that were not stored."""
    if reuse.num_run != num_expected:
        raise WrongOutputError(
            f"{whose}: {reuse.num_run} positions ran behind a prefix that was served before, not {num_expected}"
        )
    apart = [abs(cold - cached) for cold, cached in zip(reuse.cold, reuse.cached, strict=True)]
    is_single = relative_tolerance < _SINGLE_PRECISION
    allowed = _MOST_APART if is_single else relative_tolerance * max(map(abs, reuse.cold))
    if not apart or not all(each <= allowed for each in apart):  # a NaN agrees with nothing
        raise WrongOutputError(
            f"{whose}: the logits behind a cached prefix are {max(apart, default=0):.2g} from those without a cache, "
            f"more than the {allowed:.2g} that rounding explains"
        )


def check_hits(run: RunTiming, num_expected: int | None, whose: str) -> None:
    """Raise WrongOutputError unless exactly so many tokens were found in a cache, and all others were run.

    A store that returns nothing shows no saving, and a source that does not tell its hits shows none either. None
    stands for a prompt that nobody has sent before: nothing may be found, but a source need not tell.
    """
    if num_expected is None:
        if run.num_cached:
            raise WrongOutputError(f"{whose} found {run.num_cached} tokens of a prompt in a cache that has not seen it")
        return
    num_left = (run.num_prompt_tokens or 0) - num_expected
    if (run.num_cached, run.num_prefilled) != (num_expected, num_left):
        raise WrongOutputError(
            f"{whose} found {run.num_cached} of {run.num_prompt_tokens} tokens in a cache and ran {run.num_prefilled}, "
            f"where it had to find {num_expected} and run {num_left}"
        )
