"""What the control usually takes on this machine, kept from pass to pass, and whether a pass stands out.

Knows control times and one small JSON file. Refuses to know what was measured beside them. Only slower is suspicious:
a machine faster than usual was not disturbed, and becomes the usual soon enough.

The limits come from launches of 30 turns on two shared virtual cores, a torch load between the turns (quartiles in ms):

    quiet (16)                       best 2.0-2.6   median 2.1-2.7    slow 2.2-3.3    slow/best 1.05-1.37
    one other busy process (3)       2.4-3.8        3.4-4.1           6.0-6.1         1.6-2.5
    one for each core (2)            3.8-4.3        5.2-5.6           6.2-6.5         1.5-1.6
    several for each core (21)       6.7-27         9.7-44            13-117          1.5-4.3

Judged by three quiet launches drawn at random, another quiet one is contaminated once in 80 times, by all the others
never; every one of 69 launches beside at least one busy process is (by the best quartile alone: 63).
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from benchmarks.harness import INSTRUMENT_VERSION
from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.provenance import cpu_model

MIN_PASSES = 3
"""Fewer clean passes make no band."""

MAX_PASSES = 50
"""Clean passes that are kept: the band follows a machine that ages."""

NUM_AGREEING = 5
"""So many passes in a row beside the band, close to each other, are no disturbance but a machine that has changed."""

MAX_DISAGREEMENT = 1.25
"""Slowest over fastest median among passes that agree."""

BAND_FLOORS = {"best_quartile_s": 1.3, "median_s": 1.35, "slow_quartile_s": 1.6}
"""How far above the usual each quartile may lie however steady the history is."""

MAX_BAND = 2.0
"""How far above the usual it may lie however unsteady the history is."""

MAX_STEP = 1.5
"""Between the medians of a pass's halves, when they are apart; quiet launches stay within 0.87 to 1.10."""

MAX_RAGGEDNESS = 2.0
"""Slow over best quartile, where no band exists yet. Load on every core is even, and only a band can show it."""

_NUM_MADS = 4.0
_MAD_TO_SD = 1.4826  # of a normal distribution
_MIN_TURNS_PER_HALF = 4
_SCHEMA = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ControlPass:
    """The control's times in one pass, in seconds. `step` is second half over first, None where it cannot be told."""

    best_quartile_s: float
    median_s: float
    slow_quartile_s: float
    step: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Passes on one machine, oldest first: the clean ones, and those beside the band since the last clean one."""

    clean: tuple[ControlPass, ...] = ()
    beside: tuple[ControlPass, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`is_unexplained`: only the level of the control speaks against the pass, as a changed machine would, too."""

    state: Literal["clean", "contaminated", "no band yet"]
    reasons: tuple[str, ...] = ()
    is_unexplained: bool = False


def summarise(durations_s: Sequence[float]) -> ControlPass:
    """A pass in three quartiles and a step; a pass without a control is refused."""
    import numpy as np

    if not durations_s or min(durations_s) <= 0:
        raise InstrumentError(f"a pass needs control times above 0 s, got {list(durations_s)}")
    best, median, slow = (float(value) for value in np.quantile(durations_s, (0.25, 0.5, 0.75)))
    return ControlPass(best_quartile_s=best, median_s=median, slow_quartile_s=slow, step=_step(durations_s))


def _step(durations_s: Sequence[float]) -> float | None:
    """The halves' ratio of medians; 1 where the halves' middle parts overlap, so that few rough turns are no step."""
    import numpy as np

    half = len(durations_s) // 2
    if half < _MIN_TURNS_PER_HALF:
        return None
    first, second = (np.quantile(part, (0.25, 0.5, 0.75)) for part in (durations_s[:half], durations_s[-half:]))
    is_apart = first[2] < second[0] or second[2] < first[0]
    return float(second[1] / first[1]) if is_apart else 1.0


def judge(this: ControlPass, history: History, happened: Sequence[str] = ()) -> Verdict:
    """Hold a pass against itself, against the clean passes before it, and against what is known to have happened."""
    has_band = len(history.clean) >= MIN_PASSES
    level = tuple(_beside(this, history.clean) if has_band else _ragged(this))
    explained = (*happened, *_stepped(this))
    if level or explained:
        return Verdict(state="contaminated", reasons=(*explained, *level), is_unexplained=not explained)
    return Verdict(state="clean" if has_band else "no band yet")


def _beside(this: ControlPass, clean: Sequence[ControlPass]) -> Iterator[str]:
    for field, floor in BAND_FLOORS.items():
        usual_s, limit_s = _band([getattr(one, field) for one in clean], floor)
        if getattr(this, field) > limit_s:
            name, ratio = field.removesuffix("_s").replace("_", " "), getattr(this, field) / usual_s
            yield f"the control's {name} took {ratio:.2f} times the usual (limit {limit_s / usual_s:.2f})"


def _band(values: Sequence[float], floor: float) -> tuple[float, float]:
    """The usual value and the highest that still is usual, from median and MAD of the logarithms."""
    import numpy as np

    logs = np.log(values)
    usual = float(np.median(logs))
    width = _NUM_MADS * _MAD_TO_SD * float(np.median(np.abs(logs - usual)))
    return math.exp(usual), math.exp(usual + min(max(width, math.log(floor)), math.log(MAX_BAND)))


def _ragged(this: ControlPass) -> Iterator[str]:
    ratio = this.slow_quartile_s / this.best_quartile_s
    if ratio > MAX_RAGGEDNESS:
        yield f"the control's slow quartile took {ratio:.2f} times its best (limit {MAX_RAGGEDNESS})"


def _stepped(this: ControlPass) -> Iterator[str]:
    if this.step is not None and not 1 / MAX_STEP <= this.step <= MAX_STEP:
        yield f"the control took {this.step:.2f} times as long in the pass's second half (limit {MAX_STEP})"


def learn(history: History, this: ControlPass, verdict: Verdict) -> tuple[History, str | None]:
    """The history after this pass, and a sentence when the band has moved.

    A disturbed pass teaches nothing. Enough unexplained ones in a row that agree with each other replace the band.
    """
    if verdict.state != "contaminated":
        return History(clean=(*history.clean, this)[-MAX_PASSES:]), None
    if not verdict.is_unexplained:
        return history, None
    beside = (*history.beside, this)[-NUM_AGREEING:]
    medians = [one.median_s for one in beside]
    if len(beside) < NUM_AGREEING or max(medians) > min(medians) * MAX_DISAGREEMENT:
        return dataclasses.replace(history, beside=beside), None
    return History(clean=beside), (
        f"the control's band has moved: {NUM_AGREEING} passes in a row agree on a median of "
        f"{sorted(medians)[NUM_AGREEING // 2] * 1e3:.2f} ms, so the machine itself has changed"
    )


def machine_identity(*, num_threads: int, device_name: str | None = None) -> str:
    """The key of a history: two passes with the same key ran the same control on the same kind of machine.

    Not its host name, which in a container is new at each start.
    """
    import numpy as np

    parts = (cpu_model(), f"{os.cpu_count()} CPUs", f"{num_threads} threads", f"numpy {np.__version__}")
    return " | ".join((*parts, f"instrument {INSTRUMENT_VERSION}", device_name or "no GPU"))


def load_history(path: Path, key: str) -> tuple[History, str | None]:
    """The history under this key, empty for a new one, and a note on a file that could not be used.

    What is no history (cut off, of another tool) is moved aside, so that it is neither lost nor in the way.
    """
    machines, note = _load(path)
    entry = machines.get(key, {})
    return History(clean=_passes(entry, "clean"), beside=_passes(entry, "beside")), note


def save_history(path: Path, key: str, history: History) -> str | None:
    """Store one machine's history beside the others', all or nothing; a note where that is impossible.

    Of two passes that end at the same moment one may be forgotten. The file is whole at every moment.
    """
    machines, note = _load(path)
    if note and path.exists():  # neither readable nor out of the way: not ours to overwrite
        return note
    machines = {**machines, key: dataclasses.asdict(history)}
    spare = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        spare.write_text(json.dumps({"schema": _SCHEMA, "machines": machines}, allow_nan=False), "utf-8")
        os.replace(spare, path)
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError):
            spare.unlink(missing_ok=True)
        return f"the control's history could not be kept: {error}"
    return note


def _load(path: Path) -> tuple[Mapping[str, Any], str | None]:
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        return {}, None
    except OSError as error:
        return {}, f"the control's history could not be read: {error}"
    except ValueError as error:
        return {}, _move_aside(path, error)
    try:
        return _machines(json.loads(text)), None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return {}, _move_aside(path, error)


def _machines(stored: Any) -> Mapping[str, Any]:
    """Every entry of the file, each proven readable."""
    if stored["schema"] != _SCHEMA:
        raise ValueError(f"schema {stored['schema']!r}, not {_SCHEMA}")
    machines: dict[str, Any] = dict(stored["machines"])
    for entry, part in itertools.product(machines.values(), ("clean", "beside")):
        _passes(entry, part)
    return machines


def _passes(entry: Mapping[str, Any], part: str) -> tuple[ControlPass, ...]:
    passes = tuple(ControlPass(**one) for one in entry.get(part, ()))
    for one in passes:
        if not all(0 < getattr(one, field) < math.inf for field in BAND_FLOORS):
            raise ValueError(f"no control times: {one}")
        if one.step is not None and not 0 < one.step < math.inf:
            raise ValueError(f"no step: {one}")
    return passes


def _move_aside(path: Path, error: Exception) -> str:
    """Give the file a name that is free."""
    names = (path.with_name(f"{path.name}.corrupt{number}") for number in itertools.chain([""], itertools.count(2)))
    aside = next(name for name in names if not name.exists())
    try:
        os.replace(path, aside)
    except OSError as failed:
        return f"{path} is no history of the control ({error}), and could not be moved aside: {failed}"
    return f"{path} was no history of the control ({error}); it is now {aside.name}, and a new one begins"
