"""The frozen settings of a model, an engine and a request, each validated once, when it is made.

Knows which values can work together. Refuses to know torch, files and devices: a configuration can be
made, compared and printed on a machine that has none of them.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, Self

from nanoserve.errors import ConfigError, RequestError, unknown

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
"""Model families, by the `model_type` of their config.json."""

DTYPES = ("auto", "float32", "bfloat16", "float16")
CACHES = ("paged", "contiguous", "growing", "none")
ATTENTIONS = ("auto", "sdpa", "reference", "triton", "native")
KERNELS = ("auto", "native", "torch")
QUANTIZATIONS = ("none", "int8")
GRAPHS = ("auto", "off")
PREFIX_CACHES = ("auto", "lru", "lfu", "fifo", "size", "off")

BLOCK_SIZES = tuple(2**power for power in range(9))
"""Positions that a KV block may hold."""


class Options:
    """Adds `from_options`, which refuses an unknown name and lists the known ones."""

    @classmethod
    def option_names(cls) -> list[str]:
        return [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Raise ConfigError for a name that is no field, so that a misspelt option never passes silently."""
        known = cls.option_names()
        for name in options:
            if name not in known:
                raise ConfigError(unknown(f"{cls.__name__} option", name, known))
        return cls(**options)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3's frequency-dependent RoPE scaling (Llama 3.1 model card; `rope_type: llama3` in a config.json)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Options):
    """Shape of a decoder of one of `FAMILIES`. Counts are per model unless the name says otherwise.

    A family takes what it has a use for: gpt2 has no rotary embedding, and reads nothing named `rope`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context_tokens: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    family: str = "llama"

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ConfigError(unknown("family", self.family, FAMILIES))
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")
        if self.family == "gpt2":
            self._check_heads_of_gpt2()
        elif self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} is odd: RoPE turns pairs of numbers")

    def _check_heads_of_gpt2(self) -> None:
        """One fused matrix makes queries, keys and values of a position, each as wide as the hidden state."""
        if self.num_kv_heads != self.num_heads or self.num_heads * self.head_dim != self.hidden_size:
            raise ConfigError(
                f"gpt2 has as many KV heads as heads, and num_heads x head_dim is its hidden_size: not "
                f"{self.num_heads} heads of {self.head_dim}, {self.num_kv_heads} KV heads and {self.hidden_size}"
            )

    def kv_bytes_per_token(self, bytes_per_number: int) -> int:
        """2 (keys, values) x layers x KV heads x head size x bytes; query heads do not count."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_number


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(Options):
    """What to load and how to run it.

    `model`: a catalog name, a local folder, a GGUF file or a hub id. `device`: auto, cpu, cuda, cuda:N. `dtype` auto is
    a 16-bit type on a GPU, bfloat16 on a CPU that multiplies it, else float32. `cache` paged shares one pool of KV
    blocks among all requests, contiguous reserves each request's longest context, growing copies what it holds at every
    step, none recomputes every position at every step. `kv_memory` sizes the pool (auto, a size such as 2GiB, a share
    such as 40% of what is free). `prefix_cache` keeps the blocks of prompts and answers for requests that begin alike,
    and names what is evicted first when the pool is full (auto: lru with a pool, else off). `attention` is what
    computes it (auto: a kernel over block tables where there is one, else SDPA). `graphs` records whole decode steps
    and plays them again (auto: where such a kernel runs, on a GPU as CUDA graphs). `kernels` native are compiled on
    this machine, once, for bfloat16 on a CPU that multiplies it (auto: where they can be, else torch). `quantize` int8
    keeps matrices in 8 bits, a scale for each output. `seed` fixes the weights of a random model.
    """

    model: str = "smollm2-135m"
    device: str = "auto"
    dtype: str = "auto"
    cache: str = "paged"
    kv_memory: str = "auto"
    prefix_cache: str = "auto"
    attention: str = "auto"
    graphs: str = "auto"
    kernels: str = "auto"
    quantize: str = "none"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(unknown("dtype", self.dtype, DTYPES))
        if self.cache not in CACHES:
            raise ConfigError(unknown("cache", self.cache, CACHES))
        if self.attention not in ATTENTIONS:
            raise ConfigError(unknown("attention", self.attention, ATTENTIONS))
        if self.graphs not in GRAPHS:
            raise ConfigError(unknown("graphs", self.graphs, GRAPHS))
        if self.prefix_cache not in PREFIX_CACHES:
            raise ConfigError(unknown("prefix_cache", self.prefix_cache, PREFIX_CACHES))
        if self.kernels not in KERNELS:
            raise ConfigError(unknown("kernels", self.kernels, KERNELS))
        if self.quantize not in QUANTIZATIONS:
            raise ConfigError(unknown("quantize", self.quantize, QUANTIZATIONS))
        if self.cache != "paged" and self.prefix_cache not in ("auto", "off"):
            raise ConfigError(f"prefix_cache {self.prefix_cache!r} keeps blocks of cache 'paged', not {self.cache!r}")

    def prefix_policy(self, *, is_static: bool = False) -> str | None:
        """What leaves the prefix cache first, None without one.

        A static batch has none: its padding rows write again what others may read. Raises ConfigError for asking.
        """
        if is_static and self.prefix_cache not in ("auto", "off"):
            raise ConfigError(f"prefix_cache {self.prefix_cache!r} does not work with is_static: choose 'off'")
        if is_static or self.cache != "paged" or self.prefix_cache == "off":
            return None
        return "lru" if self.prefix_cache == "auto" else self.prefix_cache


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(Options):
    """How requests share steps, and the pool of KV blocks.

    At most `max_running` requests run at once, and `max_step_tokens` positions in a step: a longer prompt runs in
    chunks, or, with `chunks_prefill` off, as a whole in a step that no other prompt shares. `num_blocks` blocks of
    `block_size` positions; 0 is no pool. A request is admitted beside others only where `watermark_blocks` stay free.
    `is_static` admits a batch and waits for its last row.
    """

    max_running: int = 32
    max_step_tokens: int = 2048
    chunks_prefill: bool = True
    num_blocks: int = 0
    block_size: int = 16
    watermark_blocks: int = 0
    is_static: bool = False

    def __post_init__(self) -> None:
        for name, least in (
            ("max_running", 1), ("max_step_tokens", 1), ("num_blocks", 0), ("watermark_blocks", 0),
        ):  # fmt: skip
            if not isinstance(getattr(self, name), int) or getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, not {getattr(self, name)!r}")
        if not isinstance(self.block_size, int) or self.block_size not in BLOCK_SIZES:
            choices = ", ".join(map(str, BLOCK_SIZES))
            raise ConfigError(
                f"block_size must be a power of two ({choices}), so that a shift finds a slot: not {self.block_size!r}"
            )
        if self.max_step_tokens < self.max_running:
            raise ConfigError(
                f"max_step_tokens {self.max_step_tokens} is less than max_running {self.max_running}: each running "
                f"request needs one position a step"
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(Options):
    """How one request is continued. Field names and meanings are those of Hugging Face's GenerationConfig.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0 and `repetition_penalty` 1 switch themselves off.
    `stop` strings end the text and are not part of it; an EOS token ends the request and stays in its ids.
    `seed` None takes a fresh one per request. `num_logprobs` tells how likely each new token was, and so many of the
    likeliest beside it (None tells nothing); `prompt_logprobs` tells it of the prompt's tokens, which are then computed
    even where they are remembered. Both are of the logits as the model gave them.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str) or not isinstance(self.stop, Iterable):
            raise RequestError(f"stop must be a tuple of strings, not {self.stop!r}")
        object.__setattr__(self, "stop", tuple(self.stop))  # any iterable of strings will do, and is read once
        allowed = (
            (
                "max_new_tokens",
                isinstance(self.max_new_tokens, int) and self.max_new_tokens >= 1,
                "an integer of at least 1",
            ),
            (
                "temperature",
                self.temperature == 0 or 1e-4 <= self.temperature < math.inf,
                "0 (greedy) or at least 0.0001",
            ),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 100, "between 0.01 and 100"),
            (
                "seed",
                self.seed is None or _is_integer(self.seed, least=0),
                "None or an integer from 0 to 2**63 - 1",
            ),
            ("stop", all(isinstance(text, str) and text for text in self.stop), "a tuple of non-empty strings"),
            (
                "num_logprobs",
                self.num_logprobs is None or (isinstance(self.num_logprobs, int) and 0 <= self.num_logprobs <= 20),
                "None (off) or an integer from 0 to 20",
            ),
            ("prompt_logprobs", isinstance(self.prompt_logprobs, bool), "True or False"),
        )
        for name, holds, wanted in allowed:
            if not holds:
                raise RequestError(f"{name} must be {wanted}, not {getattr(self, name)!r}")


def _is_integer(value: object, least: int) -> bool:
    return isinstance(value, int) and least <= value < 2**63
