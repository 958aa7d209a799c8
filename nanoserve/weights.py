"""From an EngineConfig to a model that can run: device, dtype, checkpoint or random numbers, tokenizer.

Knows checkpoint files, and checks each tensor of them against the model before it is used. Refuses to know requests,
caches and how a model computes; the catalog says where the files are. Devices and dtypes are settled before any of
them is opened, and no weight is ever in memory twice; on a GPU, those of one group are for a moment.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from nanoserve import catalog
from nanoserve.compute import choose_ops, prepare
from nanoserve.config import DTYPES, EngineConfig, ModelConfig
from nanoserve.cpu.build import multiplies_bfloat16
from nanoserve.errors import ConfigError, WeightsError, unknown
from nanoserve.hf_config import parse_eos, parse_hf_config
from nanoserve.models.families import CLASSES, Model, build_model
from nanoserve.ops import TORCH, Ops, TorchOps
from nanoserve.tokenizer import ByteTokenizer, HFTokenizer, Tokenizer

Check = Callable[[ModelConfig, Tokenizer], object]
NamedTensors = Iterator[tuple[str, str, torch.Tensor]]  # file (for messages), name, values

_RANDOM_STD = 0.02  # the initializer_range of every family
_CHUNK = 1 << 22  # random numbers per generator; part of the definition of "same seed, same weights"


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode on its device. `weights` says in one line where its numbers come from.

    `ops` compute it; `notes` say in one line each what could not be had.
    """

    model: Model
    tokenizer: Tokenizer
    config: ModelConfig
    weights: str
    device: torch.device
    dtype: torch.dtype
    ops: Ops = TORCH
    notes: tuple[str, ...] = ()

    @property
    def is_native(self) -> bool:
        """Whether compiled kernels compute it."""
        return not isinstance(self.ops, TorchOps)


@dataclasses.dataclass(frozen=True)
class _Checkpoint:
    config: ModelConfig
    tokenizer: Tokenizer
    weights: str
    tensors: NamedTensors


def load_model(config: EngineConfig, before_weights: Check = lambda *_: None) -> LoadedModel:
    """Load what `config` names, fetching it first if need be.

    `before_weights` sees shape and tokenizer before the long part, and may raise to prevent it.
    Raises ConfigError for a device, dtype or shape that cannot work, ModelError, FetchError or WeightsError otherwise.
    """
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device, config.kernels)
    checkpoint = _open(catalog.resolve(config.model), dtype, config.seed)
    before_weights(checkpoint.config, checkpoint.tokenizer)
    ops, notes = choose_ops(config, checkpoint.config, device, dtype)
    with torch.device("meta"):
        model = build_model(checkpoint.config, ops)
    _fill(model, checkpoint.tensors, device, dtype, config.model, keeps_matrices=isinstance(ops, TorchOps))
    model.eval().requires_grad_(False)
    ops = prepare(model, ops, device)
    return LoadedModel(
        model, checkpoint.tokenizer, checkpoint.config, checkpoint.weights, device, dtype, ops=ops, notes=notes
    )


def resolve_device(name: str) -> torch.device:
    """auto, cpu, cuda or cuda:N as a device that is there, with its number; else ConfigError."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    choices = ["auto", "cpu", *(["cuda"] if num_gpus else []), *(f"cuda:{i}" for i in range(num_gpus))]
    if name not in choices:
        raise ConfigError(unknown("device", name, choices) + ("" if num_gpus else " (this machine has no CUDA device)"))
    if name == "cpu" or not num_gpus:
        return torch.device("cpu")
    return torch.device("cuda", int(name[5:]) if ":" in name else torch.cuda.current_device())


def resolve_dtype(name: str, device: torch.device, kernels: str = "auto") -> torch.dtype:
    """`auto` is bfloat16 on a GPU that computes in it, else float16 on a GPU.

    On a CPU it is bfloat16 where the processor multiplies it, or `kernels` are asked for that do, else float32.
    """
    if name not in DTYPES:
        raise ConfigError(unknown("dtype", name, DTYPES))
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    if device.type == "cuda":
        native = torch.cuda.get_device_capability(device) >= (8, 0)  # before that, bfloat16 is emulated
        return torch.bfloat16 if native else torch.float16
    return torch.bfloat16 if kernels == "native" or multiplies_bfloat16() else torch.float32


def _open(source: catalog.ModelSource, dtype: torch.dtype, seed: int) -> _Checkpoint:
    if source.config is not None:
        return _open_random(source.config, dtype, seed)
    assert source.path is not None, "a source has either a shape or a path"
    return _open_gguf(source.path, dtype) if source.kind == "gguf" else _open_folder(source.name, source.path)


def _open_random(config: ModelConfig, dtype: torch.dtype, seed: int) -> _Checkpoint:
    tensors = _random_tensors(config, dtype, seed)
    return _Checkpoint(config, ByteTokenizer(config.vocab_size), f"random, seed {seed}", tensors)


def _open_gguf(path: Path, dtype: torch.dtype) -> _Checkpoint:
    from nanoserve.gguf_file import GgufFile

    file = GgufFile(path)
    tensors = ((str(path), name, tensor) for name, tensor in file.read_tensors(dtype))
    return _Checkpoint(file.read_config(), HFTokenizer(*file.read_tokenizer()), f"GGUF file {path}", tensors)


def _open_folder(name: str, folder: Path) -> _Checkpoint:
    tokenizer, config = HFTokenizer.from_folder(folder), _read_config(folder)
    return _Checkpoint(config, tokenizer, _describe(name, folder), _adopt(config, _read_folder(folder)))


def _describe(name: str, folder: Path) -> str:
    manifest = folder / "nanoserve.json"
    if manifest.is_file():
        origin = _read_json(manifest)
        sha256 = str(origin.get("sha256"))[:12]
        return f"trained: {origin.get('source')} {origin.get('version')} (sha256 {sha256})"
    if folder.parent.name == "snapshots":
        return f"hub: {name} (commit {folder.name[:12]})"
    return f"folder {folder}"


def _read_config(folder: Path) -> ModelConfig:
    path, generation = folder / "config.json", folder / "generation_config.json"
    try:
        config = parse_hf_config(_read_json(path))
        eos = parse_eos(_read_json(generation).get("eos_token_id")) if generation.is_file() else ()
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *eos))))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} is missing or no JSON: {error}") from error
    if not isinstance(data, dict):
        raise WeightsError(f"{path} holds no JSON object")
    return data


def _adopt(config: ModelConfig, tensors: NamedTensors) -> NamedTensors:
    """The model's parameters out of a checkpoint's tensors. A second copy of tied embeddings is harmless."""
    for file, key, tensor in tensors:
        if key != "lm_head.weight" or not config.tie_embeddings:
            for name, values in CLASSES[config.family].adopt(key, tensor).items():
                yield file, name, values


def _read_folder(folder: Path) -> NamedTensors:
    """Tensors of model.safetensors, or of the shards that model.safetensors.index.json lists."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        yield from _read_safetensors(single)
    elif index.is_file():
        for shard in _shards(index):
            if not (folder / shard).is_file():
                raise WeightsError(f"{folder / shard} is missing; {index} lists it")
            yield from _read_safetensors(folder / shard)
    else:
        raise WeightsError(f"{folder} holds neither model.safetensors nor model.safetensors.index.json")


def _shards(index: Path) -> list[str]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise WeightsError(f"{index} has no weight_map from tensors to files")
    return sorted(set(weight_map.values()))


def _read_safetensors(path: Path) -> NamedTensors:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - the handle is no mapping
                yield str(path), name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} is truncated or no safetensors file: {error}") from error


def _random_tensors(config: ModelConfig, dtype: torch.dtype, seed: int) -> NamedTensors:
    """Normal matrices, norms of one and biases of zero, for every parameter the model has; equal for equal seeds."""
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in build_model(config).named_parameters()}
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for name, shape in shapes.items():
            weight = torch.full(shape, 0.0 if name.endswith(".bias") else 1.0, dtype=dtype)
            if len(shape) > 1:
                starts = range(0, weight.numel(), _CHUNK)
                list(pool.map(functools.partial(_fill_chunk, weight, f"{seed}/{name}"), starts))
            yield "random weights", name, weight


def _fill_chunk(weight: torch.Tensor, key: str, start: int) -> None:
    """Every chunk has a generator of its own, so the numbers do not depend on how many threads draw them."""
    digest = hashlib.sha256(f"{key}/{start}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
    chunk = weight.view(-1)[start : start + _CHUNK]
    chunk.copy_(torch.empty(chunk.shape).normal_(0.0, _RANDOM_STD, generator=generator))


def _fill(
    model: Model, tensors: NamedTensors, device: torch.device, dtype: torch.dtype, name: str, *, keeps_matrices: bool
) -> None:
    """Without `keeps_matrices`, whoever computes the model makes matrices of its own out of these at once."""
    expected = {key: weight.shape for key, weight in model.named_parameters()}
    found: dict[str, torch.Tensor] = {}
    for file, key, tensor in tensors:
        if key not in expected:
            raise WeightsError(f"{file}: unexpected tensor {key}")
        if tensor.shape != expected[key]:
            shapes = f"{list(tensor.shape)}, the model's is {list(expected[key])}"
            raise WeightsError(f"{file}: {key} has shape {shapes}")
        # A mapped file may change under a running model and is not aligned for vector loads: take a copy.
        copies = file.endswith(".safetensors") and (keeps_matrices or tensor.ndim == 1)
        found[key] = tensor.to(device=device, dtype=dtype, copy=copies, memory_format=torch.contiguous_format)
    _refuse_missing(name, set(expected) - set(found))
    model.load_state_dict(found, assign=True)


def _refuse_missing(name: str, missing: Iterable[str]) -> None:
    names = sorted(missing)
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise WeightsError(f"{name} lacks the tensor {names[0]}{more}")
