"""`python -m benchmarks`: the instrument on a command line."""

import sys

import typer

app = typer.Typer(
    help="Look after the benchmarks. To run them: pytest --benchmark-only",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def _commands() -> None:
    """Keep `doctor` a subcommand while it is the only one."""


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


if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
