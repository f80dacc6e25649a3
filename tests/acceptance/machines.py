"""A fleet, models, instances by plain SQL, in the words of field reports: `W(name; RAM; GPUs; reserved)`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import anyio

from gpustackd.demo.models.architectures import Tensor
from gpustackd.demo.models.sparse import header
from gpustackd.store.audit.audit import audit
from tests.integration.world import connected
from tests.waiting import PATIENCE, until

GIB = 2**30
_numbers = count(1)

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class W:
    """A READY worker. `gpus`: `8x80`, `4x24+4x16` or empty; `reserved`: RAM/VRAM. All in GiB."""

    name: str
    ram: float
    gpus: str
    reserved: str = "2/1"

    @property
    def cards(self) -> list[int]:
        """Bytes of each card."""
        sizes: list[int] = []
        for part in filter(None, self.gpus.split("+")):
            number, _, size = part.partition("x")
            sizes += [int(float(size) * GIB)] * int(number)
        return sizes


def model_directory(
    folder: Path, need: float | None = None, *, weights: int | None = None, config: Any = None
) -> Path:
    """A model of sparse files: a real `config.json`, a real header, holes for weights.

    `need` GiB is what a language model of it claims (its weights times 1.2 and 2 GiB); or give `weights`
    in bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if weights is None:
        assert need is not None
        assert need > 2, "a language model claims 2 GiB beside its weights"
        weights = int((need - 2) * GIB / 1.2)
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    head = header([Tensor("model.weight", "F8_E4M3", (weights,))])
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + weights)
    return folder


class Site:
    """One database and what users write to it. `sql` is a user's connection."""

    def __init__(self, url: str, folder: Path, sql: Any) -> None:
        self.url = url
        self.folder = folder
        self.sql = sql

    # -- writing --------------------------------------------------------------------------------------

    async def insert(self, table: str, **columns: Any) -> int:
        """One row; its id."""
        names = ", ".join(f'"{c}"' for c in columns)
        places = ", ".join(f"${n}" for n in range(1, len(columns) + 1))
        found: int = await self.sql.fetchval(
            f"INSERT INTO {table} ({names}) VALUES ({places}) RETURNING id", *columns.values()
        )
        return found

    async def worker(self, w: W, *, indexes: Sequence[int] | None = None, **columns: Any) -> int:
        """Write a worker with its GPUs in one transaction; its id."""
        ram, _, vram = w.reserved.partition("/")
        async with self.sql.transaction():
            worker_id = await self.insert(
                "workers",
                **{
                    "name": w.name,
                    "state": "READY",
                    "ram_total": int(w.ram * GIB),
                    "ram_reserved": int(float(ram) * GIB),
                    "vram_reserved": int(float(vram) * GIB),
                    **columns,
                },
            )
            await self.sql.execute(
                'INSERT INTO gpu_devices (worker_id, "index", type, vendor, vram_total)'
                " SELECT $1, i, 'cuda', 'nvidia', v FROM unnest($2::int[], $3::bigint[]) AS x (i, v)",
                worker_id,
                list(indexes or range(len(w.cards))),
                w.cards,
            )
        return worker_id

    async def fleet(self, *workers: W) -> list[int]:
        return [await self.worker(w) for w in workers]

    async def model(
        self,
        need: float | None = None,
        *,
        name: str = "",
        share: float | None = None,
        cards: int | None = None,
        **columns: Any,
    ) -> int:
        """A model row; with `need` (GiB) its directory is written too. `share` is vLLM's part of each card
        (its default: 0.9), `cards` its tensor-parallel size."""
        name = name or f"m{next(_numbers)}"
        flags = [f"--gpu-memory-utilization={share:g}"] if share else []
        flags += [f"--tensor-parallel-size={cards}"] if cards else []
        columns = {"backend": "vLLM", "backend_parameters": flags, "categories": ["llm"], **columns}
        if need is not None:
            path = await anyio.to_thread.run_sync(model_directory, self.folder / name, need)
            columns = {"source": "local_path", "local_path": str(path), **columns}
        return await self.insert("models", name=name, **columns)

    async def instances(self, model_id: int, number: int = 1, **columns: Any) -> list[int]:
        """So many PENDING rows in one statement; their ids."""
        names = [f"i{next(_numbers)}" for _ in range(number)]
        more = "".join(f', "{c}"' for c in columns)
        values = "".join(f", ${n}" for n in range(3, 3 + len(columns)))
        rows = await self.sql.fetch(
            f"INSERT INTO model_instances (name, model_id{more}) SELECT n, $2{values}"
            " FROM unnest($1::text[]) n RETURNING id",
            names,
            model_id,
            *columns.values(),
        )
        return [r["id"] for r in rows]

    async def delete(self, table: str, *ids: int) -> None:
        await self.sql.execute(f"DELETE FROM {table} WHERE id = ANY ($1::bigint[])", list(ids))

    async def update(self, table: str, id_: int, **columns: Any) -> None:
        changes = ", ".join(f'"{c}" = ${n}' for n, c in enumerate(columns, 2))
        await self.sql.execute(f"UPDATE {table} SET {changes} WHERE id = $1", id_, *columns.values())

    # -- looking --------------------------------------------------------------------------------------

    async def row(self, table: str, id_: int) -> dict[str, Any]:
        found = await self.sql.fetchrow(f"SELECT * FROM {table} WHERE id = $1", id_)
        assert found is not None, f"{table} {id_} is gone"
        return dict(found)

    async def rows(self, ids: Collection[int]) -> list[dict[str, Any]]:
        found = await self.sql.fetch(
            "SELECT * FROM model_instances WHERE id = ANY ($1::bigint[]) ORDER BY id", list(ids)
        )
        return [dict(r) for r in found]

    async def until(self, question: str, *arguments: Any, timeout: float = PATIENCE) -> Any:
        """Wait until a question to the database is answered by something true; the answer.

        Raise AssertionError with the state of all instances where that takes longer than `timeout` seconds.
        """
        return await until(
            lambda: self.sql.fetchval(question, *arguments), f"{question} {arguments}", timeout, self.story
        )

    async def placed(self, ids: Collection[int], timeout: float = PATIENCE) -> list[dict[str, Any]]:
        """Wait until all of these have a place; their rows."""
        await self.until(
            "SELECT count(*) = $2 FROM model_instances"
            " WHERE id = ANY ($1::bigint[]) AND worker_id IS NOT NULL",
            list(ids),
            len(set(ids)),
            timeout=timeout,
        )
        return await self.rows(ids)

    async def refused(self, ids: Collection[int], timeout: float = PATIENCE) -> list[dict[str, Any]]:
        """Wait until all of these are PENDING with their reasons; their rows."""
        await self.until(
            "SELECT count(*) = $2 FROM model_instances"
            " WHERE id = ANY ($1::bigint[]) AND state = 'PENDING' AND reasons IS NOT NULL",
            list(ids),
            len(set(ids)),
            timeout=timeout,
        )
        return await self.rows(ids)

    async def analyzing(self, number: int, timeout: float = PATIENCE) -> list[dict[str, Any]]:
        """Wait until so many instances are ANALYZING; their rows."""
        await self.until(
            "SELECT count(*) = $1 FROM model_instances WHERE state = 'ANALYZING'", number, timeout=timeout
        )
        return [
            dict(r) for r in await self.sql.fetch("SELECT * FROM model_instances WHERE state = 'ANALYZING'")
        ]

    async def settled(self, timeout: float = PATIENCE) -> None:
        """Wait until every instance is placed, or waits with its reasons."""
        await self.until(
            "SELECT NOT EXISTS (SELECT FROM model_instances"
            " WHERE state = 'ANALYZING' OR (state = 'PENDING' AND reasons IS NULL))",
            timeout=timeout,
        )

    async def commit_waits(self, holder: int, timeout: float = PATIENCE) -> None:
        """Wait until a daemon's commit waits for a lock that the backend `holder` has. Not to be asked in a
        transaction: the server's view of its sessions stands still in one."""
        await self.until(
            "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE query LIKE '%gpustackd_commit%'"
            " AND wait_event_type = 'Lock' AND $1 = ANY (pg_blocking_pids(pid)))",
            holder,
            timeout=timeout,
        )

    async def clean(self) -> None:
        """Every rule of the contract holds."""
        assert (await audit(self.sql)).breaches == ()

    async def story(self) -> str:
        """States and reasons of all instances, for a failure's text."""
        rows = await self.sql.fetch(
            "SELECT state, coalesce(left(state_message, 160), '') AS why, count(*) AS n, min(name) AS one"
            " FROM model_instances GROUP BY 1, 2 ORDER BY 3 DESC LIMIT 12"
        )
        return "\n".join(f"{r['n']} x {r['state']} (as {r['one']}): {r['why']}" for r in rows)


async def emptied(site: Site) -> None:
    """Everything gone, for what comes next on the same database and daemon."""
    for table in ("models", "workers", "clusters", "inference_backends"):
        await site.sql.execute(f"DELETE FROM {table}")


@asynccontextmanager
async def site_on(url: str, folder: Path) -> AsyncIterator[Site]:
    """Opened on a database whose schema is at head."""
    sql = await connected(url, application_name="a user")
    try:
        yield Site(url, folder, sql)
    finally:
        sql.terminate()
