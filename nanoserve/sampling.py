"""From the logits of a step's rows to their tokens, all rows together, and without a look at them from the host.

Knows the usual filters, in transformers' order and with transformers' rounding, so that the same tokens stay possible,
and the penalties and biases of the OpenAI API, which are added after the one that multiplies.
Refuses to know requests, text and models. Rows that only want the likeliest token are looked at together, and so are
the others, each with filters of its own; tokens and the largest logits, which tell broken ones, come back in one copy.
"""

import collections
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch

from nanoserve.config import SamplingParams
from nanoserve.errors import ModelError
from nanoserve.staging import to_device, to_host

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_EXCLUDED = -torch.inf


class Scores(NamedTuple):
    """Logits [rows, vocab] of what may come next, and what `likeliest` finds in them where that is known already."""

    logits: torch.Tensor
    found: torch.Tensor | None = None


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Each row's likeliest token, and its logit: float64 [2, rows], which holds either exactly."""
    best, tokens = logits.max(dim=-1)
    return torch.stack((tokens, best.double()))


class Sampler:
    """Draws the tokens of one request. One seed gives one sequence of draws, whoever consumes them and how."""

    def __init__(self, params: SamplingParams, device: torch.device, num_prompt_tokens: int = 0) -> None:
        self.params, self.num_prompt_tokens = params, num_prompt_tokens
        changes_logits = params.repetition_penalty != 1 or _adds(params)
        self.wants_likeliest = not params.temperature and not changes_logits
        """Whether it draws nothing and changes nothing: the largest logit is the token."""
        self._num_draws = 0
        self._generator = torch.Generator(device)
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def sample(self, logits: torch.Tensor, token_ids: Sequence[int]) -> int:
        """Pick the next token from logits [vocab], given all ids so far (prompt included); logits stay unchanged.

        Raises ModelError where there is no largest number among them.
        """
        (token,) = sample_rows(Scores(logits[None]), [(self, token_ids)])
        if isinstance(token, ModelError):
            raise token
        return token

    def fill_with_noise(self, row: torch.Tensor) -> None:
        """Exponential noise for a race among tokens; nothing where there is nothing to draw."""
        if self.params.temperature:
            self._num_draws += 1
            row.exponential_(generator=self._generator)

    def rewind(self, num_draws: int, vocab_size: int) -> None:
        """As it was after so many draws, where it has a seed: what came of a step that failed is drawn again."""
        if self.params.seed is None or self._num_draws <= num_draws:
            return
        self._generator.manual_seed(self.params.seed)
        row = torch.empty(vocab_size, device=self._generator.device)
        for self._num_draws in range(num_draws):
            self.fill_with_noise(row)
        self._num_draws = num_draws


def _adds(params: SamplingParams) -> bool:
    """Whether something is added to some of its logits."""
    return bool(params.presence_penalty or params.frequency_penalty or params.logit_bias)


def _amounts(sampler: Sampler, ids: Sequence[int]) -> dict[int, float]:
    """What is added to which token's logit: its bias, less the penalties of the OpenAI API for what was generated."""
    params, amounts = sampler.params, dict(sampler.params.logit_bias)
    if params.presence_penalty or params.frequency_penalty:
        for token, times in collections.Counter(ids[sampler.num_prompt_tokens :]).items():
            amounts[token] = amounts.get(token, 0) - params.presence_penalty - params.frequency_penalty * times
    return amounts


Row = tuple[Sampler, Sequence[int]]
"""Who samples, and all ids so far, prompt included."""


class Looks(Protocol[T_co]):
    """Who wants more of a step's rows than their tokens."""

    def look(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Numbers [any], float64, of logits [rows, vocab] and the tokens [rows] that came of them."""
        ...

    def read(self, numbers: Sequence[float]) -> T_co:
        """The same numbers, on the host."""
        ...


def sample_rows(scores: Scores, rows: Sequence[Row]) -> list[int | ModelError]:
    """A token for each row of the scores. Waits for the device at its end, and nowhere before.

    Where a row has none, the error stands in its place: what one request cannot do is no fault of the others.
    """
    return _checked(*to_host(_find(scores, rows)))


def sample_and_look(scores: Scores, rows: Sequence[Row], looks: Looks[T]) -> tuple[list[int | ModelError], T]:
    """As `sample_rows`, with what somebody reads of the rows, in the same copy."""
    found, num = _find(scores, rows), len(rows)
    numbers = to_host(torch.cat((found.flatten(), looks.look(scores.logits, found[0]))))
    return _checked(numbers[:num], numbers[num : 2 * num]), looks.read(numbers[2 * num :])


def _find(scores: Scores, rows: Sequence[Row]) -> torch.Tensor:
    """Tokens and largest logits, float64 [2, rows], on the device."""
    found = likeliest(scores.logits) if scores.found is None else scores.found
    places = [place for place, (sampler, _) in enumerate(rows) if not sampler.wants_likeliest]
    if places:
        found = _sample_some(scores.logits, found, places, [rows[place] for place in places])
    return found


def _checked(tokens: Sequence[float], bests: Sequence[float]) -> list[int | ModelError]:
    return [_checked_one(token, best) for token, best in zip(tokens, bests, strict=True)]


def _checked_one(token: float, best: float) -> int | ModelError:
    if not math.isfinite(best):
        return ModelError(f"the largest logit is {best}: broken weights, or too small a dtype (try float32)")
    return int(token)


def _sample_some(logits: torch.Tensor, found: torch.Tensor, places: Sequence[int], rows: Sequence[Row]) -> torch.Tensor:
    """What is found of all rows, with the tokens of those at `places` drawn, or penalised."""
    filters = Filters(rows, logits.shape[-1], logits.device, places=places)
    some = filters.apply(logits.index_select(0, filters.places).float())
    best, tokens = some.max(dim=-1)
    if any(sampler.params.temperature for sampler, _ in rows):
        drawn = race(some.softmax(dim=-1), [sampler for sampler, _ in rows])
        tokens = torch.where(filters.draws, drawn, tokens)
    return found.index_copy(1, filters.places, torch.stack((tokens, best.double())))


def race(probabilities: torch.Tensor, samplers: Sequence[Sampler]) -> torch.Tensor:
    """A token for each row [rows, vocab], as likely as it says: the first to arrive of exponential clocks.

    It is what `torch.multinomial` draws from the same generator, which has no generator for each row, and looks at
    its probabilities from the host.
    """
    noise = torch.ones_like(probabilities)
    for row, sampler in zip(noise, samplers, strict=True):
        sampler.fill_with_noise(row)
    return (probabilities / noise).argmax(dim=-1)


class Filters:
    """What some rows want, each in a column [rows, 1] on the device, sent there in one copy.

    `places` are the rows' own among others, and come along. `draws` [rows] tells who does not take the likeliest token.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        vocab_size: int,
        device: torch.device,
        *,
        places: Sequence[int] = (),
    ) -> None:
        self._drawing = [sampler.params for sampler, _ in rows if sampler.params.temperature]
        self._largest_k = min(max((params.top_k for params in self._drawing), default=0), vocab_size)
        wishes = [self._wishes(sampler.params) for sampler, _ in rows]
        columns = [number for column in zip(*wishes, strict=True) for number in column]
        seen = [
            place * vocab_size + token
            for place, (sampler, ids) in enumerate(rows)
            if sampler.params.repetition_penalty != 1
            for token in set(ids)
        ]
        added = {
            place * vocab_size + token: amount
            for place, (sampler, ids) in enumerate(rows)
            if _adds(sampler.params)
            for token, amount in _amounts(sampler, ids).items()
        }
        parts = [columns, places, seen, added.keys(), added.values()]
        sent = to_device([*itertools.chain(*parts)], torch.float64, device)  # exact for all of them
        wished, places_there, seen_there, added_there, amounts = torch.split(sent, [*map(len, parts)])
        self.places, self._seen, self._added = places_there.long(), seen_there.long(), added_there.long()
        self._amounts = amounts.float()
        self._temperature, self._top_k, self._tail, self._min_p, self._penalty = wished.float().view(5, -1, 1)
        self.draws: torch.Tensor = self._temperature.flatten() > 0

    def _wishes(self, params: SamplingParams) -> tuple[float, ...]:
        """Temperature, top_k, what top_p leaves out, min_p, penalty: so that what is not wanted changes nothing."""
        if not params.temperature:
            return 0, 0, -1, 0, params.repetition_penalty
        top_k = min(params.top_k, self._largest_k)
        tail = 1 - params.top_p if params.top_p < 1 else -1
        return params.temperature, top_k, tail, params.min_p, params.repetition_penalty

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Penalise, add, sharpen and exclude: float32 logits [rows, vocab] -> as many, excluded tokens at -inf.

        Greedy rows are penalised and added to only: no filter here ever excludes the largest logit.
        """
        if self._seen.numel():
            logits = penalise_repetition(logits, self._seen, self._penalty)
        if self._added.numel():
            logits = logits.flatten().index_add(0, self._added, self._amounts).view_as(logits)
        logits = logits / torch.where(self._temperature > 0, self._temperature, 1)
        if self._largest_k:
            logits = keep_top_k(logits, self._top_k, self._largest_k)
        if any(params.top_p < 1 for params in self._drawing):
            logits = keep_top_p(logits, self._tail)
        return keep_min_p(logits, self._min_p) if any(params.min_p for params in self._drawing) else logits


def penalise_repetition(logits: torch.Tensor, seen: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """Make tokens seen so far less likely (CTRL, arXiv:1909.05858): divide positive logits, multiply negative ones.

    `seen` are places in all logits [rows, vocab], row after row.
    """
    is_seen = torch.zeros_like(logits, dtype=torch.bool).view(-1).index_fill_(0, seen, True).view_as(logits)
    return torch.where(is_seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def keep_top_k(logits: torch.Tensor, k: torch.Tensor, largest_k: int) -> torch.Tensor:
    """Keep each row's k largest logits, and what ties with the last of them; all where k is 0."""
    largest = logits.topk(largest_k).values
    smallest = largest.gather(-1, (k.long() - 1).clamp(min=0))
    return logits.masked_fill((logits < smallest) & (k > 0), _EXCLUDED)


def keep_top_p(logits: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
    """Keep the smallest set of most likely tokens that leaves out `tail` = 1 - p at most; all where it is negative.

    Nucleus sampling (arXiv:1904.09751).
    """
    ascending, order = logits.sort(descending=False)
    excluded = ascending.softmax(dim=-1).cumsum(dim=-1) <= tail
    excluded[..., -1] = False
    return logits.masked_fill(torch.zeros_like(excluded).scatter(-1, order, excluded), _EXCLUDED)


def keep_min_p(logits: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Keep the tokens that are at least p times as likely as the likeliest (arXiv:2407.01082)."""
    probabilities = logits.softmax(dim=-1)
    return logits.masked_fill(probabilities < p * probabilities.amax(dim=-1, keepdim=True), _EXCLUDED)
