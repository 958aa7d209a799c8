"""How many prompts a prefix cache finds again, by its size and by who leaves it first: counted, with no model, no time
and no noise. Any change is a change.

`test_zipf` is the simulation of a published study of prefix caches, with what it left open settled: 200 requests for
one of 32 prompts of a block each, every first use a miss, a fixed list of seeds whose counts are added up. Its "84 to
91 % with unlimited slots" are the first uses that no cache can save; the arm `unlimited` is that floor. With prompts of
one block `size` is `lfu`, and they have to agree. `test_trace` is made up (`generate_trace(200, 0)` of
`harness/prefix_traces.py`): conversations behind shared system prompts, where blocks build on others and only the last
ones of a prefix can leave. Any other trace: `python -m benchmarks replay`.

Cannot see: what a hit saves (`bench_prefix_cache.py`), what it costs to find, add and evict; requests that run side by
side and hold each other's blocks; answers, whose blocks an engine keeps as well.
"""

from pathlib import Path

import pytest

TRACE = Path(__file__).parent / "traces" / "prefixes.jsonl"
POLICIES = ("lru", "lfu", "fifo", "size")


def _arms(name, *sizes):
    """Every policy at every size, the optimum, which knows what comes, and one that never has to choose."""
    every = (*POLICIES, "optimum")
    chosen = {f"{policy}_{size}": {"policy": policy, name: size} for policy in every for size in sizes}
    return pytest.mark.arms(**chosen, unlimited={"policy": "lru", name: None})


@_arms("slots", 4, 8, 16)
@pytest.mark.quantities("num_missed_requests")
@pytest.mark.parametrize(
    ("alpha", "num_seeds"),
    [
        (1.0, 20),
        pytest.param(1.0, 200, marks=[pytest.mark.desk, pytest.mark.study]),
        *(pytest.param(a, 200, marks=[pytest.mark.desk, pytest.mark.full, pytest.mark.study]) for a in (0.5, 2.0)),
    ],
)
def test_zipf(count_work, alpha, num_seeds, benchmark):
    """From nearly alike to nearly always the same one. Where nothing is measured, a few seeds say whether it works."""
    seeds = num_seeds if benchmark.enabled else 5
    count_work.hit_rate(num_requests=200, num_prompts=32, alpha=alpha, seeds=seeds)


@_arms("capacity", 16, 64, 128)
@pytest.mark.quantities("num_missed_blocks")
def test_trace(count_work):
    """Conversations that grow, behind system prompts."""
    count_work.replay(TRACE)
