"""Tables, capacity guards, the ledger, the commit protocol and the wake-ups.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

from gpustackd.store.postgres.statements import statements

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

SQL = Path(__file__).resolve().parent.parent / "sql"
FILES = (
    "0001_capacity",
    "0001_ledger",
    "0001_lifecycle",
    "0001_turns",
    "0001_wake",
    "0001_health",
    "0001_aftercare",
    "0001_replicas",
    "0001_protocol",
)


def upgrade() -> None:
    op.create_table(
        "clusters",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("topology", JSONB(), nullable=True),
        sa.Column("devices", JSONB(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("name", name="clusters_name_key"),
    )
    op.create_table(
        "inference_backends",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=True),
        sa.Column("versions", JSONB(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(
        "inference_backends_name_owner_idx", "inference_backends", ["name", "owner"], unique=False
    )
    op.create_table(
        "scheduling_decisions",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("instance_id", sa.BigInteger(), nullable=False),
        sa.Column("placement_epoch", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("replica", sa.Text(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("pool", JSONB(), nullable=True),
        sa.Column("candidates", JSONB(), nullable=True),
        sa.Column("reasons", JSONB(), nullable=True),
        sa.Column("duration_ms", sa.Double(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(
        "scheduling_decisions_instance_id_id_idx", "scheduling_decisions", ["instance_id", "id"], unique=False
    )
    op.create_index(
        "scheduling_decisions_placed_once_key",
        "scheduling_decisions",
        ["instance_id", "placement_epoch"],
        unique=True,
        postgresql_where=sa.text("outcome = 'PLACED'"),
    )
    op.create_table(
        "instance_types",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("cluster_id", sa.BigInteger(), nullable=True),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("detail", JSONB(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(["cluster_id"], ["clusters.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(
        "instance_types_cluster_id_name_idx", "instance_types", ["cluster_id", "name"], unique=False
    )
    op.create_table(
        "models",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=True),
        sa.Column("cluster_id", sa.BigInteger(), nullable=True),
        sa.Column("source", sa.Text(), nullable=True),
        sa.Column("huggingface_repo_id", sa.Text(), nullable=True),
        sa.Column("huggingface_filename", sa.Text(), nullable=True),
        sa.Column("model_scope_model_id", sa.Text(), nullable=True),
        sa.Column("model_scope_file_path", sa.Text(), nullable=True),
        sa.Column("local_path", sa.Text(), nullable=True),
        sa.Column("revision", sa.Text(), nullable=True),
        sa.Column("replicas", sa.BigInteger(), nullable=True),
        sa.Column("categories", JSONB(), nullable=True),
        sa.Column("meta", JSONB(), nullable=True),
        sa.Column("backend", sa.Text(), nullable=True),
        sa.Column("backend_version", sa.Text(), nullable=True),
        sa.Column("backend_parameters", JSONB(), nullable=True),
        sa.Column("image_name", sa.Text(), nullable=True),
        sa.Column("run_command", sa.Text(), nullable=True),
        sa.Column("env", JSONB(), nullable=True),
        sa.Column("placement_strategy", sa.Text(), nullable=True),
        sa.Column("cpu_offloading", sa.Boolean(), nullable=True),
        sa.Column("distributable", sa.Boolean(), nullable=True),
        sa.Column("distributed_inference_across_workers", sa.Boolean(), nullable=True),
        sa.Column("worker_selector", JSONB(), nullable=True),
        sa.Column("gpu_selector", JSONB(), nullable=True),
        sa.Column("gpu_type_selector", JSONB(), nullable=True),
        sa.Column("speculative_config", JSONB(), nullable=True),
        sa.Column("extended_kv_cache", JSONB(), nullable=True),
        sa.Column("lora_list", JSONB(), nullable=True),
        sa.Column("roles", JSONB(), nullable=True),
        sa.Column("disaggregation", JSONB(), nullable=True),
        sa.Column("gather", JSONB(), nullable=True),
        sa.Column("scaling_schedule", JSONB(), nullable=True),
        sa.Column("restart_on_error", sa.Boolean(), server_default=sa.text("true"), nullable=False),
        sa.Column("min_available", sa.BigInteger(), nullable=True),
        sa.Column("priority", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("preemption", sa.Text(), nullable=True),
        sa.Column("version", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("jsonb_typeof(gpu_selector) = 'object'", name="models_gpu_selector_is_a_map"),
        sa.CheckConstraint(
            "jsonb_typeof(worker_selector) = 'object'", name="models_worker_selector_is_a_map"
        ),
        sa.CheckConstraint(
            "placement_strategy IN ('spread', 'binpack', 'first_fit', 'best_fit', 'fragmentation')",
            name="models_placement_strategy_known",
        ),
        sa.CheckConstraint("preemption IN ('PreemptLowerPriority', 'Never')", name="models_preemption_known"),
        sa.CheckConstraint(
            "source IN ('huggingface', 'model_scope', 'local_path')", name="models_source_known"
        ),
        sa.CheckConstraint("replicas >= 0 AND min_available >= 0", name="models_replicas_not_negative"),
        sa.ForeignKeyConstraint(["cluster_id"], ["clusters.id"], ondelete="RESTRICT"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("name", name="models_name_key"),
    )
    op.create_index("models_cluster_id_idx", "models", ["cluster_id"], unique=False)
    op.create_table(
        "workers",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("cluster_id", sa.BigInteger(), nullable=True),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), server_default=sa.text("'NOT_READY'"), nullable=False),
        sa.Column("state_message", sa.Text(), nullable=True),
        sa.Column("hostname", sa.Text(), nullable=True),
        sa.Column("ip", sa.Text(), nullable=True),
        sa.Column("ifname", sa.Text(), nullable=True),
        sa.Column("advertise_address", sa.Text(), nullable=True),
        sa.Column("port", sa.BigInteger(), nullable=True),
        sa.Column("labels", JSONB(), nullable=True),
        sa.Column("ram_total", sa.BigInteger(), nullable=True),
        sa.Column("ram_reserved", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("vram_reserved", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("unified_memory", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("cpu_arch", sa.Text(), nullable=True),
        sa.Column("service_port_range", sa.Text(), nullable=True),
        sa.Column("heartbeat_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("maintenance", JSONB(), nullable=True),
        sa.Column("state_since", sa.DateTime(timezone=True), nullable=True),
        sa.Column("stale_since", sa.DateTime(timezone=True), nullable=True),
        sa.Column("lost_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ram_capacity", sa.BigInteger(), nullable=True),
        sa.Column("ram_allocated", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("over_committed", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("version", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column(
            "changed_in",
            sa.BigInteger(),
            server_default=sa.text("((pg_current_xact_id())::text)::bigint"),
            nullable=False,
        ),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("jsonb_typeof(labels) = 'object'", name="workers_labels_are_a_map"),
        sa.CheckConstraint(
            "state IN ('READY', 'NOT_READY', 'UNREACHABLE', 'MAINTENANCE', 'PENDING', 'PROVISIONING', 'INITIALIZING', 'DELETING', 'ERROR')",
            name="workers_state_known",
        ),
        sa.CheckConstraint(
            "over_committed OR ram_allocated = 0 OR (ram_capacity IS NOT NULL AND ram_allocated <= ram_capacity)",
            name="workers_ram_fits",
        ),
        sa.CheckConstraint("port BETWEEN 1 AND 65535", name="workers_port_valid"),
        sa.CheckConstraint(
            "ram_total >= 0 AND ram_reserved >= 0 AND vram_reserved >= 0 AND ram_allocated >= 0",
            name="workers_sizes_not_negative",
        ),
        sa.ForeignKeyConstraint(["cluster_id"], ["clusters.id"], ondelete="RESTRICT"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("name", name="workers_name_key"),
        postgresql_with={"fillfactor": "50"},
    )
    op.create_index("workers_changed_in_idx", "workers", ["changed_in"], unique=False)
    op.create_index("workers_cluster_id_idx", "workers", ["cluster_id"], unique=False)
    op.create_table(
        "gpu_devices",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("worker_id", sa.BigInteger(), nullable=False),
        sa.Column("index", sa.BigInteger(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("vendor", sa.Text(), nullable=True),
        sa.Column("name", sa.Text(), nullable=True),
        sa.Column("uuid", sa.Text(), nullable=True),
        sa.Column("arch_family", sa.Text(), nullable=True),
        sa.Column("compute_capability", sa.Text(), nullable=True),
        sa.Column("runtime_version", sa.Text(), nullable=True),
        sa.Column("vram_total", sa.BigInteger(), nullable=True),
        sa.Column("vram_used", sa.BigInteger(), nullable=True),
        sa.Column("vram_used_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("links", JSONB(), nullable=True),
        sa.Column("network", JSONB(), nullable=True),
        sa.Column("schedulable", sa.Boolean(), server_default=sa.text("true"), nullable=False),
        sa.Column("worker_ready", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("worker_reserve", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("unified", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("capacity", sa.BigInteger(), nullable=True),
        sa.Column("open", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("vram_allocated", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("over_committed", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("version", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column(
            "changed_in",
            sa.BigInteger(),
            server_default=sa.text("((pg_current_xact_id())::text)::bigint"),
            nullable=False,
        ),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint(
            "index >= 0 AND vram_total >= 0 AND vram_used >= 0 AND vram_allocated >= 0",
            name="gpu_devices_sizes_not_negative",
        ),
        sa.CheckConstraint(
            "over_committed OR vram_allocated = 0 OR (capacity IS NOT NULL AND vram_allocated <= capacity)",
            name="gpu_devices_vram_fits",
        ),
        sa.ForeignKeyConstraint(["worker_id"], ["workers.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("worker_id", "type", "index", name="gpu_devices_worker_id_type_index_key"),
        postgresql_with={"fillfactor": "50"},
    )
    op.create_index("gpu_devices_changed_in_idx", "gpu_devices", ["changed_in"], unique=False)
    op.create_table(
        "model_files",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("worker_id", sa.BigInteger(), nullable=False),
        sa.Column("source_index", sa.Text(), nullable=False),
        sa.Column("resolved_path", sa.Text(), nullable=True),
        sa.Column("size", sa.BigInteger(), nullable=True),
        sa.Column("state", sa.Text(), server_default=sa.text("'DOWNLOADING'"), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("state IN ('READY', 'DOWNLOADING', 'ERROR')", name="model_files_state_known"),
        sa.CheckConstraint("size >= 0", name="model_files_size_not_negative"),
        sa.ForeignKeyConstraint(["worker_id"], ["workers.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("worker_id", "source_index", name="model_files_worker_id_source_index_key"),
    )
    op.create_table(
        "model_instances",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("model_id", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), server_default=sa.text("'PENDING'"), nullable=False),
        sa.Column("state_message", sa.Text(), nullable=True),
        sa.Column("priority", sa.BigInteger(), nullable=True),
        sa.Column("role", sa.Text(), nullable=True),
        sa.Column("group_id", sa.Text(), nullable=True),
        sa.Column("group_size", sa.BigInteger(), nullable=True),
        sa.Column("draining_since", sa.DateTime(timezone=True), nullable=True),
        sa.Column("restart_count", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("last_restart_time", sa.DateTime(timezone=True), nullable=True),
        sa.Column("worker_id", sa.BigInteger(), nullable=True),
        sa.Column("worker_name", sa.Text(), nullable=True),
        sa.Column("worker_ip", sa.Text(), nullable=True),
        sa.Column("worker_advertise_address", sa.Text(), nullable=True),
        sa.Column("worker_ifname", sa.Text(), nullable=True),
        sa.Column("gpu_type", sa.Text(), nullable=True),
        sa.Column("gpu_indexes", JSONB(), nullable=True),
        sa.Column("gpu_addresses", JSONB(), nullable=True),
        sa.Column("computed_resource_claim", JSONB(), nullable=True),
        sa.Column("distributed_servers", JSONB(), nullable=True),
        sa.Column("named_ports", JSONB(), nullable=True),
        sa.Column("placement_epoch", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("attempts", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("next_attempt_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("reasons", JSONB(), nullable=True),
        sa.Column("lease_owner", sa.Uuid(), nullable=True),
        sa.Column("lease_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("scheduled_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("state_since", sa.DateTime(timezone=True), nullable=True),
        sa.Column("failures", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("avoid", JSONB(), nullable=True),
        sa.Column("claim_raise", JSONB(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint(
            "(state = 'ANALYZING') = (lease_owner IS NOT NULL) AND (lease_owner IS NULL) = (lease_until IS NULL)",
            name="model_instances_lease_while_analyzing",
        ),
        sa.CheckConstraint(
            "NOT state IN ('PENDING', 'ANALYZING') OR (worker_id IS NULL AND gpu_type IS NULL AND gpu_indexes IS NULL AND computed_resource_claim IS NULL AND distributed_servers IS NULL)",
            name="model_instances_waiting_holds_nothing",
        ),
        sa.CheckConstraint(
            "state <> 'ERROR' OR (worker_id IS NULL) = (computed_resource_claim IS NULL)",
            name="model_instances_error_holds_all_or_nothing",
        ),
        sa.CheckConstraint(
            "state IN ('PENDING', 'ANALYZING') OR state = 'ERROR' OR (worker_id IS NOT NULL AND computed_resource_claim IS NOT NULL)",
            name="model_instances_placed_holds_a_claim",
        ),
        sa.CheckConstraint(
            "state IN ('PENDING', 'ANALYZING', 'SCHEDULED', 'INITIALIZING', 'DOWNLOADING', 'STARTING', 'RUNNING', 'ERROR', 'UNREACHABLE')",
            name="model_instances_state_known",
        ),
        sa.CheckConstraint(
            "placement_epoch >= 0 AND attempts >= 0 AND restart_count >= 0 AND failures >= 0",
            name="model_instances_counts_not_negative",
        ),
        sa.ForeignKeyConstraint(["model_id"], ["models.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("name", name="model_instances_name_key"),
        postgresql_with={"fillfactor": "50"},
    )
    op.create_index("model_instances_model_id_idx", "model_instances", ["model_id"], unique=False)
    op.create_table(
        "instance_claims",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("instance_id", sa.BigInteger(), nullable=False),
        sa.Column("worker_id", sa.BigInteger(), nullable=False),
        sa.Column("gpu_device_id", sa.BigInteger(), nullable=True),
        sa.Column("part", sa.Text(), server_default=sa.text("'main'"), nullable=False),
        sa.Column("vram", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("ram", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("part IN ('main', 'subordinate')", name="instance_claims_part_known"),
        sa.CheckConstraint(
            "(gpu_device_id IS NOT NULL AND ram = 0) OR (gpu_device_id IS NULL AND vram = 0)",
            name="instance_claims_gpu_or_ram",
        ),
        sa.CheckConstraint("vram >= 0 AND ram >= 0", name="instance_claims_sizes_not_negative"),
        sa.ForeignKeyConstraint(["instance_id"], ["model_instances.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("instance_claims_instance_id_idx", "instance_claims", ["instance_id"], unique=False)
    op.create_index("instance_claims_worker_id_idx", "instance_claims", ["worker_id"], unique=False)
    for name in FILES:
        for statement in statements(SQL / f"{name}.sql"):
            op.execute(statement)


def downgrade() -> None:
    for table in (
        "instance_claims",
        "model_instances",
        "model_files",
        "gpu_devices",
        "workers",
        "models",
        "instance_types",
        "scheduling_decisions",
        "inference_backends",
        "clusters",
    ):
        op.drop_table(table)
    op.execute(
        """
        DO $$
        DECLARE
            f regprocedure;
        BEGIN
            FOR f IN SELECT p.oid FROM pg_proc p
                      WHERE p.pronamespace = quote_ident(current_schema())::regnamespace
                        AND p.proname LIKE 'gpustackd\\_%' LOOP
                EXECUTE format('DROP FUNCTION %s', f);
            END LOOP;
        END
        $$
        """
    )
