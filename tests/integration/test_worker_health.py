"""Workers by the age of their heartbeat: who falls silent, who returns, what becomes of what was there."""

from __future__ import annotations

import re
from typing import Any

import anyio
import pytest

from gpustackd.domain.timeouts import Timeouts
from gpustackd.store.postgres.instance_recovery import InstanceRecoveryStore
from gpustackd.store.postgres.worker_health import MassOutage, WorkerHealthStore
from tests.integration.world import GIB, World, world_of
from tests.waiting import until

pytestmark = pytest.mark.anyio

SPANS = Timeouts()
LONG = 10_000.0
"""Seconds of watching that leave no doubt."""
SLACK = 20.0
"""Seconds that may pass between two statements of a test on a busy machine."""
TAKEN = ("INITIALIZING", "DOWNLOADING", "STARTING", "RUNNING")


def health(world: World) -> WorkerHealthStore:
    return WorkerHealthStore(world.store.connections, SPANS)


async def beat(world: World, *workers: int, ago: float = 0.0) -> None:
    """A heartbeat, so many seconds ago."""
    await world.sql.execute(
        "UPDATE workers SET heartbeat_at = clock_timestamp() - make_interval(secs => $2)"
        " WHERE id = ANY ($1::bigint[])",
        list(workers),
        ago,
    )


async def on(world: World, *workers: tuple[int, list[int]], state: str = "RUNNING", **more: Any) -> int:
    """An instance with a GPU of each of these workers, in a state."""
    parts = [await world.part(w, gpus[:1], GIB, ram=GIB) for w, gpus in workers]
    instance = await world.placed(*parts, **more)
    if state != "SCHEDULED":
        await world.update("model_instances", instance, state=state)
    return instance


async def state(world: World, worker: int) -> str:
    return str((await world.row("workers", worker))["state"])


async def fleet(world: World, number: int, **columns: Any) -> list[tuple[int, list[int]]]:
    """Workers that beat just now."""
    made = [await world.worker(80 * GIB, 80 * GIB, **columns) for _ in range(number)]
    await beat(world, *[w for w, _ in made])
    return made


async def test_a_worker_that_is_silent_for_longer_than_the_grace_is_not_ready_until_its_next_heartbeat(
    world: World,
) -> None:
    (one, gpus), (other, _) = await fleet(world, 2)
    await beat(world, one, ago=150 - SLACK)
    assert (await health(world).sweep(LONG)).silent == ()
    await beat(world, one, ago=160)
    before = await world.row("workers", one)
    census = await health(world).sweep(LONG)
    row = await world.row("workers", one)
    assert (census.silent, census.down, row["state"]) == ((row["name"],), 1, "NOT_READY")
    assert re.fullmatch(r"no heartbeat for 1[67]\d s", row["state_message"])
    assert row["version"] == before["version"] + 1
    assert not (await world.row("gpu_devices", gpus[0]))["open"]
    assert await state(world, other) == "READY"
    await beat(world, one)
    row = await world.row("workers", one)
    assert (row["state"], row["state_message"], row["stale_since"]) == ("READY", None, None)
    assert (await world.row("gpu_devices", gpus[0]))["open"]
    await world.clean()


async def test_heartbeats_raise_no_version(world: World) -> None:
    ((one, gpus),) = await fleet(world, 1)
    before = [await world.row("workers", one), await world.row("gpu_devices", gpus[0])]
    for _ in range(3):
        await beat(world, one)
    after = [await world.row("workers", one), await world.row("gpu_devices", gpus[0])]
    assert [r["version"] for r in after] == [r["version"] for r in before]
    assert [r["changed_in"] for r in after] == [r["changed_in"] for r in before]


async def test_silence_changes_no_state_that_somebody_else_set(world: World) -> None:
    ((one, _),) = await fleet(world, 1)
    for kept in ("MAINTENANCE", "PROVISIONING", "UNREACHABLE", "ERROR", "DELETING"):
        await world.update("workers", one, state=kept)
        await beat(world, one, ago=1000)
        assert (await health(world).sweep(LONG)).silent == ()
        assert await state(world, one) == kept


async def test_a_worker_without_a_heartbeat_is_never_aged(world: World) -> None:
    host = await world.worker(80 * GIB)
    instance = await on(world, host)
    await health(world).sweep(LONG)
    assert await health(world).evict_from_lost_workers(LONG) == []
    assert (await state(world, host[0]), (await world.row("model_instances", instance))["state"]) == (
        "READY",
        "RUNNING",
    )


async def test_not_ready_that_somebody_else_set_is_not_taken_back_by_a_heartbeat(world: World) -> None:
    ((one, _),) = await fleet(world, 1)
    await world.update("workers", one, state="NOT_READY", state_message="disk is failing")
    await beat(world, one)
    assert await state(world, one) == "NOT_READY"
    # nor where silence came first and the state was set after it
    await world.update("workers", one, state="READY")
    await beat(world, one, ago=200)
    await health(world).sweep(LONG)
    await world.update("workers", one, state="ERROR")
    await beat(world, one)
    assert await state(world, one) == "ERROR"


async def test_a_late_heartbeat_of_an_older_time_brings_nobody_back(world: World) -> None:
    ((one, _),) = await fleet(world, 1)
    await beat(world, one, ago=300)
    await health(world).sweep(LONG)
    await beat(world, one, ago=200)
    assert await state(world, one) == "NOT_READY"


async def test_what_a_silent_worker_had_taken_is_unreachable_then_placed_anew(world: World) -> None:
    one, other = await fleet(world, 2)
    instance = await on(world, one)
    others = {await on(world, one, state=s) for s in TAKEN}
    untouched = await on(world, other)
    await beat(world, one[0], ago=160)
    await health(world).sweep(LONG)
    moved = await health(world).evict_from_lost_workers(LONG)
    assert {(m.kind, m.id) for m in moved} == {("unreachable", i) for i in (instance, *others)}
    row = await world.row("model_instances", instance)
    assert (row["state"], row["worker_id"]) == ("UNREACHABLE", one[0])
    assert re.search(r"NOT_READY \(no heartbeat for 1[67]\d s\)", row["state_message"])
    assert await health(world).evict_from_lost_workers(LONG) == []
    await beat(world, one[0], ago=301)
    moved = await health(world).evict_from_lost_workers(LONG)
    assert {(m.kind, m.id) for m in moved} == {("evicted", i) for i in (instance, *others)}
    row = await world.row("model_instances", instance)
    assert (row["state"], row["worker_id"], row["placement_epoch"]) == ("PENDING", None, 2)
    assert await world.allocated(one[1][0]) == 0
    assert await health(world).evict_from_lost_workers(LONG) == []
    assert (await world.row("model_instances", untouched))["state"] == "RUNNING"
    await world.clean()


async def test_scheduled_and_failed_instances_of_a_lost_worker_are_placed_anew_too(world: World) -> None:
    one, _ = await fleet(world, 2)
    scheduled, failed = await on(world, one, state="SCHEDULED"), await on(world, one, state="ERROR")
    await beat(world, one[0], ago=200)
    await health(world).sweep(LONG)
    assert await health(world).evict_from_lost_workers(LONG) == []
    await beat(world, one[0], ago=400)
    assert {m.id for m in await health(world).evict_from_lost_workers(LONG)} == {scheduled, failed}
    await world.clean()


async def test_an_instance_over_several_workers_is_placed_anew_as_a_whole_once_a_part_is_lost(
    world: World,
) -> None:
    main, sub, _ = await fleet(world, 3)
    instance, alone = await on(world, main, sub), await on(world, sub)
    await beat(world, sub[0], ago=160)
    await health(world).sweep(LONG)
    moved = {m.id: m.kind for m in await health(world).evict_from_lost_workers(LONG)}
    assert moved == {instance: "evicted", alone: "unreachable"}
    assert await world.ledger(instance) == []
    assert await world.allocated(main[1][0]) == 0
    await world.clean()


async def test_a_heartbeat_that_comes_before_the_eviction_stops_it(world: World) -> None:
    one, _ = await fleet(world, 2)
    instance = await on(world, one)
    await beat(world, one[0], ago=400)
    await health(world).sweep(LONG)
    await beat(world, one[0])
    assert await health(world).evict_from_lost_workers(LONG) == []
    assert (await world.row("model_instances", instance))["state"] == "RUNNING"


async def test_a_heartbeat_under_way_is_waited_for_and_believed(world: World, database: str) -> None:
    one, _ = await fleet(world, 2)
    instance = await on(world, one)
    await beat(world, one[0], ago=400)
    await health(world).sweep(LONG)
    async with world_of(database) as another:
        transaction = another.sql.transaction()
        await transaction.start()
        await beat(another, one[0])
        moved: list[Any] = []

        async def leave() -> None:
            moved.extend(await health(world).evict_from_lost_workers(LONG))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leave)
            waits = (
                "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
                " AND query LIKE '%gpustackd_leave_workers%' AND datname = current_database()"
            )
            await until(lambda: world.sql.fetchval(waits), "the sweep waits for the heartbeat")
            await transaction.commit()
    assert moved == []
    assert (await world.row("model_instances", instance))["state"] == "RUNNING"


async def test_two_sweeps_at_once_evict_once(world: World, database: str) -> None:
    one, _ = await fleet(world, 2)
    instances = [await on(world, one) for _ in range(20)]
    await beat(world, one[0], ago=400)
    await health(world).sweep(LONG)
    async with world_of(database) as another, anyio.create_task_group() as tasks:
        for who in (world, another):
            for _ in range(2):
                tasks.start_soon(health(who).evict_from_lost_workers, LONG)
    rows = await world.sql.fetch("SELECT state, placement_epoch FROM model_instances")
    assert {tuple(r) for r in rows} == {("PENDING", 2)}
    assert len(rows) == len(instances)
    await world.clean()


async def test_states_set_by_others_are_believed_after_the_reschedule_grace(world: World) -> None:
    one, other, _ = await fleet(world, 3)
    instance, waits = await on(world, one), await on(world, other)
    await world.update("workers", one[0], state="NOT_READY", state_message="being repaired")
    await world.update("workers", other[0], state="UNREACHABLE")
    moved = await health(world).evict_from_lost_workers(LONG)
    assert {(m.id, m.kind) for m in moved} == {(instance, "unreachable"), (waits, "unreachable")}
    for seconds, gone in ((300 - SLACK, set()), (301, {instance}), (900 - SLACK, set()), (901, {waits})):
        await world.sql.execute(
            "UPDATE workers SET state_since = clock_timestamp() - make_interval(secs => $1)"
            " WHERE state <> 'READY'",
            seconds,
        )
        assert {m.id for m in await health(world).evict_from_lost_workers(LONG)} == gone, seconds
    row = await world.row("model_instances", instance)
    assert "is NOT_READY (being repaired)" in row["state_message"]


async def test_maintenance_prevents_aging_and_eviction(world: World) -> None:
    one, _ = await fleet(world, 2)
    instance = await on(world, one)
    await world.update("workers", one[0], state="MAINTENANCE")
    await beat(world, one[0], ago=5000)
    await health(world).sweep(LONG)
    assert await health(world).evict_from_lost_workers(LONG) == []
    assert (await world.row("model_instances", instance))["state"] == "RUNNING"


# -- who doubts itself first ----------------------------------------------------------------------


async def test_more_than_55_percent_and_three_workers_at_once_evict_nobody(world: World) -> None:
    cluster = await world.insert("clusters", name="east")
    hosts = await fleet(world, 10, cluster_id=cluster)
    elsewhere = await fleet(world, 2)
    instances = [await on(world, h) for h in hosts]
    far = await on(world, elsewhere[0])
    await beat(world, *[w for w, _ in hosts[:6]], elsewhere[0][0], ago=600)
    census = await health(world).sweep(LONG)
    assert census.outages == (MassOutage("east", 6, 10),)
    assert len(census.silent) == 7
    # the other cluster lost one of two, and is believed
    assert [m.id for m in await health(world).evict_from_lost_workers(LONG)] == [far]
    assert {(await world.row("model_instances", i))["state"] for i in instances} == {"RUNNING"}
    # one of them returns: five of ten are no more than half
    await beat(world, hosts[0][0])
    assert (await health(world).sweep(LONG)).outages == ()
    assert {m.id for m in await health(world).evict_from_lost_workers(LONG)} == set(instances[1:6])
    await world.clean()


@pytest.mark.parametrize(
    ("workers", "silent", "doubted"), [(2, 2, False), (3, 3, True), (9, 5, True), (9, 4, False)]
)
async def test_the_share_counts_from_three_workers_on(
    world: World, workers: int, silent: int, doubted: bool
) -> None:
    hosts = await fleet(world, workers)
    await beat(world, *[w for w, _ in hosts[:silent]], ago=400)
    assert bool((await health(world).sweep(LONG)).outages) is doubted


async def test_workers_that_were_given_up_do_not_count_against_those_that_fall_silent_later(
    world: World,
) -> None:
    hosts = await fleet(world, 9)
    instance = await on(world, hosts[8])
    await beat(world, *[w for w, _ in hosts[:4]], ago=400)
    for _ in range(2):  # silent, then given up
        await health(world).sweep(LONG)
    assert await world.sql.fetchval("SELECT count(*) FROM workers WHERE lost_at IS NOT NULL") == 4
    await beat(world, hosts[7][0], hosts[8][0], ago=400)
    census = await health(world).sweep(LONG)
    assert (census.outages, census.down) == ((), 2)
    assert [m.id for m in await health(world).evict_from_lost_workers(LONG)] == [instance]
    await beat(world, hosts[0][0])
    assert (await world.row("workers", hosts[0][0]))["lost_at"] is None


async def test_workers_that_never_came_up_or_are_said_to_be_gone_are_no_mass_loss(world: World) -> None:
    hosts = await fleet(world, 9)
    gone, instance = await on(world, hosts[0]), await on(world, hosts[8])
    ids = [w for w, _ in hosts]
    for n, state in enumerate(["DELETING", "ERROR", "NOT_READY", "NOT_READY", "UNREACHABLE", "PROVISIONING"]):
        await world.update("workers", ids[n], state=state)
    await beat(world, *ids[:6], ids[8], ago=5000)
    assert (await health(world).sweep(LONG)).outages == ()
    assert {m.id for m in await health(world).evict_from_lost_workers(LONG)} == {gone, instance}


async def test_nothing_is_marked_or_evicted_for_a_time_that_nobody_watched(world: World) -> None:
    one, _ = await fleet(world, 2)
    instance = await on(world, one)
    await beat(world, one[0], ago=600)
    found = health(world)
    assert (await found.sweep(SPANS.min_watched - 1)).silent == ()
    assert await found.evict_from_lost_workers(SPANS.min_watched - 1) == []
    assert len((await found.sweep(SPANS.min_watched)).silent) == 1
    assert await found.evict_from_lost_workers(SPANS.grace - 1) == []
    assert [m.kind for m in await found.evict_from_lost_workers(SPANS.grace)] == ["unreachable"]
    assert await found.evict_from_lost_workers(SPANS.reschedule - 1) == []
    assert [m.kind for m in await found.evict_from_lost_workers(SPANS.reschedule)] == ["evicted"]
    assert (await world.row("model_instances", instance))["state"] == "PENDING"


async def test_a_sweep_that_comes_late_after_its_look_at_the_clock_has_watched_nothing(world: World) -> None:
    one, _ = await fleet(world, 2)
    await on(world, one)
    await beat(world, one[0], ago=600)
    found = health(world)
    await found.clock()
    found._clock_read -= SPANS.max_gap + 1  # as if everything had stood still since
    assert (await found.sweep(LONG)).silent == ()
    await found.clock()
    assert len((await found.sweep(LONG)).silent) == 1
    found._clock_read -= SPANS.max_gap + 1
    assert await found.evict_from_lost_workers(LONG) == []
    await found.clock()
    assert len(await found.evict_from_lost_workers(LONG)) == 1


async def test_moments_that_are_none_trip_nobody(world: World) -> None:
    one, two, three = await fleet(world, 3)
    gone, kept, failed = await on(world, one), await on(world, two), await on(world, three, state="ERROR")
    for worker, moment in ((one[0], "-infinity"), (two[0], "infinity")):
        await world.sql.execute(
            "UPDATE workers SET heartbeat_at = $2::text::timestamptz WHERE id = $1", worker, moment
        )
    await world.sql.execute(
        "UPDATE model_instances SET last_restart_time = 'infinity', state_since = '-infinity'"
    )
    assert len((await health(world).sweep(LONG)).silent) == 1
    assert [m.id for m in await health(world).evict_from_lost_workers(LONG)] == [gone]
    assert [(r.id, r.since) for r in await InstanceRecoveryStore(world.store.connections).failed()] == [
        (failed, 0)
    ]
    assert await health(world).requeue_overdue(LONG) == []
    assert (await world.row("model_instances", kept))["state"] == "RUNNING"


async def test_many_instances_go_in_bites(world: World) -> None:
    one, _ = await fleet(world, 2)
    part = await world.part(one[0], one[1][:1], 2**20)
    model = await world.model()
    ids = [await world.instance(model) for _ in range(130)]
    claims = await world.claims(*ids)
    await world.commit(*[await world.proposal(c, part) for c in claims])
    await beat(world, one[0], ago=400)
    await health(world).sweep(LONG)
    found = [len(await health(world).evict_from_lost_workers(LONG)) for _ in range(3)]
    assert found == [100, 30, 0]
    await world.clean()
