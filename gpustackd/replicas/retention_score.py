"""The retention score: what each replica is worth keeping, as a weighted sum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpustackd.domain.lifecycle import InstanceState, WorkerState
from gpustackd.replicas.placement_score import PlacementScores
from gpustackd.replicas.replica import Replica

OPPOSITE: Mapping[str, str] = {"prefill": "decode", "decode": "prefill"}

_UNREADABLE = (ArithmeticError, LookupError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class RetentionWeights:
    """Maximum of each part; 0 or less leaves the part out. `total` scales the sum to that maximum."""

    status: float = 100.0
    offload: float = 10.0
    placement: float = 1.0
    pairing: float = 20.0
    total: float | None = None


def status_score(replica: Replica, maximum: float) -> float:
    """0 without a worker that could serve, the maximum where it serves, half of it in between."""
    if (
        not replica.placed
        or replica.worker_state is WorkerState.NOT_READY
        or replica.state is InstanceState.ERROR
    ):
        return 0.0
    return maximum if replica.healthy else maximum / 2


def offload_score(replica: Replica, maximum: float) -> float:
    """The maximum times the share of layers on GPUs; 0 where that is unknown."""
    total, offloaded = replica.total_layers, replica.offload_layers
    if not total or offloaded is None:
        return 0.0
    return maximum * offloaded / total


def pairing_score(
    candidates: Sequence[Replica], peers: Iterable[Replica], maximum: float
) -> Callable[[Replica], float]:
    """A function that scores how close a replica is to members of the opposite role of its group.

    Members count once on each worker they span; draining members do not count. The worker with most such
    members gives the maximum.
    """
    groups = {c.group_id for c in candidates}
    if len(groups) != 1 or None in groups:
        return lambda _: 0.0
    near: dict[int, int] = {}
    opposite = {OPPOSITE.get(c.role or "") for c in candidates} - {None}
    for peer in peers:
        if peer.role in opposite and peer.group_id in groups and peer.draining_for is None:
            for worker_id in peer.workers:
                near[worker_id] = near.get(worker_id, 0) + 1
    most = max(near.values(), default=0)

    def value(replica: Replica) -> float:
        workers = replica.workers
        if not most or not workers:
            return 0.0
        return maximum * sum(near.get(w, 0) for w in workers) / len(workers) / most

    return value


def retention_scores(
    candidates: Sequence[Replica],
    weights: RetentionWeights,
    places: PlacementScores,
    peers: Sequence[Replica] | None = None,
) -> dict[int, float]:
    """Score of each candidate by id; the lowest goes first. A part that cannot read a row scores it 0."""
    parts: list[tuple[float, Callable[[Replica], float]]] = [
        (weights.status, lambda r: status_score(r, weights.status)),
        (weights.offload, lambda r: offload_score(r, weights.offload)),
        (weights.placement, places.score),
    ]
    if peers is not None:
        parts.append((weights.pairing, pairing_score(candidates, peers, weights.pairing)))
    used = [(maximum, part) for maximum, part in parts if maximum > 0]
    factor = 1.0
    if weights.total is not None and used:
        factor = weights.total / sum(maximum for maximum, _ in used)
    return {c.id: factor * sum(_safely(part, c) for _, part in used) for c in candidates}


def _safely(part: Callable[[Replica], float], replica: Replica) -> float:
    try:
        value = part(replica)
    except _UNREADABLE:
        return 0.0
    return value if value == value else 0.0  # NaN counts as 0
