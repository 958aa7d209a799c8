"""The numbers for other programs and other people: tidy CSV, Markdown for a pull request, and files written whole.

Knows formats, and how three files come to be together or not at all. The rows are those of the page.
"""

import csv
import errno
import io
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.archive import Archive, read_archives
from benchmarks.harness.curves import Labelled
from benchmarks.harness.doubts import doubts
from benchmarks.harness.errors import ArchiveError
from benchmarks.harness.results import BenchmarkResult, Measurement
from benchmarks.harness.tables import Cell, Row, Table, counter_tables, quantity_tables

COLUMNS = (
    "file", "benchmark", "case", "params", "arm", "metric", "unit", "better", "exact", "gate", "sample", "value",
    "is_outlier", "summary", "low", "high", "n", "n_too_small",
)  # fmt: skip
"""`sample` counts from 0 in the order of taking; the columns after `is_outlier` repeat the measurement's summary."""


def csv_text(archives: Sequence[Archive]) -> str:
    """A row per sample, its number at full precision. A measurement without samples keeps one row without a value."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for archive in archives:
        for result in archive.results:
            for measurement in result.measurements:
                writer.writerows(_csv_rows(archive.label, result, measurement))
    return text.getvalue()


def _csv_rows(label: str, result: BenchmarkResult, measurement: Measurement) -> Iterator[dict[str, Any]]:
    told = measurement.as_dict()
    shared = {name: told[name] for name in ("metric", "arm", "unit", "better", "exact", "gate", "n", "n_too_small")}
    shared |= {"file": label, "benchmark": result.benchmark, "case": result.case}
    shared |= {"params": json.dumps(dict(result.params), ensure_ascii=False)}
    shared |= {"summary": measurement.value, "low": measurement.low, "high": measurement.high}
    for index, sample in enumerate(measurement.samples):
        yield shared | {"sample": index, "value": repr(sample), "is_outlier": index in told["outliers"]}
    if not measurement.samples:
        yield shared


def markdown_text(archives: Sequence[Archive], labelled: Sequence[Labelled]) -> str:
    """Tables to be pasted into a pull request. Names are code there: nothing in them is markup, a mention or a link."""
    parts = [_head(archive) for archive in archives]
    parts += [_quantity(table) for table in quantity_tables(labelled)]
    parts += [_quantity(table) for table in counter_tables(labelled)]
    found = [f"- {_code(doubt.kind)} ({len(doubt.places)}): {doubt.why}" for doubt in doubts(archives)]
    if found:
        parts.append("\n".join(["**Not to be trusted without a second look**", "", *found]))
    parts.append("Value [95 % interval] n. One process: the interval says how well this process is known.")
    return "\n\n".join(parts) + "\n"


def _head(archive: Archive) -> str:
    told = archive.results[0].provenance
    where = told.get("device_name") or told.get("cpu")
    words = [told.get("model"), told.get("dtype"), where, f"commit {told.get('commit') or 'unknown'}"]
    return f"{_code(archive.label)}: {', '.join(_code(str(word)) for word in words)}, {_code(archive.taken_at)}"


def _quantity(table: Table) -> str:
    rows = [(test, row) for test, rows in table.groups for row in rows]
    has_files = any(row.file for _, row in rows)
    heads = ["benchmark", *(["file"] if has_files else []), *map(_code, table.columns)]
    lines = [f"**{table.title}** ({table.note})", "", _line(heads), _line(["---"] + ["--:"] * (len(heads) - 1))]
    lines += [_line([_row_name(test, row), *_file(row, has_files), *map(_cell, row.cells)]) for test, row in rows]
    return "\n".join(lines)


def _row_name(test: str, row: Row) -> str:
    return _code(f"{test}[{row.case}] {row.arm}".rstrip())


def _file(row: Row, has_files: bool) -> list[str]:
    return [_code(row.file)] if has_files else []


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return ""
    interval = f" [{cell.interval}]" if cell.interval else ""
    doubt = f" {_code(cell.doubt)}" if cell.doubt else ""
    return f"{cell.value}{interval}{f' n {cell.n}' if cell.n else ''}{doubt}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _code(text: str) -> str:
    """A code span around any text: a fence longer than its own backticks, no line breaks, pipes escaped for tables."""
    flat = " ".join(text.split()).replace("|", "\\|")
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", flat)), default=0))
    edge = " " if flat.startswith("`") or flat.endswith("`") or not flat else ""
    return f"{fence}{edge}{flat}{edge}{fence}"


def write_report(files: Sequence[Path], output: Path) -> list[Path]:
    """Read results files; write the page to `output`, CSV and Markdown beside it. All three paths, or an error."""
    from benchmarks.harness.page import label_results, render_page

    if output.suffix.lower() not in (".html", ".htm"):
        raise ArchiveError(f"the page is HTML: --output has to end in .html, not {output.name!r}")
    archives = read_archives(files)
    labelled = label_results(archives)
    texts = {
        output: render_page(archives),
        output.with_suffix(".csv"): csv_text(archives),
        output.with_suffix(".md"): markdown_text(archives, labelled),
    }
    overwritten = {path.resolve() for path in texts} & {file.resolve() for file in files}
    if overwritten:
        raise ArchiveError(f"{min(overwritten)} is read here; give --output another name")
    write_files(texts)
    return list(texts)


def write_files(texts: Mapping[Path, str]) -> None:
    """Write every file, each whole: a reader sees the old content or the new, never a part. OSError passes through.

    Nothing is put in place before all of it is written and every place can take a file.
    """
    drafts: dict[Path, Path] = {}
    for path in texts:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, draft = tempfile.mkstemp(prefix=f".{path.name[:40]}.", dir=path.parent)
            drafts[path] = Path(draft)
            with os.fdopen(handle, "wb") as file:
                file.write(text.encode("utf-8", "backslashreplace"))
        for path, each in drafts.items():
            _publish(each, path)
    finally:
        for each in drafts.values():
            each.unlink(missing_ok=True)


def _publish(draft: Path, path: Path) -> None:
    """Put a finished file in its place, readable like any new file (a temporary one is its owner's only)."""
    mask = os.umask(0)
    os.umask(mask)
    draft.chmod(0o666 & ~mask)
    draft.replace(path)
