"""Replicas on two GPUs, in every order of their steps; nothing is booked twice, nothing is lost.

Over memory all interleavings of two and three replicas, with users, sleepers and crashes in between; over
PostgreSQL all interleavings of two replicas that step the real statements, transactions left open included.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from itertools import combinations
from typing import Any
from uuid import UUID

import pytest

from gpustackd.domain.fleet.rows import GpuRow
from gpustackd.domain.lifecycle import InstanceState
from gpustackd.domain.outcome import Cure, NoFit, Part, Placed, Placement, Reason
from gpustackd.ports import Claim, CommitCode, Proposal, Refusal
from gpustackd.store.memory.store import MemoryStore
from gpustackd.store.postgres import commit_call
from tests.integration.world import World, connected, world_of
from tests.property.explorer import explore
from tests.property.oracle import breaches
from tests.property.stepping import now

NEED, ROOM, RAM = 10, 15, 3
LEASE = 30.0
NO = NoFit((Reason("no_room", "fit", "no room"),), "no room", Cure.CAPACITY)


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


class Replica:
    """Looks, claims, decides, commits, tries once more after a clash, then refuses what is left."""

    STEPS = ("look", "claim", "decide", "commit", "again")

    def __init__(self, number: int, many: int) -> None:
        self.owner = UUID(int=number + 1)
        self.number = number
        self.many = many
        self.at = 0
        self.gpus: list[GpuRow] = []
        self.hosts: dict[int, Any] = {}
        self.seen: list[tuple[int, int]] = []
        self.claims: list[Claim] = []
        self.batch: list[Proposal] = []
        self.codes: list[CommitCode | None] = []

    @property
    def done(self) -> bool:
        return self.at >= len(self.STEPS)

    def step(self, store: MemoryStore) -> None:
        getattr(self, self.STEPS[self.at])(store)
        self.at += 1

    def look(self, store: MemoryStore) -> None:
        changes = now(store.fleet_changes(None))
        self.gpus, self.hosts = list(changes.gpus), {w.id: w for w in changes.workers}
        self.seen = [(w.id, w.epoch) for w in now(store.waiting(None))]

    def claim(self, store: MemoryStore) -> None:
        self.claims = list(now(store.claim(self.owner, self.seen[: self.many], LEASE)))

    def decide(self, store: MemoryStore) -> None:
        taken: Counter[int] = Counter()
        self.batch = []
        for claim in self.claims:
            turn = (claim.id + self.number) % 2
            cards = sorted(self.gpus, key=lambda g: g.id, reverse=bool(turn))
            for g in cards:
                if g.open and (g.capacity or 0) - g.vram_allocated - taken[g.id] >= NEED:
                    taken[g.id] += NEED
                    self.batch.append(self.proposal(store, claim, g))
                    break

    def proposal(self, store: MemoryStore, claim: Claim, gpu: GpuRow) -> Proposal:
        host = self.hosts[gpu.worker_id]
        part = Part(
            worker_id=host.id, worker_name=host.name, gpu_type="cuda", gpu_ids=(gpu.id,),
            gpu_indexes=(gpu.index,), gpu_versions=(gpu.version,), vram=(NEED,), ram=RAM,
            worker_version=host.version,
        )  # fmt: skip
        (model,) = now(store.models([claim.model_id])) or [None]
        return Proposal(claim, model.version if model else -1, Placed(Placement((part,))))

    def commit(self, store: MemoryStore) -> None:
        results = {r.instance_id: r.code for r in now(store.commit(self.owner, "r", self.batch))}
        self.codes += results.values()
        self.claims = [c for c in self.claims if results.get(c.id, CommitCode.CONFLICT) is not None]

    def again(self, store: MemoryStore) -> None:
        changes = now(store.fleet_changes(None))
        self.gpus, self.hosts = list(changes.gpus), {w.id: w for w in changes.workers}
        self.decide(store)
        self.commit(store)
        now(store.refuse(self.owner, "r", [Refusal(c, NO) for c in self.claims]))


class Actor:
    """Something that happens once, at any moment."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.done = False

    def step(self, fleet: Fleet) -> None:
        self.done = True
        ACTS[self.what](fleet)


class Fleet:
    """Two GPUs with room for one instance each on one worker, some instances, replicas and acts."""

    def __init__(self, replicas: int, instances: int, many: int, acts: tuple[str, ...] = ()) -> None:
        self.clock = Clock()
        self.store = MemoryStore(self.clock)
        self.worker = self.store.database.insert("workers", name="w", state="READY", ram_total=100)
        self.gpus = [
            self.store.database.insert(
                "gpu_devices", worker_id=self.worker, index=n, type="cuda", vram_total=ROOM
            )
            for n in range(2)
        ]
        self.model = self.store.database.insert("models", name="m")
        self.instances = [
            self.store.database.insert("model_instances", name=f"i{n}", model_id=self.model)
            for n in range(instances)
        ]
        self.replicas = [Replica(n, many) for n in range(replicas)]
        self.acts = [Actor(a) for a in acts]

    def able(self) -> list[int]:
        everybody: list[Any] = [*self.replicas, *self.acts]
        return [n for n, a in enumerate(everybody) if not a.done]

    def step(self, actor: int) -> None:
        if actor < len(self.replicas):
            self.replicas[actor].step(self.store)
        else:
            self.acts[actor - len(self.replicas)].step(self)

    def placed(self) -> list[int]:
        return [
            i.id for i in self.store.database.model_instances.values() if i.state is InstanceState.SCHEDULED
        ]

    def drain(self) -> None:
        """All leases end, and one replica works until nothing changes any more."""
        self.clock.time += LEASE + 1
        now(self.store.expire_leases())
        for _ in range(len(self.instances) + 1):
            last = Replica(90, 10)
            while not last.done:
                last.step(self.store)


def sleep_on(fleet: Fleet) -> None:
    """Everybody slept past the leases, and somebody swept."""
    fleet.clock.time += LEASE + 1
    now(fleet.store.expire_leases())


def crash(fleet: Fleet) -> None:
    """The first replica dies with whatever it holds."""
    fleet.replicas[0].at = len(Replica.STEPS)


def shrink(fleet: Fleet) -> None:
    fleet.store.database.update("gpu_devices", fleet.gpus[0], vram_total=NEED - 1)


def cordon(fleet: Fleet) -> None:
    fleet.store.database.update("gpu_devices", fleet.gpus[1], schedulable=False)


def lose_gpu(fleet: Fleet) -> None:
    fleet.store.database.delete("gpu_devices", fleet.gpus[0])


def lose_worker(fleet: Fleet) -> None:
    fleet.store.database.delete("workers", fleet.worker)


def delete_instance(fleet: Fleet) -> None:
    fleet.store.database.delete("model_instances", fleet.instances[0])


def delete_model(fleet: Fleet) -> None:
    fleet.store.database.delete("models", fleet.model)


def edit_model(fleet: Fleet) -> None:
    fleet.store.database.update("models", fleet.model, backend="SGLang")


def less_ram(fleet: Fleet) -> None:
    fleet.store.database.update("workers", fleet.worker, ram_total=RAM)


ACTS: dict[str, Callable[[Fleet], None]] = {
    f.__name__: f
    for f in (sleep_on, crash, shrink, cordon, lose_gpu, lose_worker, delete_instance, delete_model,
              edit_model, less_ram)
}  # fmt: skip
LEFT = {"shrink": 1, "cordon": 1, "lose_gpu": 1, "lose_worker": 0, "delete_model": 0, "less_ram": 1}
"""GPUs (or RAM) that the fleet has left for placements after an act; two where nothing is named."""


def sound(fleet: Fleet) -> None:
    assert breaches(fleet.store) == []


def run(replicas: int, instances: int, many: int, *acts: str) -> None:
    def at_end(fleet: Fleet) -> None:
        # nobody still holds a claim, except one who died with it
        held = [
            i for i in fleet.store.database.model_instances.values() if i.state is InstanceState.ANALYZING
        ]
        assert not held or "crash" in acts
        fleet.drain()
        sound(fleet)
        left = min(LEFT.get(a, 2) for a in (*acts, ""))
        alive = len(fleet.store.database.model_instances)
        placed = len(fleet.placed())
        if {"cordon", "shrink", "less_ram"} & set(acts):
            assert min(left, alive) <= placed <= min(2, alive)  # what was there before stays
        else:
            assert placed == min(left, alive)
        once = Counter(d.instance_id for d in fleet.store.database.decisions if d.outcome == "PLACED")
        moved = {"lose_gpu", "lose_worker"} & set(acts)
        assert all(n == 1 for n in once.values()) or moved

    told = explore(lambda: Fleet(replicas, instances, many, acts), sound, at_end)
    print(f"{replicas} replicas, {instances} instances, {acts or 'alone'}: {told}")
    assert told.ways >= (252 if replicas == 2 else 756_756) or "crash" in acts


@pytest.mark.parametrize("many", [1, 2])
@pytest.mark.parametrize("instances", [1, 2, 3])
def test_two_replicas_in_every_order(instances: int, many: int) -> None:
    run(2, instances, many)


@pytest.mark.parametrize("instances", [2, pytest.param(3, marks=pytest.mark.chaos)])
def test_three_replicas_in_every_order(instances: int) -> None:
    run(3, instances, 2)


@pytest.mark.parametrize("act", ACTS)
def test_two_replicas_and_one_event_at_every_moment(act: str) -> None:
    run(2, 3, 2, act)


@pytest.mark.parametrize("pair", [
    ("sleep_on", "lose_gpu"), ("crash", "sleep_on"), ("shrink", "delete_instance"),
    ("sleep_on", "edit_model"), ("lose_worker", "delete_model"),
])  # fmt: skip
def test_two_replicas_and_two_events_at_every_moment(pair: tuple[str, str]) -> None:
    run(2, 2, 2, *pair)


def test_a_sleepers_late_commit_is_always_lost() -> None:
    """Wherever between a replica's claim and its commit the sweep comes."""
    late: Counter[str] = Counter()

    def at_end(fleet: Fleet) -> None:
        (replica,) = fleet.replicas
        late[str([c and c.value for c in replica.codes])] += 1

    explore(lambda: Fleet(1, 1, 1, ("sleep_on",)), sound, at_end)
    assert set(late) == {"[None]", "['lost', 'lost']"}


# --- real statements ---------------------------------------------------------------------------------------


class Session:
    """A replica on a connection of its own: each of its steps sends one statement, and a transaction stays
    open from one step to the next. A statement that waits for the other replica is left waiting."""

    STEPS = ("claim", "end", "commit", "end")

    def __init__(self, sql: Any, number: int, world: World) -> None:
        self.sql = sql
        self.number = number
        self.owner = UUID(int=number + 1)
        self.world = world
        self.pid = sql.get_server_pid()
        self.at = 0
        self.waiting: asyncio.Task[None] | None = None
        self.claimed: list[Claim] = []
        self.exceptions: list[Any] = []
        self.ids: list[int] = []
        self.parts: list[Part] = []
        self.transaction: Any = None

    async def begin(self) -> None:
        self.transaction = self.sql.transaction()
        await self.transaction.start()

    async def end(self) -> None:
        await self.transaction.commit()

    async def claim(self) -> None:
        await self.begin()
        rows = await self.sql.fetch(
            "SELECT * FROM gpustackd_claim($1, $2, $3, 30)", self.owner, self.ids, [0] * len(self.ids)
        )
        self.claimed = [Claim(r["id"], r["name"], r["model_id"], r["epoch"], r["attempts"], 0) for r in rows]

    async def commit(self) -> None:
        """Decided on the empty fleet, each replica from another end: two of three want the same GPU."""
        await self.begin()
        batch = []
        for n, claim in enumerate(self.claimed):
            part = self.parts[(n + self.number) % 2]
            batch.append(Proposal(claim, 0, Placed(Placement((part,)))))
        if batch:
            arguments = commit_call.arguments(self.owner, "r", batch)
            self.exceptions = await self.sql.fetch(commit_call.SQL, *arguments)


async def proceed(session: Session, watch: Any) -> None:
    """Start the next step; come back when it is done or known to wait for the other."""
    task = asyncio.ensure_future(getattr(session, Session.STEPS[session.at])())
    session.at += 1
    while not task.done():
        await asyncio.wait([task], timeout=0.002)
        if not task.done() and await watch.fetchval("SELECT pg_blocking_pids($1) <> '{}'", session.pid):
            session.waiting = task
            return
    await task


async def settle(sessions: list[Session], watch: Any) -> None:
    """Statements that waited go on when the other's transaction has ended."""
    for session in sessions:
        task = session.waiting
        while task is not None and not task.done():
            await asyncio.wait([task], timeout=0.002)
            if not task.done() and await watch.fetchval("SELECT pg_blocking_pids($1) <> '{}'", session.pid):
                break
        if task is not None and task.done():
            session.waiting = None
            await task


@pytest.mark.anyio
async def test_two_replicas_step_the_real_statements_in_every_order(database: str) -> None:
    steps = len(Session.STEPS)
    outcomes: Counter[str] = Counter()
    waited = 0
    async with world_of(database) as world:
        worker, gpus = await world.worker(ROOM, ROOM, ram_total=100)
        watch = await connected(database)
        connections = [await connected(database) for _ in range(2)]
        for turns in combinations(range(2 * steps), steps):
            ids = [await world.instance() for _ in range(3)]
            sessions = [Session(c, n, world) for n, c in enumerate(connections)]
            for session in sessions:
                session.ids = ids[session.number :]  # two of the three are wanted by both
                session.parts = [await world.part(worker, [g], NEED, RAM) for g in gpus]
            order = [0 if n in turns else 1 for n in range(2 * steps)]
            while order:
                # the first whose turn it is and who does not wait
                at = next((n for n, who in enumerate(order) if sessions[who].waiting is None), None)
                assert at is not None, "both wait for each other"
                await proceed(sessions[order.pop(at)], watch)
                waited += any(s.waiting is not None for s in sessions)
                await settle(sessions, watch)
            await world.clean()
            taken = await world.sql.fetch("SELECT id FROM model_instances WHERE state = 'SCHEDULED'")
            held = Counter(g for _, _, g, _, _, _ in await world.ledger() if g is not None)
            assert set(held.values()) <= {1}
            assert len(taken) == len(held)
            claimed = Counter(c.id for s in sessions for c in s.claimed)
            assert set(claimed.values()) <= {1}
            outcomes[f"{len(taken)} placed"] += 1
            outcomes.update(r["code"] for s in sessions for r in s.exceptions)
            await world.sql.execute("DELETE FROM models; DELETE FROM scheduling_decisions")
        for connection in (watch, *connections):
            await connection.close()
    print(dict(outcomes), f"{waited} waits")
    assert sum(n for what, n in outcomes.items() if "placed" in what) == 70
    assert waited > 0
    assert outcomes["conflict"] > 0
