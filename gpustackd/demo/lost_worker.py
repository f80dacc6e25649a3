"""A worker falls silent: what it had is placed elsewhere, and it is taken back at its next heartbeat."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpustackd.demo.narration import Narration

if TYPE_CHECKING:
    from gpustackd.store.postgres.inventory import Connection

PATIENCE = 30.0
INTERVAL, GRACE, RESCHEDULE = 0.5, 1.5, 3.0
SETTINGS = {
    "GPUSTACK_WORKER_HEARTBEAT_INTERVAL": str(INTERVAL),
    "GPUSTACK_WORKER_HEARTBEAT_GRACE_PERIOD": str(GRACE),
    "GPUSTACK_MODEL_INSTANCE_RESCHEDULE_GRACE_PERIOD": str(RESCHEDULE),
}
"""A hundredth of the defaults (30, 150 and 300 s), so that one can watch."""


async def lose_a_worker(told: Narration, connection: Connection) -> None:
    """The one with the least on it beats once, then no more, then again."""
    from gpustackd.demo import watch_lost

    told.say(f"\nA worker falls silent (NOT_READY after {GRACE:g} s, given up after {RESCHEDULE:g} s here)")
    lost = await watch_lost.lose_a_worker(connection, PATIENCE)
    if lost is None:
        told.finding(False, "a worker has something on it")
        return
    what = watch_lost.in_words(lost.instances)
    told.finding(
        lost.not_ready is not None and lost.unreachable > 0,
        f"{lost.worker}, which runs {what}: NOT_READY {lost.not_ready or 0:.1f} s after its last heartbeat,"
        " what it runs UNREACHABLE",
    )
    told.finding(
        lost.elsewhere is not None,
        f"{lost.elsewhere or 0:.1f} s after it: {watch_lost.in_words(lost.places) or 'nothing was moved'}",
    )
    told.finding(
        lost.back is not None, f"{lost.worker} beats again: READY {(lost.back or 0) * 1000:.0f} ms later"
    )
