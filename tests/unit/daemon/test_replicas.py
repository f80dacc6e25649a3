"""Daemons keep numbers over one store in memory: whatever they and users do in between, it comes right."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from gpustackd.daemon.reconcile.replicas import ReplicaPolicy, ReplicaSync, ReplicaWakeups
from gpustackd.daemon.scheduling.fleet_feed import FleetFeed
from gpustackd.daemon.whatif.snapshot import RemarkCollector
from gpustackd.domain.lifecycle import InstanceState
from gpustackd.domain.model_spec import Strategy
from gpustackd.ports import ReplicaSnapshot, SyncResult
from gpustackd.replicas.sync_plan import SyncPlan
from gpustackd.store.memory.store import MemoryStore
from tests.memory_replicas import MemoryReplicas

pytestmark = pytest.mark.anyio

GIB = 2**30


class Told(RemarkCollector):
    """Keeps what was told of replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: list[str] = []
        self.synced: list[SyncPlan] = []
        self.errors: list[str] = []

    def replicas_tried(self, outcome: str) -> None:
        self.outcomes.append(outcome)

    def replicas_synced(self, seen: ReplicaSnapshot, wanted: int, done: SyncPlan) -> None:
        self.synced.append(done)

    def unexpected(self, what: str, error: BaseException, **fields: Any) -> None:
        self.errors.append(repr(error))


class Meddled(MemoryReplicas):
    """A store where somebody else acts between a daemon's look and its write."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.meanwhile: list[Any] = []

    async def sync(self, seen: ReplicaSnapshot, replicas: int, steps: SyncPlan, names: Any) -> SyncResult:
        if self.meanwhile:
            await self.meanwhile.pop(0)()
        return await super().sync(seen, replicas, steps, names)


class House:
    """A store with two workers of two cards, and daemons on it."""

    def __init__(self, policy: ReplicaPolicy | None = None) -> None:
        self.now = 1_000_000.0
        self.store = MemoryStore(lambda: self.now)
        self.kept = Meddled(self.store)
        self.policy = policy or ReplicaPolicy()
        self.told = Told()
        self.workers = []
        for n in range(2):
            worker = self.store.database.insert("workers", name=f"w{n}", state="READY", ram_total=64 * GIB)
            self.workers.append(worker)
            for index in range(2):
                self.store.database.insert(
                    "gpu_devices", worker_id=worker, index=index, type="cuda", vram_total=24 * GIB
                )

    def daemon(self, seed: int = 1) -> ReplicaSync:
        return ReplicaSync(
            store=self.kept, fleet_feed=FleetFeed(self.store), wakeups=ReplicaWakeups(),
            policy=self.policy, reporter=self.told, clock=lambda: self.now, rng=Random(seed),
        )  # fmt: skip

    def model(self, replicas: int | None, **columns: Any) -> int:
        return self.store.database.insert(
            "models", name=f"m{len(self.store.database.models)}", replicas=replicas, **columns
        )

    def there(self, model: int) -> list[int]:
        return sorted(i.id for i in self.store.database.model_instances.values() if i.model_id == model)

    def set(self, instance: int, **columns: Any) -> None:
        """Past every guard, as rows from elsewhere come."""
        for name, value in columns.items():
            setattr(self.store.database.model_instances[instance], name, value)

    def runs(self, model: int, worker: int | None = None) -> None:
        claim = {"ram": 0, "vram": {"0": 8 * GIB}}
        for i in self.there(model):
            where = self.workers[0] if worker is None else worker
            self.set(i, state=InstanceState.RUNNING, worker_id=where, gpu_type="cuda", gpu_indexes=[0],
                     computed_resource_claim=claim)  # fmt: skip


@pytest.mark.parametrize("strategy", list(Strategy))
async def test_a_scale_down_meets_rows_that_miss_their_worker_or_their_claim(strategy: Strategy) -> None:
    """FR-32 with all four rows, also those that the schema's CHECKs keep out."""
    house = House()
    model = house.model(None, placement_strategy=str(strategy))
    one, two, three, four = (
        house.store.database.insert("model_instances", name=f"i{n}", model_id=model) for n in range(4)
    )
    house.runs(model)
    house.set(two, worker_id=987654)
    house.set(
        three, state=InstanceState.SCHEDULED, worker_id=None, computed_resource_claim=None, gpu_indexes=None
    )
    house.set(four, computed_resource_claim={"ram": 0})
    for replicas, left in ((3, {one, four, two, three}), (2, {one, four}), (1, {one})):
        house.store.database.update("models", model, replicas=replicas)
        await house.daemon().sync_model(model)
        assert set(house.there(model)) <= left
        assert len(house.there(model)) == replicas
    assert house.told.outcomes == ["done"] * 3


async def test_who_comes_second_finds_it_done() -> None:
    house = House()
    model = house.model(3)
    first, second = house.daemon(1), house.daemon(2)

    async def other() -> None:
        await second.sync_model(model)

    house.kept.meanwhile.append(other)
    await first.sync_model(model)
    assert len(house.there(model)) == 3
    assert house.told.outcomes == ["done", "changed"]
    house.store.database.update("models", model, replicas=1)
    house.kept.meanwhile.append(other)
    await first.sync_model(model)
    assert len(house.there(model)) == 1
    assert [len(s.delete) for s in house.told.synced] == [0, 2]


async def test_a_neighbour_that_fails_between_look_and_write_goes_instead() -> None:
    house = House()
    model = house.model(2)
    await house.daemon().sync_model(model)
    house.runs(model)
    older, younger = house.there(model)

    async def fails() -> None:
        house.set(older, state=InstanceState.ERROR)

    house.store.database.update("models", model, replicas=1)
    house.kept.meanwhile.append(fails)
    await house.daemon().sync_model(model)
    assert house.there(model) == [younger]
    assert house.told.outcomes == ["done", "changed", "done"]


async def test_names_of_others_are_passed_over_however_many_there_are() -> None:
    house = House()
    elsewhere = house.model(None)
    model = house.store.database.insert("models", name="m", replicas=2)
    for n in range(1, 60):
        house.store.database.insert("model_instances", name=f"m-{n}", model_id=elsewhere)
    await house.daemon().sync_model(model)
    assert [house.store.database.model_instances[i].name for i in house.there(model)] == ["m-60", "m-61"]


async def test_a_drain_says_when_to_look_again_by_the_databases_clock() -> None:
    house = House(ReplicaPolicy(window=60))
    model = house.model(2)
    daemon = house.daemon()
    assert await daemon.sync_model(model) is None
    house.runs(model)
    house.store.database.update("models", model, replicas=1)
    assert await daemon.sync_model(model) == 60
    house.now += 25
    assert await house.daemon(2).sync_model(model) == pytest.approx(35)
    assert len(house.there(model)) == 2
    house.now += 35
    assert await daemon.sync_model(model) is None
    assert len(house.there(model)) == 1


async def test_a_schedule_says_the_number_and_when_to_look_again() -> None:
    house = House()
    house.now = 1_767_258_000.0  # 2026-01-01 09:00 UTC
    rule = {"start_cron": "0 8 * * *", "duration_seconds": 7200, "replicas": 3}
    model = house.model(9, scaling_schedule={"enabled": True, "baseline_replicas": 1, "rules": [rule]})
    assert await house.daemon().sync_model(model) == pytest.approx(3600)
    assert len(house.there(model)) == 3
    house.now += 3600
    assert await house.daemon().sync_model(model) == pytest.approx(22 * 3600)
    assert len(house.there(model)) == 1
    # read in another zone, it is open at another time
    house.policy = ReplicaPolicy(zone="Asia/Kathmandu")
    assert await house.daemon().sync_model(model) == pytest.approx(16.25 * 3600)


async def test_a_rule_without_a_duration_voids_that_rule_and_not_its_schedule() -> None:
    house = House()
    house.now = 1_767_258_000.0  # 2026-01-01 09:00 UTC
    rules = [
        {"start_cron": "0 0 * * *", "replicas": 5},
        {"start_cron": "0 8 * * *", "duration_seconds": 7200, "replicas": 3},
    ]
    model = house.model(9, scaling_schedule={"enabled": True, "baseline_replicas": 1, "rules": rules})
    daemon = house.daemon()
    for _ in range(2):
        await daemon.sync_model(model)
    assert len(house.there(model)) == 3
    assert [event for event, _ in house.told.remarks] == ["row.bad"]
    house.now += 3600
    await daemon.sync_model(model)
    assert len(house.there(model)) == 1


async def test_what_a_row_says_that_cannot_be_used_is_told_once_and_the_rest_goes_on() -> None:
    house = House()
    bad = house.model(2, scaling_schedule={"enabled": True})
    worse = house.model(2, roles=[{"name": "prefill", "replicas": "many"}])
    slip = house.model(10**9)
    daemon = house.daemon()
    for _ in range(3):
        for model in (bad, worse, slip):
            await daemon.sync_model(model)
    assert len(house.there(bad)) == 2
    assert house.there(worse) == house.there(slip) == []
    assert [event for event, _ in house.told.remarks] == ["row.bad"] * 3


async def test_a_number_beyond_one_transaction_takes_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpustackd.daemon.reconcile.replicas._ADDED_AT_ONCE", 20)
    house = House()
    model = house.model(45)
    daemon = house.daemon()
    assert await daemon.sync_model(model) == 0
    assert len(house.there(model)) == 20
    assert await daemon.sync_model(model) == 0
    assert await daemon.sync_model(model) is None
    assert len(house.there(model)) == 45


@pytest.mark.parametrize("seed", range(12))
async def test_three_daemons_and_users_at_random_end_at_the_number(seed: int) -> None:
    house = House(ReplicaPolicy(window=20.0 if seed % 2 else 0.0))
    chance = Random(seed)
    models = [house.model(chance.randint(0, 4)) for _ in range(4)]
    daemons = [house.daemon(n) for n in range(3)]

    async def user() -> None:
        model = chance.choice(models)
        match chance.randrange(4):
            case 0:
                house.store.database.update("models", model, replicas=chance.randint(0, 6))
            case 1:
                house.store.database.insert(
                    "model_instances", name=f"x{chance.getrandbits(60)}", model_id=model
                )
            case 2:
                house.store.database.delete("model_instances", *house.there(model)[:1])
            case _:
                for i in house.there(model):
                    state = chance.choice([InstanceState.RUNNING, InstanceState.ERROR])
                    house.set(i, state=state, worker_id=house.workers[0], computed_resource_claim={"ram": 0})

    async def other() -> None:
        await chance.choice(daemons).sync_model(chance.choice(models))

    for _ in range(60):
        if chance.random() < 0.4:
            house.kept.meanwhile.append(chance.choice([user, other]))
        await (user() if chance.random() < 0.4 else other())
        house.now += chance.uniform(0, 10)
    house.kept.meanwhile.clear()
    house.now += 60
    for model in models:
        for daemon in daemons:
            await daemon.sync_model(model)
        if seed % 2:  # what began to drain only now has its time too
            house.now += 60
            await daemons[0].sync_model(model)
        assert len(house.there(model)) == house.store.database.models[model].columns["replicas"]
    assert await house.kept.out_of_sync(None) == []
    assert house.told.errors == []
