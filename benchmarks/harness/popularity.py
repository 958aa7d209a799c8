"""Which prompt each request asks for, when some are asked for more than others: Zipf's law.

Knows ranks and seeds. Refuses to know what a prompt holds, and who serves it.
"""

import bisect
import itertools
import math
import random

from benchmarks.harness.errors import InstrumentError


def zipf_order(num_requests: int, num_prompts: int, alpha: float, seed: int) -> list[int]:
    """The rank of each request's prompt, from 0: rank k is asked for as often as (k + 1) ** -alpha says.

    Ranks are not shuffled, so prompt 0 is the most popular one. The inverse of the distribution at one uniform number
    per request: all alphas of a seed share these numbers. Equals `random.Random(seed).choices` with these weights, on
    every version of Python. Raises InstrumentError for counts below 1, and for an alpha below 0 or not finite.
    """
    _check_whole("num_requests", num_requests, 1)
    _check_whole("num_prompts", num_prompts, 1)
    _check_whole("seed", seed, 0)
    if not (math.isfinite(alpha) and alpha >= 0):
        raise InstrumentError(f"alpha must be finite and at least 0 (all alike), not {alpha}")
    uniform = random.Random(seed).random
    up_to = list(itertools.accumulate(_weight(rank, float(alpha)) for rank in range(num_prompts)))
    return [bisect.bisect(up_to, uniform() * up_to[-1], 0, num_prompts - 1) for _ in range(num_requests)]


def _weight(rank: int, alpha: float) -> float:
    """None at all where a float holds nothing so small."""
    try:
        return 1 / math.pow(rank + 1, alpha)
    except OverflowError:
        return 0.0


def _check_whole(name: str, value: int, least: int) -> None:
    if type(value) is not int or value < least:
        raise InstrumentError(f"{name} must be a whole number of at least {least}, not {value!r}")
