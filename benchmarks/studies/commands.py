"""The command line of a study: a results file in, what people read out, its files beside it.

Knows typer and results files. Refuses to know what is studied.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness.results import BenchmarkResult

ROOT = Path(__file__).parents[2]

Results = Sequence[BenchmarkResult]


def command(
    help_text: str | None, tell: Callable[[Results], str], write: Callable[[Results, Path], Iterable[Path]]
) -> typer.Typer:
    """An app of one command; exit code 2, with a line that says why, for a file that holds no results."""
    app = typer.Typer(help=help_text, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

    @app.command()
    def main(
        file: Annotated[Path, typer.Argument(help="a results file of the profile `study`")],
        output: Annotated[Path, typer.Option(help="where the CSV file and the picture go")] = ROOT
        / ".benchmarks"
        / "study",
    ) -> None:
        """Set a results file beside the published study."""
        from benchmarks.harness.archive import read_results
        from benchmarks.harness.errors import InstrumentError

        try:
            results = read_results([file])
        except InstrumentError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from None
        typer.echo(tell(results))
        for path in write(results, output):
            typer.echo(path)

    return app
