"""Claim, renew, commit, refuse, hand back: what a replica may write, and what is refused it."""

from __future__ import annotations

from dataclasses import replace
from uuid import uuid4

import asyncpg
import pytest

from gpustackd.domain.outcome import Check, Cure, NoFit, PoolStep, Reason
from gpustackd.ports import CommitCode
from tests.integration.world import GIB, World, connected

pytestmark = pytest.mark.anyio

LOST = CommitCode.LOST
CONFLICT = CommitCode.CONFLICT


# --- claims ------------------------------------------------------------------------------------------------


async def test_a_claim_takes_only_pending_rows_of_the_epoch_that_was_seen(world: World) -> None:
    model = await world.model()
    free, taken, moved = [await world.instance(model) for _ in range(3)]
    await world.claim(taken, owner=uuid4())
    got = await world.store.claim(world.owner, [(free, 0), (taken, 0), (moved, 5), (10**9, 0)], 30)
    assert [(c.id, c.epoch, c.attempts) for c in got] == [(free, 1, 1)]
    row = await world.row("model_instances", free)
    assert (row["state"], row["lease_owner"]) == ("ANALYZING", world.owner)


async def test_two_replicas_that_claim_at_once_share_the_rows_without_waiting(world: World) -> None:
    model = await world.model()
    ids = [await world.instance(model) for _ in range(20)]
    other = await connected(world.url)
    async with other.transaction():
        locked = await other.fetch(
            "SELECT id FROM gpustackd_claim($1, $2, $3, 30)", uuid4(), ids[:7], [0] * 7
        )
        mine = await world.claims(*ids)  # the other has not committed yet
    assert {r["id"] for r in locked} == set(ids[:7])
    assert {c.id for c in mine} == set(ids[7:])
    await other.close()


async def test_a_claim_tells_the_priority_of_the_instance_or_its_model(world: World) -> None:
    model = await world.model(priority=3)
    plain, own = await world.instance(model), await world.instance(model, priority=9)
    assert [c.priority for c in await world.claims(plain, own)] == [3, 9]


async def test_a_lease_is_renewed_only_by_its_owner_and_only_while_it_runs(world: World) -> None:
    model = await world.model()
    ids = [await world.instance(model) for _ in range(3)]
    await world.claims(*ids)
    await world.expire(ids[0])
    assert await world.store.renew(world.owner, ids, 60) == set(ids[1:])
    assert await world.store.renew(uuid4(), ids, 60) == set()


async def test_expired_leases_are_swept_and_running_ones_are_not(world: World) -> None:
    model = await world.model()
    dead, alive = await world.instance(model), await world.instance(model)
    await world.claims(dead, alive)
    await world.expire(dead)
    assert list(await world.store.expire_leases()) == [dead]
    row = await world.row("model_instances", dead)
    assert (row["state"], row["lease_owner"], row["placement_epoch"]) == ("PENDING", None, 1)
    assert (await world.row("model_instances", alive))["state"] == "ANALYZING"


async def test_a_shutdown_hands_back_what_its_owner_holds_and_nothing_else(world: World) -> None:
    model = await world.model()
    mine, others = await world.instance(model), await world.instance(model)
    await world.claim(mine)
    await world.claim(others, owner=uuid4())
    assert list(await world.store.hand_back(world.owner)) == [mine]
    assert (await world.row("model_instances", mine))["state"] == "PENDING"
    assert (await world.row("model_instances", others))["state"] == "ANALYZING"


# --- refusals ----------------------------------------------------------------------------------------------


async def test_a_refusal_writes_the_reasons_and_a_record_and_ends_the_lease(world: World) -> None:
    instance = await world.instance()
    claim = await world.claim(instance)
    outcome = NoFit(
        (Reason("no_room", "fit", "2 GPUs are too small", {"need": 5}),),
        "too small",
        Cure.CAPACITY,
        (PoolStep("status", 1, 2),),
    )
    assert await world.refuse(claim, outcome=outcome, retry_in=7, duration_ms=1.5)
    row = await world.row("model_instances", instance)
    assert (row["state"], row["state_message"], row["placement_epoch"]) == ("PENDING", "too small", 1)
    assert row["reasons"][0]["params"] == {"need": 5}
    (waiting,) = await world.store.waiting([instance])
    assert waiting.signature is not None
    assert waiting.signature.startswith(outcome.signature)
    assert 0 < waiting.due_in <= 7
    record = await world.sql.fetchrow("SELECT * FROM scheduling_decisions")
    assert (record["outcome"], record["placement_epoch"], record["replica"]) == ("NO_FIT", 1, "r1")
    assert record["pool"] == [{"filter": "status", "kept": 1, "total": 2}]
    await world.clean()


async def test_a_refusal_that_only_an_edit_can_help_ends_in_error(world: World) -> None:
    instance = await world.instance()
    assert await world.refuse(await world.claim(instance), to_error=True, record="ERROR")
    assert (await world.row("model_instances", instance))["state"] == "ERROR"
    await world.clean()


@pytest.mark.parametrize("fence", ["expired", "owner", "epoch", "deleted"])
async def test_a_refusal_is_fenced_like_a_commit(world: World, fence: str) -> None:
    instance = await world.instance()
    claim = await world.claim(instance)
    owner = world.owner
    if fence == "expired":
        await world.expire(instance)
    elif fence == "owner":
        owner = uuid4()
    elif fence == "epoch":
        claim = replace(claim, epoch=claim.epoch - 1)
    else:
        await world.delete("model_instances", instance)
    assert not await world.refuse(claim, owner=owner)
    assert await world.sql.fetchval("SELECT count(*) FROM scheduling_decisions") == 0


# --- commits -----------------------------------------------------------------------------------------------


async def test_a_commit_books_writes_the_row_the_ledger_and_the_record(world: World) -> None:
    worker, gpus = await world.worker(80 * GIB, 80 * GIB, ip="10.0.0.7", name="node-1")
    instance = await world.placed(await world.part(worker, gpus, 30 * GIB, 4 * GIB))
    row = await world.row("model_instances", instance)
    assert row["state"] == "SCHEDULED"
    assert (row["worker_id"], row["worker_name"], row["worker_ip"]) == (worker, "node-1", "10.0.0.7")
    assert (row["gpu_type"], row["gpu_indexes"], row["lease_owner"]) == ("cuda", [0, 1], None)
    assert row["computed_resource_claim"]["vram"] == {"0": 30 * GIB, "1": 30 * GIB}
    assert row["computed_resource_claim"]["ram"] == 4 * GIB
    assert await world.ledger(instance) == [
        (instance, worker, gpus[0], 30 * GIB, 0, "main"),
        (instance, worker, gpus[1], 30 * GIB, 0, "main"),
        (instance, worker, None, 0, 4 * GIB, "main"),
    ]
    assert [await world.allocated(g) for g in gpus] == [30 * GIB] * 2
    assert (await world.row("workers", worker))["ram_allocated"] == 4 * GIB
    record = await world.sql.fetchrow("SELECT * FROM scheduling_decisions")
    assert (record["instance_id"], record["placement_epoch"], record["outcome"]) == (instance, 1, "PLACED")
    await world.clean()


async def test_a_distributed_placement_books_every_part_on_every_worker(world: World) -> None:
    first, (a, b) = await world.worker(80 * GIB, 80 * GIB, name="main")
    second, (c,) = await world.worker(48 * GIB, name="sub")
    parts = [await world.part(first, [a, b], 70 * GIB, GIB), await world.part(second, [c], 40 * GIB, 2 * GIB)]
    instance = await world.placed(*parts, mode="initialize_later")
    assert {(r[1], r[2], r[5]) for r in await world.ledger(instance)} == {
        (first, a, "main"), (first, b, "main"), (first, None, "main"),
        (second, c, "subordinate"), (second, None, "subordinate"),
    }  # fmt: skip
    servers = (await world.row("model_instances", instance))["distributed_servers"]
    assert servers["mode"] == "initialize_later"
    assert servers["subordinate_workers"][0]["worker_name"] == "sub"
    assert (await world.row("workers", second))["ram_allocated"] == 2 * GIB
    await world.clean()


async def test_a_placement_on_the_processor_alone_books_ram(world: World) -> None:
    worker, _ = await world.worker()
    instance = await world.placed(await world.part(worker, ram=8 * GIB))
    assert await world.ledger(instance) == [(instance, worker, None, 0, 8 * GIB, "main")]
    await world.clean()


async def test_a_placement_that_needs_nothing_is_still_in_the_ledger(world: World) -> None:
    worker, _ = await world.worker()
    instance = await world.placed(await world.part(worker))
    assert await world.ledger(instance) == [(instance, worker, None, 0, 0, "main")]
    await world.clean()
    await world.update("workers", worker, state="MAINTENANCE")
    (late,) = [await world.place(await world.instance(), await world.part(worker))]
    assert (late.code, late.worker_ids) == (CONFLICT, (worker,))


@pytest.mark.parametrize("fence", ["expired", "owner", "epoch", "deleted", "swept"])
async def test_a_commit_without_a_running_lease_of_its_own_is_lost(world: World, fence: str) -> None:
    worker, (gpu,) = await world.worker(80 * GIB)
    instance = await world.instance()
    claim = await world.claim(instance)
    proposal = await world.proposal(claim, await world.part(worker, [gpu], GIB, GIB))
    owner = world.owner
    if fence == "expired":
        await world.expire(instance)
    elif fence == "owner":
        owner = uuid4()
    elif fence == "epoch":
        proposal = replace(proposal, claim=replace(claim, epoch=claim.epoch - 1))
    elif fence == "deleted":
        await world.delete("model_instances", instance)
    else:
        await world.expire(instance)
        await world.store.expire_leases()
        await world.claim(instance)  # the same owner again, an epoch later
    (result,) = await world.commit(proposal, owner=owner)
    assert result.code is LOST
    assert await world.ledger() == []
    assert await world.allocated(gpu) == 0
    await world.clean()


async def test_a_commit_on_an_edited_model_is_refused_and_books_nothing(world: World) -> None:
    worker, (gpu,) = await world.worker(80 * GIB)
    model = await world.model()
    instance = await world.instance(model)
    proposal = await world.proposal(await world.claim(instance), await world.part(worker, [gpu], GIB))
    await world.update("models", model, backend_parameters=["--max-model-len=8192"])
    (result,) = await world.commit(proposal)
    assert result.code is CommitCode.MODEL_CHANGED
    assert await world.allocated(gpu) == 0
    assert (await world.row("model_instances", instance))["state"] == "ANALYZING"


async def test_what_the_daemon_fills_in_on_a_model_voids_no_decision(world: World) -> None:
    worker, (gpu,) = await world.worker(80 * GIB)
    model = await world.model()
    proposal = await world.proposal(
        await world.claim(await world.instance(model)), await world.part(worker, [gpu], GIB)
    )
    filled = await world.sql.fetchval("SELECT gpustackd_autofill($1, 0, $2)", model, {"categories": ["llm"]})
    assert filled is True
    assert (await world.row("models", model))["categories"] == ["llm"]
    assert [r.code for r in await world.commit(proposal)] == [None]
    await world.update("models", model, categories=["embedding"])  # a person's edit counts
    assert (await world.row("models", model))["version"] == 1
    assert not await world.sql.fetchval("SELECT gpustackd_autofill($1, 0, $2)", model, {"meta": {}})


async def test_an_instance_under_a_users_delete_is_lost_at_once_and_the_delete_goes_through(
    world: World,
) -> None:
    worker, gpus = await world.worker(80 * GIB, 80 * GIB)
    doomed, other = await world.instance(), await world.instance()
    batch = [
        await world.proposal(c, await world.part(worker, [g], GIB))
        for c, g in zip(await world.claims(doomed, other), gpus, strict=True)
    ]
    user = await connected(world.url)
    async with user.transaction():
        await user.execute("DELETE FROM model_instances WHERE id = $1", doomed)
        results = await world.commit(*batch)  # answers while the delete is still open
        assert [r.code for r in results] == [LOST, None]
    assert not await world.exists("model_instances", doomed)
    await world.clean()
    await user.close()


async def test_a_clash_rejects_one_placement_and_not_its_batch(world: World) -> None:
    worker, (small, large) = await world.worker(10 * GIB, 80 * GIB)
    ids = [await world.instance() for _ in range(3)]
    first, second, third = await world.claims(*ids)
    results = await world.commit(
        await world.proposal(first, await world.part(worker, [large], 30 * GIB)),
        await world.proposal(second, await world.part(worker, [small], 11 * GIB)),
        await world.proposal(third, await world.part(worker, [large], 30 * GIB)),
    )
    assert [(r.code, r.gpu_ids) for r in results] == [(None, ()), (CONFLICT, (small,)), (None, ())]
    assert await world.allocated(large) == 60 * GIB
    assert (await world.row("model_instances", second.id))["state"] == "ANALYZING"
    await world.clean()


async def test_two_placements_of_one_batch_share_a_row_until_it_is_full(world: World) -> None:
    worker, (gpu,) = await world.worker(80 * GIB)
    claims = await world.claims(*[await world.instance() for _ in range(4)])
    part = await world.part(worker, [gpu], 30 * GIB, GIB)
    results = await world.commit(*[await world.proposal(c, part) for c in claims])
    assert [r.code for r in results] == [None, None, CONFLICT, CONFLICT]
    assert await world.allocated(gpu) == 60 * GIB
    assert (await world.row("workers", worker))["ram_allocated"] == 2 * GIB
    await world.clean()


async def test_a_batch_that_names_an_instance_twice_is_refused_whole(world: World) -> None:
    worker, (a, b) = await world.worker(80 * GIB, 80 * GIB)
    claim = await world.claim(await world.instance())
    batch = [await world.proposal(claim, await world.part(worker, [g], GIB)) for g in (a, b)]
    with pytest.raises(ValueError, match="one proposal per instance"):
        await world.store.commit(world.owner, "r1", batch)
    assert await world.ledger() == []


@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize("clash", ["gpu", "worker"])
async def test_a_rejected_placement_leaves_allocations_and_versions_as_they_were(
    world: World, uniform: bool, clash: str
) -> None:
    first, a = await world.worker(*[80 * GIB] * 3)
    second, b = await world.worker(*[80 * GIB] * 3)
    await world.placed(await world.part(first, a[:1], 5 * GIB, GIB))
    if clash == "gpu":
        await world.update("gpu_devices", b[2], schedulable=False)
    else:
        await world.update("workers", second, ram_total=GIB)
    sizes = [9 * GIB] * 3 if uniform else [9 * GIB, 8 * GIB, 7 * GIB]
    claim = await world.claim(await world.instance())
    proposal = await world.proposal(
        claim, await world.part(first, a, sizes, 2 * GIB), await world.part(second, b, sizes, 2 * GIB)
    )

    async def picture() -> list[tuple[object, ...]]:
        found = await world.sql.fetch(
            "SELECT id, version, vram_allocated, over_committed FROM gpu_devices"
            " UNION ALL SELECT id, version, ram_allocated, over_committed FROM workers ORDER BY 1, 2, 3"
        )
        return [tuple(r) for r in found]

    before = await picture()
    (result,) = await world.commit(proposal)
    assert result.code is CONFLICT
    assert (result.gpu_ids, result.worker_ids) == (((b[2],), ()) if clash == "gpu" else ((), (second,)))
    assert await picture() == before
    assert await world.ledger(claim.id) == []
    await world.clean()


@pytest.mark.parametrize("check", list(Check))
async def test_a_rejected_placement_leaves_nothing_behind_for_the_next_of_its_batch(
    world: World, check: Check
) -> None:
    worker, (gpu, closed) = await world.worker(80 * GIB, 80 * GIB)
    await world.update("gpu_devices", closed, schedulable=False)
    first, second = await world.claims(await world.instance(), await world.instance())
    wide = await world.part(worker, [gpu, closed], 50 * GIB, 300 * GIB)
    narrow = await world.part(worker, [gpu], 50 * GIB, 300 * GIB)
    before = [await world.row("gpu_devices", gpu), await world.row("workers", worker)]
    results = await world.commit(
        await world.proposal(first, wide, check=check), await world.proposal(second, narrow, check=check)
    )
    assert [r.code for r in results] == [CONFLICT, None]
    after = [await world.row("gpu_devices", gpu), await world.row("workers", worker)]
    assert [r["version"] for r in after] == [r["version"] + 1 for r in before]
    assert (after[0]["vram_allocated"], after[1]["ram_allocated"]) == (50 * GIB, 300 * GIB)
    await world.clean()


async def test_a_row_that_somebody_marked_takes_nothing_though_it_fits(world: World) -> None:
    worker, (gpu,) = await world.worker(80 * GIB)
    await world.update("gpu_devices", gpu, over_committed=True)
    result = await world.place(await world.instance(), await world.part(worker, [gpu], GIB))
    assert (result.code, result.gpu_ids) == (CONFLICT, (gpu,))
    await world.update("gpu_devices", gpu, over_committed=False)
    assert (await world.place(await world.instance(), await world.part(worker, [gpu], GIB))).code is None


async def test_a_rejected_overcommit_leaves_marks_and_versions_as_they_were(world: World) -> None:
    worker, (marked, plain, closed) = await world.worker(*[10 * GIB] * 3)
    await world.placed(await world.part(worker, [marked], 8 * GIB))
    await world.update("gpu_devices", marked, vram_total=5 * GIB)
    await world.update("gpu_devices", closed, schedulable=False)
    before = [await world.row("gpu_devices", g) for g in (marked, plain)]
    assert [r["over_committed"] for r in before] == [True, False]
    part = await world.part(worker, [marked, plain, closed], 20 * GIB)
    result = await world.place(await world.instance(), part, over_commit=True)
    assert (result.code, result.gpu_ids) == (CONFLICT, (closed,))
    for old in before:
        new = await world.row("gpu_devices", old["id"])
        kept = ("version", "vram_allocated", "over_committed")
        assert [new[k] for k in kept] == [old[k] for k in kept]


async def test_unchanged_wants_the_very_versions_that_the_decision_saw(world: World) -> None:
    worker, (gpu, spare) = await world.worker(80 * GIB, 80 * GIB)
    seen = await world.part(worker, [gpu], GIB)
    with_ram = await world.part(worker, [spare], GIB, GIB)
    await world.placed(await world.part(worker, [gpu], GIB, GIB))  # room is left, but both rows changed
    stale = await world.place(await world.instance(), seen, check=Check.UNCHANGED)
    assert (stale.code, stale.gpu_ids) == (CONFLICT, (gpu,))
    stale = await world.place(await world.instance(), with_ram, check=Check.UNCHANGED)
    assert (stale.code, stale.worker_ids) == (CONFLICT, (worker,))
    assert (await world.place(await world.instance(), seen)).code is None  # `fits` looks at room alone
    fresh = await world.part(worker, [gpu, spare], GIB, GIB)
    assert (await world.place(await world.instance(), fresh, check=Check.UNCHANGED)).code is None
    await world.clean()


async def test_of_two_unchanged_placements_of_one_batch_on_one_row_the_second_conflicts(world: World) -> None:
    worker, (gpu,) = await world.worker(80 * GIB)
    part = await world.part(worker, [gpu], GIB)
    claims = await world.claims(await world.instance(), await world.instance())
    results = await world.commit(*[await world.proposal(c, part, check=Check.UNCHANGED) for c in claims])
    assert [r.code for r in results] == [None, CONFLICT]


async def test_an_asked_overcommit_marks_only_the_rows_that_do_not_fit(world: World) -> None:
    worker, (small, large) = await world.worker(10 * GIB, 80 * GIB, ram_total=4 * GIB)
    part = await world.part(worker, [small, large], 20 * GIB, 2 * GIB)
    instance = await world.placed(part, over_commit=True)
    marks = [(await world.row("gpu_devices", g))["over_committed"] for g in (small, large)]
    assert marks == [True, False]
    assert not (await world.row("workers", worker))["over_committed"]
    result = await world.place(await world.instance(), await world.part(worker, [small], 0))
    assert (result.code, result.gpu_ids) == (CONFLICT, (small,))  # takes nothing new, not even nothing
    await world.clean()
    await world.delete("model_instances", instance)
    assert not (await world.row("gpu_devices", small))["over_committed"]
    await world.clean()


async def test_a_gpu_of_unknown_memory_takes_nothing(world: World) -> None:
    worker, (unknown,) = await world.worker(None)
    for need in (0, GIB):
        result = await world.place(await world.instance(), await world.part(worker, [unknown], need))
        assert (result.code, result.gpu_ids) == (CONFLICT, (unknown,))
    await world.clean()


async def test_a_worker_of_unknown_ram_takes_gpu_placements_but_no_ram(world: World) -> None:
    worker, (gpu,) = await world.worker(80 * GIB, ram_total=None)
    assert (await world.place(await world.instance(), await world.part(worker, [gpu], GIB))).code is None
    result = await world.place(await world.instance(), await world.part(worker, [gpu], GIB, GIB))
    assert (result.code, result.worker_ids) == (CONFLICT, (worker,))
    await world.clean()


@pytest.mark.parametrize("change", ["state", "schedulable", "reserve", "total", "unified", "gpu", "worker"])
async def test_what_changed_under_a_decision_rejects_its_commit(world: World, change: str) -> None:
    worker, (gpu,) = await world.worker(80 * GIB)
    claim = await world.claim(await world.instance())
    proposal = await world.proposal(claim, await world.part(worker, [gpu], 70 * GIB))
    if change == "state":
        await world.update("workers", worker, state="MAINTENANCE")
    elif change == "schedulable":
        await world.update("gpu_devices", gpu, schedulable=False)
    elif change == "reserve":
        await world.update("workers", worker, vram_reserved=11 * GIB)
    elif change == "total":
        await world.update("gpu_devices", gpu, vram_total=60 * GIB)
    elif change == "unified":
        await world.update("workers", worker, unified_memory=True)
    elif change == "gpu":
        await world.delete("gpu_devices", gpu)
    else:
        await world.delete("workers", worker)
    (result,) = await world.commit(proposal)
    assert (result.code, result.gpu_ids) == (CONFLICT, (gpu,))
    await world.clean()


async def test_one_gpu_named_twice_is_booked_twice_or_not_at_all(world: World) -> None:
    worker, (gpu,) = await world.worker(80 * GIB)
    part = await world.part(worker, [gpu, gpu], 50 * GIB)
    assert (await world.place(await world.instance(), part)).code is CONFLICT
    assert await world.allocated(gpu) == 0
    await world.clean()


async def test_two_parts_on_one_worker_are_booked_and_undone_together(world: World) -> None:
    worker, (a, b) = await world.worker(80 * GIB, 80 * GIB, ram_total=10 * GIB)
    fits = [await world.part(worker, [g], GIB, 3 * GIB) for g in (a, b)]
    instance = await world.placed(*fits)
    assert (await world.row("workers", worker))["ram_allocated"] == 6 * GIB
    assert (await world.place(await world.instance(), *fits)).code is CONFLICT
    assert (await world.row("workers", worker))["ram_allocated"] == 6 * GIB
    await world.clean()
    await world.delete("model_instances", instance)
    assert (await world.row("workers", worker))["ram_allocated"] == 0


async def test_an_empty_batch_is_no_trouble(world: World) -> None:
    assert list(await world.store.commit(world.owner, "r1", [])) == []
    assert await world.store.refuse(world.owner, "r1", []) == set()
    assert list(await world.store.claim(world.owner, [], 30)) == []
    assert await world.store.renew(world.owner, [], 30) == set()


async def test_an_epoch_is_placed_at_most_once(world: World) -> None:
    worker, (gpu,) = await world.worker(80 * GIB)
    instance = await world.placed(await world.part(worker, [gpu], GIB))
    with pytest.raises(asyncpg.UniqueViolationError):
        await world.sql.execute(
            "INSERT INTO scheduling_decisions (instance_id, placement_epoch, outcome)"
            " VALUES ($1, 1, 'PLACED')",
            instance,
        )
