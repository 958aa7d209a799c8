"""The paths of the server, and how errors leave it.

Knows FastAPI. Refuses to know how an answer comes about (`reply.py`) and who may ask (`gate.py`).
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from nanoserve.engine import Engine
from nanoserve.errors import ApiError, NanoserveError
from nanoserve.server.bodies import ChatBody, CompletionBody, Sampling
from nanoserve.server.calls import Call, Calls
from nanoserve.server.desk import Desk, shutting_down
from nanoserve.server.gate import Gate
from nanoserve.server.metrics import Numbers
from nanoserve.server.refusals import as_api_error, response_of
from nanoserve.server.reply import Reply
from nanoserve.server.settings import ServerConfig
from nanoserve.server.thread import EngineThread

_MOST_REASONS = 4
_NUM_READERS = 32
_PROBE_S = 0.02
_PAGE = Path(__file__).with_name("page.html")


class Server:
    """One engine behind one app. The engine's thread lives as long as the app's event loop."""

    def __init__(self, engine: Engine, settings: ServerConfig, clock: Callable[[], float] = time.perf_counter) -> None:
        """From here on the engine is this server's alone. `clock` gives seconds, for the numbers."""
        self.settings = settings
        self._tokenizer = engine.tokenizer
        self._numbers = Numbers(clock)
        self._desk = Desk(self._numbers, engine.max_running + settings.max_queued)
        self._thread = EngineThread(engine, self._numbers, self._desk.post)
        self._calls = Calls(engine, settings)
        self._born_s = int(time.time())
        self._numbers.look(engine)
        self.app = self._make_app()

    def break_off(self) -> None:
        """End what is still being answered: there is no more time for it."""
        self._desk.break_off(shutting_down())

    def drain(self) -> None:
        """Answer what has been taken, and take nothing more."""
        self._desk.is_draining = True

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        # Prompts that take long to read must not keep the short ones waiting.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_NUM_READERS, "reader"))
        self._desk.open_up(self._thread)
        probe = asyncio.create_task(self._probe())
        try:
            yield
        finally:
            probe.cancel()
            await asyncio.to_thread(self._thread.stop)

    async def _probe(self) -> None:
        while True:
            due_s = self._numbers.now_s() + _PROBE_S
            await asyncio.sleep(_PROBE_S)
            self._numbers.lagged(max(0.0, self._numbers.now_s() - due_s))

    def _make_app(self) -> FastAPI:
        app = FastAPI(
            title="nanoserve",
            lifespan=self._lifespan,
            docs_url=None,  # those pages come from other people's servers
            redoc_url=None,
        )
        app.add_middleware(Gate, settings=self.settings)
        app.add_exception_handler(NanoserveError, _answer_error)
        app.add_exception_handler(Exception, _answer_error)
        app.add_exception_handler(RequestValidationError, _answer_bad_body)
        app.add_exception_handler(HTTPException, _answer_http_error)
        app.add_api_route("/v1/completions", self.complete, methods=["POST"])
        app.add_api_route("/v1/chat/completions", self.chat, methods=["POST"])
        app.add_api_route("/v1/models", self.list_models)
        app.add_api_route("/v1/models/{name:path}", self.show_model)
        app.add_api_route("/health", self.tell_health)
        app.add_api_route("/health", self.tell_health, methods=["HEAD"], include_in_schema=False)
        app.add_api_route("/metrics", self.tell_numbers)
        app.add_api_route("/", self.show_page, include_in_schema=False)
        return app

    async def complete(self, body: CompletionBody) -> Response:
        """Continue a text."""
        return await self._answer(body, lambda: self._calls.of_completion(body))

    async def chat(self, body: ChatBody) -> Response:
        """Answer the last message of a conversation."""
        return await self._answer(body, lambda: self._calls.of_chat(body))

    async def _answer(self, body: Sampling, make: Callable[[], Call]) -> Response:
        arrived_s = self._numbers.now_s()
        ends_at_s = asyncio.get_running_loop().time() + self.settings.request_timeout_s
        self._check_model(body.model)
        self._desk.check_room(body.num_requests)
        call = await asyncio.to_thread(make)
        return Reply(call, self._desk, self._tokenizer, arrived_s=arrived_s, ends_at_s=ends_at_s)

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.settings.model_name):
            served = self.settings.model_name
            said = f"the model {name!r} is not served here; choose {served!r}"
            raise ApiError(404, said, param="model", code="model_not_found")

    async def list_models(self) -> dict[str, Any]:
        """The one model."""
        return {"object": "list", "data": [self._model()]}

    async def show_model(self, name: str) -> dict[str, Any]:
        """The one model, by its name."""
        self._check_model(name)
        return self._model()

    def _model(self) -> dict[str, Any]:
        return {"id": self.settings.model_name, "object": "model", "created": self._born_s, "owned_by": "nanoserve"}

    async def tell_health(self) -> Response:
        """Whether calls are taken."""
        if self._desk.is_draining or not self._desk.is_working:
            return JSONResponse({"status": "draining" if self._desk.is_working else "dead"}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def tell_numbers(self) -> Response:
        """For Prometheus."""
        return Response(self._numbers.as_text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def show_page(self) -> Response:
        """A chat in the browser."""
        return FileResponse(_PAGE, headers={"cache-control": "no-cache"})


async def _answer_error(_: Request, error: Exception) -> Response:
    return response_of(as_api_error(error))


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """An unknown path, a wrong method, or a body that is no JSON."""
    assert isinstance(error, HTTPException), error
    said = f"{request.method} {request.url.path}: {error.detail}"
    code = "body_too_large" if error.status_code == 413 else None
    response = await _answer_error(request, ApiError(error.status_code, said, code=code))
    response.headers.update(error.headers or {})
    return response


async def _answer_bad_body(request: Request, error: Exception) -> Response:
    """What pydantic found first, in a line. What the client sent is not told again: it may be anything."""
    assert isinstance(error, RequestValidationError), error
    found = error.errors()
    if found[0]["type"] == "json_invalid":
        return await _answer_error(request, ApiError(400, f"the body is no JSON: {found[0]['ctx']['error']}"))
    field = next((str(each) for each in found[0]["loc"] if each != "body"), found[0].get("ctx", {}).get("param"))
    of_field = [each for each in found if field in map(str, each["loc"])]  # a field of several types has several
    said = dict.fromkeys(each["msg"] for each in (of_field or found)[:_MOST_REASONS])
    if found[0]["type"] == "extra_forbidden":
        said = {"this field is not known here": None}
    return await _answer_error(request, ApiError(400, f"{field or 'body'}: {', or: '.join(said)}", param=field))
