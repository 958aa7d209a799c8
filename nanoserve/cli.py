"""`nanoserve generate | chat | serve | models | memory`: the engine on a command line.

Knows options, terminals and exit codes: 0 done, 1 for a reader that went away, 2 for anything that the user can mend
(told in one line), 130 for Ctrl-C. Everything else is the engine's.
"""

import dataclasses
import io
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanoserve.config import EngineConfig, ModelConfig, SamplingParams, SchedulerConfig
from nanoserve.errors import NanoserveError, RequestError, one_line
from nanoserve.options import (
    Attention,
    Cache,
    Device,
    Dtype,
    Graphs,
    Kernels,
    KVMemory,
    MaxNewTokens,
    MaxRunning,
    MinP,
    Model,
    PrefixCache,
    Quantize,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopK,
    TopP,
)
from nanoserve.server.command import serve

if TYPE_CHECKING:
    from nanoserve.engine import Engine
    from nanoserve.request import Request, TokenEvent

_HELP = """Generate text with a small LLM, on this machine.

\b
Start here (the default model, 93 MB, is fetched once):
  nanoserve generate "The capital of France is"
  nanoserve chat
  nanoserve generate --help
"""

app = typer.Typer(
    help=_HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_ENGINE, _SAMPLING, _SCHEDULING = EngineConfig(), SamplingParams(), SchedulerConfig()

app.command()(serve)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    *,
    model: Model = _ENGINE.model,
    device: Device = _ENGINE.device,
    dtype: Dtype = _ENGINE.dtype,
    cache: Cache = _ENGINE.cache,
    kv_memory: KVMemory = _ENGINE.kv_memory,
    prefix_cache: PrefixCache = _ENGINE.prefix_cache,
    attention: Attention = _ENGINE.attention,
    graphs: Graphs = _ENGINE.graphs,
    kernels: Kernels = _ENGINE.kernels,
    quantize: Quantize = _ENGINE.quantize,
    max_new_tokens: MaxNewTokens = _SAMPLING.max_new_tokens,
    temperature: Temperature = _SAMPLING.temperature,
    top_k: TopK = _SAMPLING.top_k,
    top_p: TopP = _SAMPLING.top_p,
    min_p: MinP = _SAMPLING.min_p,
    repetition_penalty: RepetitionPenalty = _SAMPLING.repetition_penalty,
    seed: Seed = _SAMPLING.seed,
    stop: Annotated[list[str] | None, typer.Option(help="End the text before this string; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end-of-text token.")] = False,
) -> None:
    """Continue a text and print it as it comes.

    \b
    Examples:
      nanoserve generate "The capital of France is"
      nanoserve generate "Once upon a time" --temperature 0.8 --seed 1
      nanoserve generate "1, 2, 3," --stop 9 --model path/to/model.gguf
    """
    given = locals()
    _check_text("prompt", prompt)
    for text in stop or ():
        _check_text("stop text", text)
    params = _params(given, stop=tuple(stop or ()))
    engine = _load(given, lambda config, tokenizer: _request(tokenizer.encode(prompt), params).check_fits(config))
    _print_text(engine.stream(prompt, params))
    _tell_notes(engine)


@app.command()
def chat(
    *,
    model: Model = _ENGINE.model,
    device: Device = _ENGINE.device,
    dtype: Dtype = _ENGINE.dtype,
    cache: Cache = _ENGINE.cache,
    kv_memory: KVMemory = _ENGINE.kv_memory,
    prefix_cache: PrefixCache = _ENGINE.prefix_cache,
    attention: Attention = _ENGINE.attention,
    graphs: Graphs = _ENGINE.graphs,
    kernels: Kernels = _ENGINE.kernels,
    quantize: Quantize = _ENGINE.quantize,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.2,
    top_k: TopK = _SAMPLING.top_k,
    top_p: TopP = 0.9,
    min_p: MinP = _SAMPLING.min_p,
    repetition_penalty: RepetitionPenalty = _SAMPLING.repetition_penalty,
    seed: Seed = _SAMPLING.seed,
    system: Annotated[str | None, typer.Option(help="System message; the template may have one of its own.")] = None,
) -> None:
    """Talk with the model, using its own chat template. An empty line or Ctrl-D ends the conversation.

    \b
    Examples:
      nanoserve chat --system "You answer in one sentence."
      echo "What is the capital of France?" | nanoserve chat --temperature 0
    """
    given = locals()
    params = _params(given)
    if system:
        _check_text("system message", system)
    messages = [{"role": "system", "content": system}] if system else []
    # A tokenizer without a chat template is told before the weights are loaded.
    engine = _load(given, lambda _, tokenizer: tokenizer.render_chat([*messages, {"role": "user", "content": "?"}]))
    _tell_notes(engine)
    for line in _lines("> "):
        messages.append({"role": "user", "content": line})
        reply = _print_text(engine.stream(engine.tokenizer.render_chat(messages), params))
        messages.append({"role": "assistant", "content": reply})


@app.command()
def models() -> None:
    """List the models that are known by name.

    \b
    Example:
      nanoserve models
      nanoserve generate "The capital of France is" --model tiny
    """
    from nanoserve.catalog import describe_models

    for name, description in describe_models().items():
        typer.echo(f"{name:22} {description}")


@app.command()
def memory(
    *,
    model: Model = _ENGINE.model,
    device: Device = _ENGINE.device,
    dtype: Dtype = _ENGINE.dtype,
    kv_memory: KVMemory = _ENGINE.kv_memory,
    prefix_cache: PrefixCache = _ENGINE.prefix_cache,
    block_size: Annotated[int, typer.Option(help="Tokens in a KV block.")] = _SCHEDULING.block_size,
    max_running: MaxRunning = _SCHEDULING.max_running,
) -> None:
    """Show how large the pool of KV blocks would be on this machine, and why. No weights are loaded.

    \b
    Examples:
      nanoserve memory
      nanoserve memory --model llama-3.2-1b --dtype bfloat16
      nanoserve memory --model llama-3.2-1b --kv-memory 25% --max-running 4
    """
    engine = EngineConfig(model=model, device=device, dtype=dtype, kv_memory=kv_memory, prefix_cache=prefix_cache)
    # Each running request needs a position in every step.
    step_tokens = max(_SCHEDULING.max_step_tokens, max_running)
    _show_plan(engine, SchedulerConfig(block_size=block_size, max_running=max_running, max_step_tokens=step_tokens))


def main() -> None:
    """Entry point: a mistake of the user's becomes one line on stderr and status 2, never a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows ? for it
    try:
        app(prog_name="nanoserve")
    except NanoserveError as error:
        typer.echo(f"nanoserve: error: {one_line(error)}", err=True)
        sys.exit(2)


def _check_text(name: str, text: str) -> None:
    """Refuse what no tokenizer takes before a model is loaded."""
    if not text:
        raise RequestError(f"the {name} is empty: give at least one character")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the {name} is not valid UTF-8: it holds the byte {ord(text[error.start]) & 0xFF:#04x}"
        ) from error


def _params(given: dict[str, Any], **more: Any) -> SamplingParams:
    """Checked before a model is loaded, so that a bad value costs no waiting."""
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    return SamplingParams(**{name: value for name, value in given.items() if name in names} | more)


def _request(prompt_ids: list[int], params: SamplingParams) -> "Request":
    from nanoserve.request import Request

    return Request("prompt", prompt_ids, params)


def _tell_notes(engine: "Engine") -> None:
    """What does not go as it was meant to."""
    for note in engine.notes:
        typer.echo(f"nanoserve: {note}", err=True)


def _load(given: dict[str, Any], before_weights: Callable[..., object]) -> "Engine":
    names = [name for name in EngineConfig.option_names() if name != "seed"]  # a request's own
    config = EngineConfig(**{name: given[name] for name in names})
    from nanoserve.engine import Engine

    engine = Engine.load(before_weights=before_weights, **{name: getattr(config, name) for name in names})
    if config.kv_memory != "auto":
        typer.echo(engine.pool_plan, err=True)
    return engine


def _show_plan(engine: EngineConfig, scheduling: SchedulerConfig) -> None:
    from nanoserve.cache.sizing import parse_kv_memory
    from nanoserve.memory import plan_for
    from nanoserve.weights import load_model, resolve_device, resolve_dtype

    parse_kv_memory(engine.kv_memory)  # a bad value is told before a model is sought
    device = resolve_device(engine.device)
    dtype = resolve_dtype(engine.dtype, device, engine.kernels)

    def show(config: ModelConfig, _: object) -> None:
        typer.echo(plan_for(config, dtype, device, engine, scheduling, is_loaded=False))
        raise typer.Exit  # before the weights

    load_model(engine, show)


def _print_text(events: "Iterator[TokenEvent]") -> str:
    """Print the pieces as they come, end the line, and return the whole."""
    pieces = []
    for event in events:
        pieces.append(event.text)
        typer.echo(event.text, nl=False, color=True)  # with color, nothing is filtered out of the model's text
    typer.echo()
    return "".join(pieces)


def _lines(prompt: str) -> Iterator[str]:
    """What is typed or piped in, until an empty line or the end; the prompt is for people only."""
    while sys.stdin is not None:
        try:
            line = input(prompt if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        except UnicodeDecodeError as error:
            raise RequestError(f"standard input is not valid {error.encoding}: {one_line(error)}") from error
        if not line:
            return
        _check_text("line", line)
        yield line
