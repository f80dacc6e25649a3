"""Workers' file APIs on loopback: each answers with files of its own, late, wrongly or never.

async with WorkerApi({"w1": {"/m/config.json": {...}}}, token="t") as api:
    api.host("w1")   # a `WorkerHost`
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import anyio
import uvicorn
from anyio.abc import TaskGroup
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gpustackd.sources.worker_files import Hosts, WorkerHost
from tests.hub import Server


class WorkerApi:
    """One server for all of them, a path prefix for each. A file is its JSON content, or a number: its size
    as weights. `silent` workers wait until the asker goes, `status` answers with a code, `bodies` with raw
    bytes."""

    def __init__(self, files: Mapping[str, Mapping[str, Any]], token: str | None = None) -> None:
        self.files = {name: dict(content) for name, content in files.items()}
        self.token = token
        self.silent: set[str] = set()
        self.status: dict[str, int] = {}
        self.bodies: dict[str, bytes] = {}
        self.requests: Counter[str] = Counter()
        self.asked: list[tuple[str, str]] = []
        self.running = 0
        """Requests that silent workers hold."""
        self._idle = anyio.Event()
        self._socket: socket.socket | None = None
        self._server: Server | None = None
        self._tasks: TaskGroup | None = None

    def host(self, name: str) -> WorkerHost:
        assert self._socket is not None
        return WorkerHost(name, f"http://127.0.0.1:{self._socket.getsockname()[1]}/{name}")

    def hosts(self, *dropped: str) -> Hosts:
        return Hosts(tuple(self.host(name) for name in self.files), dropped)

    async def idle(self) -> None:
        """Until no silent worker holds a request."""
        while self.running:
            await self._idle.wait()

    async def __aenter__(self) -> WorkerApi:
        self._socket = socket.create_server(("127.0.0.1", 0))
        app = Starlette(routes=[Route("/{worker}/files/{what}", self._answer)])
        self._server = Server(
            uvicorn.Config(app, log_level="critical", log_config=None, lifespan="off", ws="none")
        )
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
        self._server.stop.set()
        await self._tasks.__aexit__(None, None, None)
        self._socket.close()

    async def _answer(self, request: Request) -> Response:
        name, what = request.path_params["worker"], request.path_params["what"]
        path = request.query_params.get("path", "")
        self.requests[name] += 1
        self.asked.append((name, path))
        if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
            return Response(status_code=401)
        if name in self.silent:
            self.running += 1
            self._idle = anyio.Event()
            try:
                while (await request.receive())["type"] != "http.disconnect":
                    pass
            finally:
                self.running -= 1
                if not self.running:
                    self._idle.set()
            return Response(status_code=500)
        if name in self.status:
            return Response(status_code=self.status[name])
        if name in self.bodies:
            return Response(self.bodies[name])
        files = self.files[name]
        if what == "file-exists":
            found = any(f == path or f.startswith(path + "/") for f in files)
            return JSONResponse({"exists": found, "path": path, "is_file": path in files, "is_dir": found})
        if what == "model-weight-size":
            return JSONResponse({"size": files[path]}) if path in files else Response(status_code=404)
        return JSONResponse(files[path]) if path in files else Response(status_code=404)
