"""A model of nanoserve as a Hugging Face folder in bfloat16: what other engines are given, so that all have one model.

Knows the model and the names that its weights have in a checkpoint. Refuses to know who reads the folder.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.files import write_whole

if TYPE_CHECKING:
    import torch

    from benchmarks.harness.sources.llama_cost import LlamaCost
    from nanoserve.config import ModelConfig


def checkpoint_tensors(model: Any) -> "dict[str, torch.Tensor]":
    """The weights of a loaded model by the names of Hugging Face's checkpoints."""
    return dict(model.named_parameters())


def export_folder(name: str, folder: Path) -> None:
    """Write config.json and model.safetensors. The configuration comes last: a folder without one is not whole.

    Raises InstrumentError where the model cannot be had.
    """
    from safetensors.torch import save_file

    loaded = _load(name)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {key: tensor.contiguous() for key, tensor in checkpoint_tensors(loaded.model).items()}
    spare = folder / ".model.safetensors.tmp"
    save_file(tensors, spare, metadata={"format": "pt"})
    spare.replace(folder / "model.safetensors")
    write_whole(folder / "config.json", json.dumps(_config(loaded.config), indent=1))


def _config(config: "ModelConfig") -> Mapping[str, Any]:
    from nanoserve.hf_config import to_hf_config

    return {**to_hf_config(config), "torch_dtype": "bfloat16"}


def _load(name: str) -> Any:
    from nanoserve import EngineConfig
    from nanoserve.errors import NanoserveError
    from nanoserve.weights import load_model

    try:
        return load_model(EngineConfig(model=name, device="cpu", dtype="bfloat16"))
    except NanoserveError as error:
        raise InstrumentError(str(error)) from error


def cost_of(folder: Path) -> "LlamaCost":
    """What steps of the model in an exported folder have to read and compute, in bfloat16."""
    from benchmarks.harness.sources.llama_cost import LlamaCost

    return LlamaCost(shape_of(folder), bytes_per_number=2)


def shape_of(folder: Path) -> "ModelConfig":
    """The shape of the model in an exported folder."""
    from nanoserve.hf_config import parse_hf_config

    return parse_hf_config(json.loads((folder / "config.json").read_text("utf-8")))
