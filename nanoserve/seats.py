"""What is known of each request while it waits or runs: its blocks, how far it has come, and its part of a step.

Knows how a request begins behind a prefix that is remembered, and leaves its own behind. Refuses to know other requests
(scheduler) and tensors.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

from nanoserve.cache.blocks import BlockTable
from nanoserve.cache.prefix import Node, PrefixTree
from nanoserve.request import Request


@dataclasses.dataclass(slots=True)
class Scheduled:
    """One request's part of a step: `num_new` positions after the `num_computed` ones whose keys and values are stored.

    `num_before` were stored already when its last token came, or when it was admitted: what came since ran for its next
    token, in one step or in chunks. `samples` tells whether its last known token is among them, so that a token comes
    of it. A padding row runs for nobody: its request has finished, and its batch has not. `table` says where its
    positions lie, None without a pool; `copied` is a block whose content has to be copied first. `prompt_targets` are
    positions whose tokens' probabilities come of it, and are wanted.
    """

    request: Request
    table: BlockTable | None
    num_computed: int
    num_new: int
    num_before: int
    samples: bool
    is_padding: bool = False
    copied: tuple[int, int] | None = None
    prompt_targets: range = range(0)


@dataclasses.dataclass(slots=True, eq=False)
class Seat:
    """What the scheduler knows of a request that is waiting or running.

    `place` is its age, in every queue. `path` are the nodes of its first blocks, as far as they are remembered.
    `num_hits` were found when it was first admitted; None before.
    """

    request: Request
    place: tuple[int, int]
    table: BlockTable | None
    num_computed: int = 0
    num_before: int = 0
    num_again: int = 0
    num_hits: int | None = None
    path: list[Node] = dataclasses.field(default_factory=list)

    @property
    def wants_whole_prompt(self) -> bool:
        """Whether each position of the prompt has to run: probabilities are wanted of it, and not told yet."""
        return self.request.params.prompt_logprobs and not self.request.num_output_tokens

    def reuse(self, path: list[Node]) -> None:
        """Begin behind these blocks. What ran for the next token before a preemption, and is found now, is no hit."""
        assert self.table is not None
        self.table.adopt([node.block for node in path])
        self.path, self.num_computed = path, self.table.num_tokens
        is_first_token = self.num_hits is not None and not self.request.num_output_tokens
        self.num_before = min(self.num_computed, self.num_hits or 0) if is_first_token else self.num_computed

    def give_back(self) -> None:
        """Nothing of it is stored any more, as far as it knows."""
        if self.table is not None:
            self.table.release()
        self.path, self.num_computed, self.num_before = [], 0, 0

    def remember(self, prefixes: PrefixTree, space: Hashable) -> None:
        """Blocks that are full are found from now on."""
        assert self.table is not None
        remember(prefixes, self.table, self.path, self.request.token_ids, num_computed=self.num_computed, space=space)

    def part(self, num_computed: int, num_new: int, **how: Any) -> Scheduled:
        """The request's part of a step."""
        is_whole = num_computed + num_new == len(self.request.token_ids)
        usual = {"num_before": self.num_before, "samples": is_whole}
        if self.wants_whole_prompt:
            how["prompt_targets"] = range(
                num_computed + 1, min(num_computed + num_new + 1, self.request.num_prompt_tokens)
            )
        return Scheduled(self.request, self.table, num_computed, num_new, **usual | how)


@dataclasses.dataclass(slots=True)
class Counts:
    """What came about since the scheduler was made: exact, and the same on every machine.

    `num_positions` ran in all steps together, `num_padding` of them for nobody. `num_recomputed` ran because their
    request had been preempted: of a prompt what had run, of a request that had answered its prompt and all its tokens,
    the newest included, whose own run only came with them. `num_failed_steps` are those that raised an error; whoever
    was taken back from one, to run again alone, is counted as preempted.
    """

    num_steps: int = 0
    num_positions: int = 0
    num_preemptions: int = 0
    num_recomputed: int = 0
    num_padding: int = 0
    num_failed_steps: int = 0


def remember(
    prefixes: PrefixTree,
    table: BlockTable,
    path: list[Node],
    token_ids: Sequence[Hashable],
    *,
    num_computed: int,
    space: Hashable = None,
) -> None:
    """Add the full blocks of a table that are not in `path` yet to the tree, and their nodes to `path`.

    Where another request was first, its block serves both: it takes the place of the table's own.
    """
    size = table.block_size
    for place in range(len(path), num_computed // size):
        ids, block = token_ids[place * size : (place + 1) * size], table.blocks[place]
        node = prefixes.add(path[-1] if path else None, tuple(ids), block, space)
        if node.block != block:
            table.swap(place, node.block)
        path.append(node)
