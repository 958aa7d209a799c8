"""How well three gates tell 2 and 3 % from nothing on this machine: lock step, asv's defaults, pytest-benchmark's.

    python -m benchmarks.studies.gate_power collect --minutes 60 --output .benchmarks/gate_power.jsonl
    python -m benchmarks.studies.gate_power table .benchmarks/gate_power.jsonl

`collect` measures one unchanged engine again and again, in random order: pairs in lock step, and single processes as
the other tools run them. Slowdowns are planted into some of the pairs. It can be stopped and continued.
`table` lets each gate judge comparisons made of such records (`gates.py`), all worth the same seconds of measuring of a
benchmark. Refuses to know what a comparison of several benchmarks adds.
"""

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.studies import gates

ROOT = Path(__file__).parents[2]
METRICS = ("ttft_s", "itl_p50_s")
KEPT = (*METRICS, "tpot_s")
"""What is recorded; TPOT is the mean of the gaps of which ITL p50 is the median."""

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
    turn = [*[("lockstep", 0.0)] * 5, *[("lockstep", percent) for percent in gates.LEVELS[1:]], *[("alone", 0.0)] * 3]
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
        result.case: {m.metric.name: list(m.samples) for m in result.measurements if m.metric.name in KEPT}
        for result in side.results
    }


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
        for line in gates.planted_and_seen(usable, name):
            typer.echo(line)
    typer.echo("\n| metric | gate | limit | false alarms | finds 2 % | finds 3 % |\n|---|---|---|---|---|---|")
    for name in METRICS:
        for row in (*gates.lock_step_rows(usable, name), *gates.other_rows(usable, name, budget_s)):
            typer.echo("| " + " | ".join((name, *row)) + " |")


if __name__ == "__main__":
    app()
