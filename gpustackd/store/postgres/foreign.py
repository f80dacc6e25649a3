"""Memory on cards that processes of others hold: what a usage sample shows beyond our own bookings.

Of the memory in use, `max(0, used - what our instances that hold memory booked there)` is foreign; the
worker's reserve is there for just that, so only what lies beyond it is told. An instance holds memory from
STARTING on: one that is SCHEDULED or downloads has booked what it does not use yet, and its booking must not
hide others' use. On unified memory the sample shows RAM too, and RAM booked counts as ours.
"""

from __future__ import annotations

from gpustackd.domain.lifecycle import InstanceState

HOLDING = (InstanceState.STARTING, InstanceState.RUNNING, InstanceState.UNREACHABLE)
"""States in which an instance's process may hold the memory that is booked for it."""

FOREIGN = f"""
WITH own AS (
    SELECT c.worker_id, c.gpu_device_id, sum(c.vram)::bigint AS vram, sum(c.ram)::bigint AS ram
      FROM instance_claims c JOIN model_instances i ON i.id = c.instance_id
     WHERE i.state IN ({", ".join(f"'{s.value}'" for s in HOLDING)}) GROUP BY 1, 2),
host AS (SELECT worker_id, sum(ram)::bigint AS ram FROM own GROUP BY 1)
SELECT id, beyond FROM (
    SELECT g.id, greatest(g.vram_used - coalesce(o.vram, 0)
                          - CASE WHEN g.unified THEN coalesce(h.ram, 0) ELSE 0 END, 0)
                 - g.worker_reserve AS beyond
      FROM gpu_devices g
      LEFT JOIN own o ON o.gpu_device_id = g.id
      LEFT JOIN host h ON h.worker_id = g.worker_id
     WHERE g.vram_used > g.worker_reserve
       AND g.vram_used_at > clock_timestamp() - make_interval(secs => $1)) f
 WHERE beyond > 0"""
"""(GPU id, bytes beyond the reserve) of samples no older than $1 seconds by the database's clock."""
