"""Users' statements against running commits: the daemon yields, a user's statement never does."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from gpustackd.domain.outcome import Part
from gpustackd.errors import Contended
from gpustackd.ports import CommitCode, Proposal
from gpustackd.store.postgres import commit_call
from gpustackd.store.postgres.store import PostgresStore
from tests.integration.world import GIB, World, connected, world_of
from tests.waiting import blocked, elapse, until

pytestmark = pytest.mark.anyio

ENOUGH = 40
"""Rounds of every user, and placements, after which a battery is over."""
WORKERS, GPUS = 6, 4


class Battery:
    """Replicas that claim and commit without pause on a small fleet, while users write what they like."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.chance = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.errors: list[str] = []
        self.over = asyncio.Event()

    async def replica(self, name: str) -> None:
        store = await PostgresStore.open(self.world.url, 3, replica=name)
        owner = uuid4()
        chance = random.Random(self.chance.random())
        async with world_of(self.world.url) as own:
            own.owner = owner
            while not self.over.is_set():
                try:
                    await self._round(own, store, owner, name, chance)
                except Contended:
                    self.done["yielded"] += 1
        await store.close()

    async def _round(self, own: World, store: PostgresStore, owner: Any, name: str, chance: Any) -> None:
        waiting = [(w.id, w.epoch) for w in await store.waiting(None, 200)]
        claims = await store.claim(owner, chance.sample(waiting, min(len(waiting), 16)), 30)
        changes = await store.fleet_changes(None)
        hosts = {w.id: w for w in changes.workers}
        models = {m.id: m.version for m in await store.models([c.model_id for c in claims])}
        cards = [g for g in changes.gpus if g.open and g.worker_id in hosts]
        batch = []
        for claim in claims:
            if claim.model_id not in models or len(cards) < 3:
                continue
            parts = []
            for card in chance.sample(cards, chance.choice([1, 1, 2, 3])):
                host = hosts[card.worker_id]
                if host.id in {p.worker_id for p in parts}:
                    continue
                ram = chance.choice([0, GIB])
                parts.append(Part(host.id, host.name, card.type, (card.id,), (card.index,), (card.version,),
                                  (GIB,), ram, host.version, host.unified_memory))  # fmt: skip
            batch.append(await own.proposal(claim, *parts, model_version=models[claim.model_id]))
        results = await store.commit(owner, name, batch) if batch else []
        self.done["committed"] += sum(r.code is None for r in results)
        self.done["conflicts"] += sum(r.code is CommitCode.CONFLICT for r in results)
        self.done["lost"] += sum(r.code is CommitCode.LOST for r in results)
        await store.hand_back(owner)

    async def user(self, what: str, act: Callable[[Any, random.Random], Awaitable[Any]]) -> None:
        connection = await connected(self.world.url)
        chance = random.Random(self.chance.random())
        while not self.over.is_set():
            try:
                await act(connection, chance)
                self.done[what] += 1
            except asyncpg.PostgresError as error:
                self.errors.append(f"{what}: {type(error).__name__}: {error} {error.detail}")
            await elapse(chance.random() * 0.02, "between two statements of a user")
        await connection.close()

    async def run(self, users: Mapping[str, Callable[[Any, random.Random], Awaitable[Any]]]) -> None:
        """Two replicas and these users, until each has done enough."""

        async def stop() -> None:
            try:
                await until(
                    lambda: all(self.done[what] >= ENOUGH for what in ("committed", *users)),
                    f"{ENOUGH} placements, and as many rounds of every user",
                    shows=lambda: f"done: {dict(self.done)}, errors: {self.errors[:5]}",
                )
            finally:
                self.over.set()

        await asyncio.gather(
            self.replica("a"), self.replica("b"), *[self.user(*u) for u in users.items()], stop()
        )


async def add_models(sql: Any, chance: random.Random) -> None:
    await sql.execute(
        "WITH m AS (INSERT INTO models (name) VALUES (gen_random_uuid()::text) RETURNING id)"
        " INSERT INTO model_instances (name, model_id)"
        " SELECT gen_random_uuid()::text, m.id FROM m, generate_series(1, $1)",
        chance.randint(1, 12),
    )


async def delete_models(sql: Any, chance: random.Random) -> None:
    await sql.execute("DELETE FROM models WHERE id % 3 = $1", chance.randrange(3))


async def delete_instances(sql: Any, chance: random.Random) -> None:
    """In no order at all."""
    await sql.execute(
        "DELETE FROM model_instances WHERE id IN (SELECT id FROM model_instances ORDER BY random() LIMIT 9)"
    )


async def replace_worker(sql: Any, chance: random.Random) -> None:
    name = f"w{chance.randrange(WORKERS)}"
    async with sql.transaction():
        await sql.execute("DELETE FROM workers WHERE name = $1", name)
        id_ = await sql.fetchval(
            "INSERT INTO workers (name, state, ram_total, unified_memory) VALUES ($1, 'READY', $2, $3)"
            " RETURNING id", name, 512 * GIB, chance.random() < 0.3,
        )  # fmt: skip
        await sql.execute(
            "INSERT INTO gpu_devices (worker_id, index, type, vram_total)"
            " SELECT $1, n, 'cuda', $2 FROM generate_series(0, $3 - 1) n", id_, 80 * GIB, GPUS,
        )  # fmt: skip


async def delete_worker(sql: Any, chance: random.Random) -> None:
    await sql.execute("DELETE FROM workers WHERE name = $1", f"w{chance.randrange(WORKERS)}")


async def maintenance(sql: Any, chance: random.Random) -> None:
    state = chance.choice(["MAINTENANCE", "READY", "READY"])
    await sql.execute(
        "UPDATE workers SET state = $1 WHERE id % 2 = $2 AND state <> $1", state, chance.randrange(2)
    )


async def reserve(sql: Any, chance: random.Random) -> None:
    await sql.execute("UPDATE workers SET vram_reserved = $1, unified_memory = $2 WHERE id % 3 = $3",
                      chance.randrange(GIB), chance.random() < 0.3, chance.randrange(3))  # fmt: skip


async def gpu_updates(sql: Any, chance: random.Random) -> None:
    await sql.execute("UPDATE gpu_devices SET schedulable = $1, vram_total = $2 WHERE id % 3 = $3",
                      chance.random() < 0.7, chance.randrange(1, 80) * GIB, chance.randrange(3))  # fmt: skip


async def delete_gpus(sql: Any, chance: random.Random) -> None:
    await sql.execute("DELETE FROM gpu_devices WHERE id % 7 = $1", chance.randrange(7))


async def heartbeats(sql: Any, chance: random.Random) -> None:
    await sql.execute("UPDATE workers SET heartbeat_at = now()")
    await sql.execute("UPDATE gpu_devices SET vram_used = 1, vram_used_at = now()")


async def any_change(sql: Any, chance: random.Random) -> None:
    await chance.choice([maintenance, reserve, gpu_updates, heartbeats])(sql, chance)


DELETES = {"delete models": delete_models, "delete instances": delete_instances}
LOSSES = {"delete workers": delete_worker, "delete gpus": delete_gpus, "replace workers": replace_worker}
# one user for these: two who change many workers and GPUs at once meet as in any database
CHANGES = {"change workers and GPUs": any_change}


async def fleet(world: World) -> None:
    for n in range(WORKERS):
        await world.worker(*[80 * GIB] * GPUS, name=f"w{n}", unified_memory=n == 0)


@pytest.mark.parametrize("users", [DELETES, LOSSES, CHANGES, DELETES | LOSSES | CHANGES], ids=" and ".join)
async def test_users_statements_against_running_commits_never_fail(
    world: World, users: dict[str, Callable[[Any, random.Random], Awaitable[Any]]]
) -> None:
    await fleet(world)
    battery = Battery(world, 7)
    await battery.run({"add": add_models} | users)
    print(dict(battery.done))
    assert battery.errors == []
    await world.clean()


# --- who waits for whom ------------------------------------------------------------------------------------


async def test_time_outs_of_the_commit_connection_outlive_its_return_to_the_pool(world: World) -> None:
    for _ in range(2):
        async with world.store.connections.acquire_for_commit() as connection:
            assert await connection.fetchval("SHOW lock_timeout") == "300ms"
            assert await connection.fetchval("SHOW statement_timeout") == "800ms"
        async with world.store.connections.acquire() as connection:
            assert await connection.fetchval("SHOW lock_timeout") == "5s"


async def test_a_commit_yields_to_a_users_open_change_and_the_rest_of_its_batch_goes_through(
    world: World,
) -> None:
    worker, gpus = await world.worker(*[80 * GIB] * 4)
    claims = await world.claims(*[await world.instance() for _ in gpus])
    batch = [
        await world.proposal(c, await world.part(worker, [g], GIB)) for c, g in zip(claims, gpus, strict=True)
    ]
    user = await connected(world.url)
    async with user.transaction():
        await user.execute("UPDATE gpu_devices SET schedulable = false WHERE id = $1", gpus[3])
        assert [(r.code, r.gpu_ids) for r in await world.commit(*batch)] == [
            (None, ()), (None, ()), (None, ()), (CommitCode.CONFLICT, ()),
        ]  # fmt: skip
        assert [await world.allocated(g) for g in gpus] == [GIB, GIB, GIB, 0]
    (result,) = await world.commit(batch[3])
    assert (result.code, result.gpu_ids) == (CommitCode.CONFLICT, (gpus[3],))
    await world.clean()
    await user.close()


async def commit_in(sql: Any, world: World, proposal: Proposal) -> None:
    """The commit statement inside a transaction that stays open."""
    assert await sql.fetch(commit_call.SQL, *commit_call.arguments(world.owner, "r1", [proposal])) == []


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM models",
        "DELETE FROM model_instances",
        "DELETE FROM workers",
        "DELETE FROM gpu_devices",
        "UPDATE workers SET state = 'MAINTENANCE'",
        "UPDATE workers SET unified_memory = true",
        "UPDATE gpu_devices SET vram_total = 1",
    ],
)
@pytest.mark.parametrize("ram", [0, GIB], ids=["no RAM", "RAM"])
async def test_a_users_statement_that_meets_a_commit_half_way_waits_and_sees_it(
    world: World, statement: str, ram: int
) -> None:
    worker, gpus = await world.worker(80 * GIB, 80 * GIB)
    claim = await world.claim(await world.instance())
    proposal = await world.proposal(claim, await world.part(worker, gpus, GIB, ram))
    replica = await connected(world.url)
    transaction = replica.transaction()
    await transaction.start()
    await commit_in(replica, world, proposal)
    async with blocked(world.url, statement) as finished:
        await transaction.commit()
        await finished()
    await world.clean()
    if "DELETE" in statement:
        assert await world.ledger() == []
    else:
        assert len(await world.ledger()) == (3 if ram else 2)
    await replica.close()


async def test_deletes_of_a_worker_and_of_a_model_at_once_take_turns(world: World) -> None:
    worker, gpus = await world.worker(80 * GIB, 80 * GIB)
    await world.placed(await world.part(worker, gpus, GIB, GIB))
    user = await connected(world.url)
    transaction = user.transaction()
    await transaction.start()
    await user.execute("DELETE FROM workers")
    async with blocked(world.url, "DELETE FROM models") as finished:
        await transaction.commit()
        await finished()
    await world.clean()
    await user.close()


@pytest.mark.parametrize(("open_", "next_"), [
    ("DELETE FROM models WHERE id = 1", "DELETE FROM models WHERE id = 2"),
    ("DELETE FROM models WHERE id = 1", "UPDATE workers SET heartbeat_at = now()"),
    ("UPDATE workers SET heartbeat_at = now()", "DELETE FROM models WHERE id = 2"),
    ("UPDATE workers SET heartbeat_at = now()", "UPDATE gpu_devices SET vram_used = 1"),
])  # fmt: skip
async def test_a_transaction_left_open_delays_statements_on_other_rows_and_stops_none(
    world: World, open_: str, next_: str
) -> None:
    await world.worker(80 * GIB)
    await world.model()
    await world.model()
    user = await connected(world.url)
    await world.sql.execute("SET deadlock_timeout = '100ms'")  # how long to be polite follows from it
    async with user.transaction():
        await user.execute(open_)
        await world.sql.execute(next_)
    await user.close()


async def test_a_claim_never_waits_for_a_users_delete(world: World) -> None:
    kept, gone = await world.instance(), await world.instance()
    user = await connected(world.url)
    async with user.transaction():
        await user.execute("DELETE FROM model_instances WHERE id = $1", gone)
        assert [c.id for c in await world.claims(kept, gone)] == [kept]
        assert kept in await world.store.renew(world.owner, [kept, gone], 30)
    await user.close()


@pytest.mark.parametrize("write", ["commit", "refuse"])
async def test_a_replica_that_meets_its_own_renewal_waits_for_it(database: str, write: str) -> None:
    admin = await connected(database)
    name = await admin.fetchval("SELECT current_database()")
    await admin.execute(
        f"ALTER DATABASE \"{name}\" SET deadlock_timeout = '10min'"
    )  # patience follows from it
    async with world_of(database) as world:
        worker, (gpu,) = await world.worker(80 * GIB)
        claim = await world.claim(await world.instance())
        proposal = await world.proposal(claim, await world.part(worker, [gpu], GIB))
        transaction = admin.transaction()
        await transaction.start()
        await admin.execute("SELECT gpustackd_renew($1, $2, 60)", world.owner, [claim.id])
        if write == "commit":
            writing: asyncio.Future[Any] = asyncio.ensure_future(world.commit(proposal))
        else:
            writing = asyncio.ensure_future(world.refuse(claim))
        sleeps = "SELECT count(*) FROM pg_stat_activity WHERE datname = $1 AND wait_event = 'PgSleep'"

        async def waits() -> bool:
            assert not writing.done(), "it did not wait"
            return bool(await world.sql.fetchval(sleeps, name))

        await until(waits, "it waits for the renewal")
        await transaction.commit()
        done = await writing
        assert done is True or [r.code for r in done] == [None]
        await world.clean()
    await admin.close()
