"""What one measured curve T(n) of prefill implies: the time of a hit, what it saves, breakeven, a conversation.

Knows times by the number of tokens. Refuses to know stores: it says what a perfect one could save, to be held against
what the real one did.

T(n) = max(floor, a + b n + c n^2). A forward pays a once, b for each position that it runs, and c for each two
positions of which one attends to the other; and it never takes less than the floor, which is the time to launch it. A
hit runs S positions, and attends from them to P + S: T(S | P) = max(floor, a + b S + c ((P + S)^2 - P^2)), which above
the floor is T(P + S) - T(P) + a. It leaves out what a store itself costs: looking up, sharing, reading from blocks.

Which of these terms a measured curve has, `cost_shape.py` finds.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.harness.breakeven import MIN_SAMPLES, percentile_ends, resampled_places
from benchmarks.harness.cost_shape import Samples, Shape
from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.fits import Fit, Root
from benchmarks.harness.least_squares import Array
from benchmarks.harness.stats import finite_array

_NUM_RESAMPLES = 2000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of a conversation, counted from 1: with nothing carried over and with all of it."""

    turn: int
    prompt_tokens: int
    cached_tokens: int
    full_s: float
    carried_s: float
    saved_so_far_s: float

    @property
    def speedup(self) -> float:
        return self.full_s / self.carried_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """T(n) in seconds over tokens. `floor_s` is None without a floor; `fit` is what chose the terms."""

    floor_s: float | None
    overhead_s: float
    per_token_s: float
    per_token2_s: float
    fit: Fit | None = dataclasses.field(default=None, compare=False)

    @property
    def floor_until_tokens(self) -> float | None:
        """Where the curve leaves its floor: None without one, infinity where it never rises."""
        if self.floor_s is None:
            return None
        a, b, c = self.overhead_s - self.floor_s, self.per_token_s, self.per_token2_s
        if not b and not c:
            return math.inf
        return (math.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * c) if c else -a / b

    def full_s(self, tokens: int) -> float:
        """T(n)."""
        return self.hit_s(0, tokens)

    def hit_s(self, prefix_tokens: int, suffix_tokens: int) -> float:
        """T(S | P): a forward over the suffix that attends to a prefix which is there."""
        _check("prefix_tokens", prefix_tokens, 0)
        _check("suffix_tokens", suffix_tokens, 1)
        return float(_hit(self._terms, self.floor_s or 0.0, prefix_tokens, suffix_tokens))

    def saving_s(self, prefix_tokens: int, suffix_tokens: int) -> float:
        """T(P + S) - T(S | P); exactly 0 where both run on the floor."""
        return self.full_s(prefix_tokens + suffix_tokens) - self.hit_s(prefix_tokens, suffix_tokens)

    def why_nothing(self, prefix_tokens: int, suffix_tokens: int) -> str:
        """Why a hit saves nothing, or "" where it does."""
        if self.saving_s(prefix_tokens, suffix_tokens) > 0:
            return ""
        tokens, knot = prefix_tokens + suffix_tokens, self.floor_until_tokens
        if not prefix_tokens:
            return "there is no prefix"
        if knot is None:
            return "T does not grow with the tokens"
        until = "and nothing measured leaves it" if math.isinf(knot) else f"which lasts until {knot:.0f} tokens"
        return f"all {tokens} tokens run on the launch floor, {until}"

    def breakeven(self, prefix_tokens: int, suffix_tokens: int) -> Root:
        """N* = T(P) / (T(P + S) - T(S | P)), without an interval; "undefined: ..." where nothing is saved."""
        if why := self.why_nothing(prefix_tokens, suffix_tokens):
            return Root(value=None, low=None, high=None, why=f"undefined: {why}")
        value = self.full_s(prefix_tokens) / self.saving_s(prefix_tokens, suffix_tokens)
        return Root(value=value, low=None, high=None)

    def conversation(
        self, num_turns: int, turn_tokens: int, answer_tokens: int, *, block_tokens: int = 1
    ) -> list[Turn]:
        """Each turn's prompt is all that was said before and `turn_tokens` more; turn 1 saves exactly 0.

        The last token of an answer was never run, so that nothing is stored of it; whole blocks are reused.
        """
        least = {"num_turns": (num_turns, 1), "turn_tokens": (turn_tokens, 1), "block_tokens": (block_tokens, 1)}
        for name, (count, bound) in {**least, "answer_tokens": (answer_tokens, 0)}.items():
            _check(name, count, bound)
        return list(self._turns(num_turns, turn_tokens, answer_tokens, block_tokens))

    def _turns(self, num_turns: int, turn_tokens: int, answer_tokens: int, block_tokens: int) -> Iterator[Turn]:
        prompt, stored, saved_s = turn_tokens, 0, 0.0
        for turn in range(1, num_turns + 1):
            cached = min(stored, prompt - 1) // block_tokens * block_tokens
            full_s, carried_s = self.full_s(prompt), self.hit_s(cached, prompt - cached)
            saved_s += full_s - carried_s
            yield Turn(
                turn=turn, prompt_tokens=prompt, cached_tokens=cached, full_s=full_s, carried_s=carried_s,
                saved_so_far_s=saved_s,
            )  # fmt: skip
            stored = prompt + max(answer_tokens - 1, 0)
            prompt += answer_tokens + turn_tokens

    @property
    def _terms(self) -> Array:
        return np.array([self.overhead_s, self.per_token_s, self.per_token2_s])


def _check(name: str, count: int, least: int) -> None:
    if count < least:
        raise InstrumentError(f"{name} is {count}; the least is {least}")


def _hit(terms: Array, floor: Array | float, prefix: int, suffix: int) -> Array:
    """T(S | P) of one curve, or of many: `terms` (..., 3), `floor` (...)."""
    work = np.array([1.0, suffix, (prefix + suffix) ** 2 - prefix**2])
    return np.asarray(np.maximum(terms @ work, floor))


def curve_of(lengths_s: Samples) -> Curve:
    """The curve through measured times, with the terms that they ask for.

    Raises InstrumentError below two lengths, for a length below 1 and for a time that is not finite or not above 0.
    """
    shape = Shape.of(lengths_s)
    terms, floor = shape.solve(np.array([[np.median(lengths_s[n]) for n in shape.lengths]]))
    a, b, c = terms[0].tolist()
    floor_s = float(floor[0]) if shape.num_floor else None
    return Curve(floor_s=floor_s, overhead_s=a, per_token_s=b, per_token2_s=c, fit=shape.fit)


def derived_over_direct(
    lengths_s: Samples,
    prefix_tokens: Sequence[int],
    suffix_tokens: int,
    full_s: Sequence[Sequence[float]],
    hit_s: Sequence[Sequence[float]],
) -> Root:
    """The saving of the longest prefix by the curve through `lengths_s`, over the one measured directly.

    `full_s` and `hit_s` have a row of samples for each prefix; the direct saving is the median of their differences,
    place by place. The two agree where the interval holds 1: a percentile bootstrap over whole samples, in which a
    place is drawn at all lengths together. A length that several loads measured has a multiple of the samples, load
    after load. The terms of the curve are chosen once. With 3 % of noise the interval covers 91 to 99 % from 6 samples
    on (test_harness_prefill_cost.py). "undefined: ..." where the direct saving may be nothing; below 5 samples there is
    a value without an interval.
    """
    longest = _longest(prefix_tokens, full_s, hit_s)
    prefix, difference = prefix_tokens[longest], np.array(full_s[longest]) - np.array(hit_s[longest])
    shape, num = Shape.of(lengths_s), difference.size
    odd = {n: len(samples) for n, samples in lengths_s.items() if len(samples) % num}
    if odd:
        raise InstrumentError(f"{num} samples were measured directly, so that each length has a multiple, not {odd}")
    places = np.vstack([np.arange(num), resampled_places(num, _NUM_RESAMPLES)])
    terms, floor = shape.solve(np.stack([_medians(lengths_s[n], places) for n in shape.lengths], -1))
    derived = _hit(terms, floor, 0, prefix + suffix_tokens) - _hit(terms, floor, prefix, suffix_tokens)
    return _ratio(derived, _medians(difference, places), num)


def _longest(prefix_tokens: Sequence[int], full_s: Sequence[Sequence[float]], hit_s: Sequence[Sequence[float]]) -> int:
    """The place of the longest prefix."""
    if not len(prefix_tokens) == len(full_s) == len(hit_s) > 0:
        nums = f"{len(prefix_tokens)} prefixes with {len(full_s)} and {len(hit_s)} rows"
        raise InstrumentError(f"each prefix needs a row of full and of hit times, not {nums}")
    place = int(np.argmax(prefix_tokens))
    full, hit = finite_array(full_s[place], "full time"), finite_array(hit_s[place], "hit time")
    if full.size != hit.size or not full.size:
        raise InstrumentError(f"samples are paired by place, not {full.size} full and {hit.size} hit times")
    return place


def _medians(samples: Sequence[float] | Array, places: Array) -> Array:
    """Of each draw of places (B, n), from samples (n,) or a multiple of it."""
    rows = np.asarray(samples, float).reshape(-1, places.shape[1])
    return np.asarray(np.median(np.concatenate([row[places] for row in rows], -1), -1))


def _ratio(derived: Array, direct: Array, num: int) -> Root:
    """Of all samples, which come first, with the interval of the draws behind them."""
    low, high = percentile_ends(direct[1:])
    if low <= 0 <= high or not direct[0]:
        why = f"undefined: a hit saved {low * 1e6:.3g} to {high * 1e6:.3g} us, which may be nothing"
        return Root(value=None, low=None, high=None, why=why)
    value = float(derived[0] / direct[0])
    if num < MIN_SAMPLES:
        return Root(value=value, low=None, high=None, why=f"too few samples for an interval: it takes {MIN_SAMPLES}")
    low, high = percentile_ends(derived[1:] / direct[1:])
    return Root(value=value, low=low, high=high)
