"""Shows how far a measuring session has come: on a terminal one line that follows the samples, elsewhere plain lines.

Knows pytest's terminal, and a small file with what each case took the last time. Refuses to know how long anything
should take: `pace.py` estimates.
"""

import contextlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.files import write_whole
from benchmarks.harness.loop import Say
from benchmarks.harness.pace import Pace
from benchmarks.harness.stash import PUBLISHED

_PACE = pytest.StashKey[Pace]()

_EVERY_S = 10.0
"""Where every line stays, there is one at most in so many seconds."""


def follow(request: pytest.FixtureRequest, reporter: Any, capture: Any) -> Say:
    """What a case says of its samples. How long it took is known once it was measured to its end."""
    pace, name = _pace_of(request), request.node.name
    pace.begin(request.node.nodeid)
    request.addfinalizer(lambda: pace.end() if PUBLISHED in request.node.stash else None)
    told_s = time.monotonic()

    def say(phase: str, number: int, total: int) -> None:
        nonlocal told_s
        text = f"{name}: {pace.say(phase, number, total)}"
        if reporter.isatty:
            with capture.global_and_fixture_disabled():
                reporter.rewrite(f"{text} ", erase=True)
        elif time.monotonic() - told_s >= _EVERY_S:
            told_s = time.monotonic()
            with capture.global_and_fixture_disabled():
                reporter.write_line(text)

    return say


def _pace_of(request: pytest.FixtureRequest) -> Pace:
    stash, session = request.config.stash, request.session
    if _PACE not in stash:
        cases = [item.nodeid for item in session.items if "measure" in getattr(item, "fixturenames", ())]
        last = _read(_file(request.config)).get(_key(request.config), {})
        stash[_PACE] = Pace(cases, last, time.monotonic)
    return stash[_PACE]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Remember what each case took."""
    pace, path = session.config.stash.get(_PACE, None), _file(session.config)
    if pace and pace.taken_s:
        known, key = _read(path), _key(session.config)
        with contextlib.suppress(OSError):  # an estimate is no loss
            write_whole(path, json.dumps({**known, key: {**known.get(key, {}), **pace.taken_s}}, indent=1))


def _file(config: pytest.Config) -> Path:
    return config.rootpath / ".benchmarks" / "pace.json"


def _key(config: pytest.Config) -> str:
    """What decides how long a case takes, beside the machine."""
    return " ".join(str(config.getoption(name)) for name in ("--model", "--dtype", "--device", "--samples"))


def _read(path: Path) -> dict[str, Mapping[str, float]]:
    """Nothing where there is nothing that can be read: an estimate is no loss."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
