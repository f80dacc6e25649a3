"""The HTTP surface: is it alive, is it ready, what does it count, which version is it. GET and HEAD only.

It asks nothing of the database: every answer is at hand, so that it comes even when nothing else works.
"""

from __future__ import annotations

import json
import math
import socket
from asyncio import TimerHandle, Transport
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import anyio
import h11
import uvicorn
from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskStatus
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from gpustackd.errors import UsageError
from gpustackd.observe.metrics import exposition
from gpustackd.setting_types import Address

_CONNECTIONS = 64
_LONGEST_HEAD = 16 * 1024
"""Bytes of a request's line and headers."""
_IDLE = 5
"""Seconds that a connection may wait for its next request."""
_LIFETIME = 15.0
"""Seconds after which a connection is closed, so that slow or silent clients cannot hold all of them."""
_FINISH = 1
"""Seconds for answers under way when the daemon stops."""


@dataclass(frozen=True, slots=True)
class HttpPages:
    """What the four pages answer with; everything is asked at the moment of the request."""

    registry: CollectorRegistry
    """Of the metrics."""
    beat_age: Callable[[], float]
    """Seconds since the last turn of the decide loop; beyond `beat_limit` the daemon is not alive."""
    beat_limit: float
    readiness: Callable[[], tuple[bool, Mapping[str, Any]]]
    """The answer and its details."""
    version: Mapping[str, Any]


class HttpServer:
    """Serves until cancelled; ready once requests are taken."""

    name = "HTTP surface"

    def __init__(
        self,
        address: Address | None,
        pages: HttpPages,
        *,
        on_listening: Callable[[Address | Literal["off"]], None],
        on_error: Callable[[str, Exception], None],
    ) -> None:
        """`on_listening` is called with the real address once requests are taken; with `off`, and nothing is
        served, where `address` is None. `on_error` is called with the path of a page that failed inside."""
        self._address = address
        self._pages = pages
        self._on_listening = on_listening
        self._on_error = on_error

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Until cancelled. Raise UsageError where the address cannot be had."""
        if self._address is None:
            self._on_listening("off")
            task_status.started()
            return
        address = self._address
        listener = bind(address)

        def started() -> None:
            self._on_listening(Address(address.host, listener.getsockname()[1]))
            task_status.started()

        config = uvicorn.Config(
            application(self._pages, self._on_error),
            http=_Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=_CONNECTIONS,
            h11_max_incomplete_event_size=_LONGEST_HEAD,
            timeout_keep_alive=_IDLE,
            timeout_graceful_shutdown=_FINISH,
        )
        server = _Server(config, started)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_stop_when_cancelled, server)
                # uvicorn leaves its sockets open when it is cancelled; so it is asked to stop instead
                with anyio.CancelScope(shield=True):
                    await server.serve(sockets=[listener])
                tasks.cancel_scope.cancel()
        finally:
            listener.close()


def bind(address: Address) -> socket.socket:
    """A listening socket. Raise UsageError naming the setting where the address is taken or not ours."""
    v6 = ":" in address.host
    try:
        return socket.create_server(
            (address.host, address.port),
            family=socket.AF_INET6 if v6 else socket.AF_INET,
            backlog=_CONNECTIONS,
            dualstack_ipv6=address.host == "::" and socket.has_dualstack_ipv6(),
        )
    except OSError as error:
        raise UsageError(
            f"GPUSTACKD_HTTP: cannot listen on {address}: {error.strerror or error}",
            "name another address; port 0 takes any free one, off does without",
        ) from None


def application(pages: HttpPages, on_error: Callable[[str, Exception], None]) -> Starlette:
    """The four pages."""

    async def healthz(_: Request) -> Response:
        age = pages.beat_age()
        alive = age <= pages.beat_limit
        body = {
            "status": "ok" if alive else "stuck",
            "beat_age_seconds": round(age, 3),
            "limit_seconds": pages.beat_limit,
        }
        return _answer(body, 200 if alive else 503)

    async def readyz(_: Request) -> Response:
        ready, details = pages.readiness()
        return _answer({"ready": ready, **details}, 200 if ready else 503)

    async def metrics(request: Request) -> Response:
        text, content_type = exposition(pages.registry, request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type, "cache-control": "no-store"})

    async def version(_: Request) -> Response:
        return _answer(pages.version)

    paths = {"/healthz": healthz, "/readyz": readyz, "/metrics": metrics, "/version": version}

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _answer({"error": error.detail, "pages": list(paths)}, error.status_code, error.headers or {})

    def contained(page: Callable[[Request], Any]) -> Callable[[Request], Any]:
        # caught here and not by the outermost handler, which would raise it again for the server to print
        async def answer(request: Request) -> Response:
            try:
                response: Response = await page(request)
            except Exception as error:
                on_error(request.url.path, error)
                return _answer({"error": "this page cannot be made now"}, 500)
            return response

        return answer

    app = Starlette(
        routes=[Route(path, contained(page), methods=["GET"]) for path, page in paths.items()],
        exception_handlers={HTTPException: refused},
    )
    app.router.redirect_slashes = False
    return app


def _answer(body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    text = json.dumps({name: _plain(value) for name, value in body.items()}, default=str)
    return Response(
        text + "\n", status, {**(headers or {}), "cache-control": "no-store"}, media_type="application/json"
    )


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


async def _stop_when_cancelled(server: uvicorn.Server) -> None:
    try:
        await anyio.sleep_forever()
    finally:
        server.should_exit = True


class _Server(uvicorn.Server):
    """Leaves signals to the daemon, and says when requests are taken."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()


class _Connection(H11Protocol):
    """A connection that does not live for ever, whatever its client does or fails to do."""

    _end: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._end = self.loop.call_later(_LIFETIME, self._close_when_answered)

    def _close_when_answered(self) -> None:
        try:
            self.shutdown()
        except h11.LocalProtocolError:  # the client broke the protocol; the close is under way
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._end is not None:
            self._end.cancel()
        super().connection_lost(exc)
