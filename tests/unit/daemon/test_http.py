"""The HTTP surface, asked over real sockets."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx2
import pytest
from prometheus_client import CollectorRegistry

from gpustackd.daemon.surface import http
from gpustackd.daemon.surface.http import HttpPages, HttpServer, bind
from gpustackd.errors import UsageError
from gpustackd.observe.metrics import Metrics
from gpustackd.setting_types import Address

pytestmark = pytest.mark.anyio
LOOPBACK = Address("127.0.0.1", 0)
NO_PAGES = HttpPages(CollectorRegistry(), lambda: 0, 1, lambda: (True, {}), {})


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Daemon:
    """What the surface is told, to be changed by a test."""

    def __init__(self) -> None:
        self.age: Callable[[], float] = lambda: 0.5
        self.ready = True
        self.details: dict[str, Any] = {"database": "ok", "listening": True}
        self.metrics = Metrics(version="1.2.3", replica="r1").registry
        self.address: Address | str | None = None
        self.errors: list[tuple[str, Exception]] = []

    @asynccontextmanager
    async def served(self, address: Address | None = LOOPBACK) -> AsyncIterator[httpx2.AsyncClient]:
        pages = HttpPages(
            registry=self.metrics,
            beat_age=lambda: self.age(),  # noqa: PLW0108 - tests put another in its place
            beat_limit=15.0,
            readiness=lambda: (self.ready, self.details),
            version={"version": "1.2.3"},
        )

        def listening(real: Address | str) -> None:
            self.address = real

        server = HttpServer(
            address, pages, on_listening=listening, on_error=lambda *what: self.errors.append(what)
        )
        async with anyio.create_task_group() as tasks:
            await tasks.start(server.run)
            async with httpx2.AsyncClient(base_url=f"http://{self.address}", trust_env=False) as client:
                yield client
            tasks.cancel_scope.cancel()


async def test_port_zero_takes_a_free_one_and_tells_which() -> None:
    daemon = Daemon()
    async with daemon.served() as client:
        assert isinstance(daemon.address, Address)
        assert daemon.address.port > 0
        assert (await client.get("/version")).json() == {"version": "1.2.3"}


async def test_alive_while_the_loop_turns_and_not_when_it_is_stuck() -> None:
    daemon = Daemon()
    async with daemon.served() as client:
        answer = await client.get("/healthz")
        assert (answer.status_code, answer.json()["status"]) == (200, "ok")
        daemon.age = lambda: 15.1
        answer = await client.get("/healthz")
        assert (answer.status_code, answer.json()["beat_age_seconds"]) == (503, 15.1)


async def test_ready_or_not_with_the_causes() -> None:
    daemon = Daemon()
    async with daemon.served() as client:
        answer = await client.get("/readyz")
        assert (answer.status_code, answer.json()) == (
            200,
            {"ready": True, "database": "ok", "listening": True},
        )
        daemon.ready, daemon.details = False, {"database": "connection refused", "since": float("inf")}
        answer = await client.get("/readyz")
        assert answer.status_code == 503
        assert answer.json() == {"ready": False, "database": "connection refused", "since": "inf"}


async def test_metrics_come_in_the_form_that_is_asked_for() -> None:
    async with Daemon().served() as client:
        plain = await client.get("/metrics")
        assert plain.headers["content-type"].startswith("text/plain; version=")
        assert 'gpustackd_build_info{replica="r1",version="1.2.3"} 1.0' in plain.text
        newer = await client.get("/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0"})
        assert newer.headers["content-type"].startswith("application/openmetrics-text")


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics", "/version"])
async def test_head_answers_as_get_does_but_without_the_body(path: str) -> None:
    async with Daemon().served() as client:
        answer = await client.head(path)
        assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
async def test_other_methods_are_refused(method: str) -> None:
    async with Daemon().served() as client:
        answer = await client.request(method, "/metrics")
        assert answer.status_code == 405
        assert set(answer.headers["allow"].replace(" ", "").split(",")) == {"GET", "HEAD"}


@pytest.mark.parametrize("path", ["/", "/healthz/", "/metrics/x", "/..%2fetc", "/%00"])
async def test_other_paths_are_not_there_and_the_pages_are_named(path: str) -> None:
    async with Daemon().served() as client:
        answer = await client.get(path)
        assert answer.status_code == 404
        assert "/healthz" in answer.json()["pages"]


async def test_a_failure_inside_shows_no_traceback_and_the_next_request_is_answered() -> None:
    daemon = Daemon()
    async with daemon.served() as client:
        daemon.age = lambda: 1 / 0
        answer = await client.get("/healthz")
        assert answer.status_code == 500
        assert "Error" not in answer.text
        assert "Traceback" not in answer.text
        assert (await client.get("/version")).status_code == 200


async def test_a_head_that_grows_without_end_is_refused() -> None:
    daemon = Daemon()
    async with daemon.served():
        assert isinstance(daemon.address, Address)
        async with await anyio.connect_tcp(daemon.address.host, daemon.address.port) as stream:
            await stream.send(b"GET /version HTTP/1.1\r\nx-long: " + b"x" * 20_000)
            assert b" 400 " in await stream.receive()


async def test_garbage_is_refused_and_does_no_harm() -> None:
    daemon = Daemon()
    async with daemon.served() as client:
        assert isinstance(daemon.address, Address)
        async with await anyio.connect_tcp(daemon.address.host, daemon.address.port) as stream:
            await stream.send(b"\x16\x03\x01 hello\r\n\r\n")
            assert b" 400 " in await stream.receive()
        assert (await client.get("/version")).status_code == 200


async def test_a_silent_client_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_LIFETIME", 0.01)
    daemon = Daemon()
    async with daemon.served():
        assert isinstance(daemon.address, Address)
        async with await anyio.connect_tcp(daemon.address.host, daemon.address.port) as stream:
            await stream.send(b"GET /version HT")
            with pytest.raises(anyio.EndOfStream):
                await stream.receive()


async def test_stopping_frees_the_port_even_with_a_client_connected() -> None:
    daemon = Daemon()
    async with daemon.served() as client:
        await client.get("/version")
        assert isinstance(daemon.address, Address)
        stream = await anyio.connect_tcp(daemon.address.host, daemon.address.port)
    async with stream:
        with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
            await stream.receive()
    bind(daemon.address).close()


async def test_a_port_in_use_is_a_mistake_in_the_settings_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = Address("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(UsageError, match=f"GPUSTACKD_HTTP: cannot listen on {busy}: ") as caught:
            await HttpServer(busy, NO_PAGES, on_listening=pytest.fail, on_error=pytest.fail).run()
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid"])
def test_an_address_that_is_not_ours_is_a_mistake_too(host: str) -> None:
    with pytest.raises(UsageError, match="GPUSTACKD_HTTP"):
        bind(Address(host, 0))


async def test_off_serves_nothing_and_says_so() -> None:
    told: list[object] = []
    await HttpServer(None, NO_PAGES, on_listening=told.append, on_error=pytest.fail).run()
    assert told == ["off"]
