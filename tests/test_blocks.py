"""KV blocks: handed out last in, first out, all or none; shared by count; copied before they are written to."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.cache.blocks import BlockAllocator, BlockTable
from nanoserve.errors import BlockError, OutOfBlocksError


def table(allocator, num_tokens, block_size=16):
    made = BlockTable(allocator, block_size)
    made.grow(num_tokens)
    return made


def test_the_block_freed_last_is_handed_out_first():
    pool = BlockAllocator(6)
    a, b, c = table(pool, 40), table(pool, 20), table(pool, 16)
    assert (a.blocks, b.blocks, c.blocks) == ([0, 1, 2], [3, 4], [5])
    with pytest.raises(OutOfBlocksError, match="1 blocks are wanted and 0 of 6 are free"):
        table(pool, 1)
    pool.check([a.blocks, b.blocks, c.blocks])
    pool.free(a.blocks)
    assert table(pool, 30).blocks == [2, 1]


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([5], "freed 1 times and has 0 owners"),
        ([0, 0], "freed 2 times"),
        ([7], "not of this pool"),
        ([-1], "not of this"),
    ],
)
def test_a_double_or_foreign_free_raises_and_changes_nothing(blocks, message):
    pool = BlockAllocator(6)
    held = pool.allocate(2)
    with pytest.raises(BlockError, match=message):
        pool.free([1, *blocks])
    pool.check([held])
    assert pool.num_free == 4


def test_allocation_is_all_or_nothing():
    pool = BlockAllocator(3)
    pool.allocate(2)
    with pytest.raises(OutOfBlocksError):
        pool.allocate(2)
    assert pool.allocate(1) == [2]


@pytest.mark.parametrize("num", [0, -1])
def test_a_pool_without_blocks_is_refused(num):
    with pytest.raises(BlockError, match=f"at least one block, not {num}"):
        BlockAllocator(num)


def test_a_negative_number_of_blocks_is_refused():
    with pytest.raises(BlockError, match="cannot allocate -1 blocks"):
        BlockAllocator(3).allocate(-1)


# Tables.


def test_a_position_is_a_block_and_an_offset():
    pool = BlockAllocator(8)
    pool.allocate(3)
    made = table(pool, 6, block_size=4)
    assert made.blocks == [3, 4]
    assert made.slots(5, 6) == [4 * 4 + 1]
    assert made.slots(3, 6) == [15, 16, 17]


def test_ten_appends_of_one_equal_one_of_ten():
    one_by_one, at_once = (BlockTable(BlockAllocator(8), 4) for _ in range(2))
    for num_tokens in range(1, 11):
        one_by_one.grow(num_tokens)
    at_once.grow(10)
    assert (one_by_one.blocks, one_by_one.slots(0, 10)) == (at_once.blocks, at_once.slots(0, 10))


def test_a_prompt_that_fills_its_block_buys_the_next_one_with_its_first_decode():
    made = table(BlockAllocator(8), 4, block_size=4)
    assert made.blocks == [0]
    assert made.num_missing(5) == 1
    made.grow(5)
    assert made.blocks == [0, 1]


def test_a_growth_that_fails_leaves_everything_as_it_was():
    pool = BlockAllocator(3)
    made = table(pool, 8, block_size=4)
    with pytest.raises(OutOfBlocksError):
        made.grow(17)
    assert (made.blocks, made.num_tokens, pool.num_free) == ([0, 1], 8, 1)


# Sharing.


def test_a_shared_block_is_free_when_its_last_owner_lets_go():
    pool = BlockAllocator(4)
    first = table(pool, 8, block_size=4)
    second = first.fork()
    pool.check([first.blocks, second.blocks])
    first.release()
    assert pool.num_free == 2
    second.release()
    assert pool.num_free == 4


def test_who_writes_into_a_shared_block_copies_it_first():
    pool = BlockAllocator(4)
    first = table(pool, 6, block_size=4)
    second = first.fork()
    assert second.num_missing(7) == 1
    assert second.grow(7) == (1, 2)
    assert (first.blocks, second.blocks) == ([0, 1], [0, 2])
    assert first.grow(7) is None, "nobody reads it any more"
    pool.check([first.blocks, second.blocks])


def test_a_full_shared_block_is_not_written_to_and_not_copied():
    first = table(BlockAllocator(4), 4, block_size=4)
    second = first.fork()
    assert second.grow(5) is None
    assert second.blocks == [0, 1]


def test_a_copy_that_finds_no_block_leaves_the_sharing_as_it_was():
    pool = BlockAllocator(2)
    first = table(pool, 6, block_size=4)
    second = first.fork()
    with pytest.raises(OutOfBlocksError):
        second.grow(7)
    assert second.blocks == [0, 1]
    pool.check([first.blocks, second.blocks])


def test_a_free_block_cannot_be_shared():
    pool = BlockAllocator(4)
    pool.allocate(1)
    with pytest.raises(BlockError, match="block 3 is free"):
        pool.share([0, 3])
    assert pool.num_owners(0) == 1


def test_a_leak_is_named():
    pool = BlockAllocator(4)
    held = pool.allocate(2)
    with pytest.raises(BlockError, match="block 1 has 1 owners, and 0 tables hold it"):
        pool.check([held[:1]])


@given(st.integers(0, 2**32), st.integers(1, 5))
def test_every_block_is_free_or_owned_whatever_happens(seed, block_size):
    rng, pool, tables = random.Random(seed), BlockAllocator(12), []
    for _ in range(60):
        what = rng.choice(["new", "grow", "fork", "release"])
        try:
            if what == "new":
                tables.append(table(pool, rng.randint(1, 3 * block_size), block_size))
            elif tables and what == "grow":
                chosen = rng.choice(tables)
                chosen.grow(chosen.num_tokens + rng.randint(0, 2 * block_size))
            elif tables and what == "fork":
                tables.append(rng.choice(tables).fork())
            elif tables:
                tables.pop(rng.randrange(len(tables))).release()
        except OutOfBlocksError:
            pass
        pool.check(each.blocks for each in tables)
        for each in tables:
            slots = each.slots(0, each.num_tokens)
            assert len(set(slots)) == each.num_tokens


def test_a_released_table_comes_back_in_the_order_of_its_positions():
    """Or every second request alone would find its blocks in reverse, and could not be read in place."""
    allocator = BlockAllocator(6)
    for _ in range(3):
        table = BlockTable(allocator, 4)
        table.grow(16)
        assert table.blocks == [0, 1, 2, 3]
        table.release()
