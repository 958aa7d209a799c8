"""When requests are due, and how large each is: a schedule that is whole before the run begins.

Knows rates, seeds and trace files. Refuses to know clocks and engines: every due time is absolute, so that a slow
engine cannot slow down the load that it is measured with (no coordinated omission). A trace is good as a whole or not
at all: no line is repaired, sorted or left out.
"""

import contextlib
import csv
import dataclasses
import datetime
import functools
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.harness.errors import InstrumentError

Tokens = int | Sequence[int]
"""A size that all requests share, or one for each."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request, tokens in and out: due `due_s` after the window began, or after the end of request `after`."""

    due_s: float
    prompt_tokens: int
    new_tokens: int
    after: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.due_s) and self.due_s >= 0):
            raise InstrumentError(f"due_s must be finite and at least 0, not {self.due_s}")
        for name in ("prompt_tokens", "new_tokens"):
            _check_count(name, getattr(self, name))


def together(num_requests: int, *, prompt_tokens: Tokens, new_tokens: Tokens) -> tuple[Arrival, ...]:
    """All requests at the moment in which the window begins."""
    _check_count("num_requests", num_requests)
    return _schedule([0.0] * num_requests, prompt_tokens, new_tokens)


def poisson(
    rate_per_s: float, num_requests: int, *, seed: int, prompt_tokens: Tokens, new_tokens: Tokens
) -> tuple[Arrival, ...]:
    """Arrivals that know nothing of each other: `bursts` of burstiness 1, whose gaps are exponential."""
    return bursts(
        rate_per_s, num_requests, burstiness=1.0, seed=seed, prompt_tokens=prompt_tokens, new_tokens=new_tokens
    )


def bursts(
    rate_per_s: float, num_requests: int, *, burstiness: float, seed: int, prompt_tokens: Tokens, new_tokens: Tokens
) -> tuple[Arrival, ...]:
    """Independent gaps from a gamma distribution of shape `burstiness` and mean 1 / `rate_per_s`.

    As vLLM's `--burstiness`: their coefficient of variation is burstiness ** -0.5, so below 1 is burstier than
    Poisson and above 1 more even. Unlike there, the first request is due at 0, and nothing is rescaled to meet the
    rate exactly (gaps of a fixed sum are not independent); where that is wanted: `scaled`.

    Per burstiness and seed there is one pattern: another rate stretches it, more requests continue it. numpy promises
    the bits of its PCG64, not what it makes of them, so a test pins the values. Raises InstrumentError for a rate or
    burstiness that is not positive and finite.
    """
    _check_count("num_requests", num_requests)
    _check_positive("rate_per_s", rate_per_s)
    _check_positive("burstiness", burstiness)
    if seed < 0:
        raise InstrumentError(f"a seed is at least 0, not {seed}")
    gaps = np.random.Generator(np.random.PCG64(seed)).standard_gamma(burstiness, num_requests - 1)
    due_s = np.cumsum(gaps) / (rate_per_s * burstiness)
    return _schedule([0.0, *due_s.tolist()], prompt_tokens, new_tokens)


def asked_rate_per_s(arrivals: Sequence[Arrival]) -> float | None:
    """(n - 1) / (last due - first due), one over the mean gap: n requests have n - 1 gaps.

    None where no time passes between them, as in a burst of all or with a single request.
    """
    return mean_rate_per_s([arrival.due_s for arrival in arrivals])


def mean_rate_per_s(times_s: Sequence[float]) -> float | None:
    """One over the mean gap between some times; None where none passes between them."""
    span_s = max(times_s, default=0.0) - min(times_s, default=0.0)
    return (len(times_s) - 1) / span_s if span_s else None


def scaled(arrivals: Sequence[Arrival], *, rate_per_s: float) -> tuple[Arrival, ...]:
    """The same requests in the same pattern, the time axis stretched so that `asked_rate_per_s` gives this rate.

    Raises InstrumentError where they have no rate, because all are due at the same time.
    """
    _check_positive("rate_per_s", rate_per_s)
    asked = asked_rate_per_s(arrivals)
    if asked is None:
        raise InstrumentError(f"{len(arrivals)} requests due at the same time have no rate that could be scaled")
    return tuple(dataclasses.replace(arrival, due_s=arrival.due_s * (asked / rate_per_s)) for arrival in arrivals)


def as_csv(arrivals: Iterable[Arrival]) -> str:
    """The arrivals as a trace that `from_trace` reads back to the last digit."""
    rows = (f"{arrival.due_s!r},{arrival.prompt_tokens},{arrival.new_tokens}" for arrival in arrivals)
    return "\n".join([",".join(_OWN.columns), *rows, ""])


def from_trace(path: Path) -> tuple[Arrival, ...]:
    """Read a trace file. Its first line tells which of these it is; columns may be more, and in any order:

    - CSV of `due_s,prompt_tokens,new_tokens`, or JSON lines with these keys: due since the window began;
    - CSV of Azure's public LLM inference traces of 2023 and 2024, `TIMESTAMP,ContextTokens,GeneratedTokens`: ISO
      times, read to the microsecond, as UTC where they have no offset, and counted from the first row;
    - JSON lines of Mooncake's public traces, `timestamp`, `input_length`, `output_length`: milliseconds, counted from
      the first line.

    Blank lines and lines that begin with # say nothing. Raises InstrumentError, which names the file, the line and
    the fault, for everything else: also for rows that are not in order of time, and for a last line that was cut off. A
    CSV of ours has to end with a newline for that, because half a number is one as well; Azure's do not always.
    """
    text = _text(path)
    lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.lstrip()[:1] not in ("", "#")]
    if not lines:
        raise InstrumentError(f"{path} is empty: a trace has at least one request")
    with _fault_at(path, lines[0][0]):
        layout, parse, num_headers = _read_first(lines[0][1])
    if num_headers and layout is _OWN and not text.endswith("\n"):
        raise InstrumentError(f"{path}, line {text.count(chr(10)) + 1}: cut off? If it is whole, end it with a newline")
    return _read_rows(path, lines[num_headers:], layout, parse)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """What a kind of trace calls its columns (time, tokens in, tokens out), and how its time is to be read."""

    columns: tuple[str, str, str]
    read_time: Callable[[str, str], float]
    units_per_s: int
    from_first: bool


_Line = tuple[int, str]
"""Its number in the file, from 1, and its text."""

_Parse = Callable[[str], Mapping[str, str]]
"""One line to the texts of its columns, as they stand there."""


def _number(column: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise InstrumentError(f"{column} is {text[:40] or 'empty'}, which is no number") from error


def _whole(column: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise InstrumentError(f"{column} is {text[:40] or 'empty'}, which is no whole number") from error


def _microseconds(column: str, text: str) -> int:
    """Since 1970, as a whole number: seconds of that size as a float are a quarter of a microsecond apart."""
    try:
        at = datetime.datetime.fromisoformat(text)
    except ValueError as error:
        raise InstrumentError(f"{column} is {text[:40] or 'empty'}, which is no ISO time") from error
    at = at if at.tzinfo else at.replace(tzinfo=datetime.UTC)
    return (at - datetime.datetime.fromtimestamp(0, datetime.UTC)) // datetime.timedelta(microseconds=1)


_OWN = _Layout(columns=("due_s", "prompt_tokens", "new_tokens"), read_time=_number, units_per_s=1, from_first=False)
_AZURE = _Layout(
    columns=("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    read_time=_microseconds,
    units_per_s=1_000_000,
    from_first=True,
)
_MOONCAKE = _Layout(
    columns=("timestamp", "input_length", "output_length"), read_time=_number, units_per_s=1_000, from_first=True
)


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")  # spreadsheets put a mark before the first column
    except OSError as error:
        raise InstrumentError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InstrumentError(f"{path} is no text: {error}") from error


@contextlib.contextmanager
def _fault_at(path: Path, line_number: int) -> Iterator[None]:
    try:
        yield
    except InstrumentError as error:
        raise InstrumentError(f"{path}, line {line_number}: {error}") from error


def _read_first(line: str) -> tuple[_Layout, _Parse, int]:
    """What a trace's first line tells: its layout, how to take a line apart, and how many lines are no request."""
    if line.lstrip().startswith("{"):
        return _layout_of(_json_record(line), (_OWN, _MOONCAKE)), _json_record, 0
    header = _fields(line)
    if len(set(header)) < len(header):
        raise InstrumentError(f"a column is there twice: {','.join(header)[:80]}")
    return _layout_of(header, (_OWN, _AZURE)), functools.partial(_csv_record, header), 1


def _layout_of(found: Collection[str], known: Sequence[_Layout]) -> _Layout:
    for layout in known:
        if layout.columns[0] in found:
            _check_columns(layout, found)
            return layout
    choices = " or ".join(",".join(layout.columns) for layout in known)
    raise InstrumentError(f"no trace that is known here: it has {','.join(found)[:80] or 'nothing'}, not {choices}")


def _check_columns(layout: _Layout, found: Collection[str]) -> None:
    missing = [column for column in layout.columns if column not in found]
    if missing:
        raise InstrumentError(f"lacks {', '.join(missing)}")


def _json_record(line: str) -> dict[str, str]:
    """The values as Python writes them, so that a text in quotes is no number, nor is true."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InstrumentError(f"no complete JSON object, perhaps cut off: {error}") from error
    if not isinstance(record, dict):
        raise InstrumentError(f"no JSON object: {line[:40]}")
    return {key: repr(value) for key, value in record.items()}


def _csv_record(header: Sequence[str], line: str) -> dict[str, str]:
    fields = _fields(line)
    if len(fields) != len(header):
        raise InstrumentError(f"has {len(fields)} fields and not {len(header)}, perhaps cut off: {line[:80]}")
    return dict(zip(header, fields, strict=True))


def _fields(line: str) -> list[str]:
    try:
        return [field.strip() for field in next(csv.reader([line], strict=True))]
    except csv.Error as error:
        raise InstrumentError(f"no CSV: {error}") from error


def _read_rows(path: Path, lines: Iterable[_Line], layout: _Layout, parse: _Parse) -> tuple[Arrival, ...]:
    arrivals: list[Arrival] = []
    times: list[float] = []
    for line_number, line in lines:
        with _fault_at(path, line_number):
            record = parse(line)
            _check_columns(layout, record)
            times.append(layout.read_time(layout.columns[0], record[layout.columns[0]]))
            if times[-1] < times[-2:][0]:
                raise InstrumentError("due before the request above; sort the trace by time")
            start = times[0] if layout.from_first else 0
            arrivals.append(_arrival(layout, record, (times[-1] - start) / layout.units_per_s))
    if not arrivals:
        raise InstrumentError(f"{path} has a header and no request")
    return tuple(arrivals)


def _arrival(layout: _Layout, record: Mapping[str, str], due_s: float) -> Arrival:
    prompt_tokens, new_tokens = (_whole(column, record[column]) for column in layout.columns[1:])
    return Arrival(due_s=due_s, prompt_tokens=prompt_tokens, new_tokens=new_tokens)


def _schedule(due_s: Sequence[float], prompt_tokens: Tokens, new_tokens: Tokens) -> tuple[Arrival, ...]:
    sizes_in = _one_each("prompt_tokens", prompt_tokens, len(due_s))
    sizes_out = _one_each("new_tokens", new_tokens, len(due_s))
    rows = zip(due_s, sizes_in, sizes_out, strict=True)
    return tuple(Arrival(due_s=at_s, prompt_tokens=num_in, new_tokens=num_out) for at_s, num_in, num_out in rows)


def _one_each(name: str, tokens: Tokens, num_requests: int) -> Sequence[int]:
    if isinstance(tokens, int):
        return [tokens] * num_requests
    if len(tokens) != num_requests:
        raise InstrumentError(f"{name} has {len(tokens)} entries for {num_requests} requests")
    return tokens


def _check_count(name: str, count: int) -> None:
    if type(count) is not int or count < 1:
        raise InstrumentError(f"{name} must be a whole number of at least 1, not {count!r}")


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise InstrumentError(f"{name} must be positive and finite, not {value}")
