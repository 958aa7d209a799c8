"""How well three gates tell 2 and 3 % from nothing on this machine: lock step, asv's defaults, pytest-benchmark's.

    python -m benchmarks.studies.gate_power collect --minutes 60 --output .benchmarks/gate_power.jsonl
    python -m benchmarks.studies.gate_power table .benchmarks/gate_power.jsonl

`collect` measures one unchanged engine again and again, in random order: pairs in lock step, and single processes as
the other tools run them. Slowdowns are planted into some of the pairs. It can be stopped and continued.
`table` lets each gate judge comparisons made of such records, all worth the same seconds of measuring of a benchmark:
this project's by its own code, asv by asv's own test. Refuses to know what a comparison of several benchmarks adds.
"""

import dataclasses
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).parents[2]
LEVELS = (0.0, 2.0, 3.0)
METRICS = ("ttft_s", "itl_p50_s")
NUM_DRAWS = 300
FALSE_ALARMS = 0.01
"""What every gate is allowed: the limits of the others are set so that they raise no more of them."""

app = typer.Typer(help=__doc__, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def collect(
    *,
    minutes: Annotated[float, typer.Option(help="stop after the first record past this")] = 60,
    output: Annotated[Path, typer.Option(help="records are added to it")] = ROOT / ".benchmarks" / "gate_power.jsonl",
    case: Annotated[str, typer.Option("-k", help="pytest's -k")] = "prompt_length and (16 or 32 or 64)",
    pytest_args: Annotated[str, typer.Option(help="more arguments for pytest")] = "",
    launch_s: Annotated[float, typer.Option(help="seconds of measuring a case in a launch, both sides together")] = 5,
    commit: str = "HEAD",
) -> None:
    """Measure until time is up."""
    from benchmarks.harness.gate.builds import build
    from benchmarks.harness.gate.comparison import package_of
    from benchmarks.harness.gate.revisions import resolve

    package = package_of(build(resolve(commit, ROOT), ROOT, ROOT / ".benchmarks" / "builds"))
    arguments = [*pytest_args.split(), "--samples=200", "--max-warmups=1", "-k", case, str(ROOT / "benchmarks")]
    output.parent.mkdir(parents=True, exist_ok=True)
    end_s = time.monotonic() + 60 * minutes
    for number, (kind, percent) in enumerate(_schedule()):
        if time.monotonic() > end_s:
            break
        record = _record(kind, percent, number, package=package, arguments=arguments, launch_s=launch_s)
        with output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
        typer.echo(f"{number}: {kind} {percent:g} %, {record['wall_s']:.1f} s")


def _schedule() -> Iterator[tuple[str, float]]:
    """In each turn five equal pairs, one pair of each planted level and three lone processes, in random order."""
    order = random.Random(0)
    turn = [*[("lockstep", 0.0)] * 5, *[("lockstep", percent) for percent in LEVELS[1:]], *[("alone", 0.0)] * 3]
    while True:
        order.shuffle(turn)
        yield from turn


def _record(
    kind: str, percent: float, number: int, *, package: Any, arguments: list[str], launch_s: float
) -> dict[str, Any]:
    from benchmarks.harness.gate.lockstep import Share, launch_alone, launch_pair

    start_s, planted = time.monotonic(), [f"--planted-slowdown={percent:g}"]
    share = Share(max_s=launch_s)
    if kind == "lockstep":
        led = launch_pair(package, package, ROOT, arguments, seed=number, head_arguments=planted, share=share)
        sides, spent_s = list(led.launch.sides), led.spent_s
    else:
        side, spent_s = launch_alone(package, ROOT, [*arguments, *planted], share=share)
        sides = [side]
    return {
        "kind": kind, "percent": percent, "at": time.time(), "wall_s": time.monotonic() - start_s,
        "spent_s": sum(spent_s.values()), "failed": [list(side.failed.values()) for side in sides],
        "sides": [_samples_of(side) for side in sides],
        "flags": [[flag.what for result in side.results for flag in result.flags] for side in sides],
    }  # fmt: skip


def _samples_of(side: Any) -> dict[str, dict[str, list[float]]]:
    """By case and metric."""
    return {
        result.case: {each.metric.name: list(each.samples) for each in result.measurements if each.metric.name in METRICS}
        for result in side.results
    }


# What the gates say.


@dataclasses.dataclass(frozen=True)
class Rate:
    """How often a gate found something among comparisons of one kind."""

    num_found: int
    num: int

    def __str__(self) -> str:
        from benchmarks.harness.stats import wilson_interval

        if not self.num:
            return "n/a"
        ends = wilson_interval(self.num_found, self.num)
        assert ends.low is not None
        assert ends.high is not None
        return f"{100 * self.num_found / self.num:.0f} % [{100 * ends.low:.0f}, {100 * ends.high:.0f}] of {self.num}"


@app.command()
def table(
    records: Annotated[Path, typer.Argument(help="what `collect` wrote")],
    budget_s: Annotated[float, typer.Option(help="seconds of measuring a benchmark in one comparison")] = 60,
) -> None:
    """Let each gate judge what was collected, and print the table as Markdown."""
    lines = [json.loads(line) for line in records.read_text("utf-8").splitlines()]
    usable = [line for line in lines if not any(line["failed"])]
    taken_min = sum(line["wall_s"] for line in usable) / 60
    typer.echo(f"{len(usable)} records, {taken_min:.0f} min; up to {budget_s:g} s a benchmark and comparison\n")
    for name in METRICS:
        for line in _planted_and_seen(usable, name):
            typer.echo(line)
    typer.echo("\n| metric | gate | limit | false alarms | finds 2 % | finds 3 % |\n|---|---|---|---|---|---|")
    for name in METRICS:
        for row in (*_lock_step_rows(usable, name), *_other_rows(usable, name, budget_s)):
            typer.echo("| " + " | ".join((name, *row)) + " |")


def _planted_and_seen(lines: Sequence[Any], name: str) -> Iterator[str]:
    from benchmarks.harness.gate.paired import ratio_over_launches

    for percent in LEVELS:
        launches = [launch for of_case in _launches(lines, name, percent).values() for launch in of_case]
        found = ratio_over_launches([pairs.logs(_metric(name)) for pairs in launches])
        if found.value is not None and found.interval.low is not None and found.interval.high is not None:
            seen = [100 * math.expm1(each) for each in (found.value, found.interval.low, found.interval.high)]
            yield f"{name}: {percent:g} % planted, {seen[0]:+.2f} % [{seen[1]:+.2f}, {seen[2]:+.2f}] seen in {len(launches)}"


def _metric(name: str) -> Any:
    from benchmarks.harness.metrics import metric

    return metric(name)


# Lock step.


def _lock_step_rows(lines: Sequence[Any], name: str) -> Iterator[tuple[str, ...]]:
    equal = _launches(lines, name, 0.0)
    real = [verdict for launches in equal.values() for verdict in _in_a_row(launches, name)]
    yield "lock step, comparisons in a row", "p <= 1 %", str(_alarms(real)), "-", "-"
    yield "lock step, drawn from these launches", "p <= 1 %", *_drawn(equal, name)


def _launches(lines: Sequence[Any], name: str, percent: float) -> dict[str, list[Any]]:
    """The pairs of each launch, by case."""
    from benchmarks.harness.gate.evidence import Pairs

    found: dict[str, list[Any]] = {}
    for line in lines:
        if (line["kind"], line["percent"]) == ("lockstep", percent):
            base, head = line["sides"]
            for case in base.keys() & head.keys():
                pairs = Pairs(base=tuple(base[case][name]), head=tuple(head[case][name]))
                found.setdefault(case, []).append(pairs)
    return found


def _ended(launches: Sequence[Any], name: str) -> tuple[str, int]:
    """What a comparison of this one quantity says, with a look after each launch, and after how many it ends."""
    from benchmarks.harness.gate.evidence import Evidence, Key
    from benchmarks.harness.gate.paired import MIN_LAUNCHES
    from benchmarks.harness.gate.rows import is_settled
    from benchmarks.harness.gate.rules import Rules
    from benchmarks.harness.gate.timed import timed_rows

    key, rules = Key("benchmark", "case", "arm", name), Rules()
    for taken in range(MIN_LAUNCHES, rules.max_launches + 1):
        (row,) = timed_rows(Evidence(num_launches=taken, pairs={key: tuple(launches[:taken])}), rules)
        if is_settled(row, rules):
            break
    return row.verdict, taken


def _in_a_row(launches: Sequence[Any], name: str) -> Iterator[str]:
    """Comparisons without a launch in common: each begins where the one before ended."""
    from benchmarks.harness.gate.rules import Rules

    start = 0
    while start + Rules().max_launches <= len(launches):
        verdict, taken = _ended(launches[start:], name)
        start += taken
        yield verdict


def _alarms(verdicts: Sequence[str]) -> Rate:
    return Rate(sum(verdict in ("worse", "better") for verdict in verdicts), len(verdicts))


def _drawn(equal: Mapping[str, Sequence[Any]], name: str) -> Iterator[str]:
    """Comparisons of launches drawn from equal builds, sides swapped by lot, head slowed as much as was planted.

    Swapping is fair: which of two equal builds is called head is arbitrary. The comparisons share their launches: many,
    but no surer than those.
    """
    from benchmarks.harness.gate.rules import Rules

    draw, num = random.Random(0), Rules().max_launches
    for percent in LEVELS:
        verdicts = [
            _ended([_slowed(pairs, percent, swap=draw.random() < 0.5) for pairs in draw.sample(launches, num)], name)[0]
            for launches in equal.values()
            for _ in range(NUM_DRAWS if len(launches) >= num else 0)
        ]
        yield str(_alarms(verdicts) if percent == 0 else Rate(verdicts.count("worse"), len(verdicts)))


def _slowed(pairs: Any, percent: float, *, swap: bool) -> Any:
    base, head = (pairs.head, pairs.base) if swap else (pairs.base, pairs.head)
    return dataclasses.replace(pairs, base=base, head=tuple(each * (1 + percent / 100) for each in head))


# The others.

Side = Sequence[Sequence[float]]
"""The samples of some processes."""

Ratio = Callable[[Side, Side], float]
"""By how much head is slower than base in the eyes of a tool; 1 where it sees no difference."""


def _other_rows(lines: Sequence[Any], name: str, budget_s: float) -> Iterator[tuple[str, ...]]:
    alone = [line for line in lines if line["kind"] == "alone"]
    if not alone:
        return
    seconds = statistics.median(line["spent_s"] / max(1, len(line["sides"][0])) for line in alone)
    num = max(2, round(budget_s / seconds / 2))
    for title, num_processes, ratio in (
        ("asv continuous, 2 processes a side", 2, _asv_ratio),
        (f"asv continuous, {num} processes a side", num, _asv_ratio),
        ("pytest-benchmark, median of one process", 1, _median_ratio),
        (f"pytest-benchmark, median of {num} processes", num, _median_ratio),
    ):
        yield title, *_others(_windows(alone, name, num_processes), ratio)


def _windows(alone: Sequence[Any], name: str, num: int) -> list[tuple[Side, Side]]:
    """Neighbouring processes in turns base and head, by case. Windows overlap: many, but no surer than their number."""
    found = []
    for case in alone[0]["sides"][0]:
        processes = [line["sides"][0][case][name] for line in alone if case in line["sides"][0]]
        windows = (processes[i : i + 2 * num] for i in range(len(processes) - 2 * num + 1))
        found += [(window[::2], window[1::2]) for window in windows]
    return found


def _others(windows: Sequence[tuple[Side, Side]], ratio: Ratio) -> Iterator[str]:
    """With the lowest limit at which 1 % of equal comparisons are false alarms, or the tool's own if that is higher."""
    equal = sorted(ratio(base, head) for base, head in windows)
    limit = max(1.0, equal[math.ceil((1 - FALSE_ALARMS) * len(equal)) - 1]) if equal else math.nan
    yield f"{100 * (limit - 1):.1f} %"
    for percent in LEVELS:
        found = [ratio(base, [[each * (1 + percent / 100) for each in samples] for samples in head]) for base, head in windows]
        yield str(Rate(sum(each > limit for each in found), len(found)))


def _asv_ratio(base: Side, head: Side) -> float:
    """The ratio of medians where asv's own test calls the samples different."""
    from asv._stats import is_different
    from asv_runner.statistics import compute_stats

    pooled = [[sample for process in side for sample in process] for side in (base, head)]
    told = [compute_stats(side, 1)[1] for side in pooled]
    return _median_ratio(base, head) if is_different(pooled[0], pooled[1], told[0], told[1]) else 1.0


def _median_ratio(base: Side, head: Side) -> float:
    pooled = [[sample for process in side for sample in process] for side in (base, head)]
    return statistics.median(pooled[1]) / statistics.median(pooled[0])


if __name__ == "__main__":
    app()
