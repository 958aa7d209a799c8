"""Drives requests through the model: `add_request`, then `step` until no work is left; `stream`, `generate` do both.

Knows the order of a step: schedule, run the model over what is not yet cached, sample, commit. Refuses to know the
policy (scheduler), the kernels (attention), where keys and values live (cache) and what time it is.
"""

import dataclasses
import operator
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Protocol

import torch

from nanoserve.cache.contiguous import ContiguousCache
from nanoserve.cache.growing import GrowingCache
from nanoserve.cache.kv import KVCache, NoCache
from nanoserve.config import EngineConfig, SamplingParams
from nanoserve.errors import RequestError
from nanoserve.request import Completion, FinishReason, Request, TokenEvent
from nanoserve.sampling import Sampler
from nanoserve.scheduler import Scheduler
from nanoserve.stopping import StopStrings
from nanoserve.tokenizer import TextStream, Tokenizer
from nanoserve.weights import Check, LoadedModel, load_model

Prompt = str | Sequence[int]


class CausalModel(Protocol):
    """What the engine asks of a model; `models/llama.py` states the shapes."""

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, cache: KVCache) -> torch.Tensor: ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


@dataclasses.dataclass(slots=True)
class _Run:
    """What a request owns while it runs; dropped when it finishes, and its cache with it."""

    request: Request
    cache: KVCache
    sampler: Sampler
    text: TextStream
    stop: StopStrings


class Engine:
    """One model on one device, and the requests that it is answering. Not safe to call from two threads."""

    def __init__(self, loaded: LoadedModel, *, cache: str = "contiguous") -> None:
        """Take a loaded model, shared with any other engine that has it; `cache` is one of `config.CACHES`."""
        self.loaded = loaded
        self.cache = EngineConfig(cache=cache).cache
        self.tokenizer: Tokenizer = loaded.tokenizer
        self._model: CausalModel = loaded.model
        self._eos_token_ids = loaded.config.eos_token_ids or loaded.tokenizer.eos_token_ids
        self._scheduler = Scheduler()
        self._runs: dict[str, _Run] = {}
        self._inboxes: dict[str, deque[TokenEvent]] = {}

    @classmethod
    def load(cls, model: str = "smollm2-135m", before_weights: Check = lambda *_: None, **options: Any) -> "Engine":
        """Load a model by name, folder, GGUF file or hub id; `options` are the fields of `EngineConfig`.

        `before_weights` gets the model's configuration and tokenizer before the long part, and may raise.
        """
        config = EngineConfig.from_options({"model": model, **options})
        return cls(load_model(config, before_weights), cache=config.cache)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def kv_bytes(self) -> int:
        """Bytes that the keys and values of running requests take, reserved positions included."""
        return sum(run.cache.num_bytes for run in self._runs.values())

    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> str:
        """Check and queue a prompt (text or token ids), return the request's id. Raises RequestError; runs nothing."""
        request = self._check(prompt, params, request_id)
        self._scheduler.add(request)
        return request.request_id

    @torch.inference_mode()
    def step(self) -> list[TokenEvent]:
        """One scheduler decision and one forward per scheduled request: an event for each token that came of it."""
        events = [self._advance_or_abort(request) for request in self._scheduler.schedule()]
        self._scheduler.commit()
        for event in events:
            self._deliver(event)
        return events

    def abort(self, request_id: str) -> None:
        """Stop a request and free its cache. Raises RequestError when it is unknown or has finished."""
        self._scheduler.abort(request_id)
        self._runs.pop(request_id, None)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[TokenEvent]:
        """Yield one request's events as its tokens come. The prompt is checked at once; leaving the loop aborts it."""
        return self._follow(self._check(prompt, params, None))

    def generate(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None) -> list[Completion]:
        """Answer one prompt or a list of them, in their order. A prompt that is refused refuses the whole call."""
        requests = [self._check(prompt, params, None) for prompt in _as_list(prompts)]
        return [_complete(list(self._follow(request)), request.num_prompt_tokens) for request in requests]

    def _check(self, prompt: Prompt, params: SamplingParams | None, request_id: str | None) -> Request:
        prompt_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else _as_ids(prompt)
        request = Request(request_id or f"request-{uuid.uuid4().hex[:12]}", prompt_ids, params or SamplingParams())
        request.check_fits(self.loaded.config)
        return request

    def _follow(self, request: Request) -> Iterator[TokenEvent]:
        """Queue the request at the first pull. Steps taken for it may serve others; their events wait for them."""
        self._scheduler.add(request)
        inbox = self._inboxes[request.request_id] = deque()
        try:
            while inbox or request.finish_reason is None:
                if not inbox:
                    self.step()
                else:
                    yield inbox.popleft()
        finally:
            del self._inboxes[request.request_id]
            if request.finish_reason is None:
                self.abort(request.request_id)

    def _deliver(self, event: TokenEvent) -> None:
        if event.request_id in self._inboxes:
            self._inboxes[event.request_id].append(event)
        if event.finish_reason is not None:
            del self._runs[event.request_id]

    def _run_of(self, request: Request) -> _Run:
        """What the request owns, made when it is first scheduled: a waiting request holds no memory."""
        if request.request_id not in self._runs:
            self._runs[request.request_id] = _Run(
                request=request,
                cache=self._make_cache(request.num_prompt_tokens + request.params.max_new_tokens),
                sampler=Sampler(request.params, self.loaded.device),
                text=TextStream(self.tokenizer),
                stop=StopStrings(request.params.stop),
            )
        return self._runs[request.request_id]

    def _make_cache(self, num_tokens: int) -> KVCache:
        if self.cache == "none":
            return NoCache()
        if self.cache == "growing":
            return GrowingCache(self.loaded.config.num_layers)
        return ContiguousCache(self.loaded.config, num_tokens, self.loaded.dtype, self.loaded.device)

    def _advance_or_abort(self, request: Request) -> TokenEvent:
        """A request that cannot go on leaves, so that it does not stand in the way of all others for ever."""
        try:
            return self._advance(self._run_of(request))
        except BaseException:
            self.abort(request.request_id)
            raise

    def _advance(self, run: _Run) -> TokenEvent:
        """Run what is not cached yet, sample from the last position, and tell what came of it."""
        token_ids, num_cached = run.request.token_ids, run.cache.num_cached
        num_prefilled = len(token_ids) - num_cached
        token_id = run.sampler.sample(self._forward(token_ids[num_cached:], run.cache), token_ids)
        text = self._commit(run, token_id)
        return TokenEvent(
            request_id=run.request.request_id,
            index=run.request.num_output_tokens - 1,
            token_id=token_id,
            text=text,
            num_prefilled=num_prefilled,
            num_cached=num_cached,
            finish_reason=run.request.finish_reason,
        )

    def _forward(self, new_ids: Sequence[int], cache: KVCache) -> torch.Tensor:
        """Logits [vocab] of the last of the new positions; the cache then holds all of them."""
        device, start = self.loaded.device, cache.num_cached
        positions = torch.arange(start, start + len(new_ids), device=device)
        hidden = self._model(torch.tensor(new_ids, device=device), positions, cache)
        cache.advance(len(new_ids))
        return self._model.compute_logits(hidden[-1:])[0]

    def _commit(self, run: _Run, token_id: int) -> str:
        """Append the token, decide whether the request ends with it, and return the text that is now certain."""
        request = run.request
        request.append(token_id, self._eos_token_ids)
        text = run.stop.push(run.text.push(token_id))
        if request.finish_reason is not None:
            text += run.stop.push(run.text.flush())
        if run.stop.was_hit:
            request.finish_reason = FinishReason.STOP
        return text + run.stop.flush() if request.finish_reason is not None else text


def _as_ids(prompt: Sequence[int]) -> list[int]:
    """Token ids as plain integers, from a list, an array or a tensor. Raises RequestError for anything else."""
    try:
        return [operator.index(token_id) for token_id in prompt]
    except TypeError:
        raise RequestError(f"a prompt is a text or a sequence of token ids, not {str(prompt)[:60]!r}") from None


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A text or a flat sequence of ids is one prompt; any other sequence is a list of them."""
    if isinstance(prompts, Mapping | Set) or not isinstance(prompts, Iterable):
        raise RequestError(f"prompts are a text, token ids or a list of these, not {str(prompts)[:60]!r}")
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    is_one = bool(items) and all(hasattr(item, "__index__") and not getattr(item, "ndim", 0) for item in items)
    return [items] if is_one else items  # type: ignore[list-item, return-value]


def _complete(events: Sequence[TokenEvent], num_prompt_tokens: int) -> Completion:
    last = events[-1]
    assert last.finish_reason is not None
    return Completion(
        request_id=last.request_id,
        text="".join(event.text for event in events),
        token_ids=tuple(event.token_id for event in events),
        num_prompt_tokens=num_prompt_tokens,
        finish_reason=last.finish_reason,
    )
