"""The gate's commands: what `python -m benchmarks compare` takes, and in which order it does things.

Knows options, files to write and exit codes. Refuses to judge.
"""

import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.files import write_whole
from benchmarks.harness.gate.progress import progress_on_stderr
from benchmarks.harness.profiles import TRACKED

if TYPE_CHECKING:
    from benchmarks.harness.gate.comparison import Sampling
    from benchmarks.harness.gate.telling import About
    from benchmarks.harness.gate.verdict import Judgement, Rules

ROOT = Path(__file__).parents[3]
STORE = ROOT / ".benchmarks" / "builds"
RESULTS = ROOT / ".asv" / "results"


def share_of(option: str, text: str) -> float:
    """A percentage, with or without its sign, as a share. Raises InstrumentError for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%?\s*", text)
    if not found:
        raise InstrumentError(f"{option} takes percent, such as 2 or 2.5%, not {text!r}")
    return float(found[1]) / 100


def compare(
    base: Annotated[str, typer.Argument(help="a commit, branch or tag: what was")],
    head: Annotated[str, typer.Argument(help="the same: what is; HEAD+dirty is the working tree")],
    *,
    k: Annotated[str, typer.Option("-k", metavar="EXPRESSION", help="pytest's -k: only benchmarks that match")] = "",
    model: Annotated[str, typer.Option(help="pytest's --model (default: by device)")] = "",
    device: Annotated[str, typer.Option(help="pytest's --device")] = "auto",
    budget_s: Annotated[float, typer.Option(help="seconds of measuring for each case, both sides together")] = 60.0,
    launches: Annotated[int, typer.Option(help="fresh pairs of processes, at most; at least 4")] = 12,
    margin: Annotated[str, typer.Option(metavar="PERCENT", help="closer than this is the same")] = "3",
    threshold: Annotated[
        str, typer.Option(metavar="PERCENT", help="a smaller change is neither worse nor better")
    ] = "0",
    stored: Annotated[bool, typer.Option("--stored", help="measure nothing: judge what asv has stored")] = False,
    machine: Annotated[str, typer.Option(help="with --stored: asv's name of the machine")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="everything, for machines")] = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="for a pull request")] = None,
    pytest_args: Annotated[str, typer.Option(metavar="ARGS", help="more arguments for pytest on both sides")] = "",
    planted: Annotated[
        str, typer.Option("--planted-slowdown", metavar="PERCENT", help="slow head down: is it found?")
    ] = "",
) -> None:
    """Did HEAD make anything worse than BASE? The sharp instrument.

    Two processes, one per commit, each with its own installed nanoserve, run the checkout's benchmarks in lock step:
    one step each, in random order, again and again, in several launches. Stops as soon as the verdict is clear.

    Exit status: 0 same or better, 1 worse, 3 cannot tell, 4 no data (something was not measured on a side),
    5 contaminated (somebody else used the machine), 2 wrong usage.

    \b
    Examples:
      python -m benchmarks compare main HEAD
      python -m benchmarks compare HEAD HEAD+dirty -k "prompt_length and 16" --markdown verdict.md
      python -m benchmarks compare main HEAD --stored
    """
    try:
        from benchmarks.harness.gate.verdict import Rules

        rules = Rules(
            max_launches=launches,
            margin=share_of("--margin", margin),
            threshold=share_of("--threshold", threshold),
            looks_once=stored,
        )
        if stored:
            judgement, about = _judge_stored(base, head, machine, rules)
        else:
            asked = _asked(k, _options(model, device, pytest_args), budget_s, planted)
            judgement, about = _measure(base, head, {"rules": rules, **asked})
    except (InstrumentError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        typer.echo("interrupted: nothing was judged, nothing is left behind", err=True)
        sys.exit(130)
    _tell(judgement, about, json_file, markdown)
    sys.exit(judgement.exit_code)


def _asked(k: str, options: tuple[str, ...], budget_s: float, planted: str) -> dict[str, Any]:
    """The options as fields of a Plan."""
    from benchmarks.harness.gate.comparison import Sampling

    slowed = (f"--planted-slowdown={100 * share_of('--planted-slowdown', planted):g}",) if planted else ()
    selection = ("-m", TRACKED, *(("-k", k) if k else ()))
    sampling = Sampling(budget_s=budget_s)
    return {"selection": selection, "options": options, "sampling": sampling, "head_options": slowed}


reference_app = typer.Typer(help="The build that every pass of asv is measured beside.", no_args_is_help=True)


@reference_app.command("set")
def set_reference(
    commit: Annotated[str, typer.Argument(help="a commit that builds and is not far from today's")],
) -> None:
    """Choose the reference: asv's times are anchored to it from now on, so that history does not follow the host.

    Each pass then runs this build in lock step with the one under test, and asv stores the ratio of the two times the
    reference's nominal cost, which is measured once, when a benchmark is first met. Another choice begins a new
    generation, whose numbers are not comparable: asv then needs a new name for this machine, and says so.

    \b
    Examples:
      python -m benchmarks reference set main
      NANOSERVE_BENCH_ARGS=--raw asv continuous main HEAD      # once without it
    """
    from benchmarks.harness.gate.builds import build
    from benchmarks.harness.gate.reference import load_reference, save_reference, successor
    from benchmarks.harness.gate.revisions import resolve

    try:
        with progress_on_stderr() as progress:
            built = build(resolve(commit, ROOT), ROOT, STORE, progress.now)
        if built.revision.is_dirty:
            raise InstrumentError("a reference is a commit: the working tree will not stay as it is")
        reference = successor(load_reference(ROOT), built.revision.commit, built.source_sha256)
        save_reference(ROOT, reference)
    except (InstrumentError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    typer.echo(f"reference: {reference}, {len(reference.nominal)} nominal costs known")


@reference_app.command("show")
def show_reference() -> None:
    """Say which build it is, and what each benchmark nominally costs with it. Exit status 1 without one."""
    from benchmarks.harness.gate.reference import SET_COMMAND, load_reference

    try:
        reference = load_reference(ROOT)
    except InstrumentError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    if reference is None:
        typer.echo(f"no reference is set, asv's times are raw: {SET_COMMAND}")
        sys.exit(1)
    typer.echo(f"reference: {reference}, since {reference.set_at}")
    for key, cost in sorted(reference.nominal.items()):
        typer.echo(f"  {key.benchmark}[{key.case}] {key.arm} {key.metric}: {cost:.6g}")


def _options(model: str, device: str, more: str) -> tuple[str, ...]:
    try:
        given = shlex.split(more)
    except ValueError as error:
        raise InstrumentError(f"--pytest-args cannot be read, {error}: {more!r}") from None
    return (*([f"--model={model}"] if model else []), f"--device={device}", *given)


def _measure(base: str, head: str, asked: dict[str, Any]) -> "tuple[Judgement, About]":
    """Build both, measure them against each other, and say what it took."""
    from benchmarks.harness.gate.builds import build
    from benchmarks.harness.gate.comparison import Plan, compare
    from benchmarks.harness.gate.revisions import resolve
    from benchmarks.harness.gate.telling import About

    known, said = _calibration(asked["options"], asked["rules"], asked["sampling"])
    revisions = resolve(base, ROOT), resolve(head, ROOT)
    with progress_on_stderr() as progress:
        builds = [build(revision, ROOT, STORE, progress.now) for revision in revisions]
        compared = compare(Plan(base=builds[0], head=builds[1], root=ROOT, **asked), progress)
    same = ["both have the same source of nanoserve: a difference is noise, or planted"]
    notes = (*(same if builds[0].source_sha256 == builds[1].source_sha256 else []), *compared.notes)
    about = About(
        base=str(revisions[0]),
        head=str(revisions[1]),
        taken_s=compared.taken_s,
        calibration=known,
        notes=(*said, *notes),
    )
    return compared.judgement, about


def _calibration(options: Sequence[str], rules: "Rules", sampling: "Sampling") -> tuple[str, tuple[str, ...]]:
    """What is known of false alarms and of small effects on this machine, and notes on that knowledge.

    Raises InstrumentError for a threshold that this machine is known not to hold.
    """
    from benchmarks.harness.gate.calibration import check_threshold
    from benchmarks.harness.gate.calibration_file import calibration_file, newest_here

    notes: list[str] = []
    chosen = dict(option.removeprefix("--").split("=", 1) for option in options if option.count("=") == 1)
    found = newest_here(calibration_file(ROOT), chosen.get("model", ""), chosen.get("device", "auto"), notes.append)
    if found is None:
        return "", (*notes, "how often it is wrong on this machine is not known yet: python -m benchmarks calibrate")
    odd = found.unlike(rules, sampling)
    if odd:
        return found.line(), (*notes, f"calibrated with {odd}")
    check_threshold(rules.threshold, found)
    return found.line(), tuple(notes)


def calibrate(
    commit: Annotated[str, typer.Argument(help="what is compared with itself")] = "HEAD",
    *,
    k: Annotated[str, typer.Option("-k", metavar="EXPRESSION", help="pytest's -k")] = "prompt_length and 16",
    model: Annotated[str, typer.Option(help="pytest's --model (default: by device)")] = "",
    device: Annotated[str, typer.Option(help="pytest's --device")] = "auto",
    budget_s: Annotated[float, typer.Option(help="seconds of measuring for each case of a comparison")] = 60.0,
    launches: Annotated[int, typer.Option(help="of equal builds; each 12 are one comparison")] = 48,
    planted: Annotated[int, typer.Option(help="of each planted slowdown: 1, 2, 3, 5 and 10 %")] = 8,
    pytest_args: Annotated[str, typer.Option(metavar="ARGS", help="more arguments for pytest on both sides")] = "",
) -> None:
    """How often is `compare` wrong on this machine, and what is the smallest slowdown that it finds?

    Launches a build against itself, and against itself with more work planted into each step. What comes out is kept
    below .benchmarks, and quoted by every later comparison; a --threshold that the machine cannot hold is refused then.
    Takes about half an hour of a machine that does nothing else.

    \b
    Example:
      python -m benchmarks calibrate
    """
    try:
        from benchmarks.harness.gate.builds import build
        from benchmarks.harness.gate.calibrating import calibrate as measure
        from benchmarks.harness.gate.calibration_file import calibration_file, save_calibration
        from benchmarks.harness.gate.calibration_text import render
        from benchmarks.harness.gate.comparison import Plan
        from benchmarks.harness.gate.gathering import Effort
        from benchmarks.harness.gate.revisions import resolve
        from benchmarks.harness.gate.rules import Rules

        effort = Effort(num_launches=launches, num_planted=planted)
        asked = _asked(k, _options(model, device, pytest_args), budget_s, "")
        with progress_on_stderr() as progress:
            built = build(resolve(commit, ROOT), ROOT, STORE, progress.now)
            plan = Plan(base=built, head=built, root=ROOT, rules=Rules(), **asked)
            found = measure(plan, effort, progress)
        save_calibration(calibration_file(ROOT), found, lambda text: typer.echo(text, err=True))
    except (InstrumentError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    typer.echo(render(found), nl=False)


def _judge_stored(base: str, head: str, machine: str, rules: "Rules") -> "tuple[Judgement, About]":
    from benchmarks.harness.gate.revisions import resolve
    from benchmarks.harness.gate.stored import read_stored
    from benchmarks.harness.gate.telling import About
    from benchmarks.harness.gate.verdict import judge

    revisions = resolve(base, ROOT), resolve(head, ROOT)
    evidence = read_stored(RESULTS, revisions[0].commit, revisions[1].commit, machine or None)
    return judge(evidence, rules), About(base=str(revisions[0]), head=str(revisions[1]))


def _tell(judgement: "Judgement", about: "About", json_file: Path | None, markdown: Path | None) -> None:
    """Files first: what is printed says that they are there."""
    from benchmarks.harness.gate.telling import as_json, as_markdown, as_text

    for path, text in ((json_file, as_json), (markdown, as_markdown)):
        if path is not None:
            write_whole(path, text(judgement, about))
    width, is_terminal = shutil.get_terminal_size((118, 40)).columns, sys.stdout.isatty()
    typer.echo(as_text(judgement, about, width=max(width, 80), colour=is_terminal), nl=False)
