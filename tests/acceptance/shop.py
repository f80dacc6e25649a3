"""One cluster of one test: its rows, its models, what the ledger holds of its instances, and gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from tests.acceptance import shapes
from tests.acceptance.daemons import within
from tests.acceptance.machines import GIB, Site
from tests.acceptance.record import Record
from tests.hub import Repo

RAM = 512
"""GiB of every worker unless said; the reserves are 2 GiB of RAM and 1 GiB of each card."""
NAMES = count(1)
MIB = 2**20
CARD_24 = 26_015_170_560
CARD_80 = 80 * GIB
NPU_64 = 64 * GIB
HALF_GIB = 512 * MIB

QWEN_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "torch_dtype": "bfloat16",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152_064,
    "max_position_embeddings": 32768,
}
QWEN_7B_WEIGHTS = 15_231_271_864
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "torch_dtype": "bfloat16",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 129_280,
    "max_position_embeddings": 4096,
}
WHISPER = {"architectures": ["WhisperForConditionalGeneration"], "torch_dtype": "float16", "d_model": 1280}


@dataclass(frozen=True)
class Card:
    """One GPU row."""

    total: int
    type: str = "cuda"
    vendor: str = "nvidia"
    name: str = "A100"
    index: int | None = None
    network: dict[str, str] | None = None


@dataclass
class Booked:
    """What the ledger holds of one instance on one worker. Bytes; cards as `type:index`."""

    part: str
    vram: dict[str, int] = field(default_factory=dict)
    ram: int = 0


class Shop:
    """One cluster of one test."""

    def __init__(self, site: Site, record: Record, cluster: int, folder: Path) -> None:
        self.site = site
        self.record = record
        self.cluster = cluster
        self.folder = folder

    async def worker(self, name: str, *cards: Card, ram: float = RAM, **columns: Any) -> int:
        name = f"{name}-{self.cluster}"
        columns = {"state": "READY", "ram_reserved": 2 * GIB, "vram_reserved": GIB, **columns}
        async with self.site.sql.transaction():
            worker = await self.site.insert(
                "workers", name=name, cluster_id=self.cluster, ram_total=int(ram * GIB), **columns
            )
            for n, c in enumerate(cards):
                await self.site.insert(
                    "gpu_devices", worker_id=worker, index=n if c.index is None else c.index, type=c.type,
                    vendor=c.vendor, name=c.name, vram_total=c.total, network=c.network,
                )  # fmt: skip
        return worker

    async def model(self, repo: Repo | None, **columns: Any) -> int:
        """A model on files of its own; None where `columns` name a source."""
        name = f"m{next(NAMES)}"
        if repo is not None:
            path = shapes.written(self.folder / name, repo)
            columns = {"source": "local_path", "local_path": str(path), **columns}
        return await self.site.insert("models", name=name, cluster_id=self.cluster, **columns)

    async def placed(self, model: int) -> dict[str, Any]:
        """An instance of it, once it is SCHEDULED."""
        (row,) = await self.site.placed(await self.site.instances(model), timeout=within(1))
        assert row["state"] == "SCHEDULED"
        return row

    async def filled(self, model: int) -> dict[str, Any]:
        """Its row, once what the files say has been filled in."""
        await self.site.until("SELECT categories IS NOT NULL FROM models WHERE id = $1", model)
        return await self.site.row("models", model)

    async def refused(self, model: int) -> dict[str, Any]:
        (row,) = await self.site.refused(await self.site.instances(model), timeout=within(1))
        return row

    async def booked(self, instance: int) -> dict[str, Booked]:
        """The ledger's rows, by name of the worker without its cluster."""
        rows = await self.site.sql.fetch(
            "SELECT w.name, c.part, c.vram, c.ram, g.type, g.index FROM instance_claims c"
            " JOIN workers w ON w.id = c.worker_id LEFT JOIN gpu_devices g ON g.id = c.gpu_device_id"
            " WHERE c.instance_id = $1 ORDER BY g.type, g.index",
            instance,
        )
        found: dict[str, Booked] = {}
        for r in rows:
            here = found.setdefault(r["name"].rpartition("-")[0], Booked(r["part"]))
            assert here.part == r["part"]
            if r["type"] is not None:
                here.vram[f"{r['type']}:{r['index']}"] = r["vram"]
            here.ram += r["ram"]
        return found

    async def holds(self, row: Mapping[str, Any], expected: dict[str, Booked]) -> None:
        """The ledger is as expected, the row tells the same, and every rule of the contract holds."""
        assert await self.booked(row["id"]) == expected
        parts = [row, *(row["distributed_servers"] or {}).get("subordinate_workers", [])]
        told: dict[str, Booked] = {}
        for n, p in enumerate(parts):
            claim = p["computed_resource_claim"]
            name = p["worker_name"].rpartition("-")[0]
            vram = {f"{p['gpu_type']}:{i}": claim["vram"][str(i)] for i in p["gpu_indexes"] or []}
            told[name] = Booked("subordinate" if n else "main", vram, claim.get("ram") or 0)
            assert len(vram) == len(p["gpu_indexes"] or [])
        assert told == expected
        await self.site.clean()

    async def gives_all_back(self, *ids: int) -> None:
        """DELETE leaves nothing booked in this cluster."""
        await self.site.delete("model_instances", *ids)
        left = await self.site.sql.fetchval(
            "SELECT coalesce(sum(w.ram_allocated), 0) + coalesce(sum(g.vram_allocated), 0)"
            " + (SELECT count(*) FROM instance_claims WHERE instance_id = ANY ($2::bigint[]))"
            " FROM workers w LEFT JOIN gpu_devices g ON g.worker_id = w.id WHERE w.cluster_id = $1",
            self.cluster,
            list(ids),
        )
        assert left == 0
        await self.site.clean()
        assert await self.record.broken() == []


def llm(weights: int = QWEN_7B_WEIGHTS, config: Mapping[str, Any] = QWEN_7B) -> Repo:
    return shapes.repository(config, weights)
