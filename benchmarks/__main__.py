"""`python -m benchmarks`: the instrument on a command line."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness.gate.cli import calibrate, compare, reference_app
from benchmarks.harness.github.cli import github_app
from benchmarks.harness.nightly.cli import nightly
from benchmarks.harness.peers.cli import peers

app = typer.Typer(
    help="Look after the benchmarks. To run them: pytest --benchmark-only",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command()
def doctor() -> None:
    """Say what this machine lacks for good measurements, and the command that mends it.

    Exit status 1 when something is missing, 0 when there are warnings only.

    \b
    Example:
      python -m benchmarks doctor && pytest --benchmark-only
    """
    from benchmarks.harness.doctor import examine, render

    findings = examine()
    typer.echo(render(findings))
    sys.exit(any(finding.state == "missing" for finding in findings))


app.command()(compare)
app.command()(calibrate)
app.command()(nightly)
app.command()(peers)
app.add_typer(reference_app, name="reference")
app.add_typer(github_app, name="github")


@app.command()
def report(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Results of --benchmark-json or -autosave (default: the newest below .benchmarks)"),
    ] = None,
    output: Annotated[
        Path, typer.Option(metavar="PATH", help="The page to write; a .csv and an .md are put beside it")
    ] = Path(".benchmarks/report.html"),
) -> None:
    """Make one HTML page of what was measured, with a CSV and a Markdown file beside it.

    The page needs no network: tables, curves with fits, distributions of gaps, counts of work, provenance, and what
    is not to be trusted. Several files are shown side by side. Exit status 2, and nothing written, when a file cannot
    be read or holds something else.

    \b
    Examples:
      pytest --benchmark-only --benchmark-autosave && python -m benchmarks report
      pytest --benchmark-only --benchmark-json base.json
      python -m benchmarks report base.json head.json --output compare.html
    """
    from benchmarks.harness.archive import newest_file
    from benchmarks.harness.errors import InstrumentError
    from benchmarks.harness.exports import write_report

    try:
        paths = write_report(files or [newest_file(Path(".benchmarks"))], output)
    except (InstrumentError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    for path in paths:
        typer.echo(path)


@app.command()
def counts(
    base: Annotated[Path, typer.Argument(help="Results of --benchmark-json, before a change")],
    head: Annotated[Path, typer.Argument(help="Results of --benchmark-json, after it")],
) -> None:
    """Compare counts of work exactly: operators, FLOPs, bytes, tokens recomputed. Times are not looked at.

    Exit status 0 when no count got worse, 1 when one did, if only by one, 4 when a count is missing on either side
    (and so when nothing was compared), 2 when a file cannot be read.

    \b
    Example:
      pytest --benchmark-only benchmarks/bench_work.py --benchmark-json base.json
      ... change something, measure again into head.json ...
      python -m benchmarks counts base.json head.json
    """
    from benchmarks.harness.count_gate import compare_counts
    from benchmarks.harness.errors import InstrumentError

    try:
        code, told = compare_counts(base, head)
    except (InstrumentError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    typer.echo(told)
    sys.exit(code)


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(metavar="TRACE.jsonl", help="Mooncake's format: ids of shared blocks")],
    capacity: Annotated[
        list[int] | None, typer.Option(metavar="BLOCKS", help="of the cache; again for more (default: powers of two)")
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="who leaves first; again for more (default: all there are)")
    ] = None,
    block_tokens: Annotated[int, typer.Option(help="tokens that an id of the trace stands for")] = 512,
    picture: Annotated[Path | None, typer.Option(metavar="PATH", help="draw curves: .png, .svg or .pdf")] = None,
) -> None:
    """How often would a prefix cache find the blocks of a recorded trace again? No model runs.

    The trace goes through nanoserve's own prefix tree and pool at each capacity, under each policy, beside the optimum,
    which knows what comes, and an unlimited cache. Lines that are no request are left out and listed. Exit status 2
    when the file cannot be read or holds no request.

    \b
    Examples:
      python -m benchmarks replay benchmarks/traces/prefixes.jsonl
      python -m benchmarks replay conversation_trace.jsonl --policy lru --capacity 1000 --capacity 10000
    """
    from benchmarks.harness.errors import InstrumentError
    from benchmarks.harness.hit_curves import replay_trace

    try:
        told, faults = replay_trace(trace, capacity or (), policy or (), block_tokens, picture)
    except (InstrumentError, OSError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    for fault in faults:
        typer.echo(f"left out: {fault}", err=True)
    typer.echo(told, nl=False)


if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
