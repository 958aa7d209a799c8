"""The radix tree and its policies, without tensors: what is found, what goes first, and what is counted."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.cache.blocks import BlockAllocator, BlockTable
from nanoserve.cache.prefix import POLICIES, PrefixTree
from nanoserve.config import SamplingParams, SchedulerConfig
from nanoserve.errors import BlockError, ConfigError, OutOfBlocksError
from nanoserve.request import Request
from nanoserve.scheduler import Scheduler

NEVER = ()


class Store:
    """A tree and its pool, and a request's whole life in one call."""

    def __init__(self, num_blocks, policy="lru", block_size=1):
        self.tree = PrefixTree(block_size, policy)
        self.pool = BlockAllocator(num_blocks, self.tree)

    def begin(self, ids):
        """Blocks that are held, and how many of them were found."""
        path = self.tree.find(ids)
        self.pool.share([node.block for node in path])
        self.tree.admit(path, len(ids))
        size = self.tree.block_size
        blocks = [node.block for node in path]
        blocks += self.pool.allocate(len(ids) // size - len(path))
        for place in range(len(path), len(blocks)):
            parent = path[-1] if path else None
            path.append(self.tree.add(parent, tuple(ids[place * size : (place + 1) * size]), blocks[place]))
        return blocks

    def serve(self, ids):
        """Tokens that were found; everything is idle again afterwards."""
        num = len(self.tree.find(ids)) * self.tree.block_size
        self.pool.free(reversed(self.begin(ids)))
        return num


# What is found.


def test_a_prefix_is_found_in_whole_blocks_and_only_from_position_0():
    store = Store(8, block_size=4)
    store.serve(range(12))
    assert [store.serve(range(length)) for length in (3, 4, 7, 8, 12)] == [0, 4, 4, 8, 12]
    assert store.serve([*range(8), 99, 99, 99, 99]) == 8
    assert store.serve(range(4, 12)) == 0, "the same ids elsewhere are something else"


def test_what_another_model_or_dtype_has_computed_is_not_found():
    tree = PrefixTree(2)
    pool = BlockAllocator(4, tree)
    one, other = pool.allocate(2)
    tree.add(None, (1, 2), one, space=("model", "float32"))
    assert tree.find([1, 2], space=("model", "bfloat16")) == []
    assert tree.find([1, 2]) == []
    tree.add(None, (1, 2), other, space=("model", "bfloat16"))
    assert [node.block for node in tree.find([1, 2], space=("model", "float32"))] == [one]


def test_where_two_computed_the_same_the_first_block_stays():
    tree = PrefixTree(1)
    first, second = BlockAllocator(2, tree).allocate(2)
    assert tree.add(None, (7,), first).block == first
    assert tree.add(None, (7,), second).block == first
    assert (len(tree), tree.counts.num_added_blocks) == (1, 1)


def test_a_block_stands_for_as_many_tokens_as_it_has_and_for_one_thing():
    tree = PrefixTree(2)
    tree.add(None, (1, 2), 0)
    with pytest.raises(BlockError, match="stands for 2 tokens, not for 1"):
        tree.add(None, (3,), 1)
    with pytest.raises(BlockError, match="block 0 stands for other tokens already"):
        tree.add(None, (3, 4), 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((0,), "at least one token, not 0"),
        ((1, "mru"), "unknown prefix cache policy 'mru'; choose one of: lru, lfu, fifo, size"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        PrefixTree(*options)


def test_a_prefix_is_not_longer_than_its_prompt():
    store = Store(4, block_size=2)
    store.serve(range(8))
    with pytest.raises(BlockError, match="a prefix of 8 tokens is longer than a prompt of 7"):
        store.tree.admit(store.tree.find(range(8)), 7)
    assert store.tree.counts.num_queries == 1


@pytest.mark.parametrize("config", [{"num_blocks": 4, "block_size": 8}, {"block_size": 4}])
def test_the_blocks_of_a_pool_and_of_its_prefixes_are_of_one_size(config):
    with pytest.raises(ConfigError, match="a prefix cache of blocks of 4 tokens needs a pool of such blocks"):
        Scheduler(SchedulerConfig(**config), PrefixTree(4))


# What goes first.


def test_a_prefix_never_goes_before_its_continuation():
    """Blocks 1, 2, 3 are remembered: as they go, what is found shrinks from the end, until nothing is."""
    store = Store(3)
    store.serve("abc")
    assert len(store.tree.find("abc")) == 3
    for left in (2, 1, 0):
        store.pool._free += store.tree.evict(1)
        assert len(store.tree.find("abc")) == left


def test_what_is_held_is_not_evicted_and_nothing_is_taken_for_more_than_there_is():
    store = Store(3)
    held = store.begin("ab")
    store.serve("abc")
    with pytest.raises(OutOfBlocksError):
        store.pool.allocate(2)
    assert store.serve("abc") == 3, "a failed allocation evicts nothing"
    assert store.pool.allocate(1)
    assert [node.block for node in store.tree.find("abc")] == held


def test_a_prefix_that_is_held_becomes_idle_with_its_last_owner():
    """Its continuation goes while it is held; it goes after that, though nothing else happens to it."""
    store = Store(3)
    first, second = store.begin("a"), store.begin("ab")
    store.pool.free([second[1]])
    store.pool.free([second[0]])
    assert store.tree.evict(1) == [second[1]]
    store.pool._free.append(second[1])
    store.pool.free(first)
    assert len(store.pool.allocate(3)) == 3


def hits(order, num_blocks, policy):
    store = Store(num_blocks, policy)
    return sum(store.serve(ids) for ids in order)


@pytest.mark.parametrize(
    ("order", "policy", "expected"),
    [
        ("AABCA", "lfu", 2), ("AABCA", "lru", 1), ("AABCA", "fifo", 1),
        ("AAABCBCBCBC", "lfu", 2), ("AAABCBCBCBC", "lru", 8),
    ],
)  # fmt: skip
def test_small_traces(order, policy, expected):
    assert hits(order, 2, policy) == expected


def test_blocks_that_were_used_together_go_together_and_no_others():
    """A prefix that others used as well stays; the blocks of one request come back in the order of their numbers."""
    tree = PrefixTree(1, evicts_runs=True)
    store = Store(9)
    store.tree, store.pool = tree, BlockAllocator(9, tree)
    for ids in ("abcde", "abxy", "z"):
        store.serve(ids)
    assert store.pool.allocate(2) == [8, 2]
    assert [len(tree.find(ids)) for ids in ("abcde", "abxy", "z")] == [2, 4, 1]
    assert tree.counts.num_evicted_blocks == 3
    assert store.pool.allocate(2) == [3, 4]
    store.pool.check([[8, 2, 3, 4]])


def test_by_size_the_longest_of_equally_used_prefixes_loses_its_end():
    store = Store(6, "size")
    for ids in ("abcd", "xy", "z"):
        store.serve(ids)
    assert [len(store.tree.find(ids)) for ids in ("abcd", "xy")] == [3, 2]


class Plain:
    """What the tree is held against: a list of prefixes, searched from one end to the other at every step."""

    def __init__(self, num_blocks, policy):
        self.num_blocks, self.policy, self.now, self.order = num_blocks, policy, 0, 0
        self.known = {}

    def serve(self, ids):
        prefixes = [tuple(ids[: end + 1]) for end in range(len(ids))]
        found = [prefix for prefix in prefixes if prefix in self.known]
        self.now += 1
        for prefix in found:
            self.known[prefix] |= {"uses": self.known[prefix]["uses"] + 1, "last": self.now}
        for prefix in prefixes[len(found) :]:
            if len(self.known) == self.num_blocks:
                del self.known[min(self.leaves(prefixes), key=self.rank)]
            self.known[prefix] = {"uses": 1, "last": self.now, "born": self.now, "depth": len(prefix), "idle": 0}
        return len(found)

    def leaves(self, held):
        inner = {prefix[:-1] for prefix in self.known}
        return [prefix for prefix in self.known if prefix not in inner and prefix not in held]

    def rank(self, prefix):
        each = self.known[prefix]
        return {
            "lru": (each["last"],),
            "lfu": (each["uses"], each["last"]),
            "fifo": (each["born"],),
            "size": (each["uses"] / each["depth"], each["last"]),
        }[self.policy]


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_tree_does_what_a_search_through_everything_does(policy, data):
    """Requests of few letters, so that they share prefixes. No ties: each block is of one request at a time."""
    num_blocks = data.draw(st.integers(4, 9))
    requests = data.draw(st.lists(st.text("ab", min_size=1, max_size=4), max_size=25))
    store, plain = Store(num_blocks, policy), Plain(num_blocks, policy)
    for ids in requests:
        assert store.serve(ids) == plain.serve(ids)
        store.pool.check([])
        assert len(store.tree) == len(plain.known)


def test_the_queue_of_idle_blocks_does_not_grow_without_evictions():
    store = Store(4)
    for _ in range(1000):
        store.serve("abcd")
    assert len(store.tree._queue) < 100


def test_fewest_uses_are_those_since_a_block_is_here():
    """As in the published simulation: a count is forgotten with its block."""
    orders = {alpha: random.Random(42).choices(range(32), [1 / (k + 1) ** alpha for k in range(32)], k=200)
              for alpha in (0.5, 1.0, 2.0)}  # fmt: skip
    expected = {"lru": [25, 62, 156], "lfu": [53, 83, 165], "fifo": [27, 58, 145]}
    for policy, counts in expected.items():
        assert [hits([(each,) for each in order], 4, policy) for order in orders.values()] == counts
    assert [hits([(each,) for each in order], 32, "lru") for order in orders.values()] == [168, 169, 183]


# In a scheduler.


def scheduler_of(num_blocks=16, block_size=4, **config):
    return Scheduler(SchedulerConfig(num_blocks=num_blocks, block_size=block_size, **config), PrefixTree(block_size))


def request(name, prompt, budget=1):
    return Request(name, prompt, SamplingParams(max_new_tokens=budget, ignore_eos=True))


def step(scheduler):
    scheduled = list(scheduler.schedule())
    for each in scheduled:
        if each.samples:
            each.request.append(7, NEVER)
    scheduler.commit()
    scheduler.check()
    return [(each.request.request_id, each.num_computed, each.num_new, each.num_before) for each in scheduled]


def drain(scheduler, *requests):
    for each in requests:
        scheduler.add(each)
    steps = []
    while scheduler.has_work:
        steps += step(scheduler)
    return steps


def test_a_prompt_that_is_sent_again_runs_its_last_block():
    """64 tokens in blocks of 16: 48 are found, as the last token has to run."""
    scheduler = scheduler_of(block_size=16)
    drain(scheduler, request("a", range(64)))
    assert drain(scheduler, request("b", range(64))) == [("b", 48, 16, 48)]
    counts = scheduler.prefixes.counts
    assert (counts.num_queries, counts.num_query_tokens, counts.num_hit_tokens) == (2, 128, 48)


def test_an_answer_is_found_in_the_next_turn_but_for_its_last_token():
    """A prompt of 100 and an answer of 50: 149 positions have run, 144 of them in whole blocks of 16."""
    scheduler = scheduler_of(block_size=16, num_blocks=64)
    first = request("a", list(range(100)), 50)
    drain(scheduler, first)
    following = [*first.token_ids, *range(50)]
    assert drain(scheduler, request("b", following)) == [("b", 144, 56, 144)]


def test_a_lookup_that_waits_for_room_counts_once():
    """b finds two blocks at every step and is admitted at the fourth."""
    scheduler = scheduler_of(num_blocks=6)
    drain(scheduler, request("x", range(8)))
    scheduler.add(request("a", range(100, 112), 4))
    step(scheduler)
    scheduler.add(request("b", [*range(8), 50, 51, 52, 53, 54]))
    waited = [step(scheduler) for _ in range(3)]
    assert [[name for name, *_ in each] for each in waited] == [["a"]] * 3
    before = scheduler.prefixes.counts.num_queries
    assert step(scheduler) == [("b", 8, 5, 8)]
    assert scheduler.prefixes.counts.num_queries == before + 1
    assert scheduler.prefixes.counts.num_hit_tokens == 8


def test_what_a_preempted_request_finds_of_itself_is_no_hit():
    scheduler = scheduler_of(num_blocks=6, max_running=2)
    steps = drain(scheduler, request("a", range(8), 9), request("b", range(50, 58), 9))
    assert scheduler.counts.num_preemptions == 1
    back = next(each for each in steps[2:] if each[0] == "b" and each[2] > 1)
    assert back[1] > 0, "its blocks were still there"
    counts = scheduler.prefixes.counts
    assert (counts.num_queries, counts.num_query_tokens, counts.num_hit_tokens) == (2, 16, 0)
    assert scheduler.counts.num_recomputed == back[2]


@pytest.mark.parametrize("policy", ["lru", "lfu", "size"])
def test_a_block_that_is_run_again_is_used_again(policy):
    """The last block of a prompt of whole blocks is never found, as its last token has to run: it is used too."""
    scheduler = Scheduler(SchedulerConfig(num_blocks=12, block_size=4), PrefixTree(4, policy))
    for name, first in (("a", 0), ("b", 100), ("c", 200), ("again", 0), ("and again", 0)):
        drain(scheduler, request(name, range(first, first + 16)))
    drain(scheduler, request("d", range(300, 316)))
    assert [len(scheduler.prefixes.find(range(first, first + 16))) for first in (0, 300)] == [4, 4]


@pytest.mark.parametrize(("prefixes", "num_again"), [(None, 8), (PrefixTree(2), 0)])
def test_a_prompt_that_is_preempted_one_token_before_its_end_was_not_decoding(prefixes, num_again):
    scheduler = Scheduler(SchedulerConfig(num_blocks=6, block_size=2, max_running=2, max_step_tokens=10), prefixes)
    drain(scheduler, request("a", [1, 2], 3), request("b", range(10, 19)))
    assert (scheduler.counts.num_preemptions, scheduler.counts.num_recomputed) == (1, num_again)
    assert scheduler.counts.num_positions == 4 + 9 + num_again


def test_what_ran_before_a_preemption_in_mid_prompt_ran_for_the_first_token():
    """a's growth takes the room in which b's prompt runs in chunks. b finds its first chunks, and they were no hits."""
    scheduler = scheduler_of(num_blocks=6, max_running=2, max_step_tokens=6)
    steps = drain(scheduler, request("a", range(4), 16), request("b", range(50, 66), 2))
    assert scheduler.counts.num_preemptions >= 1
    of_b = [each for each in steps if each[0] == "b"]
    assert any(num_computed for _, num_computed, _, _ in of_b)
    first_token = next(each for each in of_b if each[1] + each[2] == 16)
    assert first_token[3] == 0, "nothing was stored before its first chunk"


def test_two_that_compute_the_same_at_once_hold_it_once_afterwards():
    scheduler = scheduler_of(num_blocks=8)
    scheduler.add(request("a", range(9), 2))
    scheduler.add(request("b", range(9), 2))
    step(scheduler)
    first, second = scheduler.tables
    assert first.blocks[:2] == second.blocks[:2]
    assert scheduler.pool.num_free == 8 - 2 - 2


def test_room_is_counted_after_what_is_found():
    """b finds two of its three blocks: one more is enough, though they were idle, and counted as free."""
    scheduler = scheduler_of(num_blocks=4)
    drain(scheduler, request("x", range(8)))
    scheduler.add(request("a", [90], 2))
    step(scheduler)
    scheduler.add(request("b", [*range(8), 1]))
    assert [name for name, *_ in step(scheduler)] == ["a", "b"]


def test_a_table_swaps_a_block_for_one_of_the_same_content():
    tree = PrefixTree(1)
    pool = BlockAllocator(3, tree)
    one, other = BlockTable(pool, 1), BlockTable(pool, 1)
    one.grow(1)
    other.grow(1)
    other.swap(0, one.blocks[0])
    assert (other.blocks, pool.num_owners(one.blocks[0]), pool.num_free) == (one.blocks, 2, 2)


def test_a_pool_that_has_forgotten_everything_hands_out_its_blocks_as_a_new_one():
    store = Store(5)
    for ids in ("abc", "x", "ay"):
        store.serve(ids)
    store.pool.forget_idle()
    assert (store.pool.num_free, store.pool.num_idle, store.tree.find("abc")) == (5, 0, [])
    assert store.pool.allocate(5) == [0, 1, 2, 3, 4]
