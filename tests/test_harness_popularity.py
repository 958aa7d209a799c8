"""Zipf orders: what `random.choices` gives, the same uniforms for every alpha, and what is refused."""

import itertools
import math
import random

import pytest

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.popularity import zipf_order


@pytest.mark.parametrize("alpha", [0, 0.5, 1.0, 2.0, 3])
@pytest.mark.parametrize("seed", [0, 1, 42])
def test_an_order_is_what_random_chooses_with_these_weights(alpha, seed):
    weights = [1 / (rank + 1) ** alpha for rank in range(32)]
    assert zipf_order(200, 32, alpha, seed) == random.Random(seed).choices(range(32), weights, k=200)


def test_the_values_are_pinned():
    assert zipf_order(12, 32, 1.0, 42) == [7, 0, 1, 0, 10, 8, 20, 0, 2, 0, 0, 3]


def test_more_requests_continue_the_pattern():
    assert zipf_order(200, 32, 1.0, 3)[:50] == zipf_order(50, 32, 1.0, 3)


def test_all_alphas_share_the_uniforms_so_a_larger_one_never_moves_a_request_away_from_the_top():
    orders = [zipf_order(500, 32, alpha, 5) for alpha in (0.0, 0.5, 1.0, 2.0, 1000.0)]
    for flat, steep in itertools.pairwise(orders):
        assert all(a >= b for a, b in zip(flat, steep, strict=True))
    assert set(orders[-1]) == {0}


def test_alpha_zero_is_no_preference():
    order = zipf_order(32_000, 32, 0.0, 1)
    assert all(abs(order.count(rank) - 1000) < 5 * math.sqrt(1000) for rank in range(32))


@pytest.mark.parametrize("alpha", [-0.1, math.nan, math.inf, -math.inf])
def test_an_alpha_that_is_none_is_refused(alpha):
    with pytest.raises(InstrumentError, match=f"alpha must be finite and at least 0 .*, not {alpha}"):
        zipf_order(1, 1, alpha, 0)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((0, 1, 1.0, 0), "num_requests must be a whole number of at least 1, not 0"),
        ((1, 0, 1.0, 0), "num_prompts must be a whole number of at least 1, not 0"),
        ((1, 2.0, 1.0, 0), "num_prompts must be a whole number of at least 1, not 2.0"),
        ((1, 1, 1.0, -1), "seed must be a whole number of at least 0, not -1"),
    ],
)
def test_counts_that_are_none_are_refused(given, told):
    with pytest.raises(InstrumentError, match=told):
        zipf_order(*given)
