"""nanoserve as a subject: something that streams tokens, tells what it holds, and says what it is.

The only file that knows nanoserve, by public names and inside functions: what an older commit cannot do is known here
and nowhere else. (`doctor.py` asks it for the folder of the model cache.)
"""

import functools
import inspect
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.errors import InstrumentError, MissingFeatureError
from benchmarks.harness.timing import Emission

TWIN = {"engine": "transformers"}
"""The options of the arm that is no engine of ours: transformers' `generate` on the same weights."""

_TOLD_BY_THE_ENGINE = ("kv_bytes", "num_kv_blocks")

if TYPE_CHECKING:
    from benchmarks.harness.sources.llama_cost import LlamaCost
    from nanoserve.engine import Engine
    from nanoserve.weights import LoadedModel


class UnusableSubjectError(InstrumentError):
    """The model or the device cannot be had; the message is nanoserve's own. `is_fetch` tells an index out of reach."""

    def __init__(self, message: str, *, is_fetch: bool = False) -> None:
        super().__init__(message)
        self.is_fetch = is_fetch


def package_folder() -> Path:
    """Where the nanoserve that is measured lies."""
    import nanoserve

    return Path(nanoserve.__file__).parent


def choose_device(name: str) -> str:
    """`auto`, `cpu`, `cuda` or `cuda:N` as the device that will be used. Raises UnusableSubjectError."""
    from nanoserve.errors import ConfigError
    from nanoserve.weights import resolve_device

    try:
        return str(resolve_device(name))
    except ConfigError as error:
        raise UnusableSubjectError(str(error)) from None


def missing_metrics() -> dict[str, MissingFeatureError]:
    """The metrics that come from the engine's own word and that this build's engine does not tell."""
    from nanoserve import Engine

    return {
        name: MissingFeatureError(f"the engine of this commit does not tell its {name}", f"nanoserve.Engine.{name}")
        for name in _TOLD_BY_THE_ENGINE
        if not hasattr(Engine, name)
    }


@functools.cache
def passes_probe(root: Path, probe: str) -> bool:
    """Whether the nanoserve whose sources lie in `root` has what a MissingFeatureError asks for.

    Asked in a process of its own: two nanoserves do not fit into one.
    """
    script = f"import sys; sys.path.insert(0, {str(root)!r}); import nanoserve; {probe}"
    command = [sys.executable, "-B", "-c", script]
    return subprocess.run(command, cwd=root, capture_output=True, check=False, timeout=300).returncode == 0


class NanoserveSubject:
    """One loaded model. Arms are told apart by the options of `Engine`, such as `cache`; each has an engine."""

    def __init__(self, loaded: "LoadedModel", name: str) -> None:
        self._loaded = loaded
        self._engines: dict[tuple[tuple[str, Any], ...], Engine] = {}
        self._twin: Any = None
        self.name = name
        self.dtype = loaded.dtype
        self.vocab_size = loaded.config.vocab_size
        self.relative_tolerance = 8 * _epsilon(loaded.dtype)

    @classmethod
    def load(cls, name: str, device: str, dtype: str) -> "NanoserveSubject":
        """Load a model of the catalog, a folder, a GGUF file or a hub id. Raises UnusableSubjectError."""
        from nanoserve import EngineConfig
        from nanoserve.errors import FetchError, NanoserveError
        from nanoserve.weights import load_model

        try:
            return cls(load_model(EngineConfig(model=name, device=device, dtype=dtype)), name)
        except NanoserveError as error:
            raise UnusableSubjectError(str(error), is_fetch=isinstance(error, FetchError)) from error

    def stream(self, prompt_ids: Sequence[int], num_new_tokens: int, **arm: Any) -> Iterator[Emission]:
        """See `measure.Subject`. Raises MissingFeatureError at the first pull for an arm that this build cannot run."""
        from nanoserve import SamplingParams

        if arm == TWIN:
            yield from self._twin_stream(prompt_ids, num_new_tokens)
            return
        params = SamplingParams(max_new_tokens=num_new_tokens, ignore_eos=True)
        for event in self._engine(**arm).stream(prompt_ids, params):
            yield Emission(
                token_ids=(event.token_id,),
                finish_reason=event.finish_reason,
                num_cached=event.num_cached,
                num_prefilled=event.num_prefilled,
            )

    def _twin_stream(self, prompt_ids: Sequence[int], num_new_tokens: int) -> Iterator[Emission]:
        from benchmarks.harness.sources.huggingface import hf_stream
        from benchmarks.harness.sources.llama_twin import llama_twin
        from nanoserve.hf_config import to_hf_config

        if self._twin is None:
            self._twin = llama_twin(self._loaded.model, to_hf_config(self._loaded.config))
        return hf_stream(self._twin, prompt_ids, num_new_tokens)

    def next_logits(self, token_ids: Sequence[int]) -> Sequence[float]:
        import torch

        from nanoserve.cache.kv import NoCache

        with torch.inference_mode():
            ids = torch.tensor(token_ids, device=self._loaded.device)
            positions = torch.arange(len(token_ids), device=self._loaded.device)
            hidden = self._loaded.model(ids, positions, NoCache())
            return self._loaded.model.compute_logits(hidden[-1:])[0].tolist()

    def kv_bytes(self, **arm: Any) -> int | None:
        return getattr(self._engine(**arm), "kv_bytes", None)

    def num_kv_blocks(self, **arm: Any) -> int | None:
        return getattr(self._engine(**arm), "num_kv_blocks", None)

    def cost(self, **arm: Any) -> "LlamaCost":
        """What steps of an arm have to read and compute; see `efficiency.Cost`."""
        from benchmarks.harness.sources.llama_cost import LlamaCost

        return LlamaCost(self._loaded.config, self._loaded.dtype.itemsize, keeps_kv=arm.get("cache") != "none")

    def describe(self) -> dict[str, Any]:
        """The subject's part of the provenance."""
        import torch

        return {
            "model": self.name,
            "weights": self._loaded.weights,
            "dtype": str(self._loaded.dtype).removeprefix("torch."),
            "device": str(self._loaded.device),
            "device_name": _device_name(self._loaded.device),
            "num_threads": torch.get_num_threads(),
            "attention": _attention_backend(),
        }

    def _engine(self, **arm: Any) -> "Engine":
        key = tuple(sorted(arm.items()))
        if key not in self._engines:
            self._engines[key] = _make_engine(self._loaded, arm)
        return self._engines[key]


def _make_engine(loaded: "LoadedModel", arm: Mapping[str, Any]) -> "Engine":
    from nanoserve import Engine
    from nanoserve.errors import ConfigError

    try:
        inspect.signature(Engine).bind(loaded, **arm)
    except TypeError as error:
        raise _without(arm, error) from None
    try:
        return Engine(loaded, **arm)
    except ConfigError as error:
        raise _without(arm, error) from error


def _without(arm: Mapping[str, Any], error: Exception) -> MissingFeatureError:
    options = ", ".join(f"{name}={value!r}" for name, value in arm.items())
    probe = f"nanoserve.EngineConfig.from_options({dict(arm)!r})"
    return MissingFeatureError(f"this commit has no engine with {options}: {error}", probe)


def _attention_backend() -> str | None:
    """None for a commit that does not tell."""
    from nanoserve import attention

    return getattr(attention, "BACKEND", None)


def _epsilon(dtype: Any) -> float:
    import torch

    return torch.finfo(dtype).eps


def _device_name(device: Any) -> str | None:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else None
