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
from collections.abc import Callable, Iterator, Sequence
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
    budget_s: Annotated[float, typer.Option(help="seconds of measuring for one comparison")] = 60,
) -> None:
    """Let each gate judge what was collected, and print the table as Markdown."""
    lines = [json.loads(line) for line in records.read_text("utf-8").splitlines()]
    usable = [line for line in lines if not any(line["failed"])]
    taken_min = sum(line["wall_s"] for line in usable) / 60
    typer.echo(f"{len(usable)} records, {taken_min:.0f} min; {budget_s:g} s a comparison\n")
    typer.echo("| metric | gate | limit | false alarms | finds 2 % | finds 3 % |\n|---|---|---|---|---|---|")
    for name in METRICS:
        for row in _rows(usable, name, budget_s):
            typer.echo("| " + " | ".join((name, *row)) + " |")


def _rows(lines: Sequence[Any], name: str, budget_s: float) -> Iterator[tuple[str, ...]]:
    launches = {percent: _launches(lines, name, percent) for percent in PLANTED}
    yield (
        "lock step, real comparisons",
        "p < 1 %",
        *(str(_found_in_lock_step(launches[percent])) for percent in PLANTED),
    )
    yield "lock step, drawn from the same launches", "p < 1 %", *map(str, _drawn(launches))
    alone = {percent: _processes(lines, name, percent) for percent in PLANTED}
    seconds = statistics.median(line["spent_s"] for line in lines if line["kind"] == "alone")
    num = max(2, round(budget_s / seconds / 2))
    for title, num_processes, ratio in (
        ("asv continuous, 2 processes a side", 2, _asv_ratio),
        (f"asv continuous, {num} processes a side", num, _asv_ratio),
        ("pytest-benchmark, median of one process", 1, _median_ratio),
        (f"pytest-benchmark, median of {num} processes", num, _median_ratio),
    ):
        yield title, *_others(alone, num_processes, ratio)


def _launches(lines: Sequence[Any], name: str, percent: float) -> list[list[float]]:
    """Log-ratios of the pairs, launch by launch."""
    from benchmarks.harness.gate.evidence import Pairs
    from benchmarks.harness.metrics import metric

    chosen = [line["sides"] for line in lines if line["kind"] == "lockstep" and line["percent"] == percent]
    pairs = (Pairs(base=tuple(base[name]), head=tuple(head[name])) for base, head in chosen)
    return [list(each.logs(metric(name))) for each in pairs]


def _found_in_lock_step(launches: Sequence[Sequence[float]]) -> Rate:
    """Comparisons of disjoint runs of launches."""
    blocks = [launches[i : i + NUM_LAUNCHES] for i in range(0, len(launches) - NUM_LAUNCHES + 1, NUM_LAUNCHES)]
    return Rate(sum(map(_finds, blocks)), len(blocks))


def _finds(block: Sequence[Sequence[float]]) -> bool:
    """Whether head is called worse, with a look after each launch from the fourth on."""
    from benchmarks.harness.gate.paired import MIN_LAUNCHES, over_looks, ratio_over_launches

    for taken in range(MIN_LAUNCHES, len(block) + 1):
        found = ratio_over_launches(block[:taken])
        p = over_looks(found.p, taken, first=MIN_LAUNCHES, last=len(block))
        if p <= FALSE_ALARMS and (found.value or 0) > 0:
            return True
    return False


def _drawn(launches: dict[float, list[list[float]]]) -> list[Rate | str]:
    """Comparisons of launches drawn from those of equal builds, shifted by what the planted ones were measured as.

    They share their launches: many, but no surer than those.
    """
    same = [statistics.median(each) for each in launches[0.0]]
    if len(same) < NUM_LAUNCHES:
        return ["n/a"] * len(PLANTED)
    draw = random.Random(0)
    draws = [draw.sample(same, NUM_LAUNCHES) for _ in range(NUM_DRAWS)]
    shifts = [statistics.median(map(statistics.median, launches[percent] or [[math.nan]])) for percent in PLANTED[1:]]
    return [
        Rate(sum(_finds([[each + shift] for each in drawn]) for drawn in draws), NUM_DRAWS) for shift in (0.0, *shifts)
    ]


def _processes(lines: Sequence[Any], name: str, percent: float) -> list[list[float]]:
    return [line["sides"][0][name] for line in lines if line["kind"] == "alone" and line["percent"] == percent]


Ratio = Callable[[Sequence[Sequence[float]], Sequence[Sequence[float]]], float]
"""By how much head is slower than base in the eyes of a tool; 1 where it sees no difference."""


def _asv_ratio(base: Sequence[Sequence[float]], head: Sequence[Sequence[float]]) -> float:
    """The ratio of medians where asv's own test calls the samples different."""
    from asv._stats import is_different
    from asv_runner.statistics import compute_stats

    pooled = [[sample for process in side for sample in process] for side in (base, head)]
    told = [compute_stats(side, 1)[1] for side in pooled]
    differ = is_different(pooled[0], pooled[1], told[0], told[1])
    return statistics.median(pooled[1]) / statistics.median(pooled[0]) if differ else 1.0


def _median_ratio(base: Sequence[Sequence[float]], head: Sequence[Sequence[float]]) -> float:
    pooled = [[sample for process in side for sample in process] for side in (base, head)]
    return statistics.median(pooled[1]) / statistics.median(pooled[0])


def _others(alone: dict[float, list[list[float]]], num: int, ratio: Ratio) -> tuple[str, ...]:
    """With the lowest limit at which 1 % of identical comparisons are false alarms, or the tool's own if higher."""
    same = _ratios(alone[0.0][::2], alone[0.0][1::2], num, ratio)
    if not same:
        return ("n/a",) * 4
    limit = max(1.0, sorted(same)[min(len(same) - 1, int((1 - FALSE_ALARMS) * len(same)))])
    rates = [Rate(sum(each > limit for each in same), len(same))]
    for percent in PLANTED[1:]:
        found = _ratios(alone[0.0], alone[percent], num, ratio)
        rates.append(Rate(sum(each > limit for each in found), len(found)))
    return f"{100 * (limit - 1):.1f} %", *map(str, rates)


def _ratios(base: Sequence[Any], head: Sequence[Any], num: int, ratio: Ratio) -> list[float]:
    """Every run of `num` neighbours on both sides; those overlap, so that their number promises more than it holds."""
    return [ratio(base[i : i + num], head[i : i + num]) for i in range(min(len(base), len(head)) - num + 1)]


if __name__ == "__main__":
    app()
