"""`python -m benchmarks peers`: what it takes, and in which order it does things.

Knows options, folders and exit codes. Refuses to measure.
"""

import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.files import write_whole
from benchmarks.harness.gate.progress import Progress, progress_on_stderr

if TYPE_CHECKING:
    from benchmarks.harness.peers.columns import Column
    from benchmarks.harness.peers.install import Environments
    from benchmarks.harness.peers.registry import Peer
    from benchmarks.harness.peers.session import Facts
    from benchmarks.harness.peers.weights import WeightStore

ROOT = Path(__file__).parents[3]
HOME = ROOT / ".benchmarks" / "peers"


class Choice(NamedTuple):
    """What was asked for, the same for every model."""

    peers: "Sequence[Peer]"
    columns: "Sequence[Column]"
    rounds: int
    threads: int
    seed: int


def peers(
    *,
    peer: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="only this one; again for more (default: all installed)")
    ] = None,
    model: Annotated[list[str] | None, typer.Option(help="again for more (default: smollm2-135m)")] = None,
    columns: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="only this quantity; again for more (default: all)")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="turns of every peer in everything; an interval needs 6")] = 6,
    threads: Annotated[int, typer.Option(min=0, help="of every peer (default: torch's own choice)")] = 0,
    seed: Annotated[int, typer.Option(help="of prompts and order")] = 0,
    output: Annotated[Path, typer.Option(metavar="DIR", help="gets a .md and a .json for each model")] = (
        HOME / "results"
    ),
    list_only: Annotated[bool, typer.Option("--list", help="say which peers are installed, and stop")] = False,
    install: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="make its environment, and stop; again for more")
    ] = None,
) -> None:
    """Compare nanoserve with the engines that a user would pick instead, in one interleaved run.

    One process for each peer, all with the same weights, threads and prompts, taking turns. A peer that fails is told
    with its reason, and the others go on. Exit status 0 when there is a table, 2 when nothing was measured.

    \b
    Examples:
      python -m benchmarks peers --list
      python -m benchmarks peers --install llama-cpp --install openvino
      python -m benchmarks peers --model smollm2-135m --model llama-3.2-1b
      python -m benchmarks peers --peer nanoserve --peer transformers --columns itl_16 --rounds 3
    """
    from benchmarks.harness.peers.columns import find_columns
    from benchmarks.harness.peers.weights import file_name

    try:
        wanted = find_columns(columns or [])
        with progress_on_stderr() as progress:
            if install:
                _install(install, progress)
            elif list_only:
                typer.echo(_listed())
            else:
                choice = Choice(_there(peer or [], progress), wanted, rounds, threads, seed)
                _refuse_unwritable(output)
                for each in model or ["smollm2-135m"]:
                    _measure(each, choice, output / file_name(each), progress)
    except (InstrumentError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)


def _refuse_unwritable(folder: Path) -> None:
    """What takes an hour to measure must not be lost in the end: OSError for a folder that takes no file."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def _environments() -> "Environments":
    from benchmarks.harness.peers.install import Environments

    return Environments(HOME / "env")


def _listed() -> str:
    from benchmarks.harness.peers.install import listed
    from benchmarks.harness.peers.registry import PEERS

    return listed(PEERS, _environments())


def _install(names: Sequence[str], progress: Progress) -> None:
    from benchmarks.harness.nightly.runner import ProcessRunner
    from benchmarks.harness.peers.registry import find_peers

    runner = ProcessRunner(ROOT, progress.step, every_s=15.0)
    for each in find_peers(names):
        _environments().install(each, runner, progress.step)
        progress.step(f"{each.name}: installed")


def _there(names: Sequence[str], progress: Progress) -> "list[Peer]":
    """The peers that can run. One that was asked for by name and cannot is an error; any other is told about."""
    from benchmarks.harness.errors import PeerError
    from benchmarks.harness.peers.install import how_to_install
    from benchmarks.harness.peers.registry import find_peers

    asked, environments = find_peers(names), _environments()
    absent = [each for each in asked if not environments.has(each)]
    if names and absent:
        told = "; ".join(f"{each.name} is not installed: {how_to_install(each)}" for each in absent)
        raise PeerError(told)
    for each in absent:
        progress.step(f"{each.name} is not installed: {how_to_install(each)}")
    return [each for each in asked if each not in absent]


def _measure(model: str, choice: Choice, stem: Path, progress: Progress) -> None:
    from benchmarks.harness.nightly.runner import ProcessRunner
    from benchmarks.harness.peers.session import Bench, run_session
    from benchmarks.harness.peers.weights import WeightStore
    from benchmarks.harness.sources.nanoserve_export import export_folder

    store = WeightStore(
        HOME / "weights", model, export_folder, ProcessRunner(ROOT, progress.step, every_s=15.0), progress.step
    )
    bench = Bench(_environments(), store, _facts(store, model, choice), HOME / "logs", progress)
    _write(run_session(choice.peers, choice.columns, bench, choice.rounds), stem)


def _facts(store: "WeightStore", model: str, choice: Choice) -> "Facts":
    import torch

    from benchmarks.harness.ceilings import Ceilings
    from benchmarks.harness.peers.session import Facts
    from benchmarks.harness.provenance import provenance
    from benchmarks.harness.sources.nanoserve import package_folder
    from benchmarks.harness.sources.nanoserve_export import cost_of, shape_of

    torch.set_num_threads(choice.threads or torch.get_num_threads())
    told = {"model": model, "dtype": "bfloat16", "num_threads": torch.get_num_threads(), "seed": choice.seed}
    about = {**provenance(package_folder(), told), "command": shlex.join(sys.argv)}
    shape = shape_of(store.folder)
    dtypes = (torch.float32, torch.bfloat16)
    return Facts(shape.vocab_size, cost_of(store.folder), lambda: [Ceilings("cpu", each) for each in dtypes], about)


def _write(told: dict[str, Any], stem: Path) -> None:
    """The table on standard output, and both files."""
    from benchmarks.harness.peers.table import as_markdown, as_text

    texts = {".md": as_markdown(told), ".json": json.dumps(told, indent=1, allow_nan=False)}
    typer.echo(as_text(told), nl=False)
    for ending, text in texts.items():
        path = stem.with_name(f"{stem.name}{ending}")
        write_whole(path, text)
        typer.echo(path)
