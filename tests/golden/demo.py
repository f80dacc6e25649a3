"""The demo: its fleet and sixty instances of its models, decided as `gpustackd plan` and `explain` do it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import yaml

from gpustackd.daemon.compose import open_snapshot
from gpustackd.daemon.whatif.explain import explain
from gpustackd.daemon.whatif.plan import Planner
from gpustackd.demo.models.examples import folder, write_models
from gpustackd.domain.outcome import Outcome
from gpustackd.placement.advice.changes import Holder
from gpustackd.placement.advice.suggestions import Advice
from gpustackd.settings import load
from gpustackd.store.documents.reading import read_documents
from gpustackd.store.memory.overlay import Overlay
from gpustackd.store.memory.store import MemoryStore

NOW = datetime(2026, 1, 1, tzinfo=UTC)

Entry = tuple[str, Outcome, Advice | None]
"""Instance, what was decided, and what would help it."""


def decided(into: Path) -> list[Entry]:
    """All decisions in their order. The models' directories are written below `into`."""
    write_models(into)
    return anyio.run(_decided, into)


async def _decided(into: Path) -> list[Entry]:
    store = MemoryStore(NOW.timestamp)
    overlay = Overlay(store)
    await overlay.write(read_documents(yaml.safe_dump_all(_documents(into), sort_keys=False), "demo"))
    settings = load(None, {"database_url": "postgresql://nobody@localhost/none"})
    async with open_snapshot(store, settings) as snapshot:
        plan = await Planner(store, overlay, snapshot).plan((), now=NOW)
        placed = [t for t in plan.trials if t.placed]
        holders = {t.id: Holder(t.id, t.name, t.model, t.model_id) for t in placed}
        queue = await store.waiting(None)
        found: list[Entry] = []
        asked: set[int] = set()
        for t in plan.trials:
            advice = None
            if not t.placed and t.model_id not in asked:
                asked.add(t.model_id)
                waiting = next(w for w in queue if w.id == t.id)
                advice = (await explain(snapshot, waiting, queue, holders)).advice
            found.append((t.name, t.outcome, advice))
    return found


def _documents(into: Path) -> Iterator[dict[str, Any]]:
    """Fleet, models and instances of the demo. Workers have no file API: nobody is asked for files."""
    for document in yaml.safe_load_all((folder() / "fleet.yaml").read_text()):
        document.pop("port", None)
        yield document
    yield from yaml.safe_load_all((into / "models.yaml").read_text())
    wanted = re.findall(r"\('([^']+)', (\d+), (\d+)\)", (folder() / "instances.sql").read_text())
    for name, first, last in wanted:
        for n in range(int(first), int(last) + 1):
            yield {"kind": "ModelInstance", "name": f"{name}-{n}", "model": name}
