"""The tables as the contract names them: columns, defaults, CHECKs, references."""

from __future__ import annotations

import re
from typing import Any

import asyncpg
import pytest

from gpustackd.domain.lifecycle import InstanceState, WorkerState
from tests.integration.world import GIB, World

pytestmark = pytest.mark.anyio

CONTRACT = {
    "clusters": "name topology devices",
    "workers": "cluster_id name state state_message hostname ip ifname advertise_address port labels"
    " ram_total ram_reserved vram_reserved unified_memory cpu_arch service_port_range heartbeat_at",
    "gpu_devices": "worker_id index type vendor name uuid arch_family compute_capability runtime_version"
    " vram_total vram_used vram_used_at links network schedulable",
    "models": "name owner cluster_id source huggingface_repo_id huggingface_filename model_scope_model_id"
    " model_scope_file_path local_path revision replicas categories backend backend_version"
    " backend_parameters image_name run_command env placement_strategy cpu_offloading"
    " distributed_inference_across_workers"
    " worker_selector gpu_selector gpu_type_selector speculative_config extended_kv_cache lora_list roles"
    " disaggregation gather scaling_schedule restart_on_error priority preemption",
    "model_instances": "name model_id state state_message priority role group_id group_size draining_since"
    " restart_count last_restart_time worker_id worker_name worker_ip worker_advertise_address worker_ifname"
    " gpu_type gpu_indexes gpu_addresses computed_resource_claim distributed_servers named_ports"
    " placement_epoch attempts next_attempt_at reasons",
    "instance_claims": "instance_id worker_id gpu_device_id part vram ram",
    "model_files": "worker_id source_index resolved_path size state",
    "inference_backends": "name owner versions",
    "instance_types": "cluster_id name detail",
    "scheduling_decisions": "instance_id placement_epoch attempt replica outcome pool candidates reasons"
    " duration_ms",
}
REQUIRED = {
    "clusters": {"name"}, "workers": {"name"}, "gpu_devices": {"worker_id", "index", "type"},
    "models": {"name"}, "model_instances": {"name", "model_id"},
    "instance_claims": {"instance_id", "worker_id"}, "model_files": {"worker_id", "source_index"},
    "inference_backends": {"name"}, "instance_types": {"name"},
    "scheduling_decisions": {"instance_id", "placement_epoch", "outcome"},
}  # fmt: skip
"""What an INSERT has to give; everything else is nullable or has a default."""


@pytest.mark.parametrize("table", CONTRACT)
async def test_a_table_has_its_columns_an_identity_and_its_times(world: World, table: str) -> None:
    rows = await world.sql.fetch(
        "SELECT column_name, data_type, is_nullable, column_default, is_identity"
        " FROM information_schema.columns WHERE table_schema = 'public' AND table_name = $1",
        table,
    )
    columns = {r["column_name"]: r for r in rows}
    times = (
        {"created_at"}
        if table in ("instance_claims", "scheduling_decisions")
        else {"created_at", "updated_at"}
    )
    assert set(CONTRACT[table].split()) | {"id"} | times <= set(columns)
    assert (columns["id"]["data_type"], columns["id"]["is_identity"]) == ("bigint", "YES")
    for name in times:
        assert columns[name]["data_type"] == "timestamp with time zone"
    needed = {
        n for n, r in columns.items()
        if r["is_nullable"] == "NO" and r["column_default"] is None and r["is_identity"] == "NO"
    }  # fmt: skip
    assert needed == REQUIRED[table]
    kinds = {r["data_type"] for r in rows}
    assert kinds <= {
        "bigint",
        "text",
        "jsonb",
        "boolean",
        "timestamp with time zone",
        "uuid",
        "double precision",
    }


async def test_the_smallest_insert_is_a_pending_instance(world: World) -> None:
    await world.sql.execute("INSERT INTO models (name) VALUES ('qwen')")
    await world.sql.execute("INSERT INTO model_instances (name, model_id) VALUES ('qwen-1', 1)")
    row = await world.sql.fetchrow("SELECT * FROM model_instances")
    assert (row["id"], row["state"], row["placement_epoch"], row["attempts"]) == (1, "PENDING", 0, 0)
    assert {k for k, v in dict(row).items() if v is not None} == {
        "id", "name", "model_id", "state", "restart_count", "failures", "placement_epoch", "attempts",
        "created_at", "updated_at",
    }  # fmt: skip


async def test_defaults_are_those_of_the_contract(world: World) -> None:
    worker = await world.row("workers", await world.insert("workers", name="w"))
    assert worker["state"] == "NOT_READY"
    assert (worker["ram_reserved"], worker["vram_reserved"], worker["unified_memory"]) == (0, 0, False)
    gpu = await world.row(
        "gpu_devices", await world.insert("gpu_devices", worker_id=worker["id"], index=0, type="cuda")
    )
    assert (gpu["schedulable"], gpu["vram_total"], gpu["open"]) == (True, None, False)
    model = await world.row("models", await world.model())
    assert (model["restart_on_error"], model["priority"], model["replicas"]) == (True, 0, None)


@pytest.mark.parametrize(("table", "state"), [
    *[("workers", s) for s in WorkerState], *[("model_files", s) for s in ("READY", "DOWNLOADING", "ERROR")],
])  # fmt: skip
async def test_known_states_are_accepted(world: World, table: str, state: str) -> None:
    worker, _ = await world.worker()
    columns = {"name": "x"} if table == "workers" else {"worker_id": worker, "source_index": "i"}
    await world.insert(table, state=state, **columns)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("workers", {"state": "TIRED"}, "workers_state_known"),
    ("workers", {"ram_total": -1}, "sizes_not_negative"),
    ("workers", {"ram_reserved": -1}, "sizes_not_negative"),
    ("workers", {"vram_reserved": -1}, "sizes_not_negative"),
    ("workers", {"port": 0}, "port_valid"),
    ("workers", {"port": 65536}, "port_valid"),
    ("workers", {"labels": ["a"]}, "labels_are_a_map"),
    ("gpu_devices", {"vram_total": -1}, "sizes_not_negative"),
    ("gpu_devices", {"vram_used": -1}, "sizes_not_negative"),
    ("gpu_devices", {"index": -1}, "sizes_not_negative"),
    ("models", {"source": "ftp"}, "source_known"),
    ("models", {"placement_strategy": "random"}, "placement_strategy_known"),
    ("models", {"preemption": "Always"}, "preemption_known"),
    ("models", {"replicas": -1}, "replicas_not_negative"),
    ("models", {"worker_selector": ["a"]}, "worker_selector_is_a_map"),
    ("models", {"gpu_selector": "all"}, "gpu_selector_is_a_map"),
    ("model_instances", {"attempts": -1}, "counts_not_negative"),
    ("model_instances", {"restart_count": -1}, "counts_not_negative"),
    ("model_files", {"state": "LOST"}, "state_known"),
    ("model_files", {"size": -1}, "size_not_negative"),
    ("instance_claims", {"vram": -1}, "gpu_or_ram|sizes_not_negative"),
    ("instance_claims", {"ram": -1}, "sizes_not_negative"),
    ("instance_claims", {"part": "half"}, "part_known"),
    ("instance_claims", {"vram": 5}, "gpu_or_ram"),
    ("instance_claims", {"gpu_device_id": 1, "ram": 5}, "gpu_or_ram"),
]


async def smallest(world: World, table: str) -> dict[str, Any]:
    """The least that an INSERT into a table has to give, and what that refers to."""
    if table == "gpu_devices":
        return {"worker_id": (await world.worker())[0], "index": 0, "type": "cuda"}
    if table == "model_instances":
        return {"name": "x", "model_id": await world.model()}
    if table == "model_files":
        return {"worker_id": (await world.worker())[0], "source_index": "i"}
    if table == "instance_claims":
        return {"instance_id": await world.instance(), "worker_id": (await world.worker())[0]}
    return {"name": "x"}


@pytest.mark.parametrize(("table", "columns", "check"), WRONG)
async def test_a_wrong_value_is_refused_by_a_check_that_names_it(
    world: World, table: str, columns: dict[str, Any], check: str
) -> None:
    given = {**await smallest(world, table), **columns}
    with pytest.raises(asyncpg.CheckViolationError) as refused:
        await world.insert(table, **given)
    assert re.search(check, refused.value.constraint_name or "")


@pytest.mark.parametrize("table", ["clusters", "workers", "models", "model_instances"])
async def test_names_are_unique(world: World, table: str) -> None:
    columns = await smallest(world, table)
    await world.insert(table, **columns)
    with pytest.raises(asyncpg.UniqueViolationError):
        await world.insert(table, **columns)


async def test_a_gpu_is_unique_by_worker_type_and_index(world: World) -> None:
    worker, _ = await world.worker(GIB)
    await world.insert("gpu_devices", worker_id=worker, index=0, type="rocm")
    with pytest.raises(asyncpg.UniqueViolationError):
        await world.insert("gpu_devices", worker_id=worker, index=0, type="cuda")


@pytest.mark.parametrize(("table", "columns"), [
    ("workers", {"name": "x", "cluster_id": 99}), ("models", {"name": "x", "cluster_id": 99}),
    ("gpu_devices", {"worker_id": 99, "index": 0, "type": "cuda"}),
    ("model_instances", {"name": "x", "model_id": 99}),
    ("model_files", {"worker_id": 99, "source_index": "x"}),
    ("instance_types", {"cluster_id": 99, "name": "x"}),
    ("instance_claims", {"instance_id": 99, "worker_id": 1}),
])  # fmt: skip
async def test_what_a_row_refers_to_has_to_exist(world: World, table: str, columns: dict[str, Any]) -> None:
    with pytest.raises(asyncpg.ForeignKeyViolationError):
        await world.insert(table, **columns)


async def test_a_cluster_goes_only_when_nothing_lives_in_it(world: World) -> None:
    cluster = await world.insert("clusters", name="c")
    await world.insert("instance_types", cluster_id=cluster, name="t")
    worker, _ = await world.worker(cluster_id=cluster)
    model = await world.model(cluster_id=cluster)
    for table, id_ in (("workers", worker), ("models", model)):
        # ON DELETE RESTRICT is an error of its own since PostgreSQL 18
        with pytest.raises(asyncpg.IntegrityConstraintViolationError):
            await world.delete("clusters", cluster)
        await world.delete(table, id_)
    await world.delete("clusters", cluster)
    assert await world.sql.fetchval("SELECT count(*) FROM instance_types") == 0


STATES = {
    "lease_while_analyzing": ["lease_owner = gen_random_uuid()", "lease_until = now()"],
    "waiting_holds_nothing": [
        "worker_id = 1", "gpu_type = 'cuda'", "gpu_indexes = '[0]'", "computed_resource_claim = '{}'",
        "distributed_servers = '{}'",
    ],
    "placed_holds_a_claim": [
        f"state = '{s}'" for s in InstanceState if s not in ("PENDING", "ANALYZING", "ERROR")
    ],
    "error_holds_all_or_nothing": ["state = 'ERROR', worker_id = 1"],
    "state_known": ["state = 'LOST'"],
}  # fmt: skip


@pytest.mark.parametrize(("check", "change"), [(c, x) for c, changes in STATES.items() for x in changes])
async def test_what_an_instance_holds_goes_with_its_state_even_past_the_triggers(
    world: World, check: str, change: str
) -> None:
    await world.instance()
    await world.sql.execute("SET session_replication_role = replica")
    with pytest.raises(asyncpg.CheckViolationError) as refused:
        await world.sql.execute(f"UPDATE model_instances SET {change}")
    assert (refused.value.constraint_name or "").startswith("model_instances_")
    if check != "state_known":
        assert check in (refused.value.constraint_name or "")


async def test_no_function_depends_on_the_search_path_of_whoever_calls(world: World) -> None:
    rows = await world.sql.fetch(
        "SELECT proname, proconfig FROM pg_proc WHERE pronamespace = 'public'::regnamespace"
        " AND proname LIKE 'gpustackd%'"
    )
    assert len(rows) > 10
    assert all("search_path=public, pg_temp" in (r["proconfig"] or []) for r in rows)
    await world.sql.execute("SET search_path = pg_catalog")
    await world.sql.execute("INSERT INTO public.models (name) VALUES ('m')")
    await world.sql.execute("INSERT INTO public.model_instances (name, model_id) VALUES ('i', 1)")
    await world.sql.execute("DELETE FROM public.models")
