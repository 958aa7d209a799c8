"""What a request owns while it runs, besides keys and values: its sampler, its text so far, its stop strings.

Knows how one more token changes them and what is told of it. Survives a preemption: the request's text does not depend
on how often it had to make room.
"""

from collections.abc import Sequence

import torch

from nanoserve.request import Completion, FinishReason, Request, TokenEvent
from nanoserve.sampling import Sampler
from nanoserve.stopping import StopStrings
from nanoserve.tokenizer import TextStream, Tokenizer


class Answer:
    """The continuation of one request, token by token."""

    def __init__(self, request: Request, tokenizer: Tokenizer, device: torch.device) -> None:
        self.request = request
        self.sampler = Sampler(request.params, device)
        self._text = TextStream(tokenizer)
        self._stop = StopStrings(request.params.stop)

    def push(self, token_id: int, eos_token_ids: Sequence[int], *, num_prefilled: int, num_cached: int) -> TokenEvent:
        """Append the token, decide whether the request ends with it, and tell the text that is now certain."""
        request = self.request
        request.append(token_id, eos_token_ids)
        text = self._stop.push(self._text.push(token_id))
        if request.finish_reason is not None:
            text += self._stop.push(self._text.flush())
        if self._stop.was_hit:
            request.finish_reason = FinishReason.STOP
        return TokenEvent(
            request_id=request.request_id,
            index=request.num_output_tokens - 1,
            token_id=token_id,
            text=text + self._stop.flush() if request.finish_reason is not None else text,
            num_prefilled=num_prefilled,
            num_cached=num_cached,
            finish_reason=request.finish_reason,
        )


def told(what: TokenEvent | BaseException) -> TokenEvent:
    """What somebody is told of a request: an event, or the error that ended it, which is raised."""
    if isinstance(what, BaseException):
        raise what
    return what


def completion_of(request: Request, events: Sequence[TokenEvent]) -> Completion:
    """A finished request and all its events as one answer."""
    assert request.finish_reason is not None, f"{request.request_id} is still running"
    return Completion(
        request_id=request.request_id,
        text="".join(event.text for event in events),
        token_ids=tuple(event.token_id for event in events),
        num_prompt_tokens=request.num_prompt_tokens,
        finish_reason=request.finish_reason,
    )
