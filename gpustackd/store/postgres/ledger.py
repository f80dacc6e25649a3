"""Proposals as the argument arrays of `gpustackd_commit`: the one place that knows their order."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from gpustackd.domain.bookings import ledger_rows, worker_bookings
from gpustackd.domain.outcome import Check, Part, Placement, Reason
from gpustackd.ports import CommitCode, CommitResult, Proposal

COMMIT_SQL = "SELECT * FROM gpustackd_commit(" + ", ".join(f"${n}" for n in range(1, 41)) + ")"


_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode


def as_json(value: Any) -> str | None:
    """JSON text for a jsonb argument; SQL NULL for None."""
    return None if value is None else _encode(value)


def claim_json(part: Part, placement: Placement) -> dict[str, Any]:
    """`computed_resource_claim` of one part. Sizes in bytes."""
    claim: dict[str, Any] = {
        "ram": part.ram,
        "vram": {str(i): v for i, v in zip(part.gpu_indexes, part.vram, strict=True)},
        "vram_utilization": placement.vram_utilization,
        "is_unified_memory": part.unified,
    }
    layers = placement.offload_layers if part.offload_layers is None else part.offload_layers
    known = {"offload_layers": layers, "total_layers": placement.total_layers}
    claim |= {name: value for name, value in known.items() if value is not None}
    if placement.tensor_split is not None and part is placement.parts[0]:
        claim["tensor_split"] = list(placement.tensor_split)
    if placement.sized_for is not None:
        claim["sized_for"] = dict(placement.sized_for)
    return claim


def distributed_json(placement: Placement) -> dict[str, Any] | None:
    """`distributed_servers`: coordination mode and every subordinate worker; None for one worker."""
    if len(placement.parts) < 2:
        return None
    return {
        "mode": placement.mode,
        "subordinate_workers": [
            {
                "worker_id": p.worker_id,
                "worker_name": p.worker_name,
                "worker_ip": p.worker_ip,
                "worker_advertise_address": p.worker_advertise_address,
                "worker_ifname": p.worker_ifname,
                "total_gpus": p.total_gpus,
                "gpu_type": p.gpu_type,
                "gpu_indexes": list(p.gpu_indexes),
                "gpu_addresses": list(p.gpu_addresses) or None,
                "computed_resource_claim": claim_json(p, placement),
            }
            for p in placement.parts[1:]
        ],
    }


def reasons_json(reasons: Sequence[Reason]) -> str | None:
    return as_json([r.as_json() for r in reasons]) if reasons else None


def commit_arguments(owner: UUID, replica: str, batch: Sequence[Proposal]) -> tuple[Any, ...]:
    """The 40 arguments of `gpustackd_commit` for a batch.

    Raises ValueError where it names an instance twice.
    """
    if len({p.claim.id for p in batch}) < len(batch):
        raise ValueError("a batch holds one proposal per instance")
    heads: list[tuple[Any, ...]] = []
    w_from: list[int] = []
    w_to: list[int] = []
    workers: list[tuple[Any, ...]] = []
    l_from: list[int] = []
    l_to: list[int] = []
    ledger: list[tuple[Any, ...]] = []
    pools: dict[int, str | None] = {}
    for proposal in batch:
        pool = proposal.decision.pool
        if id(pool) not in pools:  # equal demands share one
            pools[id(pool)] = as_json([s.as_json() for s in pool])
        heads.append(_head(proposal, pools[id(pool)]))
        w_from.append(len(workers) + 1)
        l_from.append(len(ledger) + 1)
        instance_id, placement = proposal.claim.id, proposal.decision.placement
        for part, name, gpu_id, version, vram, ram in ledger_rows(placement):
            ledger.append((instance_id, part.worker_id, gpu_id, name, vram, ram, version, part.unified))
        workers.extend(
            (part.worker_id, amount, part.unified, part.worker_version)
            for part, amount in worker_bookings(placement)
        )
        w_to.append(len(workers))
        l_to.append(len(ledger))
    return (
        owner, replica, *_columns(heads, 22), w_from, w_to, *_columns(workers, 4), l_from, l_to,
        *_columns(ledger, 8),
    )  # fmt: skip


def _columns(rows: Sequence[tuple[Any, ...]], width: int) -> Sequence[Sequence[Any]]:
    """Rows as `width` columns."""
    return list(zip(*rows, strict=True)) if rows else [()] * width


def _head(proposal: Proposal, pool: str | None) -> tuple[Any, ...]:
    claim, decision = proposal.claim, proposal.decision
    placement = decision.placement
    main = placement.parts[0]
    warnings = "; ".join(w.text for w in placement.warnings) or None
    return (
        claim.id,
        claim.epoch,
        claim.model_id,
        proposal.model_version,
        placement.check is Check.UNCHANGED,
        placement.over_commit,
        main.worker_id,
        main.worker_name,
        main.worker_ip,
        main.worker_advertise_address,
        main.worker_ifname,
        main.gpu_type,
        as_json(list(main.gpu_indexes) or None),
        as_json(list(main.gpu_addresses) or None),
        as_json(claim_json(main, placement)),
        as_json(distributed_json(placement)),
        warnings,
        claim.attempts,
        pool,
        as_json([dict(c) for c in decision.candidates]),
        reasons_json(placement.warnings),
        proposal.duration_ms,
    )


def results(batch: Sequence[Proposal], exceptions: Sequence[Mapping[str, Any]]) -> list[CommitResult]:
    """An outcome per proposal from the exceptions that the function returned."""
    failed = {
        row["instance_id"]: CommitResult(
            row["instance_id"],
            CommitCode(row["code"]),
            tuple(row["gpu_ids"] or ()),
            tuple(row["worker_ids"] or ()),
        )
        for row in exceptions
    }
    return [failed.get(p.claim.id) or CommitResult(p.claim.id) for p in batch]
