"""From a body to the requests that it asks for: prompts as token ids, parameters, and what is wanted back.

Knows the tokenizer and the limits, and checks everything before any work is done. Refuses to know queues and HTTP. Its
functions take as long as a long prompt takes to encode, and touch nothing that changes: they are called off the loop.
"""

import dataclasses
import time
import uuid
from collections.abc import Sequence
from typing import Any

from nanoserve.config import SamplingParams
from nanoserve.engine import Engine
from nanoserve.errors import ApiError, RequestError, one_line
from nanoserve.server.bodies import ChatBody, CompletionBody, Sampling
from nanoserve.server.settings import ServerConfig

_DEFAULT_COMPLETION_TOKENS = 16
_MOST_REQUESTS = 4096


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP call. `requests` are prompt after prompt, `num_answers` for each.

    `echo` holds the prompts' texts where they are told again. `num_top` is None without logprobs.
    """

    name: str
    model: str
    created_s: int
    requests: Sequence[tuple[Sequence[int], SamplingParams]]
    num_answers: int
    is_chat: bool
    streams: bool
    tells_usage: bool
    tells_running_usage: bool
    tells_token_ids: bool
    num_top: int | None
    echo: tuple[str, ...] = ()
    is_silent: bool = False
    """Nothing but the prompt is told: of zero new tokens, the one that the engine cannot do without is left out."""

    @property
    def num_prompt_tokens(self) -> int:
        """A prompt counts once, however many answers it gets."""
        return sum(len(ids) for ids, _ in self.requests[:: self.num_answers])


class Calls:
    """Makes calls of bodies, for one engine. Raises ApiError for what cannot be answered."""

    def __init__(self, engine: Engine, settings: ServerConfig) -> None:
        self._engine, self._settings = engine, settings
        self._most_prompt = settings.max_prompt_tokens or engine.max_request_tokens - 1

    def of_completion(self, body: CompletionBody) -> Call:
        prompts = body.prompts
        _check_number(body.num_requests)
        ids = [self._engine.tokenizer.encode(each) if isinstance(each, str) else each for each in prompts]
        num_new = _DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
        wanted = {"num_logprobs": body.logprobs, "prompt_logprobs": (body.echo and body.logprobs is not None) or None}
        call = self._make(
            body,
            [(each, num_new) for each in ids],
            wanted,
            is_chat=False,
            num_top=body.logprobs,
            is_silent=body.max_tokens == 0,
        )
        # Ids are told again once they are known to be tokens.
        return dataclasses.replace(call, echo=tuple(map(self._text_of, prompts))) if body.echo else call

    def of_chat(self, body: ChatBody) -> Call:
        try:
            ids = self._engine.tokenizer.render_chat([message.as_plain() for message in body.messages])
        except RequestError as error:
            raise ApiError(400, one_line(error), param="messages") from error
        left = self._engine.max_request_tokens - len(ids)
        num_new = body.max_completion_tokens or body.max_tokens or max(1, left)
        num_top = (body.top_logprobs or 0) if body.logprobs else None
        return self._make(body, [(ids, num_new)], {"num_logprobs": num_top}, is_chat=True, num_top=num_top)

    def _make(
        self, body: Sampling, prompts: Sequence[tuple[Sequence[int], int]], wanted: dict[str, Any], **more: Any
    ) -> Call:
        options, name = body.stream_options, "chatcmpl" if more["is_chat"] else "cmpl"
        return Call(
            name=f"{name}-{uuid.uuid4().hex}",
            model=self._settings.model_name,
            created_s=int(time.time()),
            requests=[
                (ids, self._checked(ids, body, num_new, place, wanted))
                for ids, num_new in prompts
                for place in range(body.num_answers)
            ],
            num_answers=body.num_answers,
            streams=bool(body.stream),
            tells_usage=bool(options and options.include_usage) or not body.stream,
            tells_running_usage=bool(options and options.continuous_usage_stats),
            tells_token_ids=bool(body.return_token_ids),
            **more,
        )

    def _checked(
        self, ids: Sequence[int], body: Sampling, num_new: int, place: int, wanted: dict[str, Any]
    ) -> SamplingParams:
        field = "messages" if isinstance(body, ChatBody) else "prompt"
        if len(ids) > self._most_prompt:
            said = f"the prompt has {len(ids)} tokens, this server takes {self._most_prompt} at most"
            raise ApiError(400, said, param=field, code="context_length_exceeded")
        try:
            params = body.params(num_new, place, **wanted)
            if not place:  # those after it differ in their seeds only
                self._engine.check(ids, params)
        except RequestError as error:
            raise ApiError(400, one_line(error), param=None if ids else field) from error
        return params

    def _text_of(self, prompt: str | Sequence[int]) -> str:
        return prompt if isinstance(prompt, str) else self._engine.tokenizer.decode(prompt)


def _check_number(num: int) -> None:
    if num > _MOST_REQUESTS:
        raise ApiError(400, f"{num} answers in one call are more than {_MOST_REQUESTS}", param="n")
