"""The call of `gpustackd_commit`: the one place that knows the order of its arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from gpustackd.domain.bookings import ledger_rows, worker_bookings
from gpustackd.domain.outcome import Check
from gpustackd.ports import CommitCode, CommitResult, Proposal
from gpustackd.store.placement_columns import as_json, claim_json, distributed_json

SQL = "SELECT * FROM gpustackd_commit(" + ", ".join(f"${n}" for n in range(1, 41)) + ")"


def arguments(owner: UUID, replica: str, batch: Sequence[Proposal]) -> tuple[Any, ...]:
    """The 40 arguments for a batch: arrays with one entry a proposal, a worker's row or a ledger row.

    Raises ValueError where the batch names an instance twice.
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
        as_json([w.as_json() for w in placement.warnings] or None),
        proposal.duration_ms,
    )


def results(batch: Sequence[Proposal], rows: Sequence[Mapping[str, Any]]) -> list[CommitResult]:
    """An outcome per proposal from what the function returns: a row for each one that it rejected."""
    rejected = {
        row["instance_id"]: CommitResult(
            row["instance_id"],
            CommitCode(row["code"]),
            tuple(row["gpu_ids"] or ()),
            tuple(row["worker_ids"] or ()),
        )
        for row in rows
    }
    return [rejected.get(p.claim.id) or CommitResult(p.claim.id) for p in batch]
