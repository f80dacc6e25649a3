"""Random fleets with models and instances on them, by a seed: what plans and suggestions are tried on."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

from gpustackd.daemon.compose import open_snapshot
from gpustackd.domain.demand import Demand
from gpustackd.domain.outcome import Placed
from gpustackd.settings import load
from gpustackd.store.postgres.snapshot import snapshot
from tests.acceptance.machines import GIB, Site, model_directory

NEEDS = (6, 6, 10, 14, 14, 20, 30, 30, 44, 70, 100, 150)
"""GiB that language models claim, one directory each."""
CARDS = (16, 24, 40, 48, 80)
STRATEGIES = (None, None, None, "spread", "binpack", "first_fit", "best_fit", "fragmentation")


@dataclass
class Situation:
    """One fleet and what is asked of it. The same seed makes the same."""

    seed: int
    folder: Path
    name: str = ""
    workers: list[dict[str, Any]] = field(default_factory=list)
    models: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.name = self.name or f"s{self.seed}"
        chance = self.chance
        self.workers = [self._worker(n) for n in range(chance.randint(1, 7))]
        self.models = [self._model(n) for n in range(chance.randint(2, 5))]

    @cached_property
    def chance(self) -> Random:
        return Random(self.seed)

    def _worker(self, n: int) -> dict[str, Any]:
        chance = self.chance
        size = chance.choice(CARDS)
        unified = chance.random() < 0.08
        gpus = [
            {
                "index": i, "type": "cuda", "vendor": "nvidia", "name": f"card-{size}",
                "vram_total": size * GIB, "schedulable": chance.random() > 0.15,
            }
            for i in range(1 if unified else chance.choice((1, 2, 2, 4, 8)))
        ]  # fmt: skip
        return {
            "kind": "Worker", "name": f"{self.name}-w{n}", "ip": f"10.0.0.{n + 1}",
            "state": chance.choices(("READY", "MAINTENANCE", "NOT_READY"), (8, 1, 1))[0],
            "ram_total": (size + 32 if unified else chance.choice((48, 256, 512))) * GIB,
            "ram_reserved": 2 * GIB, "vram_reserved": chance.choice((0, 1)) * GIB, "unified_memory": unified,
            "labels": {"zone": chance.choice("ab"), "disk": chance.choice(("ssd", "hdd"))}, "gpus": gpus,
        }  # fmt: skip

    def _model(self, n: int) -> dict[str, Any]:
        chance = self.chance
        need = chance.choice(NEEDS)
        flags = []
        if chance.random() < 0.3:
            flags.append(f"--gpu-memory-utilization={chance.choice((0.4, 0.6, 0.8, 0.95))}")
        if chance.random() < 0.3:
            flags.append(f"--tensor-parallel-size={chance.choice((1, 2, 4, 8))}")
        found: dict[str, Any] = {
            "kind": "Model", "name": f"{self.name}-m{n}", "source": "local_path",
            "local_path": str(self.directory(need)),
            "backend": chance.choices(("vLLM", "SGLang", "Custom"), (6, 1, 1))[0],
            "backend_parameters": flags, "categories": ["llm"], "priority": chance.choice((0, 0, 0, 5)),
            "placement_strategy": chance.choice(STRATEGIES),
        }  # fmt: skip
        if found["backend"] == "Custom":
            found["image_name"] = "registry.example/engine:1"
        if chance.random() < 0.25:
            found["worker_selector"] = {"zone": chance.choice("aabbc")}
        if chance.random() < 0.1:
            found["worker_selector"] = {"terms": [{"key": "disk", "operator": "In", "values": ["ssd"]}]}
        if chance.random() < 0.15:
            found["distributed_inference_across_workers"] = False
        return found

    def directory(self, need: int) -> Path:
        """The files of a model that claims so many GiB; written once."""
        path = self.folder / f"need-{need}"
        return path if path.exists() else model_directory(path, need)

    def instances(self, number: int, start: int = 0) -> list[dict[str, Any]]:
        """Documents of so many instances of these models."""
        return [
            {
                "kind": "ModelInstance",
                "name": f"{self.name}-i{start + n}",
                "model": self.chance.choice(self.models)["name"],
            }
            for n in range(number)
        ]


async def at_rest(site: Site) -> None:
    """Wait until the daemon has nothing to do: what waits has its reasons, and would find no place now.

    Raise AssertionError where something that has a place is not placed in time.
    """
    settings = load(None, {"database_url": site.url})
    while True:
        await site.settled()
        async with (
            snapshot(site.url, "gpustackd test") as (store, _),
            open_snapshot(store, settings) as now,
        ):
            waiting = await store.waiting(None)
            await now.read({w.model_id for w in waiting})
            fits = [
                w.id
                for w in waiting
                if isinstance(demand := now.demand(w.model_id), Demand)
                and isinstance(now.decider.decide(demand, w.id, w.name)[0], Placed)
            ]
        if not fits:
            return
        await site.until(
            "SELECT EXISTS (SELECT FROM model_instances WHERE id = ANY ($1) AND state = 'SCHEDULED')", fits
        )


def text(documents: list[dict[str, Any]]) -> str:
    """Documents as a file."""
    return "\n".join(json.dumps(d) for d in documents)
