"""Proposals as the argument arrays of `gpustackd_commit`: the one place that knows their order."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from gpustackd.domain.fleet import Booking
from gpustackd.domain.outcome import Check, Part, Placement, Reason
from gpustackd.ports import CommitCode, CommitResult, Proposal

COMMIT_SQL = "SELECT * FROM gpustackd_commit(" + ", ".join(f"${n}" for n in range(1, 41)) + ")"


def as_json(value: Any) -> str | None:
    """JSON text for a jsonb argument; SQL NULL for None."""
    return None if value is None else json.dumps(value, separators=(",", ":"), default=str)


def claim_json(part: Part, placement: Placement) -> dict[str, Any]:
    """`computed_resource_claim` of one part (contract section 4). Sizes in bytes."""
    claim: dict[str, Any] = {
        "ram": part.ram,
        "vram": {str(i): v for i, v in zip(part.gpu_indexes, part.vram, strict=True)},
        "vram_utilization": placement.vram_utilization,
        "is_unified_memory": part.unified,
    }
    for name in ("offload_layers", "total_layers"):
        if (value := getattr(placement, name)) is not None:
            claim[name] = value
    if placement.tensor_split is not None:
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


def worker_booking(part: Part) -> int | None:
    """Bytes that a part takes from its worker's own row; None where that row is not touched.

    On unified memory VRAM comes out of the worker's one pool. A part without GPUs touches the row even
    with 0 bytes, since the row is what says that the worker is READY.
    """
    if part.unified:
        return part.ram + sum(part.vram)
    if part.ram or not part.gpu_ids:
        return part.ram
    return None


def bookings(instance_id: int, model_id: int, placement: Placement) -> list[Booking]:
    """The ledger rows of one placement."""
    rows: list[Booking] = []
    for n, part in enumerate(placement.parts):
        name = "main" if n == 0 else "subordinate"
        for gpu, vram in zip(part.gpu_ids, part.vram, strict=True):
            rows.append(Booking(instance_id, model_id, part.worker_id, gpu, vram, 0, name))
        if part.ram or not part.gpu_ids:
            rows.append(
                Booking(
                    instance_id, model_id, part.worker_id, None, 0, part.ram, name, occupies=not part.gpu_ids
                )
            )
    return rows


def commit_arguments(owner: UUID, replica: str, batch: Sequence[Proposal]) -> tuple[Any, ...]:
    """The 40 arguments of `gpustackd_commit` for a batch.

    Raises ValueError where it names an instance twice.
    """
    if len({p.claim.id for p in batch}) < len(batch):
        raise ValueError("a batch holds one proposal per instance")
    heads: list[list[Any]] = [[] for _ in range(22)]
    w_from: list[int] = []
    w_to: list[int] = []
    workers: list[list[Any]] = [[] for _ in range(4)]
    l_from: list[int] = []
    l_to: list[int] = []
    ledger: list[list[Any]] = [[] for _ in range(8)]
    for proposal in batch:
        placement = proposal.decision.placement
        for column, value in zip(heads, _head(proposal), strict=True):
            column.append(value)
        w_from.append(len(workers[0]) + 1)
        l_from.append(len(ledger[0]) + 1)
        for n, part in enumerate(placement.parts):
            _ledger_rows(ledger, proposal.claim.id, part, "main" if n == 0 else "subordinate")
            if (amount := worker_booking(part)) is not None:
                row = (part.worker_id, amount, part.unified, part.worker_version)
                for column, value in zip(workers, row, strict=True):
                    column.append(value)
        w_to.append(len(workers[0]))
        l_to.append(len(ledger[0]))
    return (owner, replica, *heads, w_from, w_to, *workers, l_from, l_to, *ledger)


def _head(proposal: Proposal) -> tuple[Any, ...]:
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
        as_json([s.as_json() for s in decision.pool]),
        as_json([dict(c) for c in decision.candidates]),
        reasons_json(placement.warnings),
        proposal.duration_ms,
    )


def _ledger_rows(ledger: list[list[Any]], instance_id: int, part: Part, name: str) -> None:
    rows: list[tuple[Any, ...]] = [
        (instance_id, part.worker_id, gpu, name, vram, 0, version, part.unified)
        for gpu, vram, version in zip(part.gpu_ids, part.vram, part.gpu_versions, strict=True)
    ]
    if part.ram or not part.gpu_ids:
        rows.append((instance_id, part.worker_id, None, name, 0, part.ram, 0, part.unified))
    for row in rows:
        for column, value in zip(ledger, row, strict=True):
            column.append(value)


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
