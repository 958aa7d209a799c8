"""The calibrations of a checkout in one JSON file, one for each machine and model.

Knows the file and distrusts it: what is damaged, foreign or of another version is told and not used, and stops
nothing. A file is whole at every moment.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import INSTRUMENT_VERSION
from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.gate.calibration import Calibration, Level, Proportion, Score, machine_key
from benchmarks.harness.gate.comparison import Sampling
from benchmarks.harness.gate.evidence import Key
from benchmarks.harness.gate.rules import EXIT_CODES, Rules, Verdict
from benchmarks.harness.metrics import metric
from benchmarks.harness.stats import Estimate, Interval

SCHEMA = 1

Say = Callable[[str], None]

_BAD = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, InstrumentError)
"""What reading anything but a calibration may raise."""


def calibration_file(root: Path) -> Path:
    """Where a checkout keeps its calibrations."""
    return root / ".benchmarks" / "calibration.json"


def save_calibration(path: Path, calibration: Calibration, say: Say = lambda text: None) -> None:
    """Keep it in the place of the one before, beside those of other machines and models.

    What is no file of calibrations is moved aside. `say` hears of that, and why nothing could be kept.
    """
    try:
        kept = _entries_or_aside(path, say)
        _write(path, {"schema": SCHEMA, "calibrations": {**kept, calibration.key: dataclasses.asdict(calibration)}})
    except (OSError, ValueError) as error:
        say(f"the calibration could not be kept: {error}")


def load_calibration(path: Path, key: str, say: Say = lambda text: None) -> Calibration | None:
    """The calibration under a `machine_key`, or None; `say` hears why one that is there is not used."""
    entries = _entries_or_nothing(path, say)
    return _usable(path, key, entries[key], say) if key in entries else None


def newest_here(path: Path, model: str = "", device: str = "auto", say: Say = lambda text: None) -> Calibration | None:
    """This machine's newest calibration of this model and device: for whoever has not loaded the model yet.

    "" is any model, "auto" any device; "cuda" takes that of any GPU.
    """
    every = [_usable(path, key, told, say) for key, told in _entries_or_nothing(path, say).items()]
    here = [
        each for each in every
        if each and each.key == machine_key(model=each.model, dtype=each.dtype, device=each.device)
        and model in ("", each.model) and (device == "auto" or each.device.startswith(device))
    ]  # fmt: skip
    return max(here, key=lambda each: each.at, default=None)


def _usable(path: Path, key: str, told: Any, say: Say) -> Calibration | None:
    try:
        version = told["instrument_version"]
        if version != INSTRUMENT_VERSION:
            say(
                f"the calibration of {told['at']} was made with instrument version {version}, this is "
                f"{INSTRUMENT_VERSION}: it is not used; calibrate again"
            )
            return None
        found = _calibration(told)
        _check_whole(found, key)
        return found
    except _BAD as error:
        say(f"a calibration in {path} is not used, calibrate again ({_told(error)})")
        return None


# The file.


def _entries(path: Path) -> dict[str, Any]:
    """What is stored, by machine; none where nothing is. Raises OSError, and one of _BAD for another file."""
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        return {}
    stored = json.loads(text, parse_constant=_finite, parse_float=_finite)
    if stored["schema"] != SCHEMA:
        raise ValueError(f"schema {stored['schema']!r}, this reads {SCHEMA}")
    return dict(stored["calibrations"])


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"it holds {text}, which is no number")
    return float(text)


def _entries_or_nothing(path: Path, say: Say) -> dict[str, Any]:
    try:
        return _entries(path)
    except (OSError, *_BAD) as error:
        say(f"{path} holds no calibrations that can be read ({_told(error)}); calibrate again")
        return {}


def _entries_or_aside(path: Path, say: Say) -> dict[str, Any]:
    """Raises OSError for a file that can neither be read nor moved."""
    try:
        return _entries(path)
    except _BAD as error:
        names = (path.with_name(f"{path.name}.corrupt{number}") for number in itertools.chain([""], itertools.count(2)))
        aside = next(name for name in names if not name.exists())
        os.replace(path, aside)
        say(f"{path} held no calibrations that can be read ({_told(error)}); it is now {aside.name}")
        return {}


def _told(error: Exception) -> str:
    return f"it lacks {error}" if isinstance(error, KeyError) else str(error)[:200]


def _write(path: Path, whole: Mapping[str, Any]) -> None:
    """All or nothing, also when the machine goes down."""
    path.parent.mkdir(parents=True, exist_ok=True)
    spare = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with spare.open("w", encoding="utf-8") as file:
            json.dump(whole, file, allow_nan=False, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(spare, path)
    finally:
        with contextlib.suppress(OSError):
            spare.unlink()


# From JSON to a calibration. Everything that would later be computed with is checked here.


def _calibration(told: Mapping[str, Any]) -> Calibration:
    return Calibration(
        machine=dict(told["machine"]),
        **{name: _text(told[name]) for name in ("model", "dtype", "device", "at", "commit", "instrument_version")},
        rules=Rules(**told["rules"]),
        sampling=Sampling(**told["sampling"]),
        num_launches=_count(told["num_launches"]),
        taken_s=_number(told["taken_s"]),
        endings={_verdict(verdict): _count(num) for verdict, num in told["endings"].items()},
        whole=_score(told["whole"]),
        metrics=tuple(map(_score, told["metrics"])),
        quantities=tuple(map(_score, told["quantities"])),
        notes=tuple(map(_text, told["notes"])),
    )


def _check_whole(found: Calibration, key: str) -> None:
    """Whoever quotes a calibration may rely on this."""
    if found.key != key:
        raise ValueError("it is of another machine or model")
    if {each.key.metric for each in found.quantities} != {each.key.metric for each in found.metrics}:
        raise ValueError("its metrics are not those of its quantities")
    if len({len(each.levels) for each in (found.whole, *found.metrics, *found.quantities)}) > 1:
        raise ValueError("it does not have every planted slowdown of every quantity")


def _score(told: Mapping[str, Any]) -> Score:
    key = Key(*map(_text, told["key"]))
    if key.metric:
        metric(key.metric)
    return Score(
        key=key,
        false_alarms=_proportion(told["false_alarms"]),
        drawn_false_alarms=_proportion(told["drawn_false_alarms"]),
        effect80=_number_or_none(told["effect80"]),
        effect95=_number_or_none(told["effect95"]),
        mean_launches=_number(told["mean_launches"]),
        levels=tuple(map(_level, told["levels"])),
    )


def _level(told: Mapping[str, Any]) -> Level:
    measured = told["measured"]
    low, high = (_number_or_none(measured["interval"][end]) for end in ("low", "high"))
    return Level(
        planted=_number(told["planted"]),
        measured=Estimate(
            value=_number_or_none(measured["value"]),
            interval=Interval(low, high),
            num_samples=_count(measured["num_samples"]),
        ),
        found=_proportion(told["found"]),
        found_for_real=_proportion(told["found_for_real"]),
    )


def _proportion(told: Mapping[str, Any]) -> Proportion:
    return Proportion(num=_count(told["num"]), n=_count(told["n"]))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:40]!r} stands where a text should")
    return value


def _verdict(value: str) -> Verdict:
    if value not in EXIT_CODES:
        raise ValueError(f"{value[:40]!r} is no verdict")
    return value  # type: ignore[return-value]


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{str(value)[:40]!r} is no number")
    return float(value)


def _number_or_none(value: Any) -> float | None:
    return None if value is None else _number(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{str(value)[:40]!r} is no count")
    return value
