"""`transformers`' `generate` as a streamed source.

Knows how generate hands out tokens: to a streamer, in the thread that it runs in. Refuses to know clocks and metrics.

generate runs in a thread of its own and takes turns with whoever pulls: between two pulls it is at rest, as nanoserve's
engine is. Running ahead, it would fill the device with the next step before the clock is read, and a clock that
waits for the device would show each token one step late. On Apple's `mps` transformers itself streams one step behind.
"""

import functools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.timing import Emission

_OURS = {
    "attention_mask", "cache", "generation_config", "input_ids", "inputs", "inputs_embeds", "max_length",
    "max_new_tokens", "num_return_sequences", "past_key_values", "streamer",
}  # fmt: skip


def hf_stream(
    model: Any, prompt_ids: Sequence[int], num_new_tokens: int, *, ignore_eos: bool = True, **generate_options: Any
) -> Iterator[Emission]:
    """Stream what `model.generate` makes of one prompt, greedily unless `generate_options` say otherwise.

    Exactly `num_new_tokens` come, EOS among them; with `ignore_eos=False` generation may end early and the finish
    reason is "stop". The reason follows the last token, in an emission without tokens. The whole prompt is computed: a
    cache that holds some of it is refused. Nothing starts before the first pull; closing the iterator stops
    generation at the token last pulled. What generate raises comes out of the pull.
    """
    if refused := sorted(_OURS & generate_options.keys()):
        raise InstrumentError(f"hf_stream sets these itself: {', '.join(refused)}")
    # None as an argument disables EOS; None in a generation_config would be filled in from the model's.
    eos: dict[str, Any] = {"eos_token_id": None} if ignore_eos else {}
    options = {"do_sample": False, "max_new_tokens": num_new_tokens} | eos | generate_options
    return _stream(model, prompt_ids, options)


def _stream(model: Any, prompt_ids: Sequence[int], options: dict[str, Any]) -> Iterator[Emission]:
    token_ids: list[int] = []
    relay = _Relay()
    generate = functools.partial(_generate, model, prompt_ids, relay, options)
    worker = threading.Thread(target=relay.run, args=(generate,), name="hf_stream", daemon=True)
    worker.start()
    try:
        for new_ids in relay.take():
            is_first = not token_ids
            token_ids += new_ids
            prefill = (0, len(prompt_ids)) if is_first else (None, None)
            yield Emission(token_ids=new_ids, num_cached=prefill[0], num_prefilled=prefill[1])
        yield Emission(finish_reason=_finish_reason(model, token_ids, options))
    finally:
        relay.close()
        worker.join()


def _generate(model: Any, prompt_ids: Sequence[int], streamer: "_Relay", options: dict[str, Any]) -> None:
    import torch

    ids = torch.tensor([list(prompt_ids)], device=model.device)
    model.generate(ids, attention_mask=torch.ones_like(ids), streamer=streamer, **options)


def _finish_reason(model: Any, token_ids: list[int], options: dict[str, Any]) -> str:
    """EOS as the last token that the budget allows is "stop", too."""
    eos = options.get("eos_token_id", model.generation_config.eos_token_id)
    eos_ids = eos if isinstance(eos, list | tuple) else [eos]
    is_whole = len(token_ids) == options["max_new_tokens"] and token_ids[-1] not in eos_ids
    return "length" if is_whole else "stop"


class _ClosedError(Exception):
    """Unwinds generate when nobody wants its tokens any more, without another step."""


class _Relay:
    """A streamer in one thread, its tokens in another; generate rests from each token until the next pull."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[tuple[int, ...] | BaseException | None] = queue.SimpleQueue()
        self._pulls = threading.Semaphore(0)
        self._has_prompt = False
        self._is_closed = False

    def put(self, value: Any) -> None:
        """Take tokens from generate, whose first put is the prompt. They are on the host when this hands them over."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        self._items.put(tuple(value.flatten().tolist()))
        self._pulls.acquire()
        if self._is_closed:
            raise _ClosedError

    def end(self) -> None:
        """Generate's last word; `run` knows it without."""

    def run(self, generate: Callable[[], None]) -> None:
        """What the worker does; its failure is handed over like a token."""
        try:
            generate()
        except BaseException as error:
            self._items.put(error)
        else:
            self._items.put(None)

    def take(self) -> Iterator[tuple[int, ...]]:
        """The tokens, in the other thread. Raises what generate raised."""
        while (item := self._items.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
            self._pulls.release()

    def close(self) -> None:
        """Let generate unwind at its next token, or at the one at which it rests."""
        self._is_closed = True
        self._pulls.release()
