"""A small model hub on loopback: the parts of the Hugging Face and ModelScope APIs that readers use.

    async with Hub({"owner/name": repo_of(config, tensors)}) as hub:
        Reader(ReaderOptions(huggingface_endpoint=hub.url, modelscope_endpoint=hub.url))

Files are bytes, or `Sparse` (a real beginning and holes up to a size, nothing stored). Misbehaviour is set
per path prefix: `hub.fail["/api/models/owner/name"] = Answer(429)`; `hub.hold(prefix)` keeps requests waiting
until the event that it returns is set. Requests and bytes sent are counted.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha1
from types import TracebackType
from typing import Any

import anyio
import uvicorn
from anyio.abc import TaskGroup
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.safetensors_files import data_bytes, encode

CHUNK = 64 * 1024


@dataclass(frozen=True)
class Sparse:
    """A file whose first bytes are real and whose rest are zeros."""

    head: bytes
    size: int


@dataclass(frozen=True)
class Answer:
    """What a path answers in place of its content."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


File = bytes | Sparse
Tensors = Sequence[tuple[str, str, Sequence[int]]]


@dataclass
class Repo:
    """One repository. `revision` is the commit that every branch points to."""

    files: dict[str, File]
    gated: bool = False
    private: bool = False

    @property
    def commit(self) -> str:
        told = json.dumps(sorted((n, size_of(f)) for n, f in self.files.items()))
        small = b"".join(
            f for _, f in sorted(self.files.items()) if isinstance(f, bytes) and len(f) < 100_000
        )
        return sha1(told.encode() + small).hexdigest()


def size_of(file: File) -> int:
    """Bytes that a file has for whoever asks."""
    return file.size if isinstance(file, Sparse) else len(file)


def safetensors(tensors: Tensors, size: int | None = None) -> Sparse:
    """A safetensors file with a true header and holes for data; `size` is its length where told."""
    tensors = list(tensors)
    head = encode(tensors)
    return Sparse(head, size if size is not None else len(head) + data_bytes(tensors))


def repo_of(config: Mapping[str, Any], tensors: Tensors, **files: File) -> Repo:
    """A repository with one weight file. Further files by name, with `__` for `.`."""
    content: dict[str, File] = {
        "config.json": json.dumps(config).encode(),
        "model.safetensors": safetensors(tensors),
    }
    return Repo(content | {name.replace("__", "."): file for name, file in files.items()})


class Hub:
    """Serves repositories on 127.0.0.1 while entered. `token`: what private and gated repositories want."""

    def __init__(self, repos: Mapping[str, Repo] | None = None, token: str = "hub-token") -> None:
        self.repos: dict[str, Repo] = dict(repos or {})
        self.token = token
        self.fail: dict[str, Answer] = {}
        self.requests: Counter[str] = Counter()
        """Path -> requests."""
        self.ranges: list[tuple[str, str]] = []
        """(path, Range header) of every ranged request."""
        self.tokens: list[str] = []
        """Authorization headers that came."""
        self.bytes_sent = 0
        self.ignore_ranges = False
        self.redirect_files = False
        """Answer file requests with a redirect to `/cdn/…`, as real hubs do for large files."""
        self.arrived = anyio.Event()
        """Set by the first request that is held."""
        self._held: dict[str, anyio.Event] = {}
        self._waiting = 0
        self._one_more = anyio.Event()
        self._socket: socket.socket | None = None
        self._server: uvicorn.Server | None = None
        self._tasks: TaskGroup | None = None

    @property
    def url(self) -> str:
        assert self._socket is not None
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def hold(self, prefix: str) -> anyio.Event:
        """Let requests below this path wait until the event is set; `arrived` says when one does."""
        self.arrived = anyio.Event()
        self._held[prefix] = anyio.Event()
        return self._held[prefix]

    async def arrivals(self, count: int) -> None:
        """Until so many requests are held at once."""
        while self._waiting < count:
            self._one_more = anyio.Event()
            await self._one_more.wait()

    async def __aenter__(self) -> Hub:
        self._socket = socket.create_server(("127.0.0.1", 0))
        routes = [
            Route("/api/models/{owner}/{name}", self._hf_info),
            Route("/api/models/{owner}/{name}/revision/{revision:path}", self._hf_info),
            Route("/api/models/{owner}/{name}/tree/{revision:path}", self._hf_tree),
            Route("/api/v1/models/{owner}/{name}/repo/files", self._scope_files),
            Route("/api/v1/models/{owner}/{name}/repo", self._scope_raw),
            Route("/cdn/{owner}/{name}/{file:path}", self._cdn),
            Route("/{owner}/{name}/resolve/{revision}/{file:path}", self._hf_file),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes), log_level="critical", log_config=None, lifespan="off", ws="none",
            timeout_graceful_shutdown=1,
        )  # fmt: skip
        self._server = Server(config)
        self._tasks = await anyio.create_task_group().__aenter__()
        self._tasks.start_soon(self._server.serve, [self._socket])
        await self._server.is_up.wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        assert self._tasks is not None
        assert self._socket is not None
        for event in self._held.values():
            event.set()
        self._server.stop.set()  # type: ignore[attr-defined]
        await self._tasks.__aexit__(None, None, None)
        self._socket.close()

    # -- Hugging Face --------------------------------------------------------------------------------

    async def _hf_info(self, request: Request) -> Response:
        repo, refused = await self._admit(request)
        if refused is not None or repo is None:
            return refused or Response(status_code=500)
        name = _name(request)
        siblings = [
            {"rfilename": file, "size": size_of(content), "blobId": sha1(file.encode()).hexdigest()}
            for file, content in sorted(repo.files.items())
        ]
        return self._counted(
            JSONResponse({"id": name, "sha": repo.commit, "siblings": siblings, "private": False})
        )

    async def _hf_tree(self, request: Request) -> Response:
        repo, refused = await self._admit(request)
        if refused is not None or repo is None:
            return refused or Response(status_code=500)
        rows = [
            {"type": "file", "path": file, "size": size_of(content), "oid": sha1(file.encode()).hexdigest()}
            for file, content in sorted(repo.files.items())
        ]
        return self._counted(JSONResponse(rows))

    async def _hf_file(self, request: Request) -> Response:
        repo, refused = await self._admit(request)
        if refused is not None or repo is None:
            return refused or Response(status_code=500)
        name = request.path_params["file"]
        content = repo.files.get(name)
        if content is None:
            return Response(status_code=404, headers={"x-error-code": "EntryNotFound"})
        if self.redirect_files:
            return Response(status_code=302, headers={"location": f"{self.url}/cdn/{_name(request)}/{name}"})
        return self._file(request, content, {"x-repo-commit": repo.commit})

    async def _cdn(self, request: Request) -> Response:
        self.requests[request.url.path] += 1
        return self._file(request, self.repos[_name(request)].files[request.path_params["file"]], {})

    # -- ModelScope ----------------------------------------------------------------------------------

    async def _scope_files(self, request: Request) -> Response:
        repo, refused = await self._admit(request, scope=True)
        if refused is not None or repo is None:
            return refused or Response(status_code=500)
        folders = sorted({f.rpartition("/")[0] for f in repo.files if "/" in f})
        rows = [{"Path": f, "Name": f.rpartition("/")[2], "Type": "tree", "Size": 0} for f in folders]
        rows += [
            {
                "Path": f,
                "Name": f.rpartition("/")[2],
                "Type": "blob",
                "Size": size_of(c),
                "Revision": repo.commit,
            }
            for f, c in sorted(repo.files.items())
        ]
        return self._counted(
            JSONResponse({"Code": 200, "Success": True, "Message": "", "Data": {"Files": rows}})
        )

    async def _scope_raw(self, request: Request) -> Response:
        repo, refused = await self._admit(request, scope=True)
        if refused is not None or repo is None:
            return refused or Response(status_code=500)
        content = repo.files.get(request.query_params.get("FilePath", ""))
        if content is None:
            return JSONResponse({"Code": 404, "Success": False, "Message": "no such file"}, status_code=404)
        return self._file(request, content, {})

    # -- both ----------------------------------------------------------------------------------------

    async def _admit(self, request: Request, *, scope: bool = False) -> tuple[Repo | None, Response | None]:
        path = request.url.path
        self.requests[path] += 1
        if (sent := request.headers.get("authorization")) is not None:
            self.tokens.append(sent)
        for prefix, event in list(self._held.items()):
            if path.startswith(prefix):
                self.arrived.set()
                self._waiting += 1
                self._one_more.set()
                try:
                    await event.wait()
                finally:
                    self._waiting -= 1
        for prefix, answer in self.fail.items():
            if path.startswith(prefix):
                return None, Response(answer.body, answer.status, dict(answer.headers))
        repo = self.repos.get(_name(request))
        if repo is None:
            if scope:
                body = {"Code": 10010205001, "Success": False, "Message": "record not found", "Data": None}
                return None, JSONResponse(body, status_code=404)
            return None, Response(status_code=404, headers={"x-error-code": "RepoNotFound"})
        revision = request.path_params.get("revision")
        if revision not in {None, "main", "master", repo.commit}:
            return None, Response(status_code=404, headers={"x-error-code": "RevisionNotFound"})
        if (repo.private or repo.gated) and request.headers.get("authorization") != f"Bearer {self.token}":
            code = {"x-error-code": "GatedRepo"} if repo.gated else {"x-error-code": "RepoNotFound"}
            return None, Response(status_code=401, headers=code)
        return repo, None

    def _file(self, request: Request, content: File, headers: dict[str, str]) -> Response:
        total = size_of(content)
        wanted = request.headers.get("range", "")
        start, end = 0, total
        status = 200
        if wanted:
            self.ranges.append((request.url.path, wanted))
        if wanted.startswith("bytes=") and not self.ignore_ranges:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last) + 1 if last else total, total)
            if start >= total:
                return Response(status_code=416, headers={"content-range": f"bytes */{total}"})
            status = 206
            headers = {**headers, "content-range": f"bytes {start}-{end - 1}/{total}"}
        headers = {**headers, "etag": f'"{sha1(str(total).encode()).hexdigest()}"', "accept-ranges": "bytes",
                   "content-length": str(end - start)}  # fmt: skip
        if request.method == "HEAD":
            return Response(status_code=status, headers=headers)
        return StreamingResponse(self._body(request, content, start, end), status, headers)

    async def _body(self, request: Request, content: File, start: int, end: int) -> AsyncIterator[bytes]:
        head = content if isinstance(content, bytes) else content.head
        at = start
        while at < end and not (at > start and await request.is_disconnected()):
            upto = min(at + CHUNK, end)
            chunk = head[at:upto]
            chunk += bytes(upto - at - len(chunk))
            at = upto
            self.bytes_sent += len(chunk)
            yield chunk

    def _counted(self, response: Response) -> Response:
        self.bytes_sent += len(response.body)
        return response


class Server(uvicorn.Server):
    """uvicorn without signal handlers and without naps: it says when it listens, and stops when told."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = anyio.Event()
        self.stop = anyio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await self._serve(sockets)

    async def main_loop(self) -> None:
        await self.stop.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        tasks = list(self.server_state.tasks)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _name(request: Request) -> str:
    return f"{request.path_params['owner']}/{request.path_params['name']}"
