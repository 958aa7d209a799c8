"""How likely tokens were by the raw logits: those that a step samples, and a prompt's own where somebody wants them.

Knows log softmax, and that what it finds comes back in the same copy as the tokens. A prompt's are found while it runs,
slice by slice, and stay on the device until its first token. Refuses to know who samples how: filters and penalties
change none of these numbers.
"""

from collections.abc import Iterator, Sequence

import torch

from nanoserve.batch import PromptRows
from nanoserve.models.causal import CausalModel
from nanoserve.request import Request, Told, TokenLogprobs

_MAX_ROWS = 256
"""Logits of so many prompt positions are there at once: a row of them is as wide as the vocabulary."""


def lines_of(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> torch.Tensor:
    """For each row its token, that token's log probability, the likeliest tokens, and theirs: float64 exactly."""
    found = logits.float().log_softmax(dim=-1)
    tokens = tokens.long()[:, None]
    top = found.topk(min(num_top, found.shape[-1]), dim=-1)
    return torch.cat([each.double() for each in (tokens, found.gather(1, tokens), top.indices, top.values)], dim=-1)


class PromptLogprobs(dict[str, list[torch.Tensor]]):
    """Lines of prompts that have no answer yet, by request. One that has to run again begins again."""

    def take(self, model: CausalModel, hidden: torch.Tensor, prompts: Sequence[PromptRows]) -> None:
        """From a step's hidden states [rows, hidden], before the next one overwrites them."""
        for each in prompts:
            if each.is_first:
                self[each.request.request_id] = []
            num_top = each.request.params.num_logprobs or 0
            for start in range(0, len(each.targets), _MAX_ROWS):
                some, targets = (of[start : start + _MAX_ROWS] for of in (hidden[each.rows], each.targets))
                self[each.request.request_id].append(lines_of(model.compute_logits(some), targets, num_top))

    def beside(self, requests: Sequence[Request]) -> "Beside | None":
        """What comes back beside the next token of each of these; None where nobody asked for more than that."""
        if all(each.params.num_logprobs is None and not each.params.prompt_logprobs for each in requests):
            return None
        return Beside(requests, [self.pop(each.request_id, []) for each in requests])


class Beside:
    """Log probabilities on their way back from the device, behind the tokens of one step's rows."""

    def __init__(self, requests: Sequence[Request], prompts: Sequence[list[torch.Tensor]]) -> None:
        """`prompts` are the lines of those whose first token it is."""
        self._requests, self._prompts = requests, prompts
        self._places = [place for place, each in enumerate(requests) if each.params.num_logprobs is not None]
        self._num_top = max((requests[place].params.num_logprobs or 0 for place in self._places), default=0)
        self._widths: list[tuple[int, int]] = []

    def look(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Numbers to bring back, in a row, for logits [rows, vocab] and the tokens [rows] that came of them."""
        parts = [part for lines in self._prompts for part in lines]
        if self._places:
            some, theirs = self._rows_of(logits), self._rows_of(tokens)
            parts.insert(0, lines_of(some, theirs, self._num_top))
        self._widths = [(part.shape[0], part.shape[1]) for part in parts]
        return torch.cat([part.flatten() for part in parts]) if parts else tokens[:0]

    def _rows_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Of those who asked. Row by row: places would have to be sent."""
        return rows if len(self._places) == len(rows) else torch.stack([rows[place] for place in self._places])

    def read(self, numbers: Sequence[float]) -> list[Told]:
        """What is told of each request, once they are there."""
        lines = self._lines(numbers)
        tokens = {place: _read(next(lines), self._requests[place]) for place in self._places}
        return [
            Told(tokens.get(place), self._prompt_of(request, sum(map(len, self._prompts[place])), lines))
            for place, request in enumerate(self._requests)
        ]

    def _lines(self, numbers: Sequence[float]) -> Iterator[Sequence[float]]:
        start = 0
        for num_lines, width in self._widths:
            for _ in range(num_lines):
                yield numbers[start : start + width]
                start += width

    def _prompt_of(
        self, request: Request, num_lines: int, lines: Iterator[Sequence[float]]
    ) -> tuple[TokenLogprobs | None, ...] | None:
        """Nothing comes before a prompt's first token: it has no probability."""
        if not request.params.prompt_logprobs or request.num_output_tokens:
            return None
        return (None, *(_read(next(lines), request) for _ in range(num_lines)))


def _read(line: Sequence[float], request: Request) -> TokenLogprobs:
    num_found, num_top = len(line) // 2 - 1, request.params.num_logprobs or 0
    top = zip(map(int, line[2 : 2 + num_found]), line[2 + num_found :], strict=True)
    return TokenLogprobs(token_id=int(line[0]), logprob=line[1], top=tuple(top)[:num_top])
