"""`python -m benchmarks nightly`: its options, its modes, its exit codes.

Knows what a user types and what is refused before any work. Refuses to know how a night goes (`night.py`).
"""

import contextlib
import datetime
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from benchmarks.harness.errors import BuildError, InstrumentError
from benchmarks.harness.markdown import plain
from benchmarks.harness.nightly.missed import MAX_AGE_HOURS

if TYPE_CHECKING:
    from benchmarks.harness.nightly.fleet import Member
    from benchmarks.harness.nightly.folder import Night
    from benchmarks.harness.nightly.plan import Asked, Places

ROOT = Path(__file__).parents[3]

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def nightly(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="[DIR]...", help="with --merge: what to merge")
    ] = None,
    *,
    results: Annotated[Path, typer.Option(metavar="DIR", help="results of all nights, made to be committed")] = Path(
        ".benchmarks/nightly"
    ),
    machine: Annotated[str, typer.Option(help="the name of this machine (default: asv's)")] = "",
    max_hours: Annotated[float, typer.Option(help="what takes longer is ended, and is no data")] = 8.0,
    model: Annotated[str, typer.Option(help="pytest's --model (default: by device)")] = "",
    device: Annotated[str, typer.Option(help="pytest's --device")] = "auto",
    k: Annotated[str, typer.Option("-k", metavar="EXPRESSION", help="pytest's -k, for all but the exact counts")] = "",
    launches: Annotated[int, typer.Option(help="of compare: fresh pairs of processes, at most; at least 4")] = 12,
    budget_s: Annotated[float, typer.Option(help="of compare: seconds for each case, both sides together")] = 60.0,
    pytest_args: Annotated[str, typer.Option(metavar="ARGS", help="more arguments for pytest, everywhere")] = "",
    summary: Annotated[Path | None, typer.Option(metavar="FILE", help="append the summary there as well")] = None,
    site: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="pages to publish (default: DIR-site; with --merge: none)"),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="measure nothing: is any machine silent?")] = False,
    max_age_hours: Annotated[float, typer.Option(help="with --check and --merge: older is silent")] = MAX_AGE_HOURS,
    expected: Annotated[str, typer.Option(metavar="LIST", help="with --check: machines that have to be there")] = "",
    merge: Annotated[
        bool, typer.Option("--merge", help="measure nothing: bring other results folders into this")
    ] = False,
    accept: Annotated[str, typer.Option(metavar="COMMIT", help="declare it this machine's new baseline")] = "",
) -> None:
    """Everything that a runner does at night: the same on a laptop, in CI and on a GPU box.

    Compares the last good commit with HEAD, first in exact counts, then in time; brings new commits into asv's
    history, passing over those that do not build; makes the page of HEAD and asv's pages; writes a summary, and all of
    it into a results folder that is ready to be committed. Killed, it goes on where it was when it is started again
    within a day. A commit becomes the baseline only when nothing got worse. Where nothing is new, HEAD is compared
    with itself: that watches the machine.

    Exit status, of the gravest: 0 same or better, 1 worse, 3 cannot tell, 4 no data (something failed, or there was no
    time), 5 contaminated; 2 wrong usage, 130 interrupted. With --check only 0 and 4 (a machine has been silent).

    \b
    Examples:
      python -m benchmarks nightly
      python -m benchmarks nightly --results results --max-hours 5 --summary "$GITHUB_STEP_SUMMARY"
      python -m benchmarks nightly --results trial --model tiny -k "prompt_length and 16" --launches 4 --budget-s 4
      python -m benchmarks nightly --check --results results --expected h100,h200
      python -m benchmarks nightly --merge from-a from-b from-c --results results --site site
      python -m benchmarks nightly --accept HEAD     # slower, and meant to be
    """
    try:
        if sum((check, merge, bool(accept))) > 1:
            raise InstrumentError("choose one of --check, --accept COMMIT and --merge DIR...")
        if bool(folders) != merge:
            raise InstrumentError("--merge takes the folders to merge, and nothing else does: --merge DIR...")
        if not max_age_hours > 0:
            raise InstrumentError(f"--max-age-hours is a number above 0, not {max_age_hours}")
        _check_summary(summary)
        results = results.absolute()
        if merge:
            _merge(results, folders or [], max_age_hours, summary, site)
        if check:
            _check(results, _listed(expected) or [machine] * bool(machine), max_age_hours, summary)
        if accept:
            _accept(results, machine, accept)
        from benchmarks.harness.nightly.plan import Asked, Places

        asked = Asked(
            machine=machine or _own_name(), model=model, device=device, k=k, launches=launches, budget_s=budget_s,
            pytest_args=pytest_args,
        )  # fmt: skip
        night = _run(
            asked,
            Places(root=ROOT, results=results, site=(site or results.with_name(f"{results.name}-site")).absolute()),
            max_hours,
        )
    except (InstrumentError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        typer.echo("interrupted: what was done is kept; the same command goes on with it", err=True)
        sys.exit(130)
    _end(night.summary, night.exit_code, summary)


def _check_summary(path: Path | None) -> None:
    """Raise InstrumentError for what could not be appended to when the night is over: an unset variable, for one."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise InstrumentError(f"--summary names no file that can be written: {path}; name one, or leave it out")


def _end(told: str, code: int, summary: Path | None) -> NoReturn:
    """Print it as people read it, append it as Markdown, exit with it."""
    shown = plain(told)
    typer.echo(shown, nl=not shown.endswith("\n"))
    if summary is not None:
        with summary.open("a", encoding="utf-8") as file:
            file.write(told if told.endswith("\n") else f"{told}\n")
    sys.exit(code)


def _own_name() -> str:
    from benchmarks.harness.asv_process import machine_name

    return machine_name()


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


# A night.


def _run(asked: "Asked", places: "Places", max_hours: float) -> "Night":
    import time

    from benchmarks.harness.gate.progress import progress_on_stderr
    from benchmarks.harness.identity import identity
    from benchmarks.harness.nightly.locks import alone
    from benchmarks.harness.nightly.night import run_night
    from benchmarks.harness.nightly.runner import HEARTBEAT_S, ProcessRunner
    from benchmarks.harness.nightly.state import claim_name
    from benchmarks.harness.nightly.steps import Tools

    _check_options(asked, max_hours)
    with alone(places.results), _ended_gently(), progress_on_stderr() as progress:
        sku = claim_name(places.results, asked.machine, identity(), asked.measured)
        follows = (progress.now, 1.0) if sys.stderr.isatty() else (progress.step, HEARTBEAT_S)
        runner = ProcessRunner(places.root, *follows)
        tools = Tools(runner=runner, why_not_built=_why_not_built, now=_now, clock=time.monotonic, say=progress.step)
        return run_night(asked, sku, places, tools, 3600 * max_hours)


def _check_options(asked: "Asked", max_hours: float) -> None:
    """Raise InstrumentError for what would only be found after hours."""
    from benchmarks.harness.gate.comparison import Sampling
    from benchmarks.harness.gate.rules import Rules
    from benchmarks.harness.sources.nanoserve import choose_device

    if not max_hours > 0:
        raise InstrumentError(f"--max-hours is a number above 0, not {max_hours}")
    choose_device(asked.device)
    Rules(max_launches=asked.launches)
    Sampling(budget_s=asked.budget_s)
    _ = asked.pytest_options


def _why_not_built(commit: str) -> str:
    from benchmarks.harness.gate.builds import build
    from benchmarks.harness.gate.revisions import resolve

    try:
        build(resolve(commit, ROOT), ROOT, ROOT / ".benchmarks" / "builds")
    except BuildError as error:
        return str(error).strip().splitlines()[-1].strip()[:300]
    return ""


@contextlib.contextmanager
def _ended_gently() -> Iterator[None]:
    """SIGTERM and a terminal that closes are like Ctrl-C: whatever runs is ended first."""
    has_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    heard = [each for each in _ENDING if not (has_nohup and each == signal.SIGHUP)]
    before = {each: signal.signal(each, signal.default_int_handler) for each in heard}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


# The other modes. Each ends the process.


def _listed(text: str) -> list[str]:
    """Names as JSON, as a workflow's variable holds them, or with commas between."""
    return re.findall(r'[^\s,"\[\]]+', text)


def _check(results: Path, machines: list[str], max_age_hours: float, summary: Path | None) -> NoReturn:
    from benchmarks.harness.gate.rules import EXIT_CODES
    from benchmarks.harness.nightly.fleet import fleet_table, members, remedy

    fleet = members(results, _now(), max_age_hours, machines)
    silent = [each for each in fleet if each.is_stale]
    if not fleet:
        told = f"no data: {results} holds no nights; to run one: python -m benchmarks nightly --results {results}"
        _end(told, EXIT_CODES["no data"], summary)
    told = "\n\n".join(filter(None, (fleet_table(fleet), remedy(results, silent))))
    _end(told, EXIT_CODES["no data"] if silent else 0, summary)


def _merge(
    results: Path, sources: list[Path], max_age_hours: float, summary: Path | None, site: Path | None
) -> NoReturn:
    from benchmarks.harness.nightly.fleet import exit_code_of, fleet_table, members
    from benchmarks.harness.nightly.locks import held
    from benchmarks.harness.nightly.merging import merge

    with held(results):
        merge(results, sources)
        fleet = members(results, _now(), max_age_hours)
        if site is not None:
            _publish(results, site, fleet)
    _end(fleet_table(fleet), exit_code_of(fleet), summary)


def _publish(results: Path, site: Path, fleet: "list[Member]") -> None:
    from benchmarks.harness.nightly.plan import Places
    from benchmarks.harness.nightly.runner import ProcessRunner
    from benchmarks.harness.nightly.site import publish_fleet

    with _ended_gently():
        runner = ProcessRunner(ROOT, lambda text: None)
        publish_fleet(Places(root=ROOT, results=results, site=site.absolute()), runner, fleet)


def _accept(results: Path, machine: str, commit: str) -> NoReturn:
    from benchmarks.harness.gate.revisions import resolve
    from benchmarks.harness.nightly.locks import held
    from benchmarks.harness.nightly.state import accept

    name, revision = machine or _own_name(), resolve(commit, ROOT)
    if revision.is_dirty:
        raise InstrumentError("a baseline is a commit: the working tree will not stay as it is")
    with held(results):
        accept(results, name, revision.commit, _now())
    _end(f"{revision} is the baseline of {name}: the next night compares with it", 0, None)
