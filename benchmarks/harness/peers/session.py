"""One model, from its weights to the document: converts, starts every worker, lets them take turns, ends them.

Knows the order of things. Refuses to know any engine, and to stop for a peer that fails.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.errors import PeerError
from benchmarks.harness.gate.progress import Progress
from benchmarks.harness.gate.spin import with_brief_spin
from benchmarks.harness.peers.columns import MAX_TOKENS, Column, scenes_of
from benchmarks.harness.peers.document import document
from benchmarks.harness.peers.host import Host
from benchmarks.harness.peers.install import Environments
from benchmarks.harness.peers.process import PeerWorker
from benchmarks.harness.peers.registry import Peer
from benchmarks.harness.peers.rounds import Prompts, measure
from benchmarks.harness.peers.weights import WeightStore

ROOT = Path(__file__).parents[3]


class Facts(NamedTuple):
    """What is known of the model and the machine before anything runs."""

    vocab_size: int
    cost: Any
    make_ceilings: Callable[[], Sequence[Any]]
    about: Mapping[str, Any]


class Bench(NamedTuple):
    """What a session works with, whichever peers take part."""

    environments: Environments
    store: WeightStore
    facts: Facts
    logs: Path
    progress: Progress


class Started(NamedTuple):
    """Workers that are ready, what each said, and why others are not."""

    workers: dict[str, PeerWorker]
    said: dict[str, dict[str, Any]]
    failures: dict[str, str]


def run_session(peers: Sequence[Peer], columns: Sequence[Column], bench: Bench, rounds: int) -> dict[str, Any]:
    """Measure the peers on one model. Raises PeerError when not one of them has started."""
    facts, progress = bench.facts, bench.progress
    with started(peers, bench) as running:
        if not running.workers:
            told = "; ".join(f"{name} {why}" for name, why in running.failures.items())
            raise PeerError(f"no peer has started: {told}")
        host = Host({name: worker.pid for name, worker in running.workers.items()}, facts.make_ceilings)

        def between(number: int) -> None:
            host.look(number)
            progress.step(f"{facts.about['model']}: {number} of {rounds} rounds")

        turns = measure(
            running.workers,
            scenes_of(columns),
            rounds=rounds,
            prompts=Prompts(facts.vocab_size, facts.about["seed"]),
            seed=facts.about["seed"],
            around=between,
            say=progress.now,
        )
    return document(
        about=facts.about, peers=peers, said=running.said, failures=running.failures, columns=columns, turns=turns,
        looks=host.looks, cost=facts.cost,
    )  # fmt: skip


@contextlib.contextmanager
def started(peers: Sequence[Peer], bench: Bench) -> Iterator[Started]:
    """Convert for everyone, then start one worker after the other, each alone while it loads; end them all in the end.

    Converting takes more memory than a worker, and no worker is there yet.
    """
    found, weights = Started({}, {}, {}), dict[str, Path]()
    for peer in peers:
        with _told(peer, found, bench):
            weights[peer.name] = bench.store.path_for(peer, bench.environments.python(peer))
    with contextlib.ExitStack() as stack:
        for peer in peers:
            with _told(peer, found, bench):
                if peer.name in weights:
                    bench.progress.step(f"{peer.name}: loading")
                    worker = stack.enter_context(contextlib.closing(_start(peer, weights[peer.name], bench)))
                    found.said[peer.name] = worker.about()
                    found.workers[peer.name] = worker
        yield found


@contextlib.contextmanager
def _told(peer: Peer, found: Started, bench: Bench) -> Iterator[None]:
    """Whoever fails here is told, and the next one has its turn."""
    try:
        yield
    except (PeerError, OSError) as error:
        found.failures[peer.name] = str(error)
        bench.progress.step(f"{peer.name}: {error}")


def _start(peer: Peer, weights: Path, bench: Bench) -> PeerWorker:
    about, environments = bench.facts.about, bench.environments
    words = command(peer, environments.python(peer), weights, about)
    return PeerWorker(words, environment(environments.environ(peer), about), bench.logs / f"{peer.name}.log")


def command(peer: Peer, python: Path, weights: Path, about: Mapping[str, Any]) -> list[str]:
    """What starts the peer's worker. Without the working folder on its path: a checkout is no package to find there."""
    settings = {
        "model": about["model"],
        "weights": str(weights.resolve()),
        "num_threads": about["num_threads"],
        "max_tokens": MAX_TOKENS,
        **peer.settings,
    }
    return [str(python), "-P", "-m", peer.module, json.dumps(settings)]


def environment(own: Mapping[str, str], about: Mapping[str, Any]) -> dict[str, str]:
    """Ours, with this checkout on the path, as many threads as all have, and no hub; then the peer's `own`."""
    given = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": str(about["num_threads"]),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return with_brief_spin({**os.environ, **given, **own})
