"""Reads GGUF files of the Llama architecture: shape, weights under Hugging Face's names, tokenizer.

Knows what llama.cpp's converter does to a checkpoint and undoes it. Refuses to know devices, the engine and where
the file came from; and refuses, by name, every variant whose result it could not vouch for. No method leaves another
exception than WeightsError for a file that is foreign or broken; `convert` also leaves OSError for a disk that fails.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from nanoserve.config import ModelConfig, RopeScaling
from nanoserve.errors import ConfigError, WeightsError, unknown
from nanoserve.gguf_tokenizer import build_tokenizer
from nanoserve.hf_config import to_hf_config
from nanoserve.models.llama import rope_frequencies

Array = np.ndarray[Any, Any]

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufFile:
    """An opened file. Opening reads and checks the header (seconds for a large vocabulary), weights come on demand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = gguf.GGUFReader(path)
        except Exception as error:  # the reader trusts the file: a broken one ends in any exception there is
            raise WeightsError(f"{path} is truncated or no GGUF file ({type(error).__name__})") from error
        size = path.stat().st_size
        for tensor in self._reader.tensors:
            if tensor.data_offset + tensor.n_bytes > size:
                raise WeightsError(f"{path} is truncated: {tensor.name} ends after the file's {size} bytes")
        self._shapes = {t.name: tuple(int(n) for n in reversed(t.shape)) for t in self._reader.tensors}

    def read_config(self) -> ModelConfig:
        """The model's shape; embeddings are tied when the file has no output matrix."""
        try:
            plain = self._read_plain_config()
            return dataclasses.replace(plain, rope_scaling=self._rope_scaling(plain))
        except ConfigError as error:
            raise WeightsError(f"{self.path}: {error}") from error

    def _read_plain_config(self) -> ModelConfig:
        self._refuse_foreign()
        embedding = self._shapes.get("token_embd.weight")
        if embedding is None or len(embedding) != 2:
            raise WeightsError(f"{self.path} lacks token_embd.weight")
        num_heads = self._count("llama.attention.head_count")
        head_dim = self._count("llama.attention.key_length", self._count("llama.embedding_length") // num_heads)
        self._expect("llama.rope.dimension_count", head_dim)
        self._expect("llama.attention.value_length", head_dim)
        return ModelConfig(
            vocab_size=embedding[0],
            hidden_size=self._count("llama.embedding_length"),
            intermediate_size=self._count("llama.feed_forward_length"),
            num_layers=self._count("llama.block_count"),
            num_heads=num_heads,
            num_kv_heads=self._count("llama.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            max_context_tokens=self._count("llama.context_length"),
            rope_theta=self._number("llama.rope.freq_base", 10_000.0),
            norm_eps=self._number("llama.attention.layer_norm_rms_epsilon", 1e-5),
            tie_embeddings="output.weight" not in self._shapes,
            eos_token_ids=self._eos_token_ids(),
        )

    def read_tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights, dequantised one at a time, as tensors of their own in `dtype`."""
        num_heads = self._count("llama.attention.head_count")
        heads = {"attn_q": num_heads, "attn_k": self._count("llama.attention.head_count_kv", num_heads)}
        for tensor in self._reader.tensors:
            if tensor.name == "rope_freqs.weight":  # read_config has turned it into the shape's rope_scaling
                continue
            name = self._translate(tensor.name)
            values = self._dequantize(tensor).reshape(self._shapes[tensor.name])
            kind = tensor.name.split(".")[-2]
            if kind in heads:
                values = self._separate_pairs(tensor.name, values, heads[kind])
            yield name, torch.from_numpy(np.array(values)).to(dtype)

    def read_tokenizer(self) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
        """The tokenizer and what a tokenizer_config.json says of it. Byte-level BPE only."""
        try:
            return build_tokenizer(self._get)
        except Exception as error:  # tokenizers raises plain Exception, whatever is wrong
            raise WeightsError(f"{self.path}: {' '.join(str(error).split())}") from error

    def _refuse_foreign(self) -> None:
        architecture = self._get("general.architecture")
        if architecture != "llama":
            raise WeightsError(f"{self.path}: {unknown('general.architecture', architecture, ['llama'])}")
        self._expect("llama.expert_count", 0)
        self._expect("llama.rope.scaling.type", "none")
        self._expect("llama.rope.scaling.factor", 1.0)
        self._expect("llama.rope.scale_linear", 1.0)

    def _rope_scaling(self, plain: ModelConfig) -> RopeScaling | None:
        """llama.cpp keeps only the divisor of each frequency; accept those that Llama 3's published settings give."""
        tensor = next((t for t in self._reader.tensors if t.name == "rope_freqs.weight"), None)
        if tensor is None:
            return None
        divisors = torch.from_numpy(np.array(self._dequantize(tensor), dtype=np.float32)).flatten()
        if bool((divisors == 1).all()):
            return None
        scaling = RopeScaling(
            factor=float(divisors.max()), low_freq_factor=1.0, high_freq_factor=4.0, original_context_tokens=8192
        )
        cpu = torch.device("cpu")
        scaled = dataclasses.replace(plain, rope_scaling=scaling)
        expected = rope_frequencies(plain, cpu) / rope_frequencies(scaled, cpu)
        if divisors.shape != expected.shape or not torch.allclose(divisors, expected, rtol=1e-3):
            raise WeightsError(f"{self.path}: rope_freqs.weight is not Llama 3's RoPE scaling, the only one supported")
        return scaling

    def _dequantize(self, tensor: gguf.ReaderTensor) -> Array:
        try:
            return gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise WeightsError(f"{self.path}: {tensor.name} has unsupported type {tensor.tensor_type.name}") from error

    def _separate_pairs(self, name: str, rows: Array, num_heads: int) -> Array:
        """llama.cpp rotates neighbouring rows (0, 1), (2, 3), ... of a head; bring them back to (i, i + half)."""
        if rows.ndim != 2 or rows.shape[0] % (2 * num_heads):
            raise WeightsError(
                f"{self.path}: {name} has shape {list(rows.shape)}, which {num_heads} heads cannot share"
            )
        pairs = rows.reshape(num_heads, -1, 2, rows.shape[1])
        return pairs.swapaxes(1, 2).reshape(rows.shape)

    def _translate(self, name: str) -> str:
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
        if match and match[2] in _LAYER_NAMES:
            return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.weight"
        if name not in _TOP_NAMES:
            raise WeightsError(f"{self.path}: unexpected tensor {name}")
        return _TOP_NAMES[name]

    def _eos_token_ids(self) -> tuple[int, ...]:
        found = (self._get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
        return tuple(dict.fromkeys(token_id for token_id in found if isinstance(token_id, int)))

    def _get(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        try:
            return default if field is None else field.contents()
        except (ValueError, IndexError) as error:
            raise WeightsError(f"{self.path}: {key} cannot be read: {error}") from error

    def _count(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if not isinstance(value, int) or value < 1:
            raise WeightsError(f"{self.path}: {key} must be one positive whole number, not {value!r}")
        return value

    def _number(self, key: str, default: float) -> float:
        value = self._get(key, default)
        if not isinstance(value, float):
            raise WeightsError(f"{self.path}: {key} must be one number, not {value!r}")
        return float(f"{value:.6g}")  # stored as float32: 1e-05, not 9.999999747378752e-06

    def _expect(self, key: str, wanted: object) -> None:
        value = self._get(key, wanted)
        if value != wanted:
            raise WeightsError(f"{self.path}: {key} {value!r} is not supported; only {wanted!r} is")


def read_config(path: Path) -> ModelConfig:
    """The shape of the model in this file."""
    return GgufFile(path).read_config()


def read_tensors(path: Path, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights in this file under Hugging Face's names."""
    return GgufFile(path).read_tensors(dtype)


def read_tokenizer(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """The tokenizer in this file and its settings."""
    return GgufFile(path).read_tokenizer()


def convert(path: Path, folder: Path, source: Mapping[str, Any]) -> None:
    """Write the model as a Hugging Face checkpoint in bfloat16 into an existing folder.

    `source` (name, version, licence and so on) goes into nanoserve.json, which is written last.
    """
    file = GgufFile(path)
    tokenizer, settings = file.read_tokenizer()
    _write_json(folder / "config.json", {**to_hf_config(file.read_config()), "dtype": "bfloat16"})
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", settings)
    try:
        save_file(dict(file.read_tensors(torch.bfloat16)), folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{folder / 'model.safetensors'}: {error}") from error
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # safetensors makes it private
    sizes = {entry.name: entry.stat().st_size for entry in sorted(folder.iterdir())}
    _write_json(folder / "nanoserve.json", {**source, "file_bytes": sizes})


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", "utf-8")
