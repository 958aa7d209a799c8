"""The one thread that steps and changes the engine: takes what is asked, steps, and hands on what came of it.

Knows the engine's public methods and a queue. Refuses to know HTTP and the event loop: what a step tells goes to one
function, whichever thread that wakes. Nothing a request does ends this thread; an engine that fails as a whole fails
the requests that it has.
"""

import contextlib
import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from nanoserve.config import SamplingParams
from nanoserve.engine import Engine
from nanoserve.errors import NanoserveError, RequestError
from nanoserve.request import TokenEvent

logger = logging.getLogger(__name__)

Told = tuple[str, TokenEvent | Exception]
"""A request's id, and a token of it or the error that ended it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
    """A request on its way to the engine. `arrived_s` is on the clock of whoever watches."""

    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    arrived_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Leave:
    """Nobody wants the rest of a request; `why` is told to who watches."""

    request_id: str
    why: str


class Watch(Protocol):
    """Who keeps the server's numbers. The engine's thread calls it; `now_s` may be asked from anywhere."""

    def now_s(self) -> float: ...

    def came(self, ask: Ask) -> None: ...

    def stepped(self, admitted: Sequence[str], told: Sequence[Told], began_s: float) -> None: ...

    def left(self, request_id: str, why: str) -> None: ...

    def look(self, engine: Engine) -> None:
        """Keep what is asked for at any time, while nothing moves."""
        ...


class EngineThread:
    """Requests in by `submit` and `leave`, from any thread; tokens and errors out by `tell`, in this one."""

    def __init__(self, engine: Engine, watch: Watch, tell: Callable[[Sequence[Told]], None]) -> None:
        self._engine, self._watch, self._tell = engine, watch, tell
        self._inbox: queue.SimpleQueue[Ask | Leave | None] = queue.SimpleQueue()
        self._open: set[str] = set()
        self._ends = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after the step that runs now; whatever is open then is told nothing more."""
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, ask: Ask) -> None:
        self._inbox.put(ask)

    def leave(self, request_id: str, why: str) -> None:
        """Free what a request holds before the next step. One that has ended meanwhile is none of its business."""
        self._inbox.put(Leave(request_id, why))

    def _run(self) -> None:
        try:
            while not self._ends:
                self._take_all()
                if self._engine.has_work and not self._ends:
                    self._step()
                self._watch.look(self._engine)
        finally:
            self._tell([(request_id, RuntimeError("the engine has ended")) for request_id in sorted(self._left_over())])

    def _left_over(self) -> set[str]:
        """Whoever waits for something: what lies in the inbox, too, is taken by nobody now."""
        unread = [self._inbox.get() for _ in range(self._inbox.qsize())]
        return self._open | {each.request_id for each in unread if isinstance(each, Ask)}

    def _take_all(self) -> None:
        """All that lies there; waits for something where there is nothing else to do."""
        waits = not self._engine.has_work
        while waits or not self._inbox.empty():
            self._take(self._inbox.get())
            waits = False

    def _take(self, what: Ask | Leave | None) -> None:
        if what is None:
            self._ends = True
        elif isinstance(what, Leave):
            self._abort(what)
        else:
            self._add(what)

    def _add(self, ask: Ask) -> None:
        self._watch.came(ask)
        try:
            self._engine.add_request(ask.prompt_ids, ask.params, request_id=ask.request_id)
        except Exception as error:
            self._pass_on([(ask.request_id, error)])
        else:
            self._open.add(ask.request_id)

    def _abort(self, leave: Leave) -> None:
        if leave.request_id in self._open:
            self._open.discard(leave.request_id)
            self._watch.left(leave.request_id, leave.why)
            with contextlib.suppress(RequestError):  # it has failed, and waits to be told
                self._engine.abort(leave.request_id)

    def _step(self) -> None:
        began_s, told = self._watch.now_s(), list[Told]()
        try:
            told = [(event.request_id, event) for event in self._engine.step()]
        except Exception:
            logger.exception("a step failed as a whole")
            told = self._give_up()
        told += self._engine.take_failures()
        self._watch.stepped(self._engine.admitted, told, began_s)
        self._pass_on(told)

    def _give_up(self) -> list[Told]:
        """Nothing is known of what the engine holds: everything goes, so that the next request finds it empty."""
        failed: list[Told] = []
        for request_id in sorted(self._open):
            failed.append((request_id, RuntimeError("the engine's step failed")))
            try:
                self._engine.abort(request_id)
            except Exception:
                logger.exception("request %s could not be ended", request_id)
        return failed

    def _pass_on(self, told: Sequence[Told]) -> None:
        for request_id, what in told:
            if isinstance(what, Exception):
                self._watch.left(request_id, "error")
                ours = None if isinstance(what, NanoserveError) else what
                logger.warning("request %s: %s", request_id, what, exc_info=ours)
            if isinstance(what, Exception) or what.finish_reason is not None:
                self._open.discard(request_id)
        if told:
            self._tell(told)
