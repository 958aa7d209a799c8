"""The event loop of a client that is measured with: it goes by the session's clock, and watches itself.

Knows asyncio's selectors and an injected clock. Refuses to know HTTP. What a kernel reports is remembered with the
moment in which it did, and so is for how long nobody asked it.
"""

import asyncio
import dataclasses
import selectors
from typing import Any

from benchmarks.harness.timing import NS_PER_S, Clock


@dataclasses.dataclass(slots=True)
class ClientLog:
    """What this process saw of itself in one window.

    `away_ns`: of the time in which answers were open (`watched_ns`) that in which it did not ask the kernel what had
    arrived. `num_together`: of all `num_arrivals` those that were found at once with one of the same answer before.
    """

    watched_ns: int = 0
    away_ns: int = 0
    longest_away_ns: int = 0
    num_arrivals: int = 0
    num_together: int = 0

    def __add__(self, other: "ClientLog") -> "ClientLog":
        return ClientLog(
            watched_ns=self.watched_ns + other.watched_ns,
            away_ns=self.away_ns + other.away_ns,
            longest_away_ns=max(self.longest_away_ns, other.longest_away_ns),
            num_arrivals=self.num_arrivals + other.num_arrivals,
            num_together=self.num_together + other.num_together,
        )

    @property
    def away_share(self) -> float:
        return self.away_ns / self.watched_ns if self.watched_ns else 0.0

    @property
    def together_share(self) -> float:
        return self.num_together / self.num_arrivals if self.num_arrivals else 0.0


class Arrivals(selectors.DefaultSelector):
    """Asks the kernel what has arrived, remembers when it said so, and for how long nobody asked."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.log = clock, ClientLog()
        self._seen_ns: dict[int, int] = {}
        self._back_ns: int | None = None
        self._is_watching = False

    def select(self, timeout: float | None = None) -> Any:
        """As any selector."""
        asked_ns = self._note_absence()
        ready = self.wait(timeout)
        now_ns = self.clock.now_ns()
        if self._is_watching:
            self.log.watched_ns += now_ns - asked_ns
            self._back_ns = now_ns
        for key, _ in ready:
            self._seen_ns[key.fd] = now_ns
        return ready

    def wait(self, timeout: float | None) -> Any:
        """What the kernel says within so many seconds."""
        return super().select(timeout)

    def _note_absence(self) -> int:
        """What passed since the kernel answered last, if somebody is waited for; the time now."""
        now_ns = self.clock.now_ns()
        if self._back_ns is not None:
            away_ns = now_ns - self._back_ns
            self.log.watched_ns += away_ns
            self.log.away_ns += away_ns
            self.log.longest_away_ns = max(self.log.longest_away_ns, away_ns)
        return now_ns

    def begin(self) -> None:
        """Somebody is waited for from now on; what passed before the kernel is asked was no absence."""
        self._back_ns, self._is_watching = None, True

    def end(self) -> None:
        """Nobody is waited for any more."""
        self._note_absence()
        self._back_ns, self._is_watching = None, False

    def seen_ns(self, number: int | None) -> int:
        """When what was read last of a socket was there; now, where it is none of ours."""
        return self._seen_ns.get(-1 if number is None else number) or self.clock.now_ns()


class ClockedLoop(asyncio.SelectorEventLoop):
    """An event loop that goes by the session's own clock."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._clock = arrivals.clock  # before the loop looks at the time
        super().__init__(arrivals)

    def time(self) -> float:
        """As any loop."""
        return self._clock.now_ns() / NS_PER_S
