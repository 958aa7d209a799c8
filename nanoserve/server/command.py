"""`nanoserve serve`: options to an engine and a server, and what is said while they start and end.

Knows the command line. Refuses to know HTTP: `serve.py` runs what is made here.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanoserve.config import EngineConfig, SchedulerConfig
from nanoserve.options import (
    Attention,
    Cache,
    Device,
    Dtype,
    Graphs,
    Kernels,
    KVMemory,
    MaxRunning,
    Model,
    PrefixCache,
    Quantize,
)
from nanoserve.server.settings import ServerConfig

if TYPE_CHECKING:
    from nanoserve.engine import Engine

_ENGINE, _SCHEDULING, _SERVER = EngineConfig(), SchedulerConfig(), ServerConfig()


def serve(
    *,
    model: Model = _ENGINE.model,
    model_name: Annotated[
        str | None, typer.Option(help="What clients call the model.", show_default="as --model, without folders")
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 lets other machines in.")] = _SERVER.host,
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = _SERVER.port,
    api_key: Annotated[
        str | None, typer.Option(envvar="NANOSERVE_API_KEY", help="Clients have to send this key.", show_default="none")
    ] = _SERVER.api_key,
    max_running: MaxRunning = _SCHEDULING.max_running,
    max_step_tokens: Annotated[
        int, typer.Option(help="Positions in a step; longer prompts run in chunks.")
    ] = _SCHEDULING.max_step_tokens,
    max_queued: Annotated[int, typer.Option(help="Requests that may wait; more get status 429.")] = _SERVER.max_queued,
    max_prompt_tokens: Annotated[
        int, typer.Option(help="The longest prompt; 0 is what the context holds.")
    ] = _SERVER.max_prompt_tokens,
    max_body_bytes: Annotated[int, typer.Option(help="The largest body of a call.")] = _SERVER.max_body_bytes,
    request_timeout_s: Annotated[
        float, typer.Option(help="Seconds after which a call is given up.")
    ] = _SERVER.request_timeout_s,
    drain_timeout_s: Annotated[
        float, typer.Option(help="Seconds that open calls get when the server is told to end.")
    ] = _SERVER.drain_timeout_s,
    device: Device = _ENGINE.device,
    dtype: Dtype = _ENGINE.dtype,
    cache: Cache = _ENGINE.cache,
    kv_memory: KVMemory = _ENGINE.kv_memory,
    prefix_cache: PrefixCache = _ENGINE.prefix_cache,
    attention: Attention = _ENGINE.attention,
    graphs: Graphs = _ENGINE.graphs,
    kernels: Kernels = _ENGINE.kernels,
    quantize: Quantize = _ENGINE.quantize,
) -> None:
    """Answer over HTTP as OpenAI's API does, with a chat page at /. Ctrl-C and SIGTERM answer first what was taken.

    \b
    Examples:
      nanoserve serve
      nanoserve serve --port 9000 --max-running 16 --api-key secret
      curl -N http://127.0.0.1:8000/v1/completions -H "content-type: application/json" \\
        -d '{"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0, "stream": true}'
    """
    given = locals()
    settings = ServerConfig(
        **_of(given, ServerConfig.option_names())
        | {"model_name": Path(model).resolve().name if model_name is None else model_name}
    )
    options = _of(given, EngineConfig.option_names()) | _of(given, SchedulerConfig.option_names())
    _start(settings, options)


def _of(given: dict[str, Any], names: list[str]) -> dict[str, Any]:
    return {name: given[name] for name in names if name in given}


def _start(settings: ServerConfig, options: dict[str, Any]) -> None:
    """Whatever can be wrong without a model is told before one is loaded."""
    EngineConfig.from_options(_of(options, EngineConfig.option_names()))
    SchedulerConfig.from_options(_of(options, SchedulerConfig.option_names()))
    from nanoserve.server.serve import listen, run, url_of

    with listen(settings) as listener:
        engine = _load(options)
        from nanoserve.server.app import Server

        said = f"nanoserve: serving {settings.model_name} at {url_of(listener)}"
        run(Server(engine, settings), listener, lambda: typer.echo(said))


def _load(options: dict[str, Any]) -> "Engine":
    typer.echo(f"nanoserve: loading {options['model']} ...", err=True)
    from nanoserve.engine import Engine

    engine = Engine.load(**options)
    typer.echo("nanoserve: warming up ...", err=True)
    engine.warm_up()
    for note in engine.notes:
        typer.echo(f"nanoserve: {note}", err=True)
    return engine
