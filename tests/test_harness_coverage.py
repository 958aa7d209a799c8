"""An interval that says 95 % holds the truth in 95 of 100 simulated experiments: every interval of the instrument.

Each experiment below draws samples whose truth is known and returns, by name, the interval found and that truth. The
slow runs are 2,000 per experiment with a band of two points; the quick ones catch what is grossly wrong.
"""

import collections

import numpy as np
import pytest
from scipy.stats import binom

from benchmarks.harness.fits import crossover, fit_affine, fit_floor_limited, fit_quadratic, root, root_of_difference
from benchmarks.harness.stats import bootstrap_interval, paired_ratio, quantile_interval, wilson_interval

LENGTHS = np.array([16.0, 64, 256, 1024, 4096])
MORE_LENGTHS = np.array([16.0, 32, 64, 128, 256, 512, 1024, 2048, 4096])


def normal(rng, size):
    return rng.normal(0, 1, size)


def skewed(rng, size):
    """Of mean 0 and standard deviation 1, with a long tail upwards, as timings have: gamma noise of skewness 1."""
    return (rng.gamma(4, 1, size) - 4) / 2


# Experiments: one draw, and what is true of it.


def median_of(n, sigma):
    return lambda rng: {"median": (quantile_interval(rng.lognormal(0, sigma, n).tolist(), 0.5), 1.0)}


def p90_of(n):
    return lambda rng: {"p90": (quantile_interval(rng.exponential(1, n).tolist(), 0.9), np.log(10))}


def ratio_of(n):
    """Both sides of a pair share the state of the host; the ratio of their medians is 3."""

    def experiment(rng):
        host = rng.lognormal(0, 0.3, n)
        slow, fast = 3 * host * rng.lognormal(0, 0.05, n), host * rng.lognormal(0, 0.05, n)
        return {"ratio": (paired_ratio(slow.tolist(), fast.tolist()).interval, 3.0)}

    return experiment


def normal_mean(n):
    return lambda rng: {"mean": (bootstrap_interval(rng.normal(1, 0.1, n)), 1.0)}


def lognormal_mean(n, sigma):
    return lambda rng: {"mean": (bootstrap_interval(rng.lognormal(0, sigma, n)), np.exp(sigma**2 / 2))}


def affine(xs, noise, relative):
    a, b = 0.02, 1e-4

    def experiment(rng):
        truth = a + b * xs
        scale = 0.03 * truth if relative else 0.03 * a
        fit = fit_affine(xs, truth + scale * noise(rng, xs.size), "relative" if relative else "constant")
        return {
            "a": (fit["a"], a),
            "b": (fit["b"], b),
            "band": (fit.band(300), a + b * 300),
            "crossover": (crossover(fit), a / b),
        }

    return experiment


def quadratic(xs, noise):
    a, b, c = 0.02, 1e-4, 1e-8

    def experiment(rng):
        truth = a + b * xs + c * xs**2
        fit = fit_quadratic(xs, truth * (1 + 0.03 * noise(rng, xs.size)))
        band = (fit.band(2000), a + b * 2000 + c * 2000**2)
        return {"a": (fit["a"], a), "b": (fit["b"], b), "c": (fit["c"], c), "band": band}

    return experiment


def floor_limited(xs, noise):
    floor, a, b = 0.03, 0.005, 1e-4

    def experiment(rng):
        fit = fit_floor_limited(xs, np.maximum(floor, a + b * xs) * (1 + 0.03 * noise(rng, xs.size)))
        return {
            "floor": (fit["floor"], floor),
            "a": (fit["a"], a),
            "b": (fit["b"], b),
            "knot": (crossover(fit), (floor - a) / b),
            "band": (fit.band(700), a + b * 700),
        }

    return experiment


def crossing(xs, noise):
    """Two lines, one of them noisier, and a parabola against a line."""

    def experiment(rng):
        low, high, bent = 0.02 + 1e-4 * xs, 0.05 + 5e-5 * xs, 0.02 + 5e-5 * xs + 5e-8 * xs**2
        low, bent = (ys * (1 + 0.03 * noise(rng, xs.size)) for ys in (low, bent))
        high = high * (1 + 0.01 * noise(rng, xs.size))
        line, other, parabola = fit_affine(xs, low), fit_affine(xs, high), fit_quadratic(xs, bent)
        return {
            "lines": (root_of_difference(line, other), 600.0),
            "parabola": (root_of_difference(other, parabola), np.sqrt(0.03 / 5e-8)),
            "paired": (root(fit_affine(xs, 0.05 * xs - 30 + noise(rng, xs.size))), 600.0),
        }

    return experiment


ABOUT_95 = {
    "mean, normal, n=8": normal_mean(8),
    "mean, normal, n=30": normal_mean(30),
    "mean, lognormal 0.3, n=30": lognormal_mean(30, 0.3),
    "mean, lognormal 0.5, n=60": lognormal_mean(60, 0.5),
    "affine, 5 points": affine(LENGTHS, normal, True),
    "affine, 15 points, skewed": affine(np.repeat(LENGTHS, 3), skewed, True),
    "affine, 30 points, constant noise": affine(np.repeat(LENGTHS, 6), normal, False),
    "affine, 6 points, constant skewed noise": affine(np.linspace(100, 600, 6), skewed, False),
    "quadratic, 5 points": quadratic(LENGTHS, normal),
    "quadratic, 15 points, skewed": quadratic(np.repeat(LENGTHS, 3), skewed),
    "floor-limited, 18 points": floor_limited(np.repeat(MORE_LENGTHS, 2), normal),
    "floor-limited, 27 points, skewed": floor_limited(np.repeat(MORE_LENGTHS, 3), skewed),
    "crossing, 5 points": crossing(LENGTHS, normal),
    "crossing, 15 points, skewed": crossing(np.repeat(LENGTHS, 3), skewed),
    "median, n=6": median_of(6, 0.05),
    "median, n=10, skewed": median_of(10, 1.0),
    "median, n=12, skewed": median_of(12, 0.5),
    "median, n=30": median_of(30, 0.05),
    "p90, n=40, skewed": p90_of(40),
    "p90, n=60, skewed": p90_of(60),
    "ratio, n=6": ratio_of(6),
    "ratio, n=20": ratio_of(20),
}


def coverage(experiment, num_runs):
    """How often each interval held its truth, in percent of the runs in which it was determined."""
    rng, hits = np.random.default_rng(2024), collections.defaultdict(list)
    for _ in range(num_runs):
        for name, (interval, truth) in experiment(rng).items():
            if interval.low is not None and interval.high is not None:
                hits[name].append(interval.low <= truth <= interval.high)
    assert all(len(held) > 0.9 * num_runs for held in hits.values())
    return {name: 100 * float(np.mean(held)) for name, held in hits.items()}


@pytest.mark.parametrize("name", ABOUT_95)
def test_quickly(name):
    found = coverage(ABOUT_95[name], 120)
    assert all(each >= 88 for each in found.values()), found


@pytest.mark.slow
@pytest.mark.simulated
@pytest.mark.parametrize("name", ABOUT_95)
def test_within_two_points(name):
    found = coverage(ABOUT_95[name], 2000)
    assert all(93 <= each <= 97 for each in found.values()), found


@pytest.mark.parametrize(("n", "share"), [(200, 0.02), (200, 0.05), (200, 0.5), (30, 0.5), (1000, 0.05)])
def test_wilson_by_exact_sums(n, share):
    """Summed over every possible count: no simulation is needed."""
    counts = np.arange(n + 1)
    intervals = [wilson_interval(k, n) for k in counts.tolist()]
    holds = np.array([interval.low <= share <= interval.high for interval in intervals])
    assert 93 <= 100 * float(binom.pmf(counts, n, share) @ holds) <= 97
