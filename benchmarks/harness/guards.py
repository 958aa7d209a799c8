"""pytest plugins that keep one benchmark from costing the others: a limit of time, and what an older commit lacks.

Know pytest's hooks and the errors of an adapter. Refuse to know what becomes of the results.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.errors import InstrumentError, MissingFeatureError
from benchmarks.harness.fixtures import benchmark_id, declaration_of, is_benchmark
from benchmarks.harness.provenance import source_hash
from benchmarks.harness.sources.nanoserve import missing_metrics, package_folder, passes_probe


class TimeLimit:
    """A case that runs for longer raises where it stands, and the next one begins. Needs a POSIX system."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        with limited_to(self._limit_s):
            return (yield)


@contextlib.contextmanager
def limited_to(limit_s: float) -> Iterator[None]:
    """Raise InstrumentError inside the block after `limit_s`, once; Python code only, a hanging C call goes on."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: object) -> None:
        raise InstrumentError(f"took longer than {limit_s:g} s, the limit of a case; mark a slow one `desk`")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class OlderBuild:
    """Skips what the measured commit is too old to have, and says so; a metric that it cannot tell is left out.

    What the checkout whose benchmarks these are lacks as well stays an error: a misspelt option is no old commit.
    `absent` says why by node id and metric.
    """

    def __init__(self, checkout: Path) -> None:
        self._checkout = checkout
        self.absent: dict[tuple[str, str], str] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if is_benchmark(item):
            _, quantities = declaration_of(item)
            missing = {name: error for name, error in missing_metrics().items() if name in quantities}
            self._leave_out(item, quantities, {n: str(error) for n, error in missing.items() if self._excuses(error)})

    def _leave_out(self, item: pytest.Item, quantities: tuple[str, ...], absent: dict[str, str]) -> None:
        kept = [name for name in quantities if name not in absent]
        if len(kept) < len(quantities):
            self.absent |= {(benchmark_id(item), name): absent[name] for name in quantities if name in absent}
            item.add_marker(pytest.mark.quantities(*kept), append=False)
        if not kept:
            pytest.skip("; ".join(absent[name] for name in quantities))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_pyfunc_call(self) -> Iterator[Any]:
        try:
            return (yield)
        except MissingFeatureError as error:
            if not self._excuses(error):
                raise
            pytest.skip(str(error))

    def _excuses(self, error: MissingFeatureError) -> bool:
        return not self._is_checkout() and passes_probe(self._checkout, error.probe)

    def _is_checkout(self) -> bool:
        """Whether the measured build has the very sources of the checkout: then nothing in it is too old."""
        return source_hash(package_folder()) == source_hash(self._checkout / "nanoserve")
