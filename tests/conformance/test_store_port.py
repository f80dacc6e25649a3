"""The port `Store`: what memory and PostgreSQL promise alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpustackd.domain.outcome import Check, Cure, NoFit, Reason
from gpustackd.errors import Refused
from gpustackd.ports import CommitCode, Refusal
from tests.conformance.scenes import Replica, Scene, fleet, part_on
from tests.integration.world import GIB

pytestmark = pytest.mark.anyio

CONFLICT = CommitCode.CONFLICT


async def instances(scene: Scene, many: int = 1, **model: Any) -> list[int]:
    model_id = await scene.insert("models", **{"name": f"m{await count(scene, 'models')}", **model})
    first = await count(scene, "model_instances")
    return [
        await scene.insert("model_instances", name=f"i{first + n}", model_id=model_id) for n in range(many)
    ]


async def count(scene: Scene, table: str) -> int:
    return len(await scene.rows(table))


async def of(scene: Scene, table: str, id_: int, *columns: str) -> list[Any]:
    row = await scene.row(table, id_)
    assert row is not None
    return [row[c] for c in columns]


def no_fit(text: str = "too small") -> NoFit:
    return NoFit((Reason("no_room", "fit", text), Reason("labels", "labels", "none")), text, Cure.CAPACITY)


# --- reading -----------------------------------------------------------------------------------------------


async def test_the_feed_tells_the_whole_fleet_then_only_what_changed(scene: Scene) -> None:
    worker, (a, b) = await fleet(scene, 80 * GIB, None, vram_reserved=GIB, labels={"zone": "x"})
    all_ = await scene.store.fleet_changes(None)
    assert all_.complete
    (host,) = all_.workers
    assert (host.id, host.state, host.ram_capacity, host.labels) == (worker, "READY", 64 * GIB, {"zone": "x"})
    assert {(g.id, g.capacity, g.open) for g in all_.gpus} == {(a, 79 * GIB, True), (b, None, True)}
    nothing = await scene.store.fleet_changes(all_.mark)
    assert (nothing.complete, list(nothing.workers), list(nothing.gpus)) == (False, [], [])
    await scene.update("gpu_devices", b, vram_total=GIB)
    some = await scene.store.fleet_changes(nothing.mark)
    assert [g.id for g in some.gpus] == [b]
    await scene.update("workers", worker, state="MAINTENANCE")
    some = await scene.store.fleet_changes(some.mark)
    assert ([w.id for w in some.workers], {g.id for g in some.gpus}) == ([worker], {a, b})
    await scene.update("gpu_devices", b, vram_used=7)
    some = await scene.store.fleet_changes(some.mark)
    assert list(some.gpus) == []


async def test_sums_of_the_fleet_move_with_every_change(scene: Scene) -> None:
    worker, (gpu,) = await fleet(scene, GIB)
    before = await scene.store.fleet_sums()
    assert before == (1, 0, 1, 0)
    await scene.update("gpu_devices", gpu, schedulable=False)
    assert await scene.store.fleet_sums() == (1, 0, 1, 1)
    await scene.delete("workers", worker)
    assert await scene.store.fleet_sums() == (0, 0, 0, 0)


async def test_waiting_instances_come_by_priority_then_age(scene: Scene) -> None:
    low = await instances(scene, 2, priority=1)
    high = await instances(scene, 2, priority=5)
    await scene.update("model_instances", low[1], priority=9)
    waiting = await scene.store.waiting(None)
    assert [w.id for w in waiting] == [low[1], *high, low[0]]
    assert [w.id for w in await scene.store.waiting(None, limit=1)] == [low[1]]
    assert [w.id for w in await scene.store.waiting([high[1], 10**9])] == [high[1]]
    assert set(await scene.store.pending_ids()) == {*low, *high}


async def test_a_model_that_cannot_be_used_comes_with_the_reason(scene: Scene) -> None:
    good = await scene.insert("models", name="good", categories=["llm"])
    bad = await scene.insert("models", name="bad", backend_parameters={"not": "a list"})
    found = {m.id: m for m in await scene.store.models([good, bad, 10**9])}
    assert set(found) == {good, bad}
    spec = found[good].spec
    assert spec is not None
    assert spec.categories == ("llm",)
    assert found[bad].spec is None
    assert "backend_parameters" in found[bad].error


async def test_ready_files_are_found_by_source_and_by_path(scene: Scene) -> None:
    worker, _ = await fleet(scene)
    for index, state in (("a", "READY"), ("b", "DOWNLOADING")):
        await scene.insert(
            "model_files",
            worker_id=worker,
            source_index=index,
            resolved_path=f"/{index}",
            size=5,
            state=state,
        )
    known = {"a": {worker: 5}, "path:/a": {worker: 5}, "downloading:b": {worker: 5}}
    assert await scene.store.ready_files() == known
    await scene.delete("workers", worker)
    assert await scene.store.ready_files() == {}


# --- claims ------------------------------------------------------------------------------------------------


async def test_a_claim_is_given_once_and_raises_epoch_and_attempts(scene: Scene, replica: Replica) -> None:
    (i,) = await instances(scene, priority=4)
    (claim,) = await replica.claim(i)
    assert (claim.id, claim.epoch, claim.attempts, claim.priority) == (i, 1, 1, 4)
    assert await of(scene, "model_instances", i, "state", "lease_owner") == ["ANALYZING", replica.owner]
    assert list(await scene.store.claim(replica.owner, [(i, 0), (i, 1)], 30)) == []
    assert list(await scene.store.waiting([i])) == []


async def test_a_claim_on_an_epoch_that_moved_on_is_left_out(scene: Scene, replica: Replica) -> None:
    (i,) = await instances(scene)
    await replica.claim(i)
    await scene.store.hand_back(replica.owner)
    assert list(await scene.store.claim(replica.owner, [(i, 0)], 30)) == []
    assert [c.epoch for c in await scene.store.claim(replica.owner, [(i, 1)], 30)] == [2]


async def test_only_a_running_lease_of_its_own_is_renewed(scene: Scene, replica: Replica) -> None:
    ids = await instances(scene, 3)
    await replica.claim(*ids[:2])
    await Replica(scene.store).claim(ids[2])
    await scene.expire(ids[0])
    assert await scene.store.renew(replica.owner, ids, 60) == {ids[1]}


async def test_dead_leases_are_swept_by_anybody_and_shutdowns_hand_back_their_own(scene: Scene) -> None:
    one, two = Replica(scene.store), Replica(scene.store)
    a, b, c = await instances(scene, 3)
    await one.claim(a, b)
    await two.claim(c)
    await scene.expire(a)
    assert list(await scene.store.expire_leases()) == [a]
    assert list(await scene.store.hand_back(one.owner)) == [b]
    states = [(await of(scene, "model_instances", i, "state"))[0] for i in (a, b, c)]
    assert states == ["PENDING", "PENDING", "ANALYZING"]


# --- refusals ----------------------------------------------------------------------------------------------


async def test_a_refusal_goes_back_to_pending_with_its_reasons(scene: Scene, replica: Replica) -> None:
    a, b = await instances(scene, 2)
    first, second = await replica.claim(a, b)
    written = await scene.store.refuse(
        replica.owner, "r", [Refusal(first, no_fit(), retry_in=9.0), Refusal(second, no_fit(), to_error=True)]
    )
    assert written == {a, b}
    assert await of(scene, "model_instances", a, "state", "state_message") == ["PENDING", "too small"]
    assert await of(scene, "model_instances", b, "state") == ["ERROR"]
    (waiting,) = await scene.store.waiting(None)
    assert 0 < waiting.due_in <= 9
    assert waiting.signature is not None
    assert waiting.signature.partition("#")[0] == no_fit().signature
    assert [r[2] for r in await scene.records()] == ["NO_FIT", "NO_FIT"]
    (again,) = await replica.claim(a)
    await scene.store.refuse(replica.owner, "r", [Refusal(again, no_fit("smaller still"))])
    (later,) = await scene.store.waiting(None)
    assert later.signature != waiting.signature
    assert (later.due_in, later.epoch, later.attempts) == (0, 2, 2)


@pytest.mark.parametrize("fence", ["expired", "owner", "epoch", "deleted"])
async def test_nothing_is_written_without_a_running_lease_of_ones_own(
    scene: Scene, replica: Replica, fence: str
) -> None:
    worker, (gpu,) = await fleet(scene, 80 * GIB)
    (i,) = await instances(scene)
    (claim,) = await replica.claim(i)
    if fence == "expired":
        await scene.expire(i)
    elif fence == "owner":
        replica = Replica(scene.store)
    elif fence == "epoch":
        claim = replace(claim, epoch=claim.epoch + 1)
    else:
        await scene.delete("model_instances", i)
    proposal = await replica.proposal(claim, await part_on(scene.store, worker, [gpu], GIB, GIB))
    assert [r.code for r in await replica.commit(proposal)] == [CommitCode.LOST]
    assert await scene.store.refuse(replica.owner, "r", [Refusal(claim, no_fit())]) == set()
    assert list(await scene.store.bookings(None)) == []
    assert await scene.records() == []


# --- commits -----------------------------------------------------------------------------------------------


async def test_a_commit_books_every_part_and_tells_the_ledger(scene: Scene, replica: Replica) -> None:
    first, (a, b) = await fleet(scene, 80 * GIB, 80 * GIB, name="one")
    second, (c,) = await fleet(scene, 40 * GIB, name="two")
    (i,) = await instances(scene)
    parts = [
        await part_on(scene.store, first, [a, b], [3 * GIB, 4 * GIB], GIB),
        await part_on(scene.store, second, [c], 5 * GIB),
    ]
    mark = (await scene.store.fleet_changes(None)).mark
    assert (await replica.place(i, *parts)).code is None
    columns = ("state", "worker_name", "gpu_indexes", "placement_epoch", "lease_owner")
    assert await of(scene, "model_instances", i, *columns) == ["SCHEDULED", "one", [0, 1], 1, None]
    held = await scene.store.bookings(None)
    assert {(x.worker_id, x.gpu_id, x.vram, x.ram, x.part, x.occupies) for x in held} == {
        (first, a, 3 * GIB, 0, "main", True), (first, b, 4 * GIB, 0, "main", True),
        (first, None, 0, GIB, "main", False), (second, c, 5 * GIB, 0, "subordinate", True),
    }  # fmt: skip
    assert {x.worker_id for x in await scene.store.bookings([second])} == {second}
    changes = await scene.store.fleet_changes(mark)
    assert {w.id: (w.ram_allocated, w.version) for w in changes.workers} == {first: (GIB, 1)}
    assert {g.id: (g.vram_allocated, g.version) for g in changes.gpus} == {
        a: (3 * GIB, 1), b: (4 * GIB, 1), c: (5 * GIB, 1),
    }  # fmt: skip
    assert await scene.records() == [(i, 1, "PLACED")]


async def test_a_batch_fills_a_row_until_it_is_full_and_a_clash_hurts_one_alone(
    scene: Scene, replica: Replica
) -> None:
    worker, (small, large) = await fleet(scene, 10 * GIB, 80 * GIB)
    ids = await instances(scene, 4)
    part = await part_on(scene.store, worker, [large], 30 * GIB)
    tight = await part_on(scene.store, worker, [small], 11 * GIB)
    batch = [
        await replica.proposal(c, tight if n == 1 else part) for n, c in enumerate(await replica.claim(*ids))
    ]
    results = await replica.commit(*batch)
    assert [(r.code, r.gpu_ids) for r in results] == [
        (None, ()), (CONFLICT, (small,)), (None, ()), (CONFLICT, (large,)),
    ]  # fmt: skip


async def test_a_clash_leaves_everything_as_it_was(scene: Scene, replica: Replica) -> None:
    first, (a,) = await fleet(scene, 80 * GIB, name="one")
    second, (b, c) = await fleet(scene, 80 * GIB, 80 * GIB, name="two", unified_memory=True)
    await scene.update("gpu_devices", c, schedulable=False)
    (i,) = await instances(scene)
    parts = [
        await part_on(scene.store, first, [a], GIB, GIB),
        await part_on(scene.store, second, [b, c], [2 * GIB, GIB], GIB),
    ]
    before = [await scene.rows(t) for t in ("workers", "gpu_devices")]
    result = await replica.place(i, *parts)
    assert (result.code, result.gpu_ids, result.worker_ids) == (CONFLICT, (c,), ())
    after = [await scene.rows(t) for t in ("workers", "gpu_devices")]
    kept = ("id", "version", "ram_allocated", "vram_allocated", "over_committed")
    assert [[{k: r.get(k) for k in kept} for r in t] for t in after] == [
        [{k: r.get(k) for k in kept} for r in t] for t in before
    ]


async def test_unchanged_wants_the_versions_that_were_seen(scene: Scene, replica: Replica) -> None:
    worker, (a, b) = await fleet(scene, 80 * GIB, 80 * GIB)
    one, two, three, four = await instances(scene, 4)
    on_gpu = await part_on(scene.store, worker, [a], GIB)
    with_ram = await part_on(scene.store, worker, [b], GIB, GIB)
    assert (await replica.place(one, await part_on(scene.store, worker, [a], GIB, GIB))).code is None
    stale = await replica.place(two, on_gpu, check=Check.UNCHANGED)
    assert (stale.code, stale.gpu_ids) == (CONFLICT, (a,))
    stale = await replica.place(three, with_ram, check=Check.UNCHANGED)
    assert (stale.code, stale.worker_ids) == (CONFLICT, (worker,))
    fresh = await part_on(scene.store, worker, [a, b], GIB, GIB)
    assert (await replica.place(four, fresh, check=Check.UNCHANGED)).code is None


async def test_an_asked_overcommit_marks_what_does_not_fit_until_it_does(
    scene: Scene, replica: Replica
) -> None:
    worker, (gpu,) = await fleet(scene, 10 * GIB)
    one, two = await instances(scene, 2)
    part = await part_on(scene.store, worker, [gpu], 20 * GIB)
    assert (await replica.place(one, part, over_commit=True)).code is None
    assert await of(scene, "gpu_devices", gpu, "over_committed") == [True]
    assert (await replica.place(two, await part_on(scene.store, worker, [gpu]))).code is CONFLICT
    await scene.delete("model_instances", one)
    assert await of(scene, "gpu_devices", gpu, "over_committed", "vram_allocated") == [False, 0]


async def test_a_commit_on_an_edited_or_deleted_model_is_refused(scene: Scene, replica: Replica) -> None:
    worker, _ = await fleet(scene)
    (i,) = await instances(scene)
    (claim,) = await replica.claim(i)
    proposal = await replica.proposal(claim, await part_on(scene.store, worker, ram=GIB))
    assert await scene.store.autofill(claim.model_id, 0, {"categories": ["llm"]})
    await scene.update("models", claim.model_id, replicas=None, name="renamed", backend="SGLang")
    assert not await scene.store.autofill(claim.model_id, 0, {"categories": ["image"]})
    assert [r.code for r in await replica.commit(proposal)] == [CommitCode.MODEL_CHANGED]
    await scene.delete("models", claim.model_id)
    assert [r.code for r in await replica.commit(proposal)] == [CommitCode.LOST]


async def test_replicas_are_part_of_the_decision_where_gpus_are_picked_and_nowhere_else(scene: Scene) -> None:
    plain, picked = [
        await scene.insert("models", name=n, gpu_selector=g) for n, g in (("a", None), ("b", {}))
    ]
    before = {r.id: r.version for r in await scene.store.models([plain, picked])}
    for model in (plain, picked):
        await scene.update("models", model, replicas=5)
    after = {r.id: r.version for r in await scene.store.models([plain, picked])}
    assert (after[plain] - before[plain], after[picked] - before[picked]) == (0, 1)


# --- users -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["gpu", "worker", "evicted", "model"])
async def test_what_was_held_goes_back_whatever_ends_the_placement(
    scene: Scene, replica: Replica, loss: str
) -> None:
    first, (a,) = await fleet(scene, 80 * GIB, name="one")
    second, (b,) = await fleet(scene, 80 * GIB, name="two", unified_memory=True)
    (i,) = await instances(scene)
    parts = [
        await part_on(scene.store, first, [a], GIB, GIB),
        await part_on(scene.store, second, [b], GIB, GIB),
    ]
    assert (await replica.place(i, *parts)).code is None
    assert await of(scene, "workers", second, "ram_allocated") == [2 * GIB]
    if loss == "gpu":
        await scene.delete("gpu_devices", b)
    elif loss == "worker":
        await scene.delete("workers", second)
    elif loss == "model":
        await scene.delete("models", *[r["id"] for r in await scene.rows("models")])
    else:
        await scene.evict(i)
    assert list(await scene.store.bookings(None)) == []
    assert sum(r["ram_allocated"] for r in await scene.rows("workers")) == 0
    assert sum(r["vram_allocated"] for r in await scene.rows("gpu_devices")) == 0
    if loss == "model":
        assert await scene.row("model_instances", i) is None
    else:
        columns = ("state", "worker_name", "gpu_indexes", "placement_epoch", "attempts")
        assert await of(scene, "model_instances", i, *columns) == ["PENDING", None, None, 2, 0]


async def test_capacity_that_shrinks_marks_and_growing_unmarks(scene: Scene, replica: Replica) -> None:
    worker, (gpu,) = await fleet(scene, 80 * GIB)
    one, two = await instances(scene, 2)
    assert (
        await replica.place(one, await part_on(scene.store, worker, [gpu], 60 * GIB, 9 * GIB))
    ).code is None
    await scene.update("workers", worker, vram_reserved=30 * GIB, ram_total=8 * GIB)
    assert await of(scene, "gpu_devices", gpu, "over_committed", "capacity") == [True, 50 * GIB]
    assert await of(scene, "workers", worker, "over_committed") == [True]
    assert (await replica.place(two, await part_on(scene.store, worker, [gpu]))).code is CONFLICT
    await scene.update("workers", worker, vram_reserved=20 * GIB, ram_total=9 * GIB)
    assert await of(scene, "gpu_devices", gpu, "over_committed") == [False]
    assert await of(scene, "workers", worker, "over_committed") == [False]


async def test_unified_memory_is_one_pool_and_switching_counts_anew(scene: Scene, replica: Replica) -> None:
    worker, (gpu,) = await fleet(
        scene, 60 * GIB, unified_memory=True, vram_reserved=2 * GIB, ram_reserved=2 * GIB
    )
    one, two = await instances(scene, 2)
    assert (
        await replica.place(one, await part_on(scene.store, worker, [gpu], 40 * GIB, 10 * GIB))
    ).code is None
    assert await of(scene, "workers", worker, "ram_capacity", "ram_allocated") == [60 * GIB, 50 * GIB]
    result = await replica.place(two, await part_on(scene.store, worker, [gpu], 11 * GIB))
    assert (result.code, result.worker_ids) == (CONFLICT, (worker,))
    await scene.update("workers", worker, unified_memory=False)
    assert await of(scene, "workers", worker, "ram_capacity", "ram_allocated") == [62 * GIB, 10 * GIB]
    await scene.update("workers", worker, unified_memory=True, ram_total=20 * GIB)
    assert await of(scene, "workers", worker, "ram_allocated", "over_committed") == [50 * GIB, True]


@pytest.mark.parametrize(("table", "columns"), [
    ("workers", {"name": "one"}), ("workers", {"name": "x", "ram_total": -1}),
    ("workers", {"name": "x", "state": "TIRED"}), ("models", {"name": "m"}),
    ("gpu_devices", {"worker_id": 0, "index": 0, "type": "cuda"}),
    ("gpu_devices", {"index": 0, "type": "cuda"}), ("gpu_devices", {"index": -1, "type": "cuda"}),
    ("gpu_devices", {"index": 3, "type": "cuda", "vram_total": -5}),
    ("model_instances", {"name": "x", "model_id": 0}), ("model_instances", {"name": "i"}),
    ("model_instances", {"name": "x", "state": "RUNNING"}),
    ("model_instances", {"name": "x", "placement_epoch": 3}),
])  # fmt: skip
async def test_wrong_rows_are_refused(scene: Scene, table: str, columns: dict[str, Any]) -> None:
    worker, _ = await fleet(scene, GIB, name="one")
    model = await scene.insert("models", name="m")
    await scene.insert("model_instances", name="i", model_id=model)
    defaults = {"gpu_devices": {"worker_id": worker}, "model_instances": {"model_id": model}}
    with pytest.raises(Refused):
        await scene.insert(table, **{**defaults.get(table, {}), **columns})


async def test_unlawful_moves_are_refused_and_lawful_ones_go_through(scene: Scene, replica: Replica) -> None:
    worker, _ = await fleet(scene)
    (i,) = await instances(scene)
    with pytest.raises(Refused):
        await scene.update("model_instances", i, state="RUNNING")
    assert (await replica.place(i, await part_on(scene.store, worker, ram=GIB))).code is None
    for state in ("DOWNLOADING", "RUNNING", "UNREACHABLE", "RUNNING", "ERROR", "SCHEDULED"):
        await scene.update("model_instances", i, state=state)
    await scene.update("model_instances", i, state="STARTING")
    for change in (
        {"state": "SCHEDULED"}, {"state": "PENDING"}, {"placement_epoch": 0}, {"worker_id": worker + 1},
        {"state": "PENDING", "worker_id": None, "computed_resource_claim": None},
    ):  # fmt: skip
        with pytest.raises(Refused):
            await scene.update("model_instances", i, **change)
    await scene.update("model_instances", i, state="ERROR")
    await scene.update(
        "model_instances", i, state="PENDING", worker_id=None, computed_resource_claim=None, gpu_type=None,
        gpu_indexes=None, placement_epoch=2,
    )  # fmt: skip
    assert list(await scene.store.bookings(None)) == []
