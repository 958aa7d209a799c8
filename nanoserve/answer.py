"""What a request owns while it runs, besides keys and values: its sampler, its text so far, its stop strings.

Knows how one more token changes them, what is told of it, and to whom. Survives a preemption: the request's text does
not depend on how often it had to make room.
"""

from collections.abc import Sequence

import torch

from nanoserve.request import Completion, FinishReason, Request, Told, TokenEvent
from nanoserve.sampling import Sampler
from nanoserve.stopping import StopStrings
from nanoserve.tokenizer import TextStream, Tokenizer


class Inboxes(dict[str, list[TokenEvent | BaseException]]):
    """What has been told of each request whose stream is read. What nobody reads waits in `untold` and `errors`."""

    def __init__(self) -> None:
        super().__init__()
        self.untold: list[TokenEvent] = []
        self.errors: list[tuple[str, Exception]] = []

    def tell(self, event: TokenEvent) -> None:
        if event.request_id in self:
            self[event.request_id].append(event)
        else:
            self.untold.append(event)

    def fail(self, request_id: str, error: Exception) -> None:
        """A request cannot go on: who reads its stream is told, or who steps next."""
        if request_id in self:
            self[request_id].append(error)
        else:
            error.add_note(f"request {request_id!r} has left")
            self.errors.append((request_id, error))


class Answer:
    """The continuation of one request, token by token."""

    def __init__(self, request: Request, tokenizer: Tokenizer, device: torch.device) -> None:
        self.request = request
        self.sampler = Sampler(request.params, device)
        self._text = TextStream(tokenizer)
        self._stop = StopStrings(request.params.stop)

    def push(
        self,
        token_id: int,
        eos_token_ids: Sequence[int],
        more: Told,
        *,
        num_prefilled: int,
        num_cached: int,
    ) -> TokenEvent:
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
            logprobs=more.token,
            prompt_logprobs=more.prompt,
        )


class Answers(dict[str, Answer]):
    """By request."""

    def __init__(self, tokenizer: Tokenizer, device: torch.device) -> None:
        super().__init__()
        self._tokenizer, self._device = tokenizer, device

    def of(self, request: Request) -> Answer:
        """What there is of it, from its first token on."""
        if request.request_id not in self:
            self[request.request_id] = Answer(request, self._tokenizer, self._device)
        return self[request.request_id]


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
