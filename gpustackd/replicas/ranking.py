"""The order in which replicas are deleted when there are too many."""

from __future__ import annotations

from collections.abc import Sequence

from gpustackd.domain.lifecycle import WorkerState
from gpustackd.replicas.placement_score import PlacementScores
from gpustackd.replicas.replica import Replica
from gpustackd.replicas.retention_score import RetentionWeights, retention_scores

Key = tuple[float, ...]


def deletion_order(
    candidates: Sequence[Replica],
    weights: RetentionWeights,
    places: PlacementScores,
    peers: Sequence[Replica] | None = None,
) -> list[Replica]:
    """The candidates, the one to delete first in front. `peers` are all members of their group.

    Of equal scores, the one goes first that loses least: not taken by its worker, on a worker that takes
    nothing new, placed before the model's last edit, less far towards serving, youngest. Raises ValueError
    where candidates have several roles, since they are not replicas of each other.
    """
    if len({c.role for c in candidates}) > 1:
        raise ValueError("replicas of several roles cannot be ranked against each other")
    values = retention_scores(candidates, weights, places, peers)
    return sorted(candidates, key=lambda c: (values[c.id], *_tie_break(c)))


def _tie_break(replica: Replica) -> Key:
    return (
        replica.progress > 0,
        replica.worker_state is WorkerState.READY,
        not replica.stale,
        replica.progress,
        -replica.created,
        -replica.id,
    )
