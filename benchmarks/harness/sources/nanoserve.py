"""nanoserve as a subject: something that streams tokens, tells what it holds, and says what it is.

The only file that knows nanoserve, by public names and inside functions: what an older commit cannot do is known here
and nowhere else. (`doctor.py` asks it for the folder of the model cache.)
"""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import subprocess
import sys
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.errors import InstrumentError, MissingFeatureError
from benchmarks.harness.serving import Ask, Told
from benchmarks.harness.sources.nanoserve_reuse import PrefixCaches
from benchmarks.harness.timing import Emission

TWIN = {"engine": "transformers"}
"""The options of the arm that is no engine of ours: transformers' `generate` on the same weights."""

HELD = ("kv_bytes", "num_kv_blocks", "kv_waste_bytes", "kv_unused_bytes")
"""The metrics that are the engine's own word of what its requests hold."""

if TYPE_CHECKING:
    from benchmarks.harness.sources.nanoserve_parts import KVReads
    from benchmarks.harness.sources.step_cost import StepCost
    from nanoserve.engine import Engine
    from nanoserve.request import TokenEvent
    from nanoserve.weights import LoadedModel

_ENGINE_PROBE = (
    "import inspect; from nanoserve import config; "
    "given = inspect.signature(nanoserve.Engine).bind(None, **{options!r}).arguments; given.pop('loaded'); "
    "scheduling = given.pop('scheduling', None); config.EngineConfig.from_options(given); "
    "scheduling and config.SchedulerConfig.from_options(scheduling)"
)
"""Code that raises where an engine does not take some options; it needs no model."""


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
        for name in HELD
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


class NanoserveSubject(PrefixCaches):
    """One loaded model. Arms are told apart by the options of `Engine`, such as `cache`; each has an engine."""

    def __init__(self, loaded: "LoadedModel", name: str) -> None:
        import torch

        super().__init__()
        self._loaded = loaded
        self._twin: Any = None
        self._kv_reads: KVReads | None = None
        self.name = name
        self.dtype = loaded.dtype
        self.vocab_size = loaded.config.vocab_size
        self.relative_tolerance = 8 * torch.finfo(loaded.dtype).eps

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
        elif "reads" in arm:
            yield from self._reads(arm).stream(len(prompt_ids), **arm)
        elif "prefixes" in arm:
            yield self.look_up(prompt_ids, arm["prefixes"])
        else:
            params = SamplingParams(max_new_tokens=num_new_tokens, ignore_eos=True)
            yield from map(_emission, self._engine(**arm).stream(prompt_ids, params))

    def serve(self, inbox: deque[Ask], **arm: Any) -> Iterator[Told]:
        """See `serving.ServingSubject`. Raises MissingFeatureError as `stream` does."""
        from nanoserve import SamplingParams
        from nanoserve.errors import RequestError

        while "prefixes" in arm:
            asks = [inbox.popleft() for _ in range(len(inbox))]
            yield [(ask.request_id, self.look_up(ask.prompt_ids, arm["prefixes"])) for ask in asks]
        engine, running = self._engine(**arm), set[str]()
        try:
            while True:
                while inbox:
                    ask = inbox.popleft()
                    params = SamplingParams(max_new_tokens=ask.new_tokens, ignore_eos=True)
                    running.add(engine.add_request(ask.prompt_ids, params, request_id=ask.request_id))
                events = engine.step()
                running -= {event.request_id for event in events if event.finish_reason is not None}
                yield [(event.request_id, _emission(event)) for event in events]
        finally:
            for request_id in running:
                with contextlib.suppress(RequestError):  # a step that failed has ended its requests
                    engine.abort(request_id)

    def _reads(self, arm: Mapping[str, Any]) -> "KVReads":
        try:
            importlib.import_module("nanoserve.cache.paged")
        except ImportError as error:
            raise _without(arm, error, "import nanoserve.cache.paged") from error
        from benchmarks.harness.sources.nanoserve_parts import KVReads

        if self._kv_reads is None:
            self._kv_reads = KVReads(self._loaded)
        return self._kv_reads

    def count_schedule(self, prompt_tokens: int, new_tokens: Sequence[int], **scheduling: Any) -> dict[str, int]:
        """See `nanoserve_parts.count_schedule`. Raises MissingFeatureError for a scheduler that this build lacks."""
        from benchmarks.harness.sources.nanoserve_parts import count_schedule

        try:
            return count_schedule(prompt_tokens, new_tokens, scheduling)
        except (ImportError, TypeError) as error:
            probe = f"from nanoserve.config import SchedulerConfig; SchedulerConfig(**{scheduling!r})"
            raise MissingFeatureError(f"this commit has no scheduler with {scheduling!r}: {error}", probe) from error

    def count_hits(self, requests: Sequence[Sequence[Hashable]], *, policy: Any, capacity: int | None) -> Sequence[int]:
        """See `nanoserve_prefix.replay`. Raises MissingFeatureError for a policy that this build lacks."""
        from benchmarks.harness.sources.nanoserve_prefix import replay

        return replay(policy, capacity, requests)

    def _twin_stream(self, prompt_ids: Sequence[int], num_new_tokens: int) -> Iterator[Emission]:
        from benchmarks.harness.sources.huggingface import hf_stream
        from benchmarks.harness.sources.nanoserve_export import checkpoint_tensors
        from benchmarks.harness.sources.twin import transformers_twin
        from nanoserve.hf_config import to_hf_config

        if self._twin is None:
            self._twin = transformers_twin(checkpoint_tensors(self._loaded), to_hf_config(self._loaded.config))
        return hf_stream(self._twin, prompt_ids, num_new_tokens)

    def next_logits(self, token_ids: Sequence[int]) -> Sequence[float]:
        import torch

        from nanoserve.cache.kv import NoCache

        with torch.inference_mode():
            ids = torch.tensor(token_ids, device=self._loaded.device)
            positions = torch.arange(len(token_ids), device=self._loaded.device)
            hidden = self._loaded.model(ids, positions, NoCache())
            return self._loaded.model.compute_logits(hidden[-1:])[0].tolist()

    def release(self) -> None:
        """Give back every engine, cache and twin that was made for an arm. The next run of one makes its own."""
        self._engines.clear()
        self._twin = self._kv_reads = None

    def notes(self) -> list[str]:
        """What did not go as the engines' options meant it to, in a sentence each."""
        return [note for engine in self._engines.values() for note in getattr(engine, "notes", ())]

    def held(self, **arm: Any) -> dict[str, int | None]:
        """See `work.CountedSubject`."""
        engine = self._engine(**arm)
        return {name: getattr(engine, name, None) for name in HELD}

    def cost(self, **arm: Any) -> "StepCost | None":
        """What steps of an arm have to read and compute; see `efficiency.Cost`. None where no model runs."""
        from benchmarks.harness.sources.step_cost import StepCost

        if {"reads", "prefixes"} & arm.keys() or arm.get("model") == "none":
            return None
        config = self._loaded.config
        has_gate = getattr(config, "family", "llama") != "gpt2"  # before there were families, all were Llamas
        return StepCost(config, self._loaded.dtype.itemsize, arm.get("cache") != "none", has_gate)

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
            "attention": _attention_backend(self._loaded),
        }

    def _engine(self, **arm: Any) -> "Engine":
        key = tuple(sorted(arm.items()))
        if key not in self._engines:
            self._engines[key] = _make_engine(self._loaded, arm)
        return self._engines[key]


def _emission(event: "TokenEvent") -> Emission:
    return Emission(
        token_ids=(event.token_id,),
        finish_reason=event.finish_reason,
        num_cached=event.num_cached,
        num_prefilled=event.num_prefilled,
    )


def _make_engine(loaded: "LoadedModel", arm: Mapping[str, Any]) -> "Engine":
    """An engine with the options of an arm; `model="none"` leaves nothing of the model but its shape."""
    from nanoserve import Engine
    from nanoserve.errors import ConfigError

    if arm.get("model") == "none":
        from benchmarks.harness.sources.nanoserve_parts import Modelless

        idle: Any = Modelless()
        loaded, arm = dataclasses.replace(loaded, model=idle), {k: v for k, v in arm.items() if k != "model"}
    try:
        inspect.signature(Engine).bind(loaded, **arm)
    except TypeError as error:
        raise _without(arm, error) from None
    try:
        engine = Engine(loaded, **arm)
    except ConfigError as error:
        raise _without(arm, error) from error
    getattr(engine, "warm_up", int)()  # what is recorded once is no part of any latency
    return engine


def _without(arm: Mapping[str, Any], error: Exception, probe: str | None = None) -> MissingFeatureError:
    """`probe` is code that raises on a commit without it; by default it looks whether an engine takes the options."""
    options = ", ".join(f"{name}={value!r}" for name, value in arm.items())
    probe = probe or _ENGINE_PROBE.format(options=dict(arm))
    return MissingFeatureError(f"this commit has no engine with {options}: {error}", probe)


def _attention_backend(loaded: "LoadedModel") -> str | None:
    """None for a commit that does not tell."""
    from nanoserve import attention

    return "native kernels" if getattr(loaded, "is_native", False) else getattr(attention, "BACKEND", None)


def _device_name(device: Any) -> str | None:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else None
