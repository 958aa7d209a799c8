"""What a step holds of keys and values, in bytes: reserved, wasted inside blocks, unused in the pool. Exact.

A contiguous cache reserves what a request may still ask for. A pool wastes the rest of each last block, and what nobody
holds of it stays ready for others: with small blocks the first is small, with a pool of the right size the second.

Cannot see: fragmentation of the allocator below, intermediate results (`bench_work.py`).
"""

import pytest

POOL = {"cache": "paged", "num_blocks": 32}


@pytest.mark.arms(
    block_8=POOL | {"block_size": 8}, block_16=POOL | {"block_size": 16}, block_32=POOL | {"block_size": 32}
)
@pytest.mark.quantities("kv_bytes", "num_kv_blocks", "kv_waste_bytes", "kv_unused_bytes")
@pytest.mark.parametrize("context_tokens", [16, 100])
def test_blocks_of_a_request(count_work, context_tokens):
    """One request in a pool of 32 blocks."""
    count_work.decode_step(context_tokens=context_tokens)


SHARING = {"cache": "paged", "num_blocks": 32}


@pytest.mark.arms(shared=SHARING | {"prefix_cache": "lru"}, apart=SHARING | {"prefix_cache": "off"})
@pytest.mark.quantities("num_kv_blocks")
@pytest.mark.parametrize("num_requests", [pytest.param(1, marks=pytest.mark.desk), 4])
def test_blocks_of_one_prefix(count_work, num_requests):
    """What requests hold that share 32 tokens: (N - 1) x 32 positions less, which are 2 blocks for each but one."""
    count_work.sharing(num_requests=num_requests, prefix_tokens=32, suffix_tokens=16)
