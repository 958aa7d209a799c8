"""The JSON that clients send, as OpenAI's API has it, and some fields beyond that, named as vLLM names them.

Knows names, types and ranges; a field that is not known here is refused, one that would change an answer and is not
supported is refused unless it asks for nothing. Refuses to know tokens, the engine and what is sent back.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from nanoserve.config import SamplingParams

_AS_THEY_ARE = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos",
)  # fmt: skip
_MOST_ANSWERS = 128
_MOST_STOPS = 4
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "suffix": (None, ""),
}
"""Fields that are not supported, with the values of them that ask for nothing."""

Count = Annotated[int, Field(ge=1, le=2**31)]
Stop = Annotated[str, Field(min_length=1, max_length=4096)]
Digits = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]
Ids = Annotated[list[int], Field(fail_fast=True)]
Prompt = Annotated[
    str | Ids | Annotated[list[str], Field(fail_fast=True)] | Annotated[list[Ids], Field(fail_fast=True)],
    Field(union_mode="left_to_right"),
]
"""A text, token ids, or a list of either. Read once: a million ids would hold up the event loop otherwise."""


def _refused(param: str, why: str) -> PydanticCustomError:
    return PydanticCustomError("refused", "{why}", {"why": why, "param": param})


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(_Body):
    """What a stream tells besides its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Sampling(_Body):
    """What completions and chats have in common. Without `model`, the one that is served."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=_MOST_ANSWERS)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=_MOST_STOPS)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[Digits, Annotated[float, Field(ge=-100, le=100)]] | None = None
    # Beyond OpenAI's, as vLLM has them.
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    # They change nothing here.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: Any) -> Any:
        for name, neutral in _NEUTRAL.items() if isinstance(body, dict) else ():
            if name in cls.model_fields and body.get(name) not in neutral:
                raise _refused(name, "it is not supported by this server; leave it out")
        return body

    @model_validator(mode="after")
    def _check_streaming(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise _refused("stream_options", "only a stream has options: ask for stream true")
        return self

    @model_validator(mode="after")
    def _check_biases(self) -> Self:
        if len(set(map(int, self.logit_bias or ()))) < len(self.logit_bias or ()):
            raise _refused("logit_bias", "it names a token twice")
        return self

    @property
    def num_answers(self) -> int:
        return self.n or 1

    @property
    def num_requests(self) -> int:
        """Answers to all prompts together."""
        return self.num_answers

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def params(self, max_new_tokens: int, place: int, **more: Any) -> SamplingParams:
        """For the answer at `place` among those to one prompt, each of which draws anew.

        What is not given is as OpenAI has it; `more` are fields of SamplingParams.
        """
        given = {name: getattr(self, name) for name in _AS_THEY_ARE}
        given["seed"] = None if self.seed is None else (self.seed + place) % 2**63
        given["top_k"] = None if self.top_k is None else max(0, self.top_k)  # -1 is off, too
        given["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()} if self.logit_bias else None
        told = {name: value for name, value in (given | more).items() if value is not None}
        return SamplingParams(**{"temperature": 1.0, **told}, max_new_tokens=max_new_tokens, stop=self.stops)


class CompletionBody(Sampling):
    """POST /v1/completions."""

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: Any = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Texts and token ids; one prompt is a text or a list of ids."""
        if isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)

    @property
    def num_requests(self) -> int:
        """Answers to all prompts together."""
        return len(self.prompts) * self.num_answers

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.best_of not in (None, self.num_answers):
            raise _refused("best_of", "it is not supported unless it equals n; leave it out")
        if self.max_tokens == 0 and not self.echo:
            raise _refused("max_tokens", "0 gives no text without echo: ask for at least 1")
        return self


class TextPart(_Body):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Message(_Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    refusal: None = None

    def as_plain(self) -> dict[str, str]:
        """As chat templates take it."""
        parts = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": parts}


class ChatBody(Sampling):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    max_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    parallel_tool_calls: Any = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise _refused("top_logprobs", "it needs logprobs true")
        return self
