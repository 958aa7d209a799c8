"""The claims of the prefix study, each held against what was measured here: which hold, and which are artefacts.

Knows what was claimed and what would refute it. "Equal" is equal within five percent: what a host drifts between two
cases is no finding. Refuses to decide where an interval holds both: "cannot tell".
"""

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.harness.prefill_cost import Curve
from benchmarks.harness.results import BenchmarkResult, Measurement
from benchmarks.harness.stats import Estimate, Interval
from benchmarks.harness.timing import RunTiming
from benchmarks.studies.claims import ALIKE, Claim, Verdict, equality, median_of, ratio_of, side, told
from benchmarks.studies.prefix_points import (
    BATCHED,
    DERIVED,
    Results,
    Setting,
    by_setting,
    curve_in,
    estimate,
    longest_conversation,
    measured,
    of_test,
    windows_of,
)
from benchmarks.studies.prefix_rates import claims_of_rates

_LAW = 0.1
_LOOSE = 0.25
"""A law that is within ten percent holds in part; an interval wider than a quarter says nothing about a law."""

_SHORT, _MOST = 64, 0.8
"""Tokens of a short prefix, and the share of a long one's saving that is not little."""

Reused = Mapping[Setting, BenchmarkResult]


def claims_of(results: Results) -> Iterator[Claim]:
    """Those claims for which enough was measured."""
    reused, curve = by_setting(results), curve_in(results)
    if reused:
        yield _of_hits(reused)
        yield _of_cold(reused)
        yield _of_proxy(reused)
    yield from _of_fraction(reused)
    if curve:
        yield _of_short_prompts(curve)
    yield from _of_breakeven(reused, "breakeven_requests", "one after another")
    yield from _of_breakeven(by_setting(results, BATCHED), "batched_breakeven_requests", "at once")
    yield from _of_turns(results, curve)
    yield from claims_of_rates(results)


# One hit.


def _of_hits(reused: Reused) -> Claim:
    """Whoever measured has held the logits against each other before; here, whether each run found what it should."""
    runs = [(run.num_cached or 0, setting) for setting, run in _runs_of(reused, "primed")]
    missed = [setting for found, setting in runs if not found]
    wrong = [run for _, run in _runs_of(reused, "cold", "unseen", "suffix_only", "prefix_only") if run.num_cached]
    found, asked = sum(found for found, _ in runs), sum(setting.prefix for _, setting in runs)
    evidence = (
        f"the logits behind a found prefix had to equal those of a full prefill before anything was timed; then "
        f"{len(runs) - len(missed)} of {len(runs)} runs found their prefix, {found:,} of {asked:,} tokens in whole "
        f"blocks, and of the runs with nothing to find {len(wrong)} found something"
    )
    verdict: Verdict = "does not hold" if missed or wrong else "holds" if runs else "cannot tell"
    return Claim(text="a cached prompt computes what a cold one does", verdict=verdict, evidence=evidence)


def _runs_of(reused: Reused, *arms: str) -> list[tuple[Setting, RunTiming]]:
    return [(setting, run) for setting, result in reused.items() for arm in arms for run in result.runs.get(arm, ())]


def _of_cold(reused: Reused) -> Claim:
    found = _pooled(reused, "cold_over_unseen")
    verdict = equality(found.interval, ALIKE)
    return Claim(
        text="a cold prompt costs what an unseen one does", verdict=verdict,
        evidence=f"TTFT cold / TTFT unseen: {told(found)} over all {len(reused)} settings",
        artefact="a speedup over the first, cold run is warm-up" if verdict == "does not hold" else "",
    )  # fmt: skip


def _of_proxy(reused: Reused) -> Claim:
    """At the longest prefix, which the proxy leaves out."""
    setting = max(reused, key=lambda each: (each.prefix, -each.suffix))
    result = reused[setting]
    real, proxy = (_samples(result, name) for name in ("reuse_speedup", "reuse_speedup_proxy"))
    found = ratio_of(proxy, real)
    verdict = equality(found.interval, ALIKE)
    speedups = f"{told(median_of(real))} real, {told(median_of(proxy))} by the proxy"
    return Claim(
        text="prefill of the suffix alone measures a hit", verdict=verdict,
        evidence=f"{setting}: {speedups}; it flatters the cache {told(found)} times{_parts(result)}",
        artefact="the proxy leaves out finding the prefix and attending to it" if verdict == "does not hold" else "",
    )  # fmt: skip


def _parts(result: BenchmarkResult) -> str:
    removed, added = measured(result, "prefill_removed_s"), measured(result, "kv_read_added_s")
    if removed is None or added is None:
        return ""
    return f"; prefill removed {_ms(removed)} ms, reading the prefix added {_ms(added)} ms"


def _ms(m: Measurement) -> str:
    return told(estimate(m), 1e3)


def _of_fraction(reused: Reused) -> Iterator[Claim]:
    """One fraction, two lengths: the speedup has to be the same, if it comes from the fraction."""
    pairs = [(a, b) for a in reused for b in reused if a.tokens < b.tokens and abs(a.share - b.share) < 1e-9]
    if not pairs:
        return
    short, long = max(pairs, key=lambda pair: pair[1].tokens / pair[0].tokens)
    ours = {each: _samples(reused[each], "reuse_speedup") for each in (short, long)}
    found = ratio_of(ours[long], ours[short])
    verdict = equality(found.interval, ALIKE)
    yield Claim(
        text="a larger prefix fraction is a higher speedup", verdict=verdict,
        evidence=(
            f"of one fraction, {long.share:.2f}: {told(median_of(ours[short]))} at {short}, "
            f"{told(median_of(ours[long]))} at {long}, which is {told(found)} times that; theirs 1.26 and 2.41"
        ),
        artefact="lengths: what a forward pays once weighs more in a short one" if verdict == "does not hold" else "",
    )  # fmt: skip


# The curve, and what follows from it.


def _of_short_prompts(curve: Curve) -> Claim:
    """A floor is the launch's and no store's; without one a short prefix saves nearly as much a token as a long one."""
    assert curve.fit is not None, "a measured curve has the fit that chose its terms"
    text, equation = "short prompts save little", f"T(n) = {curve.fit.equation('tokens', 1e3, 'ms')}"
    if curve.floor_s is not None:
        return Claim(
            text=text, verdict="holds", evidence=f"{equation}: {_floor(curve)}",
            artefact="the launch floor: below its end a forward takes as long whatever it runs, and no cache saves any",
        )  # fmt: skip
    if curve.fit.family is None:
        return Claim(text=text, verdict="cannot tell", evidence=f"{equation}: too few points to see a floor")
    longest = int(curve.fit.x_max)
    short, long = (curve.saving_s(prefix, _SHORT) / prefix for prefix in (_SHORT, longest))
    share = short / long if long else 1.0
    evidence = f"{equation}: no floor; {_SHORT} tokens save {100 * share:.0f} % as much a token as {longest:,} do"
    return Claim(text=text, verdict="does not hold" if share >= _MOST else "holds in part", evidence=evidence)


def _floor(curve: Curve) -> str:
    """What it costs, and how far it reaches."""
    knot = curve.fit.knot if curve.fit else None
    text = f"a launch floor of {1e3 * (curve.floor_s or 0.0):.3g} ms"
    if knot is None or knot.value is None:
        return f"{text}, and nothing measured leaves it"
    ends = "" if knot.low is None or knot.high is None else f" [{knot.low:.0f}, {knot.high:.0f}]"
    return f"{text} until {curve.floor_until_tokens:.0f}{ends} tokens"


def _of_breakeven(reused: Reused, metric: str, how: str) -> Iterator[Claim]:
    known = {each: m for each, result in reused.items() if (m := measured(result, metric)) is not None}
    if known:
        yield _of_one_request(known, how)
    by_suffix = [[each for each in known if each.suffix == suffix] for suffix in {each.suffix for each in known}]
    longest = max(by_suffix, key=lambda each: (len(each), each), default=[])
    if len(longest) > 1:
        yield _of_longer(known, longest[0], longest[-1], how)


def _of_one_request(known: Mapping[Setting, Measurement], how: str) -> Claim:
    """It has to be true of every setting, and one that surely breaks it is enough."""
    sides = [side(Interval(m.low, m.high), 1.0, above=True) for m in known.values()]
    verdicts: list[Verdict] = ["does not hold", "cannot tell", "holds"]
    verdict = next(each for each in verdicts if each in sides)
    figures = "; ".join(f"{told(estimate(m))} at {each}" for each, m in known.items())
    return Claim(text=f"one request never wins ({how})", verdict=verdict, evidence=f"breakeven in requests: {figures}")


def _of_longer(known: Mapping[Setting, Measurement], short: Setting, long: Setting, how: str) -> Claim:
    """Two intervals that do not overlap."""
    before, after = known[short], known[long]
    if None in (before.low, before.high, after.low, after.high):
        verdict: Verdict = "cannot tell"
    elif (after.high or 0.0) < (before.low or 0.0):
        verdict = "holds"
    else:
        verdict = "does not hold" if (after.low or 0.0) > (before.high or 0.0) else "cannot tell"
    evidence = f"{told(estimate(before))} requests at {short}, {told(estimate(after))} at {long}"
    return Claim(text=f"breakeven falls as the prefix grows ({how})", verdict=verdict, evidence=evidence)


def _of_turns(results: Results, curve: Curve | None) -> Iterator[Claim]:
    """Both ways in which a curve can be held against what was measured directly, where there are both."""
    found: dict[str, Estimate] = {}
    for result in of_test(results, DERIVED):
        if (m := measured(result, "derived_over_direct")) is not None:
            found["one hit"] = estimate(m)
    conversation = longest_conversation(results)
    if conversation is not None and curve is not None:
        turns = f"{conversation.params['num_turns']} turns of {conversation.params['turn_tokens']} tokens"
        found[turns] = _of_curve_over_turns(conversation, curve)
    if found:
        each = [_law(one.interval) for one in found.values()]
        order: list[Verdict] = ["does not hold", "cannot tell", "holds in part", "holds"]
        figures = "; ".join(f"{told(one)} for {what}" for what, one in found.items())
        yield Claim(
            text="savings over turns follow from the savings curve", verdict=next(one for one in order if one in each),
            evidence=f"share saved by T(n) / share saved: {figures}",
        )  # fmt: skip


def _of_curve_over_turns(result: BenchmarkResult, curve: Curve) -> Estimate:
    """The share of all TTFTs that a conversation saves by the curve, over the share that it did save.

    By what each turn really found; shares, as the curve was measured minutes apart, in which a host changes its pace.
    """
    shares = []
    for off, carried in zip(windows_of(result, "off"), windows_of(result, "carried"), strict=True):
        off_s, carried_s = (sum(run.ttft_s or 0.0 for run in window) for window in (off, carried))
        hits = [(run.num_cached or 0, run.num_prompt_tokens or 0) for run in carried]
        saved_s = sum(curve.saving_s(cached, prompt - cached) for cached, prompt in hits)
        full_s = sum(curve.full_s(prompt) for _, prompt in hits)
        shares += [saved_s / full_s / (1 - carried_s / off_s)] if off_s != carried_s else []
    return median_of(shares)


def _law(interval: Interval) -> Verdict:
    """The two agree where the interval holds 1, if it says anything; they surely do not beyond ten percent."""
    if side(interval, 1.0, above=True) == "cannot tell":
        return "holds" if equality(interval, _LOOSE) == "holds" else "cannot tell"
    verdict = equality(interval, _LAW)
    return "holds in part" if verdict == "holds" else verdict


# What they have in common.


def _samples(result: BenchmarkResult, name: str) -> Sequence[float]:
    found = measured(result, name)
    return found.samples if found else ()


def _pooled(reused: Reused, name: str) -> Estimate:
    """The samples of all settings together, as a ratio."""
    values = [value for result in reused.values() for value in _samples(result, name)]
    return ratio_of(values, [1.0] * len(values))
