"""The order in which replicas go when there are too many."""

from __future__ import annotations

from collections.abc import Sequence

from gpustackd.domain.lifecycle import WorkerState
from gpustackd.replicas.placement_score import PlacementScores
from gpustackd.replicas.replica import Replica
from gpustackd.replicas.retention_score import RetentionWeights, scores

Key = tuple[float, ...]


def ranked(
    candidates: Sequence[Replica],
    weights: RetentionWeights,
    places: PlacementScores,
    peers: Sequence[Replica] | None = None,
) -> list[Replica]:
    """The candidates, the one to delete first in front. `peers` are all members of their generation.

    Equal scores go by what is lost least: never started, on a worker that takes nothing new, of an old spec,
    not yet serving, youngest. Raise ValueError where candidates have more than one role: they are not
    replicas of each other.
    """
    if len({c.role for c in candidates}) > 1:
        raise ValueError("replicas of several roles cannot be ranked against each other")
    worth = scores(candidates, weights, places, peers)
    return sorted(candidates, key=lambda c: (worth[c.id], *finer(c)))


def finer(replica: Replica) -> Key:
    """The order within equal scores, least worth keeping first."""
    return (
        replica.progress > 0,
        replica.worker_state is WorkerState.READY,
        not replica.stale,
        replica.progress,
        -replica.created,
        -replica.id,
    )
