"""What nanoserve's prefix cache gives back, and what asking it costs: the proof before a timing, and lookups alone.

Knows public names, inside functions. The proof goes through whole engines, whose model is watched: what ran is counted
where it runs, not where it is reported.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.harness.errors import InstrumentError, MissingFeatureError
from benchmarks.harness.sources.nanoserve_prefix import predict_hits, serve_alone
from benchmarks.harness.timing import Emission

if TYPE_CHECKING:
    import torch

    from nanoserve.engine import Engine
    from nanoserve.weights import LoadedModel

_BLOCK_SIZE = 16
_BLOCKS_OF_A_PREFIX = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Reuse:
    """See `proof.Reuse`."""

    cold: Sequence[float]
    cached: Sequence[float]
    num_run: int


class _Watched:
    """A model that remembers how many positions it ran, and the logits that it gave last."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.num_run = 0
        self.logits: Sequence[float] = ()

    def __call__(self, token_ids: "torch.Tensor", positions: "torch.Tensor", cache: object) -> "torch.Tensor":
        self.num_run += len(token_ids)
        return self._model(token_ids, positions, cache)  # type: ignore[no-any-return]

    def compute_logits(self, hidden: "torch.Tensor") -> "torch.Tensor":
        logits: torch.Tensor = self._model.compute_logits(hidden)
        if len(logits):
            self.logits = logits[-1].tolist()
        return logits


def _reuse_logits(
    loaded: "LoadedModel", prompt_ids: Sequence[int], prefix_tokens: int, arm: Mapping[str, Any]
) -> Reuse:
    from nanoserve import Engine, EngineConfig, SamplingParams

    watched: Any = _Watched(loaded.model)
    one = SamplingParams(max_new_tokens=1, ignore_eos=True)
    plain = Engine(dataclasses.replace(loaded, model=watched), cache="none")
    plain.generate(list(prompt_ids), one)
    cold = watched.logits
    # A step that is replayed runs past what watches it.
    eager = {"graphs": "off"} if "graphs" in EngineConfig.option_names() else {}
    engine = Engine(dataclasses.replace(loaded, model=watched), **{**arm, **eager})
    engine.generate(list(prompt_ids[:prefix_tokens]), one)
    watched.num_run = 0
    engine.generate(list(prompt_ids), one)
    return Reuse(cold=cold, cached=watched.logits, num_run=watched.num_run)


class Lookups:
    """A prefix cache that is full, and no model: a prompt is sought, stored, and sought again.

    So many blocks are remembered, of prefixes that are 64 blocks long. Each new prompt evicts as many as it stores.
    """

    def __init__(self, num_blocks: int) -> None:
        try:
            from nanoserve.cache.prefix import PrefixTree
        except ImportError as error:
            raise MissingFeatureError("this commit has no prefix cache", "import nanoserve.cache.prefix") from error
        from nanoserve.cache.blocks import BlockAllocator

        self._tree = PrefixTree(_BLOCK_SIZE, "lru")
        self._pool = BlockAllocator(num_blocks, self._tree)
        length = _BLOCK_SIZE * _BLOCKS_OF_A_PREFIX
        for first in range(-length, -_BLOCK_SIZE * num_blocks - length, -length):  # no prompt has such ids
            serve_alone(self._tree, self._pool, range(first, first + length), 0)

    def emission(self, prompt_ids: Sequence[int]) -> Emission:
        """Once sought, stored and sought again. Its token is the number of blocks that were found the second time."""
        found = [serve_alone(self._tree, self._pool, prompt_ids, len(prompt_ids) - 1) for _ in range(2)]
        return Emission(token_ids=(found[1],), finish_reason="length")


class PrefixCaches:
    """What a subject of nanoserve's knows of its engines' prefix caches."""

    _loaded: "LoadedModel"

    def __init__(self) -> None:
        self._engines: dict[tuple[tuple[str, Any], ...], Engine] = {}
        self._lookups: dict[int, Lookups] = {}

    def _engine(self, **arm: Any) -> "Engine":
        raise NotImplementedError

    def forget(self, **arm: Any) -> None:
        """Let the engine of an arm drop every prefix that it keeps, where there is one, and where it keeps any."""
        engine = self._engines.get(tuple(sorted(arm.items())))
        getattr(engine, "reset_prefix_cache", lambda: None)()

    def num_reusable(self, num_stored: int, num_prompt_tokens: int, **arm: Any) -> int:
        """Of so many stored positions, those that a prompt which begins with them finds: whole blocks, never all."""
        size = _block_size(arm)
        return 0 if _prefix_policy(arm) is None else min(num_stored, num_prompt_tokens - 1) // size * size

    def reuse_logits(self, prompt_ids: Sequence[int], prefix_tokens: int, **arm: Any) -> Reuse:
        """The logits that a prompt's first token comes of, from an engine without a cache, and from one with these
        options that has served the prefix before; and how many positions ran for them in that one.
        """
        if not 1 <= prefix_tokens < len(prompt_ids):
            raise InstrumentError(f"a prefix of a prompt of {len(prompt_ids)} tokens is shorter, not {prefix_tokens}")
        _prefix_policy(arm)
        return _reuse_logits(self._loaded, prompt_ids, prefix_tokens, arm)

    def predict_hits(self, prompts: Sequence[Sequence[int]], **arm: Any) -> list[int]:
        """What each of these prompts finds when they are served one after another, by the same policy and pool."""
        policy, plan = _prefix_policy(arm), self._engine(**arm).pool_plan
        if policy is None:
            return [0] * len(prompts)
        num_blocks = plan.num_blocks if plan else arm["num_blocks"]
        return predict_hits(prompts, num_blocks, _block_size(arm), policy)

    def look_up(self, prompt_ids: Sequence[int], num_blocks: int) -> Emission:
        """A prompt sought, stored and sought again in a full cache of so many blocks, without a model."""
        if num_blocks not in self._lookups:
            self._lookups[num_blocks] = Lookups(num_blocks)
        return self._lookups[num_blocks].emission(prompt_ids)


def _block_size(arm: Mapping[str, Any]) -> int:
    from nanoserve.config import SchedulerConfig

    return arm.get("block_size") or SchedulerConfig().block_size


def _prefix_policy(arm: Mapping[str, Any]) -> str | None:
    """What leaves the prefix cache of an arm's engine first, None without one. Raises MissingFeatureError."""
    from nanoserve.config import EngineConfig

    if not hasattr(EngineConfig, "prefix_policy"):
        raise MissingFeatureError("this commit has no prefix cache", "nanoserve.config.EngineConfig.prefix_policy")
    config = EngineConfig(cache=arm.get("cache", "paged"), prefix_cache=arm.get("prefix_cache", "auto"))
    return config.prefix_policy(is_static=arm.get("is_static", False))
