"""Reads of a cache alone: both kinds find what is stored, and only where it is stored."""

import pytest

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.sources.nanoserve_parts import KVReads
from nanoserve import EngineConfig
from nanoserve.cache.paged import PagedStep
from nanoserve.weights import load_model

CONTEXT = 44
"""Two whole blocks and most of a third."""


def token(of, context, **how):
    (emission,) = of.stream(context, **how)
    return emission.token_ids[0]


def marked(context):
    """In the last one of two KV heads with 16 channels each."""
    return 16 + context % 16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("requests", [1, 4])
def test_paged_and_contiguous_reads_find_the_mark(dtype, requests):
    """Whatever the precision: the heads of a group are added up, so that none of them wins by rounding."""
    loaded = KVReads(load_model(EngineConfig(model="tiny", device="cpu", dtype=dtype)))
    for context in (CONTEXT, 256, 1000):
        for kind in ("paged", "contiguous"):
            assert token(loaded, context, reads=kind, requests=requests) == marked(context)


@pytest.fixture
def read_after(tiny, monkeypatch):
    """Read again after a change of what a pool stores, or of the tables of its requests."""
    made = []

    class Kept(PagedStep):
        def __init__(self, pool, parts):
            super().__init__(pool, parts)
            made.append((pool, parts))

    monkeypatch.setattr("nanoserve.cache.paged.PagedStep", Kept)

    def read(requests, change):
        reads, key = KVReads(tiny), ("paged", CONTEXT, requests)
        assert token(reads, CONTEXT, reads="paged", requests=requests) == marked(CONTEXT)
        pool, parts = made[-1]
        change(pool, [part.table.blocks for part in parts])
        reads._prepared[key] = PagedStep(pool, parts), reads._prepared[key][1]
        return token(reads, CONTEXT, reads="paged", requests=requests)

    return read


def poison(pool, block):
    """Larger than any mark, at channel 1 of the first KV head."""
    for _, values in pool._layers:
        values[0, block * pool.block_size : (block + 1) * pool.block_size, 1] = 1e4


@pytest.mark.parametrize("requests", [1, 4])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_every_block_of_a_table_is_read(read_after, requests, place):
    assert read_after(requests, lambda pool, tables: poison(pool, tables[-1][place])) == 1


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_table_with_a_block_of_somebody_else_reads_something_else(read_after, place):
    def swap(pool, tables):
        poison(pool, tables[0][place])
        tables[1][place], tables[0][place] = tables[0][place], tables[1][place]

    assert read_after(2, lambda pool, tables: poison(pool, tables[0][place])) == marked(CONTEXT)
    assert read_after(2, swap) == 1


def test_a_read_of_the_other_half_of_the_positions_does_not_find_the_mark(read_after):
    def unmark(pool, tables):
        for _, values in pool._layers:
            values[:, ::2] = values[:, 1::2]

    assert read_after(1, unmark) != marked(CONTEXT)


def test_reads_are_of_a_cache_that_there_is(tiny):
    with pytest.raises(InstrumentError, match="one of paged, contiguous, not 'growing'"):
        token(KVReads(tiny), 8, reads="growing")
