"""transformers' `generate` as a peer. Keeps the keys and values of its last prompt, as a user of a chat would."""

from collections.abc import Sequence
from typing import Any

from benchmarks.harness.peers.workers.protocol import Emit, Serve, num_shared, versions, work

LEAST_SHARED = 32
"""Two random prompts share a token or two by chance; that is no prefix."""


class Generating:
    """One model, and the cache that its last single prompt has filled."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._last_ids: list[int] = []
        self._last_cache: Any = None

    def __call__(self, prompts: Sequence[Sequence[int]], num_new_tokens: int, emit: Emit) -> None:
        import torch

        cache = self._cache_for(prompts)
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            self._model.generate(
                ids, attention_mask=torch.ones_like(ids), past_key_values=cache, streamer=_Streamer(emit),
                do_sample=False, max_new_tokens=num_new_tokens, eos_token_id=None,
            )  # fmt: skip
        self._last_ids, self._last_cache = (list(prompts[0]), cache) if len(prompts) == 1 else ([], None)

    def _cache_for(self, prompts: Sequence[Sequence[int]]) -> Any:
        """That of the last prompt, cut to what this one shares with it, else a new one."""
        from transformers import DynamicCache

        num_held = num_shared(self._last_ids, prompts[0]) if len(prompts) == 1 else 0
        if num_held < LEAST_SHARED:
            return DynamicCache(config=self._model.config)
        self._last_cache.crop(num_held - self._last_cache.get_seq_length())
        return self._last_cache


class _Streamer:
    """Hands on what `generate` puts; its first put is the prompt."""

    def __init__(self, emit: Emit) -> None:
        self._emit, self._has_prompt = emit, False

    def put(self, value: Any) -> None:
        if self._has_prompt:
            for place, token_id in enumerate(value.flatten().tolist()):
                self._emit(place, token_id)
        self._has_prompt = True

    def end(self) -> None:
        """Nothing comes after the last token."""


def load(settings: dict[str, Any]) -> tuple[Serve, dict[str, Any]]:
    """The Hugging Face folder, in bfloat16, with SDPA: what `from_pretrained` gives."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(settings["num_threads"])
    model: Any = AutoModelForCausalLM.from_pretrained(settings["weights"], dtype=torch.bfloat16)
    model.generation_config.pad_token_id = 0
    return Generating(model.eval()), {"versions": versions("transformers", "torch")}


if __name__ == "__main__":
    work(load)
