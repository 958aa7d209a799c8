"""Runs a server on a socket until it is told to end.

Knows uvicorn and signals: the first SIGTERM or SIGINT drains, a second one ends at once. Refuses to know paths and
engines.
"""

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import uvicorn

from nanoserve.errors import ConfigError, one_line
from nanoserve.server.app import Server
from nanoserve.server.connection import Connection
from nanoserve.server.settings import ServerConfig

_BACKLOG = 4096
_KEEP_ALIVE_S = 75
"""Longer than clients and proxies keep an idle connection, so that it is they who close it."""

_SWITCH_S = 0.0005
"""How long a thread may keep the interpreter while another waits: Python's 5 ms is half a decode step."""

_GRACE_S = 2.0
"""For the last words of calls that are broken off."""


def listen(settings: ServerConfig) -> socket.socket:
    """A socket that is bound, so that a taken port is told before a model is loaded. Raises ConfigError."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise _cannot_listen(settings, error.strerror) from error
    except UnicodeError as error:  # a host that cannot be a name
        raise _cannot_listen(settings, one_line(error)) from error
    return listener


def _cannot_listen(settings: ServerConfig, why: str | None) -> ConfigError:
    where = f"{settings.host} port {settings.port}"
    return ConfigError(f"cannot listen at {where}: {why}; choose another --host or --port (0 is a free one)")


def url_of(listener: socket.socket) -> str:
    """Where clients find it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(server: Server, listener: socket.socket, ready: Callable[[], None]) -> None:
    """Serve until a signal, and return once all is answered that was taken, or the time for it is up.

    Raises ConfigError where somebody else, who bound the same port, was first to listen there.
    """
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        raise _cannot_listen(server.settings, error.strerror) from error
    sys.setswitchinterval(_SWITCH_S)
    patience_s = server.settings.drain_timeout_s
    config = uvicorn.Config(
        server.app,
        http=Connection,
        ws="none",
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=int(patience_s + _GRACE_S) + 1,
        backlog=_BACKLOG,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
    )
    _Uvicorn(config, server, ready).run(sockets=[listener])


class _Uvicorn(uvicorn.Server):
    """uvicorn, but a signal is no reason to die of it afterwards."""

    def __init__(self, config: uvicorn.Config, server: Server, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._server, self._ready = server, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:  # the app's own end comes in any case, but cancelled, and complaining
            await self.lifespan.shutdown()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._drain)
        yield

    def _drain(self) -> None:
        if self.should_exit:
            self._server.break_off()
            self.force_exit = True
            return
        self.should_exit = True
        self._server.drain()
        asyncio.get_running_loop().call_later(self._server.settings.drain_timeout_s, self._break_off)

    def _break_off(self) -> None:
        self._server.break_off()
        asyncio.get_running_loop().call_later(_GRACE_S, self._drop_all)

    def _drop_all(self) -> None:
        """Whoever has not read its last words by now is not going to."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()
