"""A connection as uvicorn keeps it, but one that can be dropped: what its client does not read keeps nothing alive.

Knows uvicorn's protocol class and how a response finds its connection. Refuses to know what is said on it.
"""

import asyncio

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_KEY = "nanoserve.connection"


class Connection(HttpToolsProtocol):
    """One client's. A writer waits until the kernel has all that was written before."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"][_KEY] = self

    def timeout_keep_alive_handler(self) -> None:
        """Closing would wait for whoever does not read."""
        self.transport.abort()

    async def flushed(self) -> None:
        await self.flow.drain()

    async def drop(self) -> None:
        """Forget what has not been read. It returns once the connection is gone."""
        self.transport.abort()
        await self.flow.drain()


def connection_of(scope: Scope) -> Connection | None:
    """None behind another server than ours."""
    found = scope.get("state", {}).get(_KEY)
    return found if isinstance(found, Connection) else None
