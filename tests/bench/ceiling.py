"""The ceiling: pgbench calls the same claim and commit functions with the arguments of placements once made.

What a burst of the daemon left behind is turned into the arguments that placed it, batch by batch (the
rows that one transaction wrote). The same instances are then inserted anew, and one pgbench client claims and
commits those batches: the same ledger rows, decision records and instance rows, and nobody decides anything.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import anyio.to_thread

from gpustackd.store.embedded import find_binaries
from tests.bench.stage import Stage

OWNER = UUID(int=1)
LEASE = 600.0
ARGUMENTS = (
    "owner uuid, replica text, instance bigint[], epoch bigint[], model bigint[], model_version bigint[],"
    " unchanged boolean[], over boolean[], worker bigint[], worker_name text[], worker_ip text[],"
    " worker_address text[], worker_ifname text[], gpu_type text[], gpu_indexes text[], gpu_addresses text[],"
    " claim text[], distributed text[], message text[], attempt bigint[], pool text[], candidates text[],"
    " reasons text[], duration double precision[], w_from int[], w_to int[], w_id bigint[], w_ram bigint[],"
    " w_unified boolean[], w_version bigint[], l_from int[], l_to int[], l_instance bigint[],"
    " l_worker bigint[], l_gpu bigint[], l_part text[], l_vram bigint[], l_ram bigint[], l_version bigint[],"
    " l_unified boolean[]"
)
NAMES = tuple(a.split()[0] for a in ARGUMENTS.split(", "))

_PLACED = """
SELECT i.id, i.xmin::text AS batch, i.model_id, m.version, i.worker_id, i.worker_name, i.worker_ip,
       i.worker_advertise_address, i.worker_ifname, i.gpu_type, i.gpu_indexes::text, i.gpu_addresses::text,
       i.computed_resource_claim::text, i.distributed_servers::text, i.state_message, d.placement_epoch,
       d.attempt, d.pool::text, d.candidates::text, d.reasons::text, d.duration_ms
  FROM model_instances i JOIN models m ON m.id = i.model_id
  JOIN scheduling_decisions d ON d.instance_id = i.id AND d.outcome = 'PLACED'
 WHERE i.state = 'SCHEDULED' ORDER BY i.scheduled_at, i.id"""
_LEDGER = """
SELECT instance_id, worker_id, gpu_device_id, part, vram, ram FROM instance_claims ORDER BY id"""
# One transaction each, as the daemon has them: a claim need not wait for the disk, a commit must.
_SCRIPT = r"""
\set n :n + 1
SELECT set_config('synchronous_commit', 'off', true), count(c.id)
  FROM bench_batches b, LATERAL gpustackd_claim(b.owner, b.instance, b.claim_epoch, {lease}) c WHERE b.n = :n;
SELECT count(c.code) AS failed
  FROM bench_batches b, LATERAL gpustackd_commit({arguments}) c WHERE b.n = :n;
"""
_TPS = re.compile(r"^tps = ([\d.]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What pgbench reached: placements a second, at batches of so many on average."""

    rate: float
    batch: float
    placed: int


async def record(stage: Stage) -> list[int]:
    """Keep what lies placed as ready-made arguments in `bench_batches`; returns the size of each batch."""
    batches: dict[str, list[Any]] = defaultdict(list)
    for row in await stage.sql.fetch(_PLACED):
        batches[row["batch"]].append(row)
    ledger: dict[int, list[Any]] = defaultdict(list)
    for row in await stage.sql.fetch(_LEDGER):
        ledger[row["instance_id"]].append(row)
    await stage.sql.execute("DROP TABLE IF EXISTS bench_batches")
    await stage.sql.execute(
        f"CREATE TABLE bench_batches (n int PRIMARY KEY, claim_epoch bigint[], {ARGUMENTS})"
    )
    # read as they are: decompressing them would be work that the daemon's server has not
    for name in NAMES[2:]:
        await stage.sql.execute(f"ALTER TABLE bench_batches ALTER {name} SET STORAGE EXTERNAL")
    places = ", ".join(f"${n}" for n in range(1, len(NAMES) + 3))
    rows = [
        (n, [r["placement_epoch"] - 1 for r in ordered], *_arguments(ordered, ledger))
        for n, ordered in enumerate((sorted(b, key=lambda r: r["id"]) for b in batches.values()), 1)
    ]
    await stage.sql.executemany(
        f"INSERT INTO bench_batches (n, claim_epoch, {', '.join(NAMES)}) VALUES ({places})", rows
    )
    await stage.sql.execute("DROP TABLE IF EXISTS bench_instances")
    await stage.sql.execute(
        "CREATE TABLE bench_instances AS"
        " SELECT id, name, model_id FROM model_instances WHERE state = 'SCHEDULED'"
    )
    return [len(b) for b in batches.values()]


def _arguments(batch: Sequence[Any], ledger: dict[int, list[Any]]) -> tuple[Any, ...]:
    """The arguments of `gpustackd_commit`, in its order."""
    heads = [
        (r["id"], r["placement_epoch"], r["model_id"], r["version"], False, False, r["worker_id"],
         r["worker_name"], r["worker_ip"], r["worker_advertise_address"], r["worker_ifname"], r["gpu_type"],
         r["gpu_indexes"], r["gpu_addresses"], r["computed_resource_claim"], r["distributed_servers"],
         r["state_message"], r["attempt"], r["pool"], r["candidates"], r["reasons"], r["duration_ms"])
        for r in batch
    ]  # fmt: skip
    w_from, w_to, l_from, l_to = [], [], [], []
    workers: list[tuple[Any, ...]] = []
    rows: list[tuple[Any, ...]] = []
    for r in batch:
        mine = ledger[r["id"]]
        w_from.append(len(workers) + 1)
        l_from.append(len(rows) + 1)
        workers += [(c["worker_id"], c["ram"], False, 0) for c in mine if c["gpu_device_id"] is None]
        rows += [
            (r["id"], c["worker_id"], c["gpu_device_id"], c["part"], c["vram"], c["ram"], 0, False)
            for c in mine
        ]
        w_to.append(len(workers))
        l_to.append(len(rows))
    return (
        OWNER, "pgbench", *_columns(heads, 22), w_from, w_to, *_columns(workers, 4), l_from, l_to,
        *_columns(rows, 8),
    )  # fmt: skip


def _columns(rows: Sequence[tuple[Any, ...]], width: int) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in range(width)]


async def play(stage: Stage, folder: Path) -> Ceiling:
    """Insert the recorded instances anew and let pgbench place them. No daemon may run (or hear).

    Raise RuntimeError where pgbench fails or places less than was recorded: then it did less work.
    """
    await stage.clear()
    await stage.sql.execute("INSERT INTO model_instances (id, name, model_id) SELECT * FROM bench_instances")
    batches, wanted = await stage.sql.fetchrow(
        "SELECT count(*), sum(cardinality(instance)) FROM bench_batches"
    )
    script = folder / "ceiling.sql"
    script.write_text(_SCRIPT.format(lease=LEASE, arguments=", ".join(f"b.{n}" for n in NAMES)))
    program = find_binaries().folder / "pgbench"
    if not program.exists():
        raise RuntimeError("the PostgreSQL programs hold no pgbench")
    command = [
        str(program), "--no-vacuum", "--client=1", "--jobs=1", "--protocol=prepared", "--define=n=0",
        f"--transactions={batches}", f"--file={script}", stage.url,
    ]  # fmt: skip
    ended = await anyio.to_thread.run_sync(
        lambda: subprocess.run(command, capture_output=True, text=True, check=False)
    )
    found = _TPS.search(ended.stdout)
    if ended.returncode or found is None:
        raise RuntimeError(f"pgbench failed: {ended.stdout[-500:]} {ended.stderr[-1000:]}")
    placed = await stage.sql.fetchval("SELECT count(*) FROM model_instances WHERE state = 'SCHEDULED'")
    if placed != wanted:
        raise RuntimeError(f"pgbench placed {placed} of {wanted}: {json.dumps(ended.stdout[-300:])}")
    return Ceiling(float(found[1]) * wanted / batches, wanted / batches, placed)
