"""Model files that only workers have, asked for over their file API: all at once, the first good answer
counts.

A worker answers at `http://{advertise_address or ip}:{port}`, to the bearer token of the settings:
`GET /files/model-config?path=` the JSON of a file, `/files/file-exists?path=` `{"exists": bool, ...}`,
`/files/model-weight-size?path=` `{"size": bytes}`.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
import httpx2

from gpustackd.domain.fleet.rows import WorkerRow
from gpustackd.domain.model_spec import ModelSpec
from gpustackd.errors import BadRow, ModelUnreadable
from gpustackd.placement.filters.labels import LabelFilter
from gpustackd.sources.formats import bounded_json

T = TypeVar("T")

TOTAL_SECONDS = 15.0
CONNECT_SECONDS = 5.0
AT_ONCE = 64
"""Requests in flight for one question, however large the fleet is."""
REASONS_SHOWN = 3
READY = "READY"


@dataclass(frozen=True, slots=True)
class WorkerHost:
    """One worker's file API: `url` is `http://address:port`."""

    name: str
    url: str


@dataclass(frozen=True, slots=True)
class Hosts:
    """Workers to ask about one model, in the order of asking, and why others are left out."""

    hosts: tuple[WorkerHost, ...] = ()
    dropped: tuple[str, ...] = ()


def hosts_of(spec: ModelSpec, workers: Iterable[WorkerRow], having_file: Collection[int] = ()) -> Hosts:
    """READY workers with a file API that the model may use: of its cluster, among its picked GPUs, by its
    labels. Those in `having_file` (ids with a READY copy of the model) are asked first."""
    picked = {g.worker for g in spec.gpu_ids}
    try:
        terms = LabelFilter.of(spec.worker_selector).terms if spec.worker_selector is not None else ()
    except BadRow as e:
        return Hosts(dropped=(str(e),))
    hosts: list[tuple[bool, WorkerHost]] = []
    dropped: list[str] = []
    for row in workers:
        if spec.cluster_id is not None and row.cluster_id != spec.cluster_id:
            continue  # of another cluster: nothing to explain
        address = row.advertise_address or row.ip
        if picked and row.name not in picked:
            dropped.append(f"{row.name} has none of the selected GPUs")
        elif (term := next((t for t in terms if not t.holds(row.labels)), None)) is not None:
            dropped.append(f"{row.name} lacks label {term}")
        elif row.state != READY:
            dropped.append(f"{row.name} is {row.state}")
        elif not address or not row.port:
            dropped.append(f"{row.name} has no address or port")
        else:
            host = f"[{address}]" if ":" in address else address
            hosts.append((row.id not in having_file, WorkerHost(row.name, f"http://{host}:{row.port}")))
    hosts.sort(key=lambda pair: pair[0])
    return Hosts(tuple(host for _, host in hosts), tuple(dropped))


class WorkerFiles:
    """The file API of workers. Limits in seconds: `total` for one answer, `connect` for its connection.
    Proxies of the environment are ignored: workers are inside the cluster."""

    def __init__(
        self, token: str | None = None, *, total: float = TOTAL_SECONDS, connect: float = CONNECT_SECONDS
    ) -> None:
        self._total = total
        self._client = httpx2.AsyncClient(
            timeout=httpx2.Timeout(total, connect=min(connect, total)),
            headers={"authorization": f"Bearer {token}"} if token else {},
            limits=httpx2.Limits(max_connections=2 * AT_ONCE, max_keepalive_connections=AT_ONCE),
            trust_env=False,
            verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),  # http alone: no certificates need be loaded
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def json_file(self, hosts: Hosts, path: str) -> tuple[Mapping[str, Any], str]:
        """The JSON object at `path` from whichever worker answers first, and that worker's name. Raise
        ModelUnreadable (retryable) with each worker's reason (three of them) where none has it."""

        async def ask(host: WorkerHost) -> Mapping[str, Any]:
            data = await self._get(host, "/files/model-config", path, bounded_json.CONFIG.size)
            document = bounded_json.parse(data, f"{path} on {host.name}")
            if not document:
                raise _NoAnswer("does not have the file, or it is empty")
            if not isinstance(document, dict):
                raise _NoAnswer("answers with something other than a JSON object")
            return document

        return await self._first(hosts, ask, path)

    async def weight_size(self, hosts: Hosts, path: str) -> tuple[int, str]:
        """Bytes of the weights below `path`, and the name of the worker that said so. An answer of 0 bytes
        counts as "has none". Raise ModelUnreadable (retryable) where no worker has any."""

        async def ask(host: WorkerHost) -> int:
            document = bounded_json.parse(
                await self._get(host, "/files/model-weight-size", path, 4096), host.name
            )
            size = document.get("size") if isinstance(document, dict) else document
            if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 2**62:
                raise _NoAnswer("answers without a size")
            if size == 0:
                raise _NoAnswer("has no weights there")
            return size

        return await self._first(hosts, ask, path)

    async def exists(self, host: WorkerHost, path: str) -> bool:
        """Whether a worker has the path. Raise ModelUnreadable (retryable) where it does not say."""
        try:
            with anyio.fail_after(self._total):
                data = await self._get(host, "/files/file-exists", path, 65536)
        except (_NoAnswer, TimeoutError) as e:
            because = str(e) or "did not answer in time"
            raise ModelUnreadable("worker_silent", f"{host.name} {because}", retryable=True) from None
        document = bounded_json.parse(data, host.name)
        return isinstance(document, dict) and document.get("exists") is True

    async def _first(
        self, hosts: Hosts, ask: Callable[[WorkerHost], Awaitable[T]], path: str
    ) -> tuple[T, str]:
        """The first answer that counts, and the name of the worker that gave it."""
        if not hosts.hosts:
            raise _nobody(hosts, path)
        winner: list[tuple[T, str]] = []
        reasons: dict[str, str] = {}
        limit = anyio.Semaphore(AT_ONCE)

        async def one(host: WorkerHost, scope: anyio.CancelScope) -> None:
            async with limit:
                try:
                    answer = await ask(host)
                except _NoAnswer as e:
                    reasons[host.name] = str(e)
                    return
                except ModelUnreadable as e:
                    reasons[host.name] = e.problem
                    return
            if not winner:
                winner.append((answer, host.name))
                scope.cancel()  # the losers; leaving the group waits until they are gone

        with anyio.move_on_after(self._total):
            async with anyio.create_task_group() as group:
                for host in hosts.hosts:
                    group.start_soon(one, host, group.cancel_scope)
        if winner:
            return winner[0]
        for host in hosts.hosts:
            reasons.setdefault(host.name, f"did not answer within {self._total:g} s")
        listed = [f"{name}: {reason}" for name, reason in reasons.items()]
        problem = f"{path} could not be read from {_count(len(hosts.hosts))}: {_some(listed)}"
        remedy = "check that a worker has the path and that its file API can be reached"
        raise ModelUnreadable("workers_silent", problem, remedy, retryable=True)

    async def _get(self, host: WorkerHost, route: str, path: str, limit: int) -> bytes:
        try:
            async with self._client.stream("GET", host.url + route, params={"path": path}) as answer:
                if answer.status_code != 200:
                    raise _NoAnswer(_STATUS_MEANING.get(answer.status_code, f"answers {answer.status_code}"))
                chunks: list[bytes] = []
                got = 0
                async for chunk in answer.aiter_bytes(65536):
                    got += len(chunk)
                    if got > limit:
                        raise _NoAnswer(f"answers with more than {limit} bytes")
                    chunks.append(chunk)
        except httpx2.ConnectTimeout:
            raise _NoAnswer("did not accept a connection in time") from None
        except httpx2.TimeoutException:
            raise _NoAnswer("did not answer in time") from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as e:
            raise _NoAnswer(f"cannot be reached ({str(e)[:80] or type(e).__name__})") from None
        return b"".join(chunks)


class _NoAnswer(Exception):
    """Why one worker's answer does not count."""


_STATUS_MEANING = {
    400: "does not have a readable file there (400)", 401: "refuses the token (401)",
    403: "does not allow the file to be read (403)", 404: "does not have the file (404)",
}  # fmt: skip


def _nobody(hosts: Hosts, path: str) -> ModelUnreadable:
    because = f"no worker can be asked: {_some(hosts.dropped)}" if hosts.dropped else "there are no workers"
    problem = f"{path} is not on this host, and {because}"
    remedy = "put the files where this process or a worker can read them"
    return ModelUnreadable("no_workers", problem, remedy, retryable=True)


def _some(lines: Sequence[str]) -> str:
    shown = "; ".join(line[:200] for line in lines[:REASONS_SHOWN])
    return shown + (f"; +{len(lines) - REASONS_SHOWN} more" if len(lines) > REASONS_SHOWN else "")


def _count(n: int) -> str:
    return "1 worker" if n == 1 else f"{n} workers"
