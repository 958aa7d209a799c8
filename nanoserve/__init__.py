"""nanoserve: a small LLM inference engine in PyTorch, made to be measured.

The names below load on first use, so that importing the package does not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanoserve.config import EngineConfig as EngineConfig
    from nanoserve.config import ModelConfig as ModelConfig
    from nanoserve.config import SamplingParams as SamplingParams
    from nanoserve.engine import Engine as Engine
    from nanoserve.errors import NanoserveError as NanoserveError
    from nanoserve.request import Completion as Completion
    from nanoserve.request import FinishReason as FinishReason
    from nanoserve.request import TokenEvent as TokenEvent
    from nanoserve.request import TokenLogprobs as TokenLogprobs

__version__ = "0.1.0"

_HOMES = {
    "Engine": "engine",
    "EngineConfig": "config",
    "ModelConfig": "config",
    "SamplingParams": "config",
    "NanoserveError": "errors",
    "Completion": "request",
    "FinishReason": "request",
    "TokenEvent": "request",
    "TokenLogprobs": "request",
}
__all__ = ["__version__", *_HOMES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'nanoserve' has no attribute {name!r}")
    return getattr(importlib.import_module(f"nanoserve.{_HOMES[name]}"), name)
