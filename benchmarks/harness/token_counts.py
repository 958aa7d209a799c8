"""What an engine ran, counted from what each of its steps reports: forwards, positions run, positions run again.

Knows positions and sizes. Refuses to know engines, tensors and time; nothing here is measured, so every number is
exact and the same on every machine.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from benchmarks.harness.errors import InstrumentError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one forward did for one request: positions it ran, positions it found stored, tokens that came of it.

    It ran the positions `num_cached` to `num_cached + num_prefilled - 1`. A source that does not tell gives None.
    """

    num_prefilled: int | None
    num_cached: int | None
    num_tokens: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """The work behind one or more requests. What the steps did not tell is None.

    `num_forwards`: steps. `num_prefilled`: prompt positions run for the first time. `num_decoded`: later positions
    run for the first time. `num_recomputed`: positions run again. `num_stored`: positions behind each request's last
    step, summed over requests, which is what a cache that keeps everything holds. `num_tokens`: output tokens.
    """

    num_forwards: int
    num_prefilled: int | None
    num_decoded: int | None
    num_recomputed: int | None
    num_stored: int | None
    num_tokens: int

    def counts(self) -> dict[str, int]:
        """The counts that are known, by name, as the exact gate compares them."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


def count_tokens(steps: Sequence[Step], num_prompt_tokens: int) -> TokenCounts:
    """Count one request's steps, in their order. Raises InstrumentError for a negative number of anything."""
    told = [_positions(step) for step in steps]
    known = [positions for positions in told if positions is not None]
    ran = set().union(*known)
    is_known = len(known) == len(steps)
    return TokenCounts(
        num_forwards=len(steps),
        num_prefilled=sum(position < num_prompt_tokens for position in ran) if is_known else None,
        num_decoded=sum(position >= num_prompt_tokens for position in ran) if is_known else None,
        num_recomputed=sum(map(len, known)) - len(ran) if is_known else None,
        num_stored=(known[-1].stop if known else 0) if is_known else None,
        num_tokens=sum(step.num_tokens for step in steps),
    )


def total_tokens(counts: Iterable[TokenCounts]) -> TokenCounts:
    """The sum over requests; a field that is None in any of them is None.

    Forwards are summed as well: a step that served two requests at once counts for each of them.
    """
    every = list(counts)
    return TokenCounts(
        num_forwards=sum(each.num_forwards for each in every),
        num_prefilled=_sum_if_known([each.num_prefilled for each in every]),
        num_decoded=_sum_if_known([each.num_decoded for each in every]),
        num_recomputed=_sum_if_known([each.num_recomputed for each in every]),
        num_stored=_sum_if_known([each.num_stored for each in every]),
        num_tokens=sum(each.num_tokens for each in every),
    )


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, bytes_per_value: int) -> int:
    """Keys and values of one position: 2 x layers x KV heads x head size x bytes. Query heads do not count."""
    return 2 * num_layers * num_kv_heads * head_dim * bytes_per_value


def kv_blocks(num_tokens: int, block_size: int) -> int:
    """Blocks of `block_size` positions that hold `num_tokens`. Raises InstrumentError for sizes that cannot be."""
    if num_tokens < 0 or block_size < 1:
        raise InstrumentError(f"{num_tokens} tokens in blocks of {block_size}: tokens are >= 0 and a block holds >= 1")
    return -(-num_tokens // block_size)


def _positions(step: Step) -> range | None:
    if step.num_prefilled is None or step.num_cached is None:
        return None
    if min(step.num_prefilled, step.num_cached, step.num_tokens) < 0:
        raise InstrumentError(f"{step} counts something below zero")
    return range(step.num_cached, step.num_cached + step.num_prefilled)


def _sum_if_known(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
