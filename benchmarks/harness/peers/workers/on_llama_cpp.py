"""llama.cpp as a peer, through the low-level API of llama-cpp-python: a batch of one token for each sequence.

Keeps the keys and values of sequence 0 and cuts them to what the next single prompt shares with the last one, which is
what llama.cpp's own server does.
"""

from collections.abc import Sequence
from typing import Any

from benchmarks.harness.peers.workers.protocol import Emit, RefusalError, Serve, num_shared, versions, work

MAX_SEQUENCES = 8
BATCH_TOKENS = 2048


class Decoding:
    """A context, a sampler that takes the largest logit, and the ids whose keys and values sequence 0 holds."""

    def __init__(self, context: Any) -> None:
        import llama_cpp

        self._lib, self._context = llama_cpp, context
        self._memory = llama_cpp.llama_get_memory(context)
        self._sampler = llama_cpp.llama_sampler_init_greedy()
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._held: list[int] = []

    def __call__(self, prompts: Sequence[Sequence[int]], num_new_tokens: int, emit: Emit) -> None:
        if len(prompts) > MAX_SEQUENCES:
            raise RefusalError(f"the context was made for {MAX_SEQUENCES} sequences, not {len(prompts)}")
        num_held = self._keep_shared(prompts)
        rows = [
            (place, position, token_id, position == len(ids) - 1)
            for place, ids in enumerate(prompts)
            for position, token_id in enumerate(ids)
            if position >= num_held
        ]
        new = self._run(rows)
        for step in range(num_new_tokens):
            for place, token_id in new.items():
                emit(place, token_id)
            if step + 1 < num_new_tokens:
                new = self._run([(place, len(prompts[place]) + step, new[place], True) for place in new])
        self._held = list(prompts[0]) if len(prompts) == 1 else []

    def _keep_shared(self, prompts: Sequence[Sequence[int]]) -> int:
        """Cut what is held to what the prompt begins with; how many positions that leaves. The last is run again."""
        num_held = num_shared(self._held, prompts[0]) if len(prompts) == 1 else 0
        for place in range(MAX_SEQUENCES):
            self._lib.llama_memory_seq_rm(self._memory, place, num_held if place == 0 else -1, -1)
        return num_held

    def _run(self, rows: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Decode rows of (sequence, position, token, whether a token is wanted there): what came of each sequence."""
        found = {}
        for start in range(0, len(rows), BATCH_TOKENS):
            part = rows[start : start + BATCH_TOKENS]
            for i, row in enumerate(part):
                self._put(i, *row)
            self._batch.n_tokens = len(part)
            if status := self._lib.llama_decode(self._context, self._batch):
                raise RuntimeError(f"llama_decode returned {status}")
            for i, (place, _, _, is_wanted) in enumerate(part):
                if is_wanted:
                    found[place] = int(self._lib.llama_sampler_sample(self._sampler, self._context, i))
        return found

    def _put(self, i: int, place: int, position: int, token_id: int, is_wanted: bool) -> None:
        batch = self._batch
        batch.token[i], batch.pos[i], batch.logits[i] = token_id, position, is_wanted
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, place


def load(settings: dict[str, Any]) -> tuple[Serve, dict[str, Any]]:
    """The GGUF file. One pool of keys and values for all sequences, in llama.cpp's default of 16 bits."""
    import llama_cpp

    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(settings["weights"].encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_seq_max = settings["max_tokens"], BATCH_TOKENS, MAX_SEQUENCES
    params.n_threads = params.n_threads_batch = settings["num_threads"]
    params.kv_unified = True
    context = model and llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError(f"llama.cpp does not load {settings['weights']}; its log says why")
    about = {"versions": versions("llama-cpp-python"), "system": llama_cpp.llama_print_system_info().decode()}
    return Decoding(context), about


if __name__ == "__main__":
    work(load)
