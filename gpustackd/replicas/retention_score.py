"""The instance chain: what each replica is worth keeping, as a weighted sum."""

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
    """Maximum of each scorer; 0 or less takes it out. `total` scales the sum to that maximum."""

    status: float = 100.0
    offload: float = 10.0
    placement: float = 1.0
    pairing: float = 20.0
    total: float | None = None


def status(replica: Replica, maximum: float) -> float:
    """Nothing without a worker that could serve, half on the way there, all where it serves."""
    if (
        not replica.placed
        or replica.worker_state is WorkerState.NOT_READY
        or replica.state is InstanceState.ERROR
    ):
        return 0.0
    return maximum if replica.healthy else maximum / 2


def offload(replica: Replica, maximum: float) -> float:
    """The share of layers on GPUs; nothing where it is not known."""
    total, offloaded = replica.total_layers, replica.offload_layers
    if not total or offloaded is None:
        return 0.0
    return maximum * offloaded / total


def pairing(
    candidates: Sequence[Replica], peers: Iterable[Replica], maximum: float
) -> Callable[[Replica], float]:
    """How near replicas are to members of the opposite role of their group.

    Draining members do not count: they will be gone. A member counts once on each machine that it spans.
    """
    groups = {c.group_id for c in candidates}
    if len(groups) != 1 or None in groups:
        return lambda _: 0.0
    near: dict[int, int] = {}
    opposite = {OPPOSITE.get(c.role or "") for c in candidates} - {None}
    for peer in peers:
        if peer.role in opposite and peer.group_id in groups and peer.draining_for is None:
            for machine in peer.machines:
                near[machine] = near.get(machine, 0) + 1
    most = max(near.values(), default=0)

    def value(replica: Replica) -> float:
        machines = replica.machines
        if not most or not machines:
            return 0.0
        return maximum * sum(near.get(m, 0) for m in machines) / len(machines) / most

    return value


def scores(
    candidates: Sequence[Replica],
    weights: RetentionWeights,
    places: PlacementScores,
    peers: Sequence[Replica] | None = None,
) -> dict[int, float]:
    """What each candidate is worth, by id; the least goes first. A scorer that cannot read a row gives it
    nothing, and nobody else suffers."""
    parts: list[tuple[float, Callable[[Replica], float]]] = [
        (weights.status, lambda r: status(r, weights.status)),
        (weights.offload, lambda r: offload(r, weights.offload)),
        (weights.placement, places.score),
    ]
    if peers is not None:
        parts.append((weights.pairing, pairing(candidates, peers, weights.pairing)))
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
    return value if value == value else 0.0  # not-a-number is nothing
