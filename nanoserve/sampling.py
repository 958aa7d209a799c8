"""From one row of logits to one token id.

Knows the usual filters, in transformers' order and with transformers' rounding, so that the same tokens stay possible.
Refuses to know requests, text and models. Rows that only want the likeliest token are looked at together.
"""

import math
from collections.abc import Sequence

import torch

from nanoserve.config import SamplingParams
from nanoserve.errors import ModelError

_EXCLUDED = -torch.inf


class Sampler:
    """Draws the tokens of one request. One seed gives one sequence of draws, whoever consumes them and how."""

    def __init__(self, params: SamplingParams, device: torch.device) -> None:
        self._params = params
        self._generator = torch.Generator(device)
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    @property
    def wants_likeliest(self) -> bool:
        """Whether it draws nothing and changes nothing: the largest logit is the token."""
        return self._params.temperature == 0 and self._params.repetition_penalty == 1

    def sample(self, logits: torch.Tensor, token_ids: Sequence[int]) -> int:
        """Pick the next token from logits [vocab], given all ids so far (prompt included); logits stay unchanged.

        Raises ModelError where there is no largest number among them.
        """
        logits = filter_logits(logits.float(), token_ids, self._params)
        best, likeliest = logits.max(dim=-1)
        _check_is_number(float(best))
        if self._params.temperature == 0:
            return int(likeliest)
        return int(torch.multinomial(logits.softmax(dim=-1), 1, generator=self._generator))


def sample_rows(logits: torch.Tensor, rows: Sequence[tuple[Sampler, Sequence[int]]]) -> list[int | ModelError]:
    """A token for each row of logits [rows, vocab], given each request's sampler and its ids so far.

    Where a row has none, the error stands in its place: what one request cannot do is no fault of the others.
    """
    best, likeliest = (each.tolist() for each in logits.max(dim=-1))
    found: list[int | ModelError] = []
    for row, (sampler, token_ids) in enumerate(rows):
        try:
            _check_is_number(best[row])
            found.append(likeliest[row] if sampler.wants_likeliest else sampler.sample(logits[row], token_ids))
        except ModelError as error:
            found.append(error)
    return found


def _check_is_number(best: float) -> None:
    if not math.isfinite(best):
        raise ModelError(f"the largest logit is {best}: broken weights, or too small a dtype (try float32)")


def filter_logits(logits: torch.Tensor, token_ids: Sequence[int], params: SamplingParams) -> torch.Tensor:
    """Penalise, sharpen and exclude: float32 logits [vocab] -> logits [vocab], excluded tokens at -inf.

    Greedy requests are penalised only: no filter here ever excludes the largest logit.
    """
    if params.repetition_penalty != 1:
        logits = penalise_repetition(logits, token_ids, params.repetition_penalty)
    if params.temperature == 0:
        return logits
    logits = logits / params.temperature
    if params.top_k:
        logits = keep_top_k(logits, params.top_k)
    if params.top_p < 1:
        logits = keep_top_p(logits, params.top_p)
    return keep_min_p(logits, params.min_p) if params.min_p else logits


def penalise_repetition(logits: torch.Tensor, token_ids: Sequence[int], penalty: float) -> torch.Tensor:
    """Make tokens seen so far less likely (CTRL, arXiv:1909.05858): divide positive logits, multiply negative ones."""
    seen = torch.tensor(sorted(set(token_ids)), device=logits.device)
    scores = logits[seen]
    return logits.index_put((seen,), torch.where(scores < 0, scores * penalty, scores / penalty))


def keep_top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Keep the k largest logits, and what ties with the last of them."""
    smallest = logits.topk(min(k, logits.shape[-1])).values[-1]
    return logits.masked_fill(logits < smallest, _EXCLUDED)


def keep_top_p(logits: torch.Tensor, p: float) -> torch.Tensor:
    """Keep the smallest set of most likely tokens whose probabilities reach p (nucleus sampling, arXiv:1904.09751)."""
    ascending, order = logits.sort(descending=False)
    excluded = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - p
    excluded[-1] = False
    return logits.masked_fill(torch.zeros_like(excluded).scatter(0, order, excluded), _EXCLUDED)


def keep_min_p(logits: torch.Tensor, p: float) -> torch.Tensor:
    """Keep the tokens that are at least p times as likely as the likeliest (arXiv:2407.01082)."""
    probabilities = logits.softmax(dim=-1)
    return logits.masked_fill(probabilities < p * probabilities.max(), _EXCLUDED)
