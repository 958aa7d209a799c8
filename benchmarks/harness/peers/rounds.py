"""Lets the peers take turns: in each round and scene every peer once, in random order, each after a warm-up of its own.

Knows workers, scenes and prompts. Refuses to know what numbers mean. All peers get the same prompts in a round, and no
prompt begins like one that any peer has seen, but for the second of a prefix scene: a prefix cache would answer it.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from benchmarks.harness.errors import PeerError
from benchmarks.harness.peers.columns import Scene
from benchmarks.harness.peers.process import Reply

WARM_TOKENS = 4
"""A warm-up computes prompts of the full length, and decodes this far."""


class Asked(Protocol):
    """A worker as far as turns go."""

    @property
    def is_alive(self) -> bool: ...

    def ask(self, prompts: Sequence[Sequence[int]], num_new_tokens: int) -> Reply: ...


class Turn(NamedTuple):
    """What came of one peer in one round of one scene: replies, or why there are none."""

    round: int
    scene: Scene
    peer: str
    replies: Sequence[Reply] = ()
    failure: str = ""


Asks = Sequence[Sequence[Sequence[int]]]
"""The prompts of each ask of a scene."""


class Prompts:
    """Seeded random ids; each prompt begins with another number, so none is a prefix of another."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size, self._random, self._serial = vocab_size, random.Random(seed), 0

    def asks(self, scene: Scene) -> Asks:
        """New prompts for all asks of a scene."""
        first = [self._ids(scene.prompt_tokens) for _ in range(scene.num_requests)]
        if not scene.prefix_tokens:
            return [first]
        rest = scene.prompt_tokens - scene.prefix_tokens
        return [first, [ids[: scene.prefix_tokens] + self._ids(rest) for ids in first]]

    def _ids(self, num_tokens: int) -> list[int]:
        self._serial += 1
        return [self._serial % self._vocab_size, *self._random.choices(range(self._vocab_size), k=num_tokens - 1)]


def measure(
    workers: Mapping[str, Asked],
    scenes: Sequence[Scene],
    *,
    rounds: int,
    prompts: Prompts,
    seed: int,
    around: Callable[[int], object] = lambda number: None,
    say: Callable[[str], object] = lambda text: None,
) -> list[Turn]:
    """Every turn that was taken, and why others were not. `around` is called before the first round and after each.

    A peer that fails in a scene is not asked for it again; one that has died is not asked for anything.
    """
    order, given_up, turns = random.Random(seed), dict[tuple[str, str], str](), list[Turn]()
    around(0)
    for number in range(1, rounds + 1):
        for scene in scenes:
            warm, timed = prompts.asks(scene), prompts.asks(scene)
            for peer in order.sample([*workers], k=len(workers)):
                say(f"round {number} of {rounds}, {scene.name}, {peer}")
                why = given_up.get((peer, scene.name)) or given_up.get((peer, ""), "")
                turn = Turn(number, scene, peer, failure=why)
                if not why:
                    turn = _taken(turn, workers[peer], warm, timed)
                if turn.failure and not why:
                    given_up[peer, scene.name if workers[peer].is_alive else ""] = turn.failure
                turns.append(turn)
        around(number)
    return turns


def _taken(turn: Turn, worker: Asked, warm: Asks, timed: Asks) -> Turn:
    new_tokens = turn.scene.new_tokens
    try:
        for prompts in warm:
            worker.ask(prompts, min(new_tokens, WARM_TOKENS))
        return turn._replace(replies=[worker.ask(prompts, new_tokens) for prompts in timed])
    except PeerError as error:
        return turn._replace(failure=str(error))
