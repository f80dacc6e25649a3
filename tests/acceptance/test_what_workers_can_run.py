"""Filters of a running daemon that look at what workers can run and have: engines by registered backends and
host levels, local paths by the workers' file API. And FR-20: every cause of a refusal, with its count."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream

from tests.acceptance.daemons import within
from tests.acceptance.machines import GIB, Site, W
from tests.acceptance.record import watching

pytestmark = pytest.mark.anyio


@pytest.fixture
def site(served: Site) -> Site:
    """One daemon serves all tests of this file, one after another."""
    return served


class FileApi:
    """One worker's file API: says whether it has what is asked for, or hangs up."""

    def __init__(self) -> None:
        self.port = 0
        self.answer = b"false"
        self.mute = False
        self.asked: list[str] = []

    async def serve(self, *, task_status: Any) -> None:
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
        self.port = int(listener.extra(SocketAttribute.local_port))
        task_status.started()
        await listener.serve(self._hear)

    async def _hear(self, stream: SocketStream) -> None:
        async with stream:
            request = b""
            while b"\r\n\r\n" not in request:
                request += await stream.receive()
            self.asked.append(request.split()[1].decode())
            if self.mute:
                return
            body = b'{"exists": ' + self.answer + b"}"
            head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            await stream.send(head.encode() + body)


@asynccontextmanager
async def file_apis(count: int) -> AsyncIterator[list[FileApi]]:
    """So many file APIs on loopback."""
    made = [FileApi() for _ in range(count)]
    async with anyio.create_task_group() as tasks:
        for api in made:
            await tasks.start(api.serve)
        yield made
        tasks.cancel_scope.cancel()


async def at(site: Site, w: W, api: FileApi, **columns: Any) -> int:
    return await site.worker(w, ip="127.0.0.1", port=api.port, **columns)


# -- local paths ---------------------------------------------------------------------------------------------


async def test_a_model_goes_to_the_worker_that_has_its_path(site: Site) -> None:
    async with file_apis(3) as apis:
        for n, api in enumerate(apis):
            await at(site, W(f"w{n}", 64, "2x24"), api)
        apis[1].answer = b"true"
        model = await site.model(need=14)
        async with watching(site.url):
            rows = await site.placed(await site.instances(model, 2), timeout=within(5))
            assert {r["worker_name"] for r in rows} == {"w1"}
            assert all(len(api.asked) == 1 for api in apis)
            assert "file-exists?path=" in apis[0].asked[0]


async def test_a_path_that_no_worker_has_is_told_and_a_ready_file_cures_it(site: Site) -> None:
    async with file_apis(2) as apis:
        ids = [await at(site, W(f"w{n}", 64, "1x24"), api) for n, api in enumerate(apis)]
        model = await site.model(need=14)
        [instance] = await site.instances(model)
        [row] = await site.refused([instance], timeout=within(5))
        assert "2 workers (w0, w1) do not have the path" in row["state_message"]
        await site.insert(
            "model_files", worker_id=ids[1], source_index="other", state="READY", size=1,
            resolved_path=(await site.row("models", model))["local_path"],
        )  # fmt: skip
        [row] = await site.placed([instance], timeout=within(2))
        assert row["worker_name"] == "w1"


async def test_workers_that_do_not_answer_may_share_what_is_on_this_host(site: Site) -> None:
    async with file_apis(1) as apis:
        apis[0].mute = True
        await at(site, W("w0", 64, "1x24"), apis[0])
        model = await site.model(need=14)
        await site.placed(await site.instances(model), timeout=within(5))
        assert apis[0].asked != []


# -- engines -------------------------------------------------------------------------------------------------


async def levels(site: Site, worker: int, **card: Any) -> None:
    for gpu in await site.sql.fetch("SELECT id FROM gpu_devices WHERE worker_id = $1", worker):
        await site.update("gpu_devices", gpu["id"], **card)


async def test_a_host_that_is_too_old_is_told_and_an_update_of_it_cures_that(site: Site) -> None:
    worker = await site.worker(W("w0", 64, "1x24"))
    await levels(site, worker, runtime_version="11.8")
    model = await site.model(need=14)
    ids = await site.instances(model)
    [row] = await site.refused(ids, timeout=within(5))
    assert "the runtime is cuda 11.8; every image needs 12.8 or newer" in row["state_message"]
    await levels(site, worker, runtime_version="12.8")
    await site.placed(ids, timeout=within(2))


async def test_a_backend_that_is_registered_cures_what_waits_for_it(site: Site) -> None:
    await site.fleet(W("w0", 64, "1x24"))
    model = await site.model(need=14, backend="mine", backend_version="v2")
    ids = await site.instances(model)
    [row] = await site.refused(ids, timeout=within(5))
    assert "cannot run mine v2" in row["state_message"]
    backend = await site.insert(
        "inference_backends", name="mine", versions={"1": {"custom_framework": "cuda"}}
    )
    await site.update("inference_backends", backend, versions={"2.0": {"custom_framework": "cuda"}})
    await site.placed(ids, timeout=within(2))


# -- FR-20 ---------------------------------------------------------------------------------------------------

CAUSES = {
    "cluster": "1 worker is not in the model's cluster",
    "label": "1 worker does not match worker_selector (zone=a)",
    "not ready": "1 worker is NOT_READY",
    "maintenance": "1 worker is MAINTENANCE",
    "accelerator": "1 worker (w5) cannot run vLLM: no known version runs on neuware",
}
ZONE = {"zone": "a"}


async def six(site: Site) -> dict[str, int]:
    """Workers that each fail for one cause, the last one for its 8 GiB; all have no more than that."""
    ours = await site.insert("clusters", name="ours")
    other = await site.insert("clusters", name="other")
    columns: dict[str, dict[str, Any]] = {
        "cluster": {"cluster_id": other},
        "label": {"labels": {"zone": "b"}},
        "not ready": {"state": "NOT_READY"},
        "maintenance": {"state": "MAINTENANCE"},
        "accelerator": {},
        "memory": {},
    }
    made = {}
    for n, (cause, more) in enumerate(columns.items(), 1):
        gpus = "" if cause == "accelerator" else "1x8"
        usual = {"cluster_id": ours, "labels": ZONE}
        made[cause] = await site.worker(W(f"w{n}", 64, gpus, "2/0"), **usual | more)
    await site.insert(
        "gpu_devices", worker_id=made["accelerator"], index=0, type="neuware", vram_total=8 * GIB
    )
    return made


async def mend(site: Site, cause: str, workers: dict[str, int]) -> None:
    """Take one cause away: that worker is left with too little memory, like the last one."""
    worker = workers[cause]
    cures: dict[str, dict[str, Any]] = {
        "cluster": {"cluster_id": (await site.row("workers", workers["memory"]))["cluster_id"]},
        "label": {"labels": ZONE},
        "not ready": {"state": "READY"},
        "maintenance": {"state": "READY"},
    }
    if cause in cures:
        await site.update("workers", worker, **cures[cause])
        return
    async with site.sql.transaction():
        await site.sql.execute("DELETE FROM gpu_devices WHERE worker_id = $1", worker)
        await site.insert("gpu_devices", worker_id=worker, index=0, type="cuda", vram_total=8 * GIB)


async def test_six_causes_are_told_and_each_falls_silent_when_it_is_gone(site: Site) -> None:
    workers = await six(site)
    cluster = (await site.row("workers", workers["memory"]))["cluster_id"]
    model = await site.model(
        need=20, cluster_id=cluster, worker_selector=ZONE, distributed_inference_across_workers=False
    )
    [instance] = await site.instances(model)
    [row] = await site.refused([instance], timeout=within(5))
    for words in (
        *CAUSES.values(),
        "not enough free GPU memory on 1 worker",
        "8.00 GiB of 8.00 GiB",
        "20.00 GiB",
    ):
        assert words in row["state_message"]
    for short, (cause, words) in enumerate(CAUSES.items(), 2):
        await mend(site, cause, workers)
        await site.until(
            "SELECT position($2 IN state_message) = 0 AND position($3 IN state_message) > 0"
            " FROM model_instances WHERE id = $1 AND state = 'PENDING'",
            instance, words, f"not enough free GPU memory on {short} workers", timeout=within(2),
        )  # fmt: skip


async def test_a_refusal_of_500_workers_is_short(site: Site) -> None:
    await site.sql.execute(
        "INSERT INTO workers (name, state, ram_total) SELECT 'worker-' || repeat('x', 100) || n,"
        " CASE WHEN n % 3 = 0 THEN 'NOT_READY' ELSE 'READY' END, 1 FROM generate_series(1, 500) n"
    )
    await site.sql.execute(
        "INSERT INTO gpu_devices (worker_id, index, type, runtime_version, vram_total) SELECT id, 0,"
        " CASE WHEN id % 2 = 0 THEN 'cuda' ELSE 'neuware' END, id::text, 8::bigint << 30 FROM workers"
    )
    model = await site.model(need=20, distributed_inference_across_workers=False)
    [row] = await site.refused(await site.instances(model), timeout=within(5))
    assert len(row["state_message"].encode()) < 4096
    assert len(str(row["reasons"])) < 20_000
