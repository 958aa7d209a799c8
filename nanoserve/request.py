"""One request's life: what was asked, which tokens came so far, how it ended, and what is told about each token.

Knows token ids and counts. Refuses to know tensors, text rules and time: whoever wants a latency stamps the
events on a clock of its own.
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import NamedTuple

from nanoserve.config import ModelConfig, SamplingParams
from nanoserve.errors import RequestError


class FinishReason(enum.StrEnum):
    """Why a request ended: an EOS token or stop string, its token budget, or the caller."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """How likely a token was, by the logits as the model gave them, and the likeliest at its place, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Told(NamedTuple):
    """How likely a request's new token was, and, with its first one, its prompt; None where nobody asked."""

    token: TokenLogprobs | None = None
    prompt: tuple[TokenLogprobs | None, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """One output token, told at the step that computed it.

    `text` is what became certain with this token; it can be empty (half a character, a possible stop string), and
    the pieces of a request join to exactly its text. `num_prefilled` counts the positions that ran for this token, in
    one step or, in chunks, in several; `num_cached` those whose keys and values were stored before. A request that was
    preempted has nothing stored: what ran again counts as run. Log probabilities are there where they were asked for:
    those of the prompt come with the first event, None in place of its first token.
    """

    request_id: str
    index: int
    token_id: int
    text: str
    num_prefilled: int
    num_cached: int
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished request. `token_ids` keeps a final EOS; `text` leaves out special tokens and the stop string."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    finish_reason: FinishReason


class Request:
    """A prompt and its continuation. Only `append` changes it, one token at a time, until `finish_reason` is set."""

    def __init__(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams, *, priority: int = 0
    ) -> None:
        if not prompt_ids:
            raise RequestError("the prompt is empty: give at least one token")
        if not isinstance(priority, int):
            raise RequestError(f"priority must be an integer, not {priority!r}")
        self.request_id = request_id
        self.params = params
        self.priority = priority
        self.token_ids = list(prompt_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.finish_reason: FinishReason | None = None

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def check_fits(self, config: ModelConfig) -> None:
        """Raise RequestError for ids outside the vocabulary and for more tokens than the model's context holds."""
        biased = (token_id for token_id, _ in self.params.logit_bias)
        bad = [token_id for token_id in (*self.token_ids, *biased) if not 0 <= token_id < config.vocab_size]
        if bad:
            raise RequestError(f"token id {bad[0]} is outside the vocabulary: choose from 0 to {config.vocab_size - 1}")
        num_prompt, num_new = self.num_prompt_tokens, self.params.max_new_tokens
        excess = num_prompt + num_new - config.max_context_tokens
        if excess > 0:
            raise RequestError(
                f"a prompt of {num_prompt} tokens and max_new_tokens {num_new} exceed the model's context of "
                f"{config.max_context_tokens} tokens; shorten either by {excess}"
            )

    def check_fits_pool(self, num_pool_blocks: int, block_size: int) -> None:
        """Raise RequestError where so many KV blocks could not hold it at its longest.

        At its longest it holds all tokens but the last one, whose keys and values nobody needs.
        """
        num_prompt, num_new = self.num_prompt_tokens, self.params.max_new_tokens
        num_blocks = -(-(num_prompt + num_new - 1) // block_size)
        if num_blocks > num_pool_blocks:
            raise RequestError(
                f"a prompt of {num_prompt} tokens and max_new_tokens {num_new} need {num_blocks} KV blocks, the whole "
                f"pool has {num_pool_blocks}; ask for fewer tokens, or give the pool more memory"
            )

    def append(self, token_id: int, eos_token_ids: Sequence[int]) -> None:
        """Add one output token. EOS wins over a budget used up by the same token: `stop`, not `length`."""
        assert self.finish_reason is None, f"request {self.request_id} has finished"
        self.token_ids.append(token_id)
        if token_id in eos_token_ids and not self.params.ignore_eos:
            self.finish_reason = FinishReason.STOP
        elif self.num_output_tokens >= self.params.max_new_tokens:
            self.finish_reason = FinishReason.LENGTH
