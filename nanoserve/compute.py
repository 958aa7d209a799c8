"""What computes a model, by device, dtype and wish: plain torch, fused or in 8 bits, or kernels compiled for this CPU.

Knows who can do what, and how a loaded model is made ready for it. Refuses to know checkpoints, and how anything is
computed.
"""

import ctypes

import torch

from nanoserve import catalog
from nanoserve.cache.kv import NoCache
from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.errors import KernelError
from nanoserve.fused import fuse
from nanoserve.models.families import Model
from nanoserve.ops import TORCH, Ops
from nanoserve.quantized import Int8Ops


def choose_ops(
    config: EngineConfig, shape: ModelConfig, device: torch.device, dtype: torch.dtype
) -> tuple[Ops, tuple[str, ...]]:
    """What computes a model, and why it is not what would be faster.

    Raises KernelError where `config` asks for native kernels that cannot be had.
    """
    is_int8 = config.quantize == "int8"
    if device.type != "cpu" or dtype != torch.bfloat16 or config.kernels == "torch":
        if config.kernels == "native":
            raise KernelError(f"kernels 'native' are for bfloat16 on a CPU, not for {dtype} on {device.type}")
        return (Int8Ops() if is_int8 else TORCH), ()
    from nanoserve.cpu.native import NativeOps

    library = _library_for(shape)
    if not isinstance(library, KernelError):
        return NativeOps(library, is_int8=is_int8), ()
    if config.kernels == "native":
        raise library
    return (Int8Ops() if is_int8 else TORCH), (f"plain torch computes the model: {library}",)


def _library_for(shape: ModelConfig) -> ctypes.CDLL | KernelError:
    """Kernels take two inputs at a time, and two numbers of a head."""
    odd = [width for width in (shape.hidden_size, shape.intermediate_size, shape.head_dim) if width % 2]
    return KernelError(f"compiled kernels need even widths, not {odd[0]}") if odd else native_library()


def native_library() -> ctypes.CDLL | KernelError:
    """The compiled kernels, made now unless they are in the cache folder; or why there are none."""
    from nanoserve.cpu.build import load_library

    try:
        return load_library(catalog.cache_dir() / "kernels")
    except KernelError as error:
        return error


@torch.inference_mode()
def prepare(model: Model, ops: Ops, device: torch.device) -> Ops:
    """Bring a loaded model's weights into the form in which they are used; returns what computes it from now on.

    Whoever packs or rounds matrices does so at their first use: one position runs through the model.
    """
    if ops is TORCH:
        return fuse(model) if device.type == "cuda" else TORCH
    zero = torch.zeros(1, dtype=torch.long, device=device)
    model.compute_logits(model(zero, zero, NoCache()))
    _give_back()
    return ops


def _give_back() -> None:
    """Matrices that were made anew have been freed: glibc would keep that memory, as much as the model takes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
