"""What a prefix cache saves: the prompt that was computed before, and what is left to pay for it.

Each claim has four arms. Cold: nothing was served before. Primed: the prefix was, so that only the suffix runs. Unseen:
the prefix was, and another prompt of that length is asked, which must cost what a cold one does, or the "speedup" is
warm-up. Suffix only: the suffix alone, as if nothing came before it; a published proxy of a hit that leaves out reading
the prefix's keys and values, and flatters the cache. Before anything is timed, the logits behind a found prefix have to
equal those without a cache; what is found has to be what was stored, to the token.

TTFT = max(floor, a + b n + c n^2) is one curve; savings and breakeven follow from it, and are measured as well.

Cannot see: a hit rate of real traffic (`bench_hit_rate.py` counts, `python -m benchmarks replay` reads traces), clients
at once (`test_batched_sharing` has equal ones), a pool that many requests have torn to pieces.
"""

import pytest

from benchmarks.harness.arrivals import together
from benchmarks.harness.popularity import zipf_order

DESK, FULL, STUDY = ("desk",), ("desk", "full"), ("desk", "full", "study")

POOL = {"cache": "paged", "kv_memory": "1GiB"}
OFF = POOL | {"prefix_cache": "off"}

COLD, PRIMED, PREFIX_ONLY = POOL | {"state": "cold"}, POOL | {"state": "primed"}, POOL | {"state": "prefix"}
four_arms = pytest.mark.arms(
    cold=COLD,
    primed=PRIMED,
    unseen=POOL | {"state": "unseen"},
    suffix_only=POOL | {"state": "suffix"},
    prefix_only=PREFIX_ONLY,
)

SAVINGS = (
    "reuse_speedup",
    "reuse_speedup_proxy",
    "cold_over_unseen",
    "ttft_saved_s",
    "prefill_removed_s",
    "kv_read_added_s",
)


def points(by_marks):
    """Parameters that some profiles leave out."""
    return [
        pytest.param(*values, marks=[getattr(pytest.mark, mark) for mark in marks])
        for marks, some in by_marks.items()
        for values in some
    ]


@pytest.mark.arms(uncached=OFF)
@pytest.mark.quantities("ttft_floor_s", "ttft_floor_until_tokens", "ttft_overhead_s", "ttft_per_token_s", "ttft_growth")
@pytest.mark.parametrize("longest", points({STUDY: [(1024,)], FULL: [(2000,)]}))
def test_prefill_curve(measure, longest):
    """T(n): what all savings follow from."""
    lengths = [length for length in (16, 32, 64, 128, 256, 512, 1024, 2000) if length <= longest]
    measure.sweep(prompt_tokens=lengths, new_tokens=1)


@four_arms
@pytest.mark.quantities("ttft_s", *SAVINGS, "breakeven_requests")
@pytest.mark.parametrize(
    ("prefix_tokens", "suffix_tokens"),
    points(
        {
            DESK: [(256, 16)],
            STUDY: [(128, 64), (256, 64), (512, 64), (512, 128)],
            FULL: [
                (64, 16),
                (128, 16),
                (512, 16),
                (1024, 16),
                (64, 64),
                (1024, 64),
                (64, 128),
                (128, 128),
                (256, 128),
                (1024, 128),
            ],
        }
    ),
)
def test_reuse(measure, prefix_tokens, suffix_tokens):
    """The saving of one hit, taken apart, and from how many requests on a prefix pays for itself."""
    measure.reuse(prefix_tokens=prefix_tokens, suffix_tokens=suffix_tokens)


@four_arms
@pytest.mark.quantities("derived_over_direct")
@pytest.mark.parametrize("suffix_tokens", points({STUDY: [(64,)]}))
def test_derived_against_direct(measure, suffix_tokens):
    """The saving that T(n) implies over the one that is measured, in the same minutes: 1, or one of them is wrong."""
    measure.reuse(prefix_tokens=[32, 64, 128, 256, 512], suffix_tokens=suffix_tokens)


@pytest.mark.arms(carried=POOL, off=OFF)
@pytest.mark.quantities("turns_speedup", "turns_saved_s", "mean_ttft_s", "hit_rate")
@pytest.mark.parametrize(
    ("num_turns", "turn_tokens", "answer_tokens"),
    points({FULL: [(4, 32, 4), (10, 64, 32)], STUDY: [(10, 64, 4)]}),
)
def test_conversation(measure, num_turns, turn_tokens, answer_tokens):
    """Each turn begins with all ids so far, answers included: the first saves nothing, the last the most."""
    measure.converse(num_turns=num_turns, turn_tokens=turn_tokens, answer_tokens=answer_tokens)
    measure.compare(slow="off", fast="carried")


@pytest.mark.arms(apart=OFF | {"state": "cold"}, shared=PRIMED, prefix_only=PREFIX_ONLY)
@pytest.mark.quantities("batched_breakeven_requests")
@pytest.mark.parametrize(("prefix_tokens", "suffix_tokens"), points({STUDY: [(128, 64), (256, 64), (512, 64)]}))
def test_batched_sharing(measure, prefix_tokens, suffix_tokens):
    """The prefix once, then all suffixes in one forward, against all whole prompts in one."""
    measure.sharing([1, 2, 4], prefix_tokens=prefix_tokens, suffix_tokens=suffix_tokens)


SMALL = {"cache": "paged", "num_blocks": 32}


@pytest.mark.arms(lru=SMALL | {"prefix_cache": "lru"}, off=SMALL | {"prefix_cache": "off"})
@pytest.mark.quantities("mean_ttft_s", "hit_rate", "effective_speedup", "ttft_over_expected")
@pytest.mark.parametrize("alpha", points({STUDY: [(1.0,)], FULL: [(0.5,), (2.0,)]}))
def test_zipf_served(measure, alpha):
    """A hit rate is not a speedup: prefixes of Zipf's popularity through a pool that holds some of them."""
    measure.revisit(zipf_order(40, 32, alpha, seed=1), prefix_tokens=64, suffix_tokens=16)
    measure.compare(slow="off", fast="lru")
    measure.price(of="lru", against="off")


@pytest.mark.arms(kept=SMALL | {"prefix_cache": "lru"}, off=SMALL | {"prefix_cache": "off"})
@pytest.mark.quantities("ttft_s", "itl_p50_s", "ttft_price", "itl_price")
@pytest.mark.parametrize("prompt_tokens", points({FULL: [(128,)]}))
def test_cost_without_hits(measure, prompt_tokens):
    """What a prefix cache costs those who never hit, in a pool that is full: lookups, insertions and evictions."""
    measure.serve(together(1, prompt_tokens=prompt_tokens, new_tokens=12))
    measure.price(of="kept", against="off")


@pytest.mark.arms(bookkeeping=POOL | {"model": "none"}, whole=POOL)
@pytest.mark.quantities("ttft_s", "itl_p50_s", "ttft_price", "itl_price")
@pytest.mark.parametrize("prompt_tokens", points({FULL: [(128,)]}))
def test_bookkeeping_without_hits(measure, prompt_tokens):
    """The same from above: all that is no model, the prefix cache in it, as a share of a step."""
    measure.serve(together(1, prompt_tokens=prompt_tokens, new_tokens=12), same_tokens=False)
    measure.price(of="bookkeeping", against="whole")


@pytest.mark.arms(lookup={"prefixes": 100_000}, prefill=POOL)
@pytest.mark.quantities("ttft_s", "ttft_price")
@pytest.mark.parametrize("prompt_tokens", points({DESK: [(512,)], FULL: [(64,)]}))
def test_lookup(measure, prompt_tokens):
    """A prompt sought, stored and sought again among 100,000 blocks, against the prefill that a hit saves."""
    measure.serve(together(1, prompt_tokens=prompt_tokens, new_tokens=1), same_tokens=False)
    measure.price(of="lookup", against="prefill")
