"""What this machine can see: how often equal builds are told apart here, and from which slowdown on one is found.

Knows a finished calibration, how it is quoted, and which thresholds it forbids. Refuses to know how it is measured
(`gathering.py`), computed (`calibrating.py`) and stored (`calibration_file.py`).
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.gate.comparison import Sampling
from benchmarks.harness.gate.evidence import Key
from benchmarks.harness.gate.rules import Rules, Verdict
from benchmarks.harness.gate.trials import LARGEST_EFFECT
from benchmarks.harness.identity import identity
from benchmarks.harness.metrics import metric
from benchmarks.harness.stats import Estimate, Interval, wilson_interval


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Proportion:
    """So many of n comparisons."""

    num: int
    n: int

    def __post_init__(self) -> None:
        if not 0 <= self.num <= self.n:
            raise InstrumentError(f"{self.num} of {self.n} is no proportion")

    @property
    def value(self) -> float | None:
        return self.num / self.n if self.n else None

    @property
    def interval(self) -> Interval:
        """Wilson's, 95 %, for comparisons that share no launch."""
        return wilson_interval(self.num, self.n)

    @property
    def range_text(self) -> str:
        """The interval in percent: `0 to 39 %`."""
        low, high = self.interval.low, self.interval.high
        return "unknown" if low is None or high is None else f"{100 * low:.0f} to {100 * high:.0f} %"

    def __str__(self) -> str:
        """With its interval: `0 of 6 (0 to 39 %)`."""
        return f"{self.num} of {self.n} ({self.range_text})"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """What became of one planted slowdown. `planted` and `measured` are shares: 0.03 for 3 % more.

    `found` counts comparisons drawn from the identical launches, each quantity slowed by what was measured of it;
    `found_for_real` those of the slowed launches themselves, none where these are too few for a comparison.
    """

    planted: float
    measured: Estimate
    found: Proportion
    found_for_real: Proportion


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How well one quantity is judged; or one metric, as well as the worst of its quantities; or everything together.

    `key` has nothing but a metric for a metric, nothing at all for everything. A false alarm is a comparison of equal
    builds in which anything of it was called worse or better: `false_alarms` counts comparisons that share no launch,
    `drawn_false_alarms` those drawn from the same launches again and again. Slowdowns of `effect80` and `effect95` are
    found 80 and 95 times in 100, where nothing else has changed; None where not even the largest one is. Of everything
    they are those of all times at once. `mean_launches` is what a comparison of equal builds takes.
    """

    key: Key
    false_alarms: Proportion
    drawn_false_alarms: Proportion
    effect80: float | None
    effect95: float | None
    mean_launches: float
    levels: tuple[Level, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Of one machine and one model, under rules without a threshold.

    `machine` is its `identity`, `at` an ISO date, `commit` what was compared with itself. `num_launches` identical
    launches were left of those that ran. `endings` says how drawn comparisons of equal builds ended.
    """

    machine: Mapping[str, Any]
    model: str
    dtype: str
    device: str
    at: str
    commit: str
    instrument_version: str
    rules: Rules
    sampling: Sampling
    num_launches: int
    taken_s: float
    endings: Mapping[Verdict, int]
    whole: Score
    metrics: tuple[Score, ...]
    quantities: tuple[Score, ...]
    notes: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """What `machine_key` gives on the machine and for the model that were calibrated."""
        return _key(self.machine, self.model, self.dtype, self.device)

    def line(self, what: str | Iterable[Key] = ()) -> str:
        """One sentence for tables and pull requests, of a metric, of these quantities, or of every metric."""
        real, drawn, found = self.whole.false_alarms, self.whole.drawn_false_alarms, _found(self._chosen(what))
        return (
            f"on this machine: {real.num} of {real.n} comparisons of equal builds were false alarms "
            f"({real.range_text}; {100 * (drawn.value or 0):.1f} % of {drawn.n} drawn ones), {found}"
        )

    def unlike(self, rules: Rules, sampling: Sampling) -> str:
        """In what a comparison differs from those that were calibrated, "" for nothing. A threshold is nothing."""
        theirs = {**dataclasses.asdict(rules), **dataclasses.asdict(sampling)}
        ours = {**dataclasses.asdict(self.rules), **dataclasses.asdict(self.sampling)}
        odd = [name for name in ours if name != "threshold" and ours[name] != theirs[name]]
        return ", ".join(f"{name} {ours[name]} (here {theirs[name]})" for name in odd)

    def worst(self, name: str) -> Score:
        """The quantity of a metric that is seen worst."""
        return max((each for each in self.quantities if each.key.metric == name), key=_effect95)

    def _chosen(self, what: str | Iterable[Key]) -> list[Score]:
        """The worst of each metric that was asked for."""
        if isinstance(what, str):
            return [each for each in self.metrics if each.key.metric == metric(what).name]
        keys = set(what)
        if not keys:
            return list(self.metrics)
        every = sorted((each for each in self.quantities if each.key in keys), key=_effect95)
        worst = {each.key.metric: each for each in every}
        return [worst[each.key.metric] for each in self.metrics if each.key.metric in worst]


def _found(scores: Sequence[Score]) -> str:
    """What of each metric is found 95 times in 100."""
    told = [f"{effect_text(each.effect95)} in {metric(each.key.metric).title}" for each in scores]
    return f"95 of 100 slowdowns of {', of '.join(told)} are found" if told else "these quantities were not calibrated"


def _effect95(score: Score) -> float:
    return math.inf if score.effect95 is None else score.effect95


def machine_key(*, model: str, dtype: str, device: str) -> str:
    """The name under which this machine's calibration is kept. The model, its dtype and device as results tell them."""
    return _key(identity(), model, dtype, device)


def _key(machine: Mapping[str, Any], model: str, dtype: str, device: str) -> str:
    """Not the host's name, which in a container is new at each start, nor the exact size of its memory."""
    gpu = [machine.get("gpu"), f"driver {machine.get('driver')}"] if device.startswith("cuda") else []
    return " | ".join(map(str, (machine["cpu"], f"{machine['num_cpus']} CPUs", *gpu, device, model, dtype)))


def check_threshold(threshold: float, calibration: Calibration) -> None:
    """Raise InstrumentError for a threshold, a share, below the effect that a gated metric shows 95 times in 100.

    A threshold of 0 asks for none.
    """
    beyond = [each for each in calibration.metrics if 0 < threshold < _effect95(each)]
    if not beyond:
        return
    rules, sampling = calibration.rules, calibration.sampling
    least = max(map(_effect95, beyond))
    margin = f", and a smaller margin than {100 * rules.margin:g} %, within half of which launches are spared"
    larger = f"; or take a threshold of at least {math.ceil(1000 * least - 1e-6) / 10:g} %" if least < math.inf else ""
    raise InstrumentError(
        f"a threshold of {100 * threshold:g} % is tighter than this machine can hold. A slowdown is found 95 times in "
        f"100 only {', '.join(_held(calibration, each) for each in beyond)}. Take more launches than "
        f"{rules.max_launches}, a larger budget than {sampling.budget_s:g} s a case, or a quieter "
        f"machine{margin if threshold < rules.early_margin else ''}, and calibrate again{larger}"
    )


def _held(calibration: Calibration, score: Score) -> str:
    """What the machine can hold in one metric, and where it is worst."""
    where = name_of_quantity(calibration.worst(score.key.metric).key)
    return f"from {effect_text(score.effect95)} on in {metric(score.key.metric).title} ({where})"


def name_of_quantity(key: Key) -> str:
    """Case and arm as people say them: `prompt_length[16] cached`."""
    short = (key.benchmark.partition("::")[2] or key.benchmark).removeprefix("test_")
    return f"{short}[{key.case}] {key.arm}".strip() if key.case else f"{short} {key.arm}".strip()


def effect_text(effect: float | None) -> str:
    """A share in percent; None is more than was tried."""
    return f"more than {100 * LARGEST_EFFECT:.0f} %" if effect is None else f"{100 * effect:.1f} %"
