"""OpenVINO GenAI's continuous-batching pipeline as a peer: paged attention, stepped by hand, prefix caching on."""

import itertools
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.peers.workers.protocol import Emit, Serve, versions, work


class Stepping:
    """A pipeline, and numbers for its requests."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._numbers = itertools.count()

    def __call__(self, prompts: Sequence[Sequence[int]], num_new_tokens: int, emit: Emit) -> None:
        import numpy as np
        import openvino as ov
        import openvino_genai as genai

        config = genai.GenerationConfig(
            max_new_tokens=num_new_tokens, min_new_tokens=num_new_tokens, ignore_eos=True, do_sample=False
        )
        handles = [
            self._pipeline.add_request(next(self._numbers), ov.Tensor(np.array([ids], dtype=np.int64)), config)
            for ids in prompts
        ]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for place, handle in enumerate(handles):
                while handle.can_read():
                    for token_id in next(iter(handle.read().values())).generated_ids:
                        emit(place, token_id)


def load(settings: dict[str, Any]) -> tuple[Serve, dict[str, Any]]:
    """The converted folder, its arithmetic and its keys and values in `precision`."""
    import openvino as ov
    import openvino_genai as genai

    scheduling = genai.SchedulerConfig()
    scheduling.enable_prefix_caching = True
    scheduling.cache_size = settings["kv_gigabytes"]
    scheduling.max_num_seqs = 8
    properties = {"INFERENCE_NUM_THREADS": settings["num_threads"], **settings["properties"]}
    pipeline = genai.ContinuousBatchingPipeline(
        settings["weights"], scheduler_config=scheduling, device="CPU", properties=properties
    )
    return Stepping(pipeline), {"versions": versions("openvino-genai", "openvino"), "runtime": ov.get_version()}


if __name__ == "__main__":
    work(load)
