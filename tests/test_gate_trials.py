"""Drawn comparisons end as `judge` ends them, and known noise gives known rates."""

import dataclasses
import functools
import math
import random

import numpy as np
import pytest
from sample_launches import ITL, key, noisy, result
from sample_results import BENCHMARK

from benchmarks.harness.gate.evidence import Key, Launch, Side
from benchmarks.harness.gate.looks import CODES, Pool, pool_of
from benchmarks.harness.gate.rules import GRAVITY, Rules
from benchmarks.harness.gate.sorting import collect
from benchmarks.harness.gate.trials import Comparisons, drawn_orders, in_a_row, smallest_effects
from benchmarks.harness.gate.verdict import judge
from benchmarks.harness.metrics import metric

TTFT = ("cached", "ttft_s")
E2E = ("cached", "e2e_s")
RULES = Rules(alpha=0.01, margin=0.02, threshold=0.0, confidence=0.95, max_launches=12)


# Drawn comparisons against `judge`.


class World:
    """A machine and two builds: launches of three cases with everything in them that the rules look at."""

    SHIFTS = (0.0, 0.0, 0.01, -0.02, 0.03, 0.1)

    def __init__(self, seed):
        rng = self.rng = random.Random(seed)
        self.cases = {str(x): rng.choice([0.0, 0.0, 0.1, 0.5]) for x in (8, 16, 32)}  # how often each is disturbed
        self.control = {case: rng.choice([None, 0.0, 0.0, 0.0, 0.0, 0.2, -0.3]) for case in self.cases}
        names = [ITL, ("naive", "itl_p50_s"), TTFT, E2E, ("cached over naive", "speedup")]
        chosen = [(case, *name) for case in self.cases for name in rng.sample(names, rng.choice([1, 2, 5]))]
        self.shifts = {each: rng.choice(self.SHIFTS) for each in chosen}
        self.usual_s = {each: 10 ** rng.uniform(-5.5, -2) for each in self.shifts}
        self.rules = Rules(
            alpha=rng.choice([0.01, 0.05]), margin=rng.choice([0.005, 0.02]), threshold=rng.choice([0.0, 0.015]),
            confidence=rng.choice([0.9, 0.95]), max_launches=rng.choice([4, 7, 12, 12]),
        )  # fmt: skip

    def launch(self, number):
        pairs = [self._results(case, number) for case in self.cases]
        return Launch(base=Side(results=tuple(p[0] for p in pairs)), head=Side(results=tuple(p[1] for p in pairs)))

    def _results(self, case, number):
        values = {}
        for (of, *name), shift in self.shifts.items():
            if of == case:
                how = {"usual": self.usual_s[(of, *name)], "num_pairs": self.rng.choice([1, 2, 5, 6])}
                values[tuple(name)] = noisy(math.exp(shift), launch_sd=0.008, seed=self.rng.random(), **how)
        values["cached", "decode_tokens_per_s"] = ([10.0], [10.0 * math.exp(self.rng.gauss(0, 0.5))])
        values["cached", "num_operators"] = (592, 592)
        disturbed = "somebody" if self.rng.random() < self.cases[case] else ""
        told = [
            {"control_s": [0.002]},
            {"control_s": [0.002 * math.exp((self.control[case] or 0) + self.rng.gauss(0, 0.05))]},
        ]
        if self.control[case] is None or (number % 3 == 0 and self.rng.random() < 0.5):
            told = [{}, {}]
        return [
            result(
                {name: both[place] for name, both in values.items()},
                case=case,
                disturbed=disturbed * place,
                **told[place],
            )
            for place in (0, 1)
        ]


def compared(launches, rules):
    """What `compare` does with launches that it can choose from: the verdicts, and the launches that each case took."""
    asked = dict.fromkeys((result.benchmark, result.case) for result in launches[0].base.results)
    asked = dict.fromkeys(asked, 1)
    for done in range(1, rules.max_launches + 1):
        judgement = judge(collect([only(launch, asked, n) for n, launch in enumerate(launches[:done])]), rules, done)
        for case in judgement.open_cases:
            asked[case] += 1
        if not judgement.open_cases:
            break
    return {row.key: (row.verdict, asked[row.key.of_case]) for row in judgement.rows if row.is_gated}


def only(launch, asked, number):
    """The cases that asked for this launch."""
    base, head = (
        Side(results=tuple(each for each in side.results if asked[each.benchmark, each.case] > number))
        for side in launch.sides
    )
    return Launch(base=base, head=head)


def timed_keys(launches):
    return [each for each in collect(launches).pairs if metric(each.metric).gate]


@functools.cache
def both_ways(seed):
    """The ends of two comparisons of one world: by `judge`, launch after launch, and all at once."""
    world = World(seed)
    launches = [world.launch(number) for number in range(16)]
    pool = pool_of([collect([launch]) for launch in launches], timed_keys(launches))
    orders = drawn_orders(16, world.rules.max_launches, 2, seed)
    trials = Comparisons(pool, orders, world.rules).slowed([0.0] * len(pool.keys))
    ended = [compared([launches[number] for number in order], world.rules) for order in orders]
    by_judge = [{key: found[key] for key in pool.keys} for found in ended]
    at_once = [
        {key: (GRAVITY[code], num) for key, code, num in zip(pool.keys, codes, asked, strict=True)}
        for codes, asked in zip(trials.codes, trials.num_asked, strict=True)
    ]
    return by_judge, at_once


SEEDS = (4, 5, 6, 14, 15, 20)
"""Few worlds, in which every verdict and every length comes about."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_drawn_comparisons_end_as_judge_ends_them(seed):
    by_judge, at_once = both_ways(seed)
    assert at_once == by_judge


def test_the_worlds_hold_every_verdict_and_every_length():
    """Or else the test before would prove nothing about some."""
    ends = [end for seed in SEEDS for found in both_ways(seed)[0] for end in found.values()]
    assert {verdict for verdict, _ in ends} == {"worse", "better", "same", "cannot tell", "contaminated"}
    assert {num for _, num in ends} >= {4, 5, 6, 7, 9, 10, 12}


@pytest.mark.parametrize(("name", "usual"), [(ITL, 0.01), (ITL, 0.00045), (("cached over naive", "speedup"), 4.0)])
def test_at_the_floors_of_a_metric_they_agree_to_the_last_digit(name, usual):
    logs = [
        sign * (near + step)
        for near in (0.01, 0.01105, 0.01117)
        for step in (-7e-5, -2e-5, 2e-5, 7e-5)
        for sign in (-1, 1)
    ]
    cases = {str(place): (-log if name[1] == "speedup" else log) for place, log in enumerate(logs)}
    launches = []
    for number in range(4):
        samples = [usual * math.exp(1e-7 * number * place) for place in (1, -1)]
        sides = [
            Side(
                results=tuple(
                    result({name: [samples[0] * math.exp(log * of_head)]}, case=case) for case, log in cases.items()
                )
            )
            for of_head in (0, 1)
        ]
        launches.append(Launch(base=sides[0], head=sides[1]))
    rules = dataclasses.replace(RULES, max_launches=4, margin=1e-5)
    pool = pool_of([collect([launch]) for launch in launches], timed_keys(launches))
    trials = Comparisons(pool, np.arange(4)[None], rules).slowed([0.0] * len(pool.keys))
    verdicts = {row.key: row.verdict for row in judge(collect(launches), rules).rows}
    assert {key: GRAVITY[code] for key, code in zip(pool.keys, trials.codes[0], strict=True)} == verdicts
    assert set(verdicts.values()) == {"worse", "better", "same"}


def timed_pool(num_launches=24, seed=0, names=(ITL, TTFT), slower=1.0, sd=0.014):
    """Launches of one case, and their pool; all of head's samples are multiplied by `slower`."""
    launches = []
    for number in range(num_launches):
        values = {name: noisy(launch_sd=sd, seed=f"{seed} {number} {name}", num_pairs=4) for name in names}
        base = {name: both[0] for name, both in values.items()}
        head = {name: [slower * sample for sample in both[1]] for name, both in values.items()}
        launches.append(Launch(base=Side(results=(result(base),)), head=Side(results=(result(head),))))
    return pool_of([collect([launch]) for launch in launches], timed_keys(launches))


def test_a_shift_is_the_same_as_slower_samples_of_head():
    orders, rules = drawn_orders(24, 12, 40, 1), RULES
    shifted = Comparisons(timed_pool(), orders, rules).slowed([math.log(1.025)] * 2)
    slowed = Comparisons(timed_pool(slower=1.025), orders, rules).slowed([0.0] * 2)
    assert np.array_equal(shifted.codes, slowed.codes)
    assert np.array_equal(shifted.num_asked, slowed.num_asked)
    assert 0 < shifted.said("worse").mean() < 1


def test_one_quantity_alone_moves_without_the_others():
    comparisons = Comparisons(timed_pool(), drawn_orders(24, 12, 40, 1), RULES)
    alone = comparisons.slowed_alone(1, math.log(1.04))
    assert np.array_equal(alone.codes, comparisons.slowed([0.0, math.log(1.04)]).codes)
    assert alone.said("worse").mean(axis=0).tolist() == [0.0, 1.0]


def test_comparisons_in_a_row_share_no_launch_and_none_is_begun_that_might_not_end():
    keys = (key(*ITL),)

    def row(logs):
        pool = Pool(
            keys=keys,
            logs=np.array(logs)[:, None],
            base=np.ones((1, len(logs), 1)),
            control=np.full((len(logs), 1), np.nan),
        )
        return in_a_row(pool, dataclasses.replace(RULES, max_launches=10))

    quiet = row([0.0] * 25)  # each is the same after 4: 0, 4, 8, 12 begin, and at 16 only 9 are left
    assert (quiet.num_launches.tolist(), quiet.codes.tolist()) == ([4] * 4, [[CODES["same"]]] * 4)
    loud = row([(-1) ** n * 0.2 for n in range(25)])
    assert (loud.num_launches.tolist(), loud.codes.tolist()) == ([10, 10], [[CODES["cannot tell"]]] * 2)
    moved = row([0.0] * 4 + [0.1, 0.1001] * 5)
    assert moved.codes.tolist() == [[CODES["same"]], [CODES["worse"]]]
    assert row([0.0] * 9).codes.shape == (0, 1)


# Rates of known noise.


def noise(num_launches, num_keys, sd, seed):
    """Quantities of separate cases, whose launches scatter by `sd` and nothing else."""
    keys = tuple(Key(BENCHMARK, f"{place:02}", "cached", "itl_p50_s") for place in range(num_keys))
    logs = np.random.default_rng(seed).normal(0, sd, (num_launches, num_keys))
    return Pool(
        keys=keys, logs=logs, base=np.full((num_keys, num_launches, 1), 0.01), control=np.full(logs.shape, np.nan)
    )


@pytest.mark.parametrize("num_keys", [1, 6])
def test_equal_builds_are_told_apart_in_at_most_one_of_a_hundred_comparisons(num_keys):
    alarms = []
    for seed in range(8):
        comparisons = Comparisons(noise(48, num_keys, 0.014, seed), drawn_orders(48, 12, 250, seed), RULES)
        alarms.append(comparisons.slowed([0.0] * num_keys).said("worse", "better").any(axis=1).mean())
    assert 0 < np.mean(alarms) <= 0.01


def effects_of(pool, rules=RULES, place=0):
    comparisons = Comparisons(pool, drawn_orders(pool.num_launches, rules.max_launches, 400, 0), rules)
    return smallest_effects(
        lambda effect: comparisons.slowed_alone(place, math.log1p(effect)).said("worse")[:, place].mean(), (0.8, 0.95)
    )


def in_theory(rate, sd, alpha, num_keys=1, num_launches=12):
    """The effect that Student's test of the last look alone finds at this rate, no quantity else being significant."""
    from scipy.optimize import brentq
    from scipy.stats import nct, t

    degrees, error = num_launches - 2 * (num_launches // 10) - 1, sd / math.sqrt(num_launches)
    limit = t.isf(alpha / 2 / num_keys / (2 - 2.0 ** (4 - num_launches)), degrees)
    return math.expm1(brentq(lambda log: nct.sf(limit, degrees, log / error) - rate, 1e-6, 1))


@pytest.mark.parametrize(("sd", "num_keys"), [(0.014, 1), (0.014, 6), (0.028, 1), (0.056, 2)])
def test_the_effects_found_are_those_of_theory(sd, num_keys):
    pool = noise(600, num_keys, sd, seed=3)
    standard = (pool.logs - pool.logs.mean(axis=0)) / pool.logs.std(axis=0)
    effect80, effect95 = effects_of(
        dataclasses.replace(pool, logs=sd * standard), dataclasses.replace(RULES, margin=1e-6)
    )
    assert effect80 == pytest.approx(in_theory(0.8, sd, 0.01, num_keys), rel=0.1)
    assert effect95 == pytest.approx(in_theory(0.95, sd, 0.01, num_keys), rel=0.1)


def test_within_the_margin_a_quiet_machine_calls_a_slowdown_the_same():
    pool = noise(200, 1, 0.004, seed=3)
    _, wide = effects_of(pool, dataclasses.replace(RULES, margin=0.03))
    _, narrow = effects_of(pool, dataclasses.replace(RULES, margin=0.01))
    assert 0.01 < narrow <= wide < 0.02, "launches are spared within half the margin only"


def test_more_noise_and_fewer_launches_hide_more():
    quiet, usual, loud = (effects_of(noise(100, 1, sd, seed=3))[1] for sd in (0.007, 0.014, 0.028))
    assert quiet < usual < loud
    assert effects_of(noise(100, 1, 0.014, seed=3), dataclasses.replace(RULES, max_launches=6))[1] > usual
    assert effects_of(noise(100, 1, 0.3, seed=3)) == [None, None]


def test_the_smallest_effect_lies_between_two_steps_of_the_grid():
    assert smallest_effects(lambda effect: min(1, effect / 0.05), (0.8, 0.95)) == [
        pytest.approx(0.04),
        pytest.approx(0.0475),
    ]
    tried = []
    steep = smallest_effects(lambda effect: tried.append(effect) or float(effect > 0.0301), (0.8, 0.95))
    assert steep == [pytest.approx(0.032), pytest.approx(0.032375)]
    assert len(tried) == len(set(tried)) < 12
    assert smallest_effects(lambda effect: 0.9, (0.8, 0.95)) == [0.0, None]
