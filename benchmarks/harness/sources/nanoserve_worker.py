"""nanoserve as one of the peers: a worker process around its engine, with the options of an arm.

Knows `add_request` and `step`. Everything else about a worker stands in `peers/workers/protocol.py`.
"""

from collections.abc import Sequence
from typing import Any

from benchmarks.harness.peers.workers.protocol import Emit, Serve, versions, work


class Stepping:
    """An engine that is stepped until all that was asked is answered."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __call__(self, prompts: Sequence[Sequence[int]], num_new_tokens: int, emit: Emit) -> None:
        from nanoserve import SamplingParams

        params = SamplingParams(max_new_tokens=num_new_tokens, ignore_eos=True)
        places = {self._engine.add_request(ids, params): place for place, ids in enumerate(prompts)}
        while self._engine.has_work:
            for event in self._engine.step():
                emit(places[event.request_id], event.token_id)


def load(settings: dict[str, Any]) -> tuple[Serve, dict[str, Any]]:
    """The model by its own name: the weights that the others got a copy of."""
    import torch

    from nanoserve import Engine

    torch.set_num_threads(settings["num_threads"])
    engine = Engine.load(settings["model"], **settings["engine"])
    return Stepping(engine), {"versions": versions("nanoserve", "torch"), "notes": list(getattr(engine, "notes", ()))}


if __name__ == "__main__":
    work(load)
