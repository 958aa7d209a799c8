"""The pytest side of what goes through HTTP: `--endpoint`, servers that live as long as the session, arms left out.

Knows pytest, its options and adapters. Refuses to know how anything is measured (`over_http.py`). With `--endpoint`
nothing of nanoserve is loaded: an arm that is no HTTP, and a benchmark that needs one, is left out and said to be.
"""

import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from benchmarks.harness.errors import SourceError
from benchmarks.harness.loop import Plan, Subject
from benchmarks.harness.measure import Tell
from benchmarks.harness.metrics import metric
from benchmarks.harness.over_http import Find, OverHttp
from benchmarks.harness.results import Flag
from benchmarks.harness.serving import runs_by_itself
from benchmarks.harness.sources.elsewhere import ElsewhereSubject
from benchmarks.harness.sources.nanoserve_server import NanoserveServers
from benchmarks.harness.timing import Clock

Arms = Mapping[str, Mapping[str, Any]]

_SESSION = pytest.StashKey[str]()

_LEFT_OUT = pytest.StashKey[dict[str, str]]()
"""By benchmark case, why it was left out, on the config."""


def endpoint_of(config: pytest.Config) -> str | None:
    """The URL that is measured instead of nanoserve, None for nanoserve."""
    url: str | None = config.getoption("--endpoint")
    return url


def reach_endpoint(config: pytest.Config) -> ElsewhereSubject:
    """Raises UsageError, in one line, where it cannot be reached, or has another model than the one asked for."""
    try:
        return ElsewhereSubject.reach(
            str(endpoint_of(config)), config.getoption("--model"), config.getoption("--endpoint-key")
        )
    except SourceError as error:
        raise pytest.UsageError(str(error)) from error


@pytest.fixture(scope="session")
def find_endpoint(model: Any) -> Iterator[Find]:
    """Where an arm's options are served. A server of nanoserve starts when it is first asked for."""
    if isinstance(model, ElsewhereSubject):
        yield lambda **options: model.endpoint
        return
    told = model.describe()
    servers = NanoserveServers(model.name, {"device": told["device"], "dtype": told["dtype"]})
    yield servers.endpoint
    servers.close()


def kept_arms(arms: Arms) -> Arms:
    """The arms that somebody else's endpoint can be asked for: HTTP, with the options of the first one of them."""
    through = {name: options for name, options in arms.items() if runs_by_itself(options)}
    first = _without_state(next(iter(through.values()), {}))
    return {name: options for name, options in through.items() if _without_state(options) == first}


def _without_state(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "state"}


def name_for_prompts(item: pytest.Item, benchmark: str, arms: Arms) -> str:
    """What tells a test's prompts from all others: a server forgets nothing between two cases of a benchmark, and one
    that we did not start knows the prompts of earlier sessions, too.
    """
    if not any(map(runs_by_itself, arms.values())):
        return benchmark
    session = item.config.stash.setdefault(_SESSION, uuid.uuid4().hex) if endpoint_of(item.config) else ""
    return f"{item.nodeid} {session}"


def why_left_out(arms: Arms, quantities: tuple[str, ...], fixtures: tuple[str, ...]) -> str | None:
    """Why a benchmark cannot be measured at an endpoint, None where it can."""
    if "count_work" in fixtures or not kept_arms(arms):
        return "no arm goes through HTTP"
    if len(kept_arms(arms)) < len(arms) and any(metric(name).compares_two for name in quantities):
        return f"it compares arms of which only {', '.join(kept_arms(arms))} can be asked of an endpoint"
    return None


def leave_out(item: pytest.Item, why: str) -> None:
    """Skip a benchmark, and say so at the end of the session."""
    item.config.stash.setdefault(_LEFT_OUT, {})[item.nodeid] = why
    pytest.skip(f"--endpoint: {why}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What was left out, by its reason."""
    by_reason: dict[str, list[str]] = {}
    for node, why in config.stash.get(_LEFT_OUT, {}).items():
        by_reason.setdefault(why, []).append(node.rpartition("::")[2])
    for why, names in by_reason.items():
        terminalreporter.write_line(f"--endpoint leaves out, as {why}: {', '.join(names)}")


def route(request: pytest.FixtureRequest, plan: Plan, model: Any, clock: Clock) -> OverHttp | None:
    """What sends the arms of a plan through HTTP, until the test ends; None where all are in this process."""
    if not any(runs_by_itself(options) for options in plan.arms.values()):
        return None
    subject: Subject = model
    has_word = not isinstance(model, ElsewhereSubject)
    over = OverHttp(subject, request.getfixturevalue("find_endpoint"), clock, has_word=has_word)
    request.addfinalizer(over.close)
    return over


def teller(over: OverHttp | None, left_out: tuple[str, ...], notes: tuple[str, ...]) -> Tell:
    """What is told of a case beside its numbers: by `over`, and what an endpoint could not be asked for."""

    def tell(windows: Any) -> tuple[list[Flag], dict[str, Any]]:
        flags, details = ([], {}) if over is None else over.tell(windows)
        said = [f"left out: the arm {name}, which is no HTTP, or another server" for name in left_out]
        return [*(Flag(kind="endpoint", arm="", what=what) for what in (*said, *notes)), *flags], details

    return tell
