"""Decides which requests run in the next step: first come, first served, at most `max_running` at once.

Knows requests, not tensors: a schedule can be tested without a model. The policy is the whole of it: release
what has finished, then admit from the head of the queue, never skipping it.
"""

from collections import deque

from nanoserve.errors import RequestError
from nanoserve.request import FinishReason, Request


class Scheduler:
    """Waiting and running requests. `schedule` admits, `commit` releases; nothing else moves a request."""

    def __init__(self, max_running: int = 1) -> None:
        assert max_running >= 1
        self._max_running = max_running
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError when its id is already waiting or running."""
        if any(request.request_id == other.request_id for other in (*self._waiting, *self._running)):
            raise RequestError(f"request id {request.request_id!r} is already in use; choose another one")
        self._waiting.append(request)

    def schedule(self) -> list[Request]:
        """The requests that take part in the next step, oldest first."""
        while self._waiting and len(self._running) < self._max_running:
            self._running.append(self._waiting.popleft())
        return list(self._running)

    def commit(self) -> None:
        """Release the requests that the step just run has finished."""
        self._running = [request for request in self._running if request.finish_reason is None]

    def abort(self, request_id: str) -> Request:
        """Take a request out wherever it is. Raises RequestError when the id is unknown or has finished."""
        for queue in (self._waiting, self._running):
            for request in queue:
                if request.request_id == request_id:
                    queue.remove(request)
                    request.finish_reason = FinishReason.ABORT
                    return request
        raise RequestError(f"no request {request_id!r} is waiting or running")
