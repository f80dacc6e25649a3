"""The demo from an empty database to its end: one stage after another, each checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import anyio

from gpustackd.demo.bursts import execute, insert_in_bursts
from gpustackd.demo.daemon_processes import DaemonProcess, daemons
from gpustackd.demo.freed_gpu import free_a_gpu
from gpustackd.demo.lost_worker import SETTINGS, lose_a_worker
from gpustackd.demo.models.examples import folder
from gpustackd.demo.narration import Narration
from gpustackd.demo.scaling import scale_up_and_down
from gpustackd.store.audit.audit import audit
from gpustackd.store.documents.apply import apply_documents
from gpustackd.store.documents.reading import read_documents
from gpustackd.store.embedded import EmbeddedPostgres
from gpustackd.store.postgres.connect import Connection, connected
from gpustackd.store.postgres.inventory import InventoryReads
from gpustackd.store.postgres.migrate import migrate

DAEMONS = 3
LEASE = 2
"""Seconds; short, so that what a killed daemon held is taken over while one watches."""
TROUBLE = ("daemon.error", "daemon.failed", "database.error", "rescan.failed")
"""Log events that must not occur, whatever is killed."""


async def play(
    narration: Narration,
    directory: Path,
    server: EmbeddedPostgres,
    models: Path,
    show: Callable[[Narration, Connection], Awaitable[None]],
) -> None:
    """Every stage. `models` are the documents of the example models, `show` prints the fleet once all
    instances are decided; logs of the daemons go to `directory`."""
    url = server.url()
    with narration.step("schema") as notes:
        notes.append(f"at {(await migrate(url))[1]}")
    async with connected(url, "gpustackd demo") as connection:
        await execute(connection, "DELETE FROM model_instances")  # of an earlier run in the same directory
        with narration.step("fleet and models") as notes:
            notes.append(await _apply(connection, [folder() / "fleet.yaml", models]))
        settings = {"GPUSTACKD_DATABASE_URL": url, "GPUSTACKD_LEASE": str(LEASE), **SETTINGS}
        async with daemons(DAEMONS, directory, settings) as processes:
            with narration.step(f"{DAEMONS} daemons") as notes:
                for daemon in processes:
                    await daemon.ready()
                notes.append("processes " + ", ".join(str(d.pid) for d in processes))
            narration.say(f"  connect with {server.psql()}", style="dim")
            await insert_in_bursts(narration, connection, processes, LEASE)
            await show(narration, connection)
            await free_a_gpu(narration, connection)
            await scale_up_and_down(narration, connection)
            await lose_a_worker(narration, connection)
            await _audit(narration, connection)
            await _stop(narration, processes)


async def _apply(connection: Connection, files: Sequence[Path]) -> str:
    """Apply documents as `gpustackd apply` does; what there is then, in words."""
    kinds: Counter[str] = Counter()
    for file in files:
        text = await anyio.Path(file).read_text("utf-8")
        kinds.update(a.kind for a in await apply_documents(connection, read_documents(text, file.name)))
    gpus = len(await InventoryReads(connection).rows("gpus"))
    return f"{kinds['Worker']} workers with {gpus} GPUs, {kinds['Model']} models"


async def _audit(narration: Narration, connection: Connection) -> None:
    result = await audit(connection)
    narration.check(result.clean, "audit: every rule holds" if result.clean else "audit: rules are broken")
    for breach in result.breaches[:10]:
        narration.say(f"       rule {breach.rule}, {breach.what}: {breach.how}", style="red")


async def _stop(narration: Narration, processes: Sequence[DaemonProcess]) -> None:
    survivors = [d for d in processes if d.running]
    codes = [await d.stop() for d in survivors]
    errors = sum(d.events[event] for d in processes for event in TROUBLE)
    narration.check(errors == 0, f"{errors or 'no'} errors in the logs of the daemons")
    narration.check(
        len(survivors) == len(processes) - 1 and codes == [0] * len(codes),
        f"the {len(survivors)} other daemons ran on and stopped on SIGTERM with exit codes {codes}",
    )
