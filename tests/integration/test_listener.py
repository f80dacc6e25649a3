"""The listening connection: heard, lost, deaf, back again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit, urlunsplit

import pytest

from gpustackd.errors import Contended, DatabaseUnavailable
from gpustackd.ports import Wake
from gpustackd.store.postgres.connect import connect
from gpustackd.store.postgres.listen import Listener, ListenerStatus
from gpustackd.store.postgres.store import PostgresStore
from tests.integration.world import World, world_of
from tests.waiting import soon, until

pytestmark = pytest.mark.anyio

OVERFLOW = Wake("overflow")


class Watched:
    """A listener that runs, with all that it told in two queues."""

    def __init__(self, url: str, probe: Any, **options: Any) -> None:
        self.wakes: asyncio.Queue[Wake] = asyncio.Queue()
        self.states: asyncio.Queue[bool] = asyncio.Queue()
        defaults = {"probe_interval": 0.05, "probe_timeout": 2.0, "retry": 0.01, "max_retry": 0.05}
        self.listener = Listener(
            url,
            replica="test-1",
            probe=probe,
            on_wake=self.wakes.put_nowait,
            on_change=lambda h: self.states.put_nowait(h.listening),
            **{**defaults, **options},
        )

    async def wake(self) -> Wake:
        return await soon(self.wakes.get(), "a wake-up")

    async def change(self) -> bool:
        return await soon(self.states.get(), "a change between listening and not")

    async def until(self, enough: Callable[[ListenerStatus], bool]) -> ListenerStatus:
        await until(
            lambda: enough(self.listener.status),
            "what the listener says of itself",
            shows=lambda: str(self.listener.status),
        )
        return self.listener.status


@asynccontextmanager
async def running(url: str, probe: Any, **options: Any) -> AsyncIterator[Watched]:
    watched = Watched(url, probe, **options)
    task = asyncio.ensure_future(watched.listener.run())
    try:
        yield watched
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Proxy:
    """Passes TCP on to a server, until told to swallow what comes in either way."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        query = parse_qs(parts.query)
        self._host = query.get("host", [parts.hostname or "127.0.0.1"])[0]
        self._port = int(query.get("port", [str(parts.port or 5432)])[0])
        self._parts = parts
        self.silent = False
        self.refuse = False
        """Whether connections are closed as soon as they are made."""
        self.connections = 0
        self._server: Any = None

    async def open(self) -> str:
        """Start; returns the URL through the proxy."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        user = f"{quote(self._parts.username or '')}"
        if self._parts.password:
            user += f":{self._parts.password}"
        return urlunsplit(("postgresql", f"{user}@127.0.0.1:{port}", self._parts.path, "sslmode=disable", ""))

    async def close(self) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self.refuse:
            writer.close()
            return
        if Path(self._host).is_absolute():
            inner = await asyncio.open_unix_connection(f"{self._host}/.s.PGSQL.{self._port}")
        else:
            inner = await asyncio.open_connection(self._host, self._port)
        pumps = [self._pump(reader, inner[1]), self._pump(inner[0], writer)]
        await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        mute = self.silent
        while data := await source.read(65536):
            mute = mute or self.silent  # once silent, this connection never speaks again
            if not mute:
                sink.write(data)
                await sink.drain()
        if not mute:
            sink.close()


@asynccontextmanager
async def proxied(url: str) -> AsyncIterator[tuple[Proxy, str]]:
    proxy = Proxy(url)
    through = await proxy.open()
    try:
        yield proxy, through
    finally:
        await proxy.close()


LISTENING = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE $1"


async def test_it_asks_for_a_full_look_once_it_hears_and_then_passes_on_what_is_told(world: World) -> None:
    async with running(world.url, world.store.notify) as watched:
        assert await watched.wake() == OVERFLOW
        assert await watched.change() is True
        instance = await world.instance()
        assert await watched.wake() == Wake("created", (instance,))
        assert watched.listener.status == ListenerStatus(listening=True)


async def test_a_terminated_backend_is_replaced_and_asks_for_a_full_look(world: World) -> None:
    async with running(world.url, world.store.notify, probe_interval=60) as watched:
        assert await watched.wake() == OVERFLOW
        (pid,) = [r["pid"] for r in await world.sql.fetch(LISTENING, "gpustackd listen test-1%")]
        await world.sql.execute("SELECT pg_terminate_backend($1)", pid)
        assert await watched.wake() == OVERFLOW
        assert [await watched.change() for _ in range(3)] == [True, False, True]
        assert watched.listener.status.reconnects == 1
        instance = await world.instance()
        assert await watched.wake() == Wake("created", (instance,))


async def test_a_connection_that_falls_silent_is_found_by_its_probe_and_replaced(world: World) -> None:
    async with (
        proxied(world.url) as (proxy, through),
        running(through, world.store.notify, probe_timeout=1.0) as watched,
    ):
        assert await watched.wake() == OVERFLOW
        proxy.silent = True
        assert [await watched.change() for _ in range(2)] == [True, False]
        hearing = await watched.until(lambda h: h.probe_failures >= 1)
        assert not hearing.listening
        proxy.silent = False  # for connections from now on
        assert await watched.change() is True
        assert await watched.wake() == OVERFLOW
        assert watched.listener.status.reconnects >= 1


async def test_a_server_that_falls_silent_amid_connecting_is_given_up_too(world: World) -> None:
    async with proxied(world.url) as (proxy, through):
        proxy.silent = True
        async with running(through, world.store.notify, probe_timeout=0.3, setup_timeout=0.3) as watched:
            await until(lambda: proxy.connections >= 2, "a second connection is tried")
            proxy.silent = False
            assert await watched.wake() == OVERFLOW


async def test_a_deaf_connection_is_never_called_listening(world: World) -> None:
    """As behind a pooler that swallows LISTEN: probes are sent and not heard."""

    async def into_the_void(_: str, __: str) -> None:
        return

    async with running(world.url, into_the_void, probe_timeout=0.05) as watched:
        hearing = await watched.until(lambda h: h.probe_failures >= 2)
        assert (hearing.listening, hearing.deaf) == (False, True)
        assert not await watched.change()
        assert watched.states.empty()  # told once
        assert watched.wakes.empty()


async def test_a_probe_that_cannot_be_sent_is_a_failed_one(world: World) -> None:
    closed = await PostgresStore.open(world.url, 2)
    await closed.close()
    async with running(world.url, closed.notify, probe_timeout=0.5) as watched:
        hearing = await watched.until(lambda h: h.probe_failures >= 2)
        assert (hearing.listening, hearing.deaf) == (False, False)


async def test_a_server_that_is_not_there_is_tried_again(world: World) -> None:
    async with proxied(world.url) as (proxy, through):
        proxy.refuse = True
        async with running(through, world.store.notify) as watched:
            await until(lambda: proxy.connections >= 3, "a third connection is tried")
            assert not watched.listener.status.listening
            proxy.refuse = False
            assert await watched.wake() == OVERFLOW


async def test_two_listeners_of_one_name_prove_to_themselves_alone(world: World) -> None:
    async with running(world.url, world.store.notify) as one, running(world.url, world.store.notify) as two:
        assert [await one.wake(), await two.wake()] == [OVERFLOW, OVERFLOW]


async def test_it_listens_to_the_schema_that_holds_the_tables(world: World) -> None:
    """Not to the first one of the search path, which may hold none of them."""
    await world.sql.execute("CREATE SCHEMA aside")
    url = f"{world.url}{'&' if '?' in world.url else '?'}options=-csearch_path%3Daside,public"
    async with world_of(url) as other, running(url, other.store.notify) as watched:
        assert await watched.wake() == OVERFLOW
        instance = await other.instance()
        assert await watched.wake() == Wake("created", (instance,))


async def test_time_outs_that_the_database_sets_do_not_end_the_listener(world: World) -> None:
    database = await world.sql.fetchval("SELECT quote_ident(current_database())")
    await world.sql.execute(f"ALTER DATABASE {database} SET statement_timeout = 1")

    async def slow(_: str, __: str) -> None:
        raise Contended("the database made us yield: statement timeout")

    async with running(world.url, slow) as watched:
        hearing = await watched.until(lambda h: h.reconnects + h.probe_failures >= 2)
        assert not hearing.listening
        await world.sql.execute(f"ALTER DATABASE {database} RESET statement_timeout")
        watched.listener._probe = world.store.notify
        assert [await watched.change(), await watched.change()] == [False, True]


async def test_an_option_that_the_server_does_not_know_is_no_mystery(world: World) -> None:
    with pytest.raises(DatabaseUnavailable, match="unrecognized configuration parameter"):
        await connect(f"{world.url}{'&' if '?' in world.url else '?'}foo=bar")
