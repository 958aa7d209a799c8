"""`python -m benchmarks github`: what is told to GitHub, on a command line.

Knows options, the environment and exit codes. Refuses to know what an issue says.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.harness.errors import GitHubError, InstrumentError

if TYPE_CHECKING:
    from benchmarks.harness.github.client import GitHub

github_app = typer.Typer(
    help="Tell GitHub what was measured. Needs GITHUB_TOKEN, GITHUB_REPOSITORY and GITHUB_API_URL.",
    no_args_is_help=True,
)

_DryRun = Annotated[bool, typer.Option("--dry-run", help="look, and say what would be done")]


@github_app.command()
def issue(
    results: Annotated[Path, typer.Option(metavar="DIR", help="the results folder of `nightly`")],
    machine: Annotated[str, typer.Option(metavar="NAME", help="whose newest night it is about")],
    dry_run: _DryRun = False,
) -> None:
    """Open, update or close the issues of a machine, by its newest night.

    Worse opens an issue, or adds to the one that is open; same or better closes it; cannot tell and contaminated leave
    it. No data opens an issue of its own. To do it twice changes nothing. Exit status 0 when GitHub knows, whatever
    the verdict is; 2 when it does not.

    \b
    Example:
      python -m benchmarks github issue --results .benchmarks/nightly --machine h200 --dry-run
    """
    from benchmarks.harness.github.issues import follow
    from benchmarks.harness.nightly.folder import newest_night

    def tell(github: "GitHub") -> list[str]:
        return follow(github, newest_night(results, machine), _run_url(), dry_run)

    _with_github(tell, f"the issues of {machine} are as they should be")


@github_app.command()
def comment(
    files: Annotated[list[Path], typer.Argument(metavar="FILE.md...", help="what `compare --markdown` wrote")],
    pull_request: Annotated[int, typer.Option(metavar="N", help="its number")] = 0,
    head: Annotated[str, typer.Option(metavar="OWNER:BRANCH", help="or where it comes from")] = "",
    head_sha: Annotated[str, typer.Option(metavar="SHA", help="with --head: the commit that was measured")] = "",
    dry_run: _DryRun = False,
) -> None:
    """Show Markdown files in a comment on a pull request: one comment, kept up to date.

    Exit status 0 when it is there, and when the commit is no open pull request's newest; 2 otherwise.

    \b
    Examples:
      python -m benchmarks compare main HEAD --markdown verdict.md
      python -m benchmarks github comment verdict.md --pull-request 12
      python -m benchmarks github comment verdict.md --head someone:branch --head-sha "$(git rev-parse HEAD)"
    """
    from benchmarks.harness.github.comments import pull_requests, read, stick

    def tell(github: "GitHub") -> list[str]:
        if bool(pull_request) == bool(head and head_sha):
            raise GitHubError("which pull request? Either --pull-request N, or --head OWNER:BRANCH and --head-sha SHA")
        text = read(files)
        numbers = [pull_request] if pull_request else pull_requests(github, head, head_sha)
        return [told for number in numbers for told in stick(github, number, text, dry_run)]

    _with_github(tell, f"no open pull request stands at {head_sha}: nothing is said")


def _with_github(tell: "Callable[[GitHub], Sequence[str]]", otherwise: str) -> None:
    """Print what was done, or `otherwise` where that is nothing; exit with 2 and the reason when it cannot be done."""
    try:
        told = _persisted(tell)
    except (InstrumentError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    for line in told or [otherwise]:
        typer.echo(line)


def _persisted(tell: "Callable[[GitHub], Sequence[str]]") -> Sequence[str]:
    import httpx2

    from benchmarks.harness.github.client import GitHub, access_from, persist

    access = access_from(os.environ)
    with httpx2.Client() as http:
        return persist(lambda: tell(GitHub(access, http)), time.sleep)


def _run_url() -> str:
    """Of the run that this is part of; empty elsewhere."""
    names = ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "GITHUB_RUN_ID")
    server, repository, run = (os.environ.get(name, "") for name in names)
    return f"{server}/{repository}/actions/runs/{run}" if server and run else ""
