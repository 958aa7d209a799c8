"""The options that several commands share: their names on a command line, and what `--help` says of them.

Knows typer and the choices of `config.py`. Refuses to know what a command does with them.
"""

from typing import Annotated

import typer

from nanoserve.config import (
    ATTENTIONS,
    CACHES,
    DTYPES,
    GRAPHS,
    KERNELS,
    PREFIX_CACHES,
    QUANTIZATIONS,
)

Model = Annotated[str, typer.Option(help="Catalog name (see `nanoserve models`), folder, .gguf file or hub id.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")]
Cache = Annotated[str, typer.Option(help=f"KV cache: {', '.join(CACHES)} (none recomputes every position).")]
Attention = Annotated[str, typer.Option(help=f"What computes attention: {', '.join(ATTENTIONS)}.")]
Graphs = Annotated[str, typer.Option(help=f"Record decode steps and play them again: {', '.join(GRAPHS)}.")]
Kernels = Annotated[
    str,
    typer.Option(help=f"What computes matrices and norms: {', '.join(KERNELS)} (auto: compiled, where they can be)."),
]
Quantize = Annotated[str, typer.Option(help=f"Keep matrices in fewer bits: {', '.join(QUANTIZATIONS)}.")]
MaxNewTokens = Annotated[int, typer.Option(help="Stop after this many tokens.")]
Temperature = Annotated[float, typer.Option(help="0 always takes the likeliest token; higher is more random.")]
TopK = Annotated[int, typer.Option(help="Sample among the k likeliest tokens; 0 is off.")]
TopP = Annotated[float, typer.Option(help="Sample among the likeliest tokens that make up this probability; 1 is off.")]
MinP = Annotated[
    float, typer.Option(help="Sample among tokens at least this likely, relative to the likeliest; 0 is off.")
]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1 makes tokens that were seen less likely; 1 is off.")]
KVMemory = Annotated[str, typer.Option(help="For keys and values: auto, a size (512MiB, 2GiB) or a share (40%).")]
PrefixCache = Annotated[
    str,
    typer.Option(help=f"Which kept prefix blocks are evicted first: {', '.join(PREFIX_CACHES)}."),
]
Seed = Annotated[
    int | None, typer.Option(help="The same seed gives the same text.", show_default="a new one each time")
]
MaxRunning = Annotated[int, typer.Option(help="Requests that may run at once.")]
