"""Drives requests through the model: `add_request`, then `step` until no work is left; `stream`, `generate` do both.

Knows the order of a step: schedule, run the model over what is not yet cached, sample, commit. Refuses to know the
policy (scheduler), the kernels (attention), where keys and values live (batch, cache) and what time it is.
"""

import contextlib
import dataclasses
import itertools
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from nanoserve.answer import Answers, Inboxes, completion_of, told
from nanoserve.attention import choose_backend
from nanoserve.batch import make_memory
from nanoserve.config import EngineConfig, SamplingParams, SchedulerConfig
from nanoserve.errors import ConfigError, ModelError, unknown
from nanoserve.gauges import Gauges
from nanoserve.leaving import Leaving
from nanoserve.logprobs import PromptLogprobs
from nanoserve.memory import plan_for
from nanoserve.models.causal import CausalModel
from nanoserve.prompts import Prompt, as_ids, as_list, for_each
from nanoserve.replay import choose_recorder, make_replays
from nanoserve.request import Completion, Request, TokenEvent, Told
from nanoserve.sampling import Scores, sample_and_look, sample_rows
from nanoserve.scheduler import make_scheduler
from nanoserve.seats import Scheduled
from nanoserve.tokenizer import Tokenizer
from nanoserve.weights import Check, LoadedModel, load_model

_Sampled = tuple[Scheduled, int | ModelError, Told]

_OWN_OPTIONS = ("cache", "kv_memory", "prefix_cache", "attention", "graphs")  # of an EngineConfig: not the model's


class Engine(Gauges, Leaving):
    """One model on one device, and the requests that it is answering. Not safe to call from two threads."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        cache: str = "paged",
        kv_memory: str = "auto",
        prefix_cache: str = "auto",
        attention: str = "auto",
        graphs: str = "auto",
        **scheduling: Any,
    ) -> None:
        """Take a loaded model, shared with any other engine that has it.

        `cache`, `kv_memory`, `prefix_cache`, `attention` and `graphs` are those of `EngineConfig`, `scheduling` the
        fields of `SchedulerConfig`; `num_blocks` sizes the pool by hand. Raises ConfigError for what cannot work
        together.
        """
        config = EngineConfig(
            cache=cache, kv_memory=kv_memory, prefix_cache=prefix_cache, attention=attention, graphs=graphs
        )
        self.loaded = loaded
        self.tokenizer: Tokenizer = loaded.tokenizer
        self._model: CausalModel = loaded.model
        self._eos_token_ids = loaded.config.eos_token_ids or loaded.tokenizer.eos_token_ids
        self.attention = choose_backend(
            config.attention, loaded.device, is_paged=cache == "paged", has_native=loaded.is_native
        )
        for name in scheduling.keys() - set(SchedulerConfig.option_names()):
            choices = (*_OWN_OPTIONS, *SchedulerConfig.option_names())
            raise ConfigError(unknown("Engine option", name, choices))
        settings = SchedulerConfig(**scheduling)
        self.pool_plan = plan_for(loaded.config, loaded.dtype, loaded.device, config, settings)
        if self.pool_plan is not None:
            settings = dataclasses.replace(settings, num_blocks=self.pool_plan.num_blocks)
        space = (loaded.config, loaded.weights, str(loaded.dtype))
        self._scheduler = make_scheduler(settings, config.prefix_policy(is_static=settings.is_static), space)
        recorder = choose_recorder(config.graphs, loaded, self.attention)
        self._memory = make_memory(loaded, config.cache, settings, self.attention, has_spare=recorder is not None)
        self._replays = make_replays(recorder, loaded, self._memory, settings)
        self._answers = Answers(self.tokenizer, loaded.device)
        self._prompt_logprobs = PromptLogprobs()
        self._inboxes = Inboxes()

    @classmethod
    def load(cls, model: str = "smollm2-135m", before_weights: Check = lambda *_: None, **options: Any) -> "Engine":
        """Load a model by name, folder, GGUF file or hub id; `options` are the fields of `EngineConfig`, and of
        `SchedulerConfig`.

        `before_weights` gets the model's configuration and tokenizer before the long part, and may raise.
        """
        scheduling = {name: options.pop(name) for name in SchedulerConfig.option_names() if name in options}
        config = EngineConfig.from_options({"model": model, **options})
        SchedulerConfig.from_options(scheduling)
        loaded = load_model(config, before_weights)
        return cls(loaded, **{name: getattr(config, name) for name in _OWN_OPTIONS}, **scheduling)

    @property
    def has_work(self) -> bool:
        """Whether a `step` would run, or tell, anything."""
        return self._scheduler.has_work or bool(self._inboxes.untold or self._inboxes.errors)

    @property
    def notes(self) -> tuple[str, ...]:
        """What does not go as it was meant to, and why, in a sentence each."""
        num_failed = self.counts.num_failed_steps
        failed = (f"steps that failed: {num_failed}; who was in one with others ran again",) if num_failed else ()
        return (*self.loaded.notes, *(self._replays.notes if self._replays else ()), *failed)

    def warm_up(self) -> int:
        """Record decode steps of every size ahead of time; returns how many, 0 where `graphs` records none.

        It takes seconds, kernels that are compiled in it among them. Without it a size is recorded in its first step.
        """
        return 0 if self._replays is None else self._replays.warm_up()

    def reset_prefix_cache(self) -> None:
        """Forget every prefix that no running request holds."""
        if self._scheduler.pool is not None:
            self._scheduler.pool.forget_idle()

    @property
    def kv_bytes(self) -> int:
        """Bytes that keys and values take: the whole pool, or all that running requests have reserved."""
        return self._memory.num_bytes

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> str:
        """Check and queue a prompt (text or token ids), return the request's id. Raises RequestError; runs nothing.

        Requests of a lower `priority` number go first.
        """
        request = self.check(prompt, params, request_id, priority)
        self._scheduler.add(request)
        return request.request_id

    def check(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None, priority: int = 0
    ) -> Request:
        """The request that a prompt and its parameters make. Raises RequestError for one that this engine cannot run.

        Changes nothing, and may be called from any thread.
        """
        prompt_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else as_ids(prompt)
        name = request_id or f"request-{uuid.uuid4().hex[:12]}"
        request = Request(name, prompt_ids, params or SamplingParams(), priority=priority)
        request.check_fits(self.loaded.config)
        self._scheduler.check_fits(request)
        return request

    def step(self) -> list[TokenEvent]:
        """One scheduler decision and one forward for all that it schedules: an event for each token that came of it.

        What came of requests that are streamed is told there; what came of others in steps that a stream took, here,
        first. A request that cannot go on leaves, and the others go on: its error is raised where its stream is read,
        or, when nobody reads it, by the next step, which does nothing else. Whoever was in a forward that fails runs
        again, alone until it has a token: who fails alone cannot go on. What is no Exception, such as a
        KeyboardInterrupt, ends all that were in it, and is raised at once.
        """
        if self._inboxes.errors:
            self._scheduler.admitted = ()
            raise self._inboxes.errors.pop(0)[1]
        self._step()
        told, self._inboxes.untold = self._inboxes.untold, []
        return told

    @torch.inference_mode()
    def _step(self) -> None:
        scheduled = self._scheduler.schedule()
        if not scheduled:
            return
        try:
            sampled = self._sample(scheduled, self._forward(scheduled))
        except Exception as error:
            self._take_back(scheduled, error)
            return
        except BaseException as error:
            self._abort_all(scheduled, error)
            raise
        events = self._tell(sampled)
        for request in self._scheduler.commit():
            self._drop(request.request_id)
        for event in events:
            self._inboxes.tell(event)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[TokenEvent]:
        """Yield one request's events as its tokens come. The prompt is checked at once; leaving the loop aborts it."""
        return self._follow(self.check(prompt, params))

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Answer one prompt, or a list of them together, in their order.

        One set of `params` for all, or one for each. A prompt that is refused refuses the whole call, before any work.
        """
        listed = as_list(prompts)
        requests = [self.check(prompt, each) for prompt, each in zip(listed, for_each(listed, params), strict=True)]
        with self._queued(requests) as inboxes:
            while any(request.finish_reason is None for request in requests):
                self._step()
                for inbox in filter(None, inboxes):
                    told(inbox[-1])
        return [completion_of(each, [*map(told, inbox)]) for each, inbox in zip(requests, inboxes, strict=True)]

    def _follow(self, request: Request) -> Iterator[TokenEvent]:
        """Queue the request at the first pull. Steps taken for it may serve others; their events wait for them."""
        with self._queued([request]) as (inbox,):
            while inbox or request.finish_reason is None:
                if inbox:
                    yield told(inbox.pop(0))
                else:
                    self._step()

    @contextlib.contextmanager
    def _queued(self, requests: Sequence[Request]) -> Iterator[list[list[TokenEvent | BaseException]]]:
        """Add requests, gather what is told of each; whoever has not finished in the end is aborted."""
        for request in requests:
            self._scheduler.add(request)
            self._inboxes[request.request_id] = []
        try:
            yield [self._inboxes[request.request_id] for request in requests]
        finally:
            for request in requests:
                del self._inboxes[request.request_id]
                if request.finish_reason is None:
                    self.abort(request.request_id)

    def _forward(self, scheduled: Sequence[Scheduled]) -> Scores:
        """Logits [sampling requests, vocab], in the order of scheduling; what ran is stored then."""
        if self._replays is not None and (replayed := self._replays.run(scheduled)) is not None:
            return replayed
        batch = self._memory.batch(scheduled)
        with self._memory.together():
            hidden = self._model(batch.token_ids, batch.positions, batch.kv)
        self._prompt_logprobs.take(self._model, hidden, batch.prompts)
        return Scores(hidden[:0] if batch.last_rows is None else self._model.compute_logits(hidden[batch.last_rows]))

    def _sample(self, scheduled: Sequence[Scheduled], scores: Scores) -> Iterable[_Sampled]:
        """A token, or an error, for each request whose last position ran."""
        sampling = [each for each in scheduled if each.samples]
        if not sampling:
            return ()
        rows = [(self._answers.of(each.request).sampler, each.request.token_ids) for each in sampling]
        beside = self._prompt_logprobs.beside([each.request for each in sampling])
        if beside is None:
            return zip(sampling, sample_rows(scores, rows), itertools.repeat(Told()))
        return zip(sampling, *sample_and_look(scores, rows, beside), strict=True)

    def _tell(self, sampled: Iterable[_Sampled]) -> list[TokenEvent]:
        """An event for each token; a request without one leaves."""
        events: list[TokenEvent] = []
        for each, token, more in sampled:
            try:
                events.append(self._push(each, token, more))
            except Exception as error:
                self._fail(each.request, error)
        return events

    def _push(self, scheduled: Scheduled, token: int | Exception, more: Told) -> TokenEvent:
        if isinstance(token, Exception):
            raise token
        ran = self._memory.positions_of(scheduled)
        num_cached = min(ran.start, scheduled.num_before)
        counts = {"num_prefilled": ran.stop - num_cached, "num_cached": num_cached}
        return self._answers.of(scheduled.request).push(token, self._eos_token_ids, more, **counts)
