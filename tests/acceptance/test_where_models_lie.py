"""Models of every source, placed by a daemon that has never seen them: hubs, a directory here, one that only
workers have. And what a hub may answer instead."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gpustackd.domain.model_spec import model_spec
from tests.acceptance import shapes
from tests.acceptance.daemons import crew, within
from tests.acceptance.machines import CONFIG, GIB, Site, W
from tests.acceptance.record import Record, watching
from tests.hub import Answer, Hub, Repo, Server

pytestmark = pytest.mark.anyio

WEIGHTS = int(8 * GIB / 1.2)
CLAIM = int(WEIGHTS * 1.2) + 2 * GIB
COMMIT = "a" * 40


@asynccontextmanager
async def file_api(files: dict[str, Any], token: str) -> AsyncIterator[int]:
    """A worker's file API on loopback: path -> JSON, or bytes of weights; yields its port."""

    async def answer(request: Request) -> Response:
        if request.headers.get("authorization") != f"Bearer {token}":
            return Response(status_code=401)
        found = files.get(request.query_params.get("path", ""))
        if found is None:
            return Response(status_code=404)
        return JSONResponse({"size": found} if isinstance(found, int) else found)

    listener = socket.create_server(("127.0.0.1", 0))
    app = Starlette(routes=[Route("/files/{what}", answer)])
    server = Server(uvicorn.Config(app, log_level="critical", log_config=None, lifespan="off", ws="none"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.serve, [listener])
        await server.is_up.wait()
        yield listener.getsockname()[1]
        server.stop.set()
    listener.close()


async def test_a_model_is_sized_alike_wherever_it_lies(site: Site, record: Record, tmp_path: Path) -> None:
    repo = shapes.repository(CONFIG, WEIGHTS)
    here = shapes.written(tmp_path / "here", repo)
    there = {"/only/there/config.json": CONFIG, "/only/there": WEIGHTS}
    sources: dict[str, dict[str, Any]] = {
        "huggingface": {"source": "huggingface", "huggingface_repo_id": "lab/model"},
        "model_scope": {"source": "model_scope", "model_scope_model_id": "lab/model"},
        "here": {"source": "local_path", "local_path": str(here)},
        "there": {"source": "local_path", "local_path": "/only/there"},
    }
    await site.fleet(W("w1", 512, "8x24", "2/1"))
    async with Hub({"lab/model": repo}) as hub, file_api(there, "worker-token") as port:
        await site.worker(W("w2", 64, "1x2", "2/1"), ip="127.0.0.1", port=port)
        settings = {
            "HF_ENDPOINT": hub.url,
            "modelscope_endpoint": hub.url,
            "worker_token": "worker-token",
            "lease": 60,
            "rescan_interval": 600,
        }
        async with crew(site.url, tmp_path / "logs", **settings) as daemons, watching(site.url):
            await daemons.start()
            for name, columns in sources.items():
                model = await site.model(name=name, backend="Custom", categories=None, **columns)
                (row,) = await site.placed(await site.instances(model), timeout=within(5))
                (index,) = row["gpu_indexes"]
                assert row["computed_resource_claim"]["vram"] == {str(index): CLAIM}, name
                told = "SELECT categories ->> 0 FROM models WHERE id = $1"
                assert await site.until(told, model) == "llm", name
            assert hub.bytes_sent < 1_000_000, "headers alone are fetched"

            # a copy that was downloaded goes before what the hub says
            hub_model = await site.sql.fetchval("SELECT id FROM models WHERE name = 'huggingface'")
            index = model_spec(await site.row("models", hub_model)).source_index
            await site.insert("model_files", worker_id=1, source_index=index, size=2 * WEIGHTS, state="READY")
            asked = hub.requests.total()
            (row,) = await site.placed(await site.instances(hub_model), timeout=within(5))
            (vram,) = row["computed_resource_claim"]["vram"].values()
            assert vram == int(2 * WEIGHTS * 1.2) + 2 * GIB
            assert hub.requests.total() == asked
    assert await record.broken() == []


async def test_what_a_hub_refuses_is_told_and_an_edit_has_it_tried_at_once(
    site: Site, record: Record, tmp_path: Path
) -> None:
    await site.fleet(W("w1", 512, "8x24", "2/1"))
    repo = shapes.repository(CONFIG, WEIGHTS)
    hub_ = Hub({"lab/gated": Repo(repo.files, gated=True), "lab/busy": repo, "lab/broken": repo})
    async with hub_ as hub:
        hub.fail["/api/models/lab/busy"] = Answer(429, headers={"retry-after": "1"})
        hub.fail["/api/models/lab/broken"] = Answer(200, b'{"siblings": [{')
        settings = {"HF_ENDPOINT": hub.url, "lease": 60, "rescan_interval": 600}
        async with crew(site.url, tmp_path / "logs", **settings) as daemons, watching(site.url):
            await daemons.start()
            ids = {}
            for name in ("gated", "busy", "broken", "nowhere"):
                model = await site.model(name=name, source="huggingface", huggingface_repo_id=f"lab/{name}")
                ids[name] = (await site.instances(model))[0]
            rows = {r["id"]: r for r in await site.refused(ids.values())}
            for name, word in (("gated", "token"), ("busy", "429"), ("nowhere", "lab/nowhere")):
                assert word in rows[ids[name]]["state_message"]
            for id_ in ids.values():
                assert rows[id_]["reasons"]
                assert rows[id_]["next_attempt_at"] is not None
            assert await site.sql.fetchval("SELECT count(*) FROM instance_claims") == 0
            hub.fail.clear()  # the hub has come round; an edit has them tried at once
            await site.sql.execute("UPDATE models SET env = '{}'")
            await site.placed([ids["busy"], ids["broken"]], timeout=within(5))
    assert await record.broken() == []


async def test_a_draft_model_counts_where_that_is_preferred_and_nowhere_else(
    site: Site, record: Record, tmp_path: Path
) -> None:
    await site.fleet(W("w1", 512, "2x24", "2/1"))
    here = shapes.written(tmp_path / "here", shapes.repository(CONFIG, WEIGHTS))
    draft = shapes.written(tmp_path / "draft", shapes.repository(CONFIG, GIB))
    speculative = {"speculative_config": {"enabled": True, "draft_model": {"local_path": str(draft)}}}
    model = await site.model(source="local_path", local_path=str(here), backend="Custom", **speculative)
    for prefer, weights in (("false", WEIGHTS), ("true", WEIGHTS + GIB)):
        settings = {"lease": 60, "rescan_interval": 600, "prefer_draft_weights": prefer}
        async with crew(site.url, tmp_path / f"logs-{prefer}", **settings) as daemons:
            await daemons.start()
            (row,) = await site.placed(await site.instances(model), timeout=within(5))
            assert set(row["computed_resource_claim"]["vram"].values()) == {int(weights * 1.2) + 2 * GIB}
            await site.delete("model_instances", row["id"])
    assert await record.broken() == []
