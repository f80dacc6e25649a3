"""The network at its worst: a proxy before PostgreSQL that falls silent, an address that swallows calls."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from urllib.parse import parse_qs, urlsplit, urlunsplit

import anyio
from anyio.abc import ByteStream, SocketStream

BROKEN = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)

STARTING = b"SFATAL\0VFATAL\0C57P03\0Mthe database system is starting up\0\0"


class Wire:
    """A TCP proxy on loopback. While `silent` names a part of an application's name, connections of such
    applications stay open and carry nothing any more, in either direction: no FIN, no RST."""

    def __init__(self, upstream: str) -> None:
        self._upstream = urlsplit(upstream)
        self.silent = ""
        self.starting = False
        """Whether it answers as a server that is not up yet does."""
        self.url = ""

    async def serve(self, listener: anyio.abc.Listener[SocketStream]) -> None:
        await listener.serve(self._carry)

    async def _carry(self, client: SocketStream) -> None:
        if self.starting:
            with suppress(*BROKEN):
                async with client:
                    if len(await client.receive()) == 8:  # asks for TLS first
                        await client.send(b"N")
                        await client.receive()
                    await client.send(b"E" + (len(STARTING) + 4).to_bytes(4, "big") + STARTING)
            return
        with suppress(*BROKEN):
            async with client, await self._connect() as server:
                name: list[bytes] = []
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._pump, client, server, name, True)
                    tasks.start_soon(self._pump, server, client, name, False)

    async def _connect(self) -> ByteStream:
        host = parse_qs(self._upstream.query).get("host", [self._upstream.hostname or ""])[0]
        port = int(parse_qs(self._upstream.query).get("port", [str(self._upstream.port or 5432)])[0])
        if host.startswith("/"):
            return await anyio.connect_unix(f"{host}/.s.PGSQL.{port}")
        return await anyio.connect_tcp(host, port)

    async def _pump(self, source: ByteStream, sink: ByteStream, name: list[bytes], learns: bool) -> None:
        try:
            async for chunk in source:
                if learns and not name and b"application_name" in chunk:
                    name.append(chunk.split(b"application_name\0", 1)[1].split(b"\0", 1)[0])
                if self.silent and name and self.silent.encode() in name[0]:
                    continue
                await sink.send(chunk)
        except BROKEN:
            return
        finally:
            # the other direction ends too, unless the line is to look alive
            if not (self.silent and name and self.silent.encode() in name[0]):
                with suppress(*BROKEN):
                    await sink.aclose()


@asynccontextmanager
async def wire_to(url: str) -> AsyncIterator[Wire]:
    """A proxy before the server of `url`; `wire.url` leads through it."""
    wire = Wire(url)
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    parts = urlsplit(url)
    user = parts.netloc.rpartition("@")[0]
    wire.url = urlunsplit(parts._replace(netloc=f"{user}@127.0.0.1:{port}", query=""))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wire.serve, listener)
        yield wire
        tasks.cancel_scope.cancel()


@contextmanager
def black_hole() -> Iterator[str]:
    """The address of a host that answers no call: its queue of connections is full, so that the kernel drops
    every further attempt, as a firewall does."""
    fillers: list[socket.socket] = []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        try:
            for _ in range(4):
                filler = socket.socket()
                filler.setblocking(False)
                with suppress(BlockingIOError):
                    filler.connect(listener.getsockname())
                fillers.append(filler)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            for filler in fillers:
                filler.close()
