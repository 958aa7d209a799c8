"""From the name of a family to its model.

Knows one class for each of `config.FAMILIES`. Refuses to know weights, and what computes an operation.
"""

from nanoserve.config import ModelConfig
from nanoserve.models.gpt2 import GPT2
from nanoserve.models.llama import Llama
from nanoserve.models.mistral import Mistral
from nanoserve.models.qwen2 import Qwen2
from nanoserve.models.qwen3 import Qwen3
from nanoserve.ops import TORCH, Ops

Model = Llama | GPT2

CLASSES: dict[str, type[Llama] | type[GPT2]] = {
    "llama": Llama,
    "mistral": Mistral,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "gpt2": GPT2,
}


def build_model(config: ModelConfig, ops: Ops = TORCH) -> Model:
    """A model of this shape whose weights are yet to be loaded; on torch's default device, as every module."""
    return CLASSES[config.family](config, ops)
