"""The rules that hold in every committed state, each as a query for what breaks it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class AuditRule(NamedTuple):
    """One check. `sql` returns (what, how) for each row that breaks it; several checks may share a number."""

    number: int
    name: str
    sql: str


TITLES: Mapping[int, str] = {
    1: "VRAM claims and reserve fit each GPU",
    2: "RAM claims and reserves fit each worker",
    3: "stored allocation equals the sum of claims",
    4: "placed rows hold a place and a claim, waiting rows hold nothing",
    5: "a group is placed whole or not at all",
    6: "only an ANALYZING row has a lease",
    7: "one placement per instance and epoch",
}
"""What must hold, by the number that `gpustackd audit` prints."""

_SUMS = """WITH per_gpu AS (
    SELECT gpu_device_id, sum(vram) AS vram FROM instance_claims WHERE gpu_device_id IS NOT NULL GROUP BY 1),
per_worker AS (
    SELECT worker_id, sum(ram) AS ram, sum(vram) AS vram FROM instance_claims GROUP BY 1)"""

_LISTED = """WITH parts AS (
    SELECT i.id, i.worker_id, i.gpu_type, i.gpu_indexes FROM model_instances i WHERE i.worker_id IS NOT NULL
    UNION ALL
    SELECT i.id, CASE WHEN s.value ->> 'worker_id' ~ '^[0-9]{1,18}$' THEN (s.value ->> 'worker_id')::bigint END,
           s.value ->> 'gpu_type', s.value -> 'gpu_indexes'
      FROM model_instances i, jsonb_array_elements(
           CASE jsonb_typeof(i.distributed_servers -> 'subordinate_workers')
                WHEN 'array' THEN i.distributed_servers -> 'subordinate_workers' ELSE '[]' END) s
     WHERE i.worker_id IS NOT NULL),
listed AS (
    SELECT p.id, p.worker_id, p.gpu_type, x.value AS index
      FROM parts p, jsonb_array_elements(
           CASE jsonb_typeof(p.gpu_indexes) WHEN 'array' THEN p.gpu_indexes ELSE '[]' END) x),
booked AS (
    SELECT c.instance_id AS id, g.worker_id, g.type, to_jsonb(g.index) AS index
      FROM instance_claims c JOIN gpu_devices g ON g.id = c.gpu_device_id)"""

RULES: tuple[AuditRule, ...] = (
    AuditRule(
        1,
        "gpu-fits",
        _SUMS
        + """
SELECT 'gpu ' || w.name || ':' || g.type || ':' || g.index AS what,
       format('claims %s + reserve %s > total %s', c.vram, w.vram_reserved, coalesce(g.vram_total::text, 'unknown')) AS how
  FROM gpu_devices g JOIN workers w ON w.id = g.worker_id JOIN per_gpu c ON c.gpu_device_id = g.id
 WHERE c.vram > 0 AND NOT g.over_committed
   AND (g.vram_total IS NULL OR c.vram + w.vram_reserved > g.vram_total)""",
    ),
    AuditRule(
        2,
        "worker-fits",
        _SUMS
        + """
SELECT 'worker ' || w.name AS what,
       format('claims %s + reserves > total %s', c.ram + CASE WHEN w.unified_memory THEN c.vram ELSE 0 END,
              coalesce(w.ram_total::text, 'unknown')) AS how
  FROM workers w JOIN per_worker c ON c.worker_id = w.id
 WHERE NOT w.over_committed
   AND c.ram + CASE WHEN w.unified_memory THEN c.vram ELSE 0 END > 0
   AND (w.ram_total IS NULL
        OR c.ram + w.ram_reserved + CASE WHEN w.unified_memory THEN c.vram + w.vram_reserved ELSE 0 END
           > w.ram_total)""",
    ),
    AuditRule(
        3,
        "gpu-allocation",
        _SUMS
        + """
SELECT 'gpu ' || w.name || ':' || g.type || ':' || g.index AS what,
       format('allocated %s, claims %s', g.vram_allocated, coalesce(c.vram, 0)) AS how
  FROM gpu_devices g JOIN workers w ON w.id = g.worker_id LEFT JOIN per_gpu c ON c.gpu_device_id = g.id
 WHERE g.vram_allocated <> coalesce(c.vram, 0)""",
    ),
    AuditRule(
        3,
        "worker-allocation",
        _SUMS
        + """
SELECT 'worker ' || w.name AS what,
       format('allocated %s, claims %s', w.ram_allocated,
              coalesce(c.ram, 0) + CASE WHEN w.unified_memory THEN coalesce(c.vram, 0) ELSE 0 END) AS how
  FROM workers w LEFT JOIN per_worker c ON c.worker_id = w.id
 WHERE w.ram_allocated <> coalesce(c.ram, 0) + CASE WHEN w.unified_memory THEN coalesce(c.vram, 0) ELSE 0 END""",
    ),
    AuditRule(
        3,
        "gpu-capacity",
        """
SELECT 'gpu ' || w.name || ':' || g.type || ':' || g.index AS what, 'capacity, openness or reserve disagrees with its worker' AS how
  FROM gpu_devices g JOIN workers w ON w.id = g.worker_id
 WHERE g.capacity IS DISTINCT FROM
       CASE WHEN g.vram_total IS NULL THEN NULL ELSE greatest(g.vram_total - w.vram_reserved, 0) END
    OR g.open <> (w.state = 'READY' AND g.schedulable)
    OR g.unified <> w.unified_memory""",
    ),
    AuditRule(
        3,
        "worker-capacity",
        """
SELECT 'worker ' || w.name AS what, 'capacity disagrees with its total and reserves' AS how
  FROM workers w
 WHERE w.ram_capacity IS DISTINCT FROM
       CASE WHEN w.ram_total IS NULL THEN NULL
            ELSE greatest(w.ram_total - w.ram_reserved
                          - CASE WHEN w.unified_memory THEN w.vram_reserved ELSE 0 END, 0) END""",
    ),
    AuditRule(
        3,
        "claims-exist",
        """
SELECT 'claim ' || c.id AS what, 'of a worker, GPU or instance that does not exist' AS how
  FROM instance_claims c
 WHERE NOT EXISTS (SELECT FROM workers w WHERE w.id = c.worker_id)
    OR NOT EXISTS (SELECT FROM model_instances i WHERE i.id = c.instance_id)
    OR (c.gpu_device_id IS NOT NULL
        AND NOT EXISTS (SELECT FROM gpu_devices g WHERE g.id = c.gpu_device_id AND g.worker_id = c.worker_id))""",
    ),
    AuditRule(
        4,
        "placed-is-complete",
        """
SELECT 'instance ' || i.name AS what, i.state || ' without worker, claim or ledger row' AS how
  FROM model_instances i
 WHERE i.state NOT IN ('PENDING', 'ANALYZING', 'ERROR')
   AND (i.worker_id IS NULL OR i.computed_resource_claim IS NULL
        OR NOT EXISTS (SELECT FROM workers w WHERE w.id = i.worker_id)
        OR NOT EXISTS (SELECT FROM instance_claims c WHERE c.instance_id = i.id AND c.worker_id = i.worker_id))""",
    ),
    AuditRule(
        4,
        "waiting-holds-nothing",
        """
SELECT 'instance ' || i.name AS what, i.state || ' with a worker, a claim or ledger rows' AS how
  FROM model_instances i
 WHERE i.state IN ('PENDING', 'ANALYZING')
   AND (i.worker_id IS NOT NULL OR i.computed_resource_claim IS NOT NULL OR i.gpu_indexes IS NOT NULL
        OR EXISTS (SELECT FROM instance_claims c WHERE c.instance_id = i.id))""",
    ),
    AuditRule(
        4,
        "error-holds-all-or-nothing",
        """
SELECT 'instance ' || i.name AS what, 'ERROR with half a placement' AS how
  FROM model_instances i
 WHERE i.state = 'ERROR'
   AND ((i.worker_id IS NULL) <> (i.computed_resource_claim IS NULL)
        OR (i.worker_id IS NULL) = EXISTS (SELECT FROM instance_claims c WHERE c.instance_id = i.id))""",
    ),
    AuditRule(
        4,
        "indexes-unique",
        _LISTED
        + """
SELECT 'instance ' || i.name AS what, format('GPU index %s twice on worker %s', l.index, l.worker_id) AS how
  FROM listed l JOIN model_instances i ON i.id = l.id
 GROUP BY i.name, l.id, l.worker_id, l.gpu_type, l.index HAVING count(*) > 1""",
    ),
    AuditRule(
        4,
        "indexes-exist",
        _LISTED
        + """
SELECT 'instance ' || i.name AS what, format('GPU index %s does not exist on worker %s', l.index, l.worker_id) AS how
  FROM listed l JOIN model_instances i ON i.id = l.id
 WHERE NOT EXISTS (SELECT FROM gpu_devices g
                    WHERE g.worker_id = l.worker_id AND g.type = l.gpu_type AND to_jsonb(g.index) = l.index)""",
    ),
    AuditRule(
        4,
        "indexes-match-ledger",
        _LISTED
        + """
SELECT 'instance ' || i.name AS what, 'GPU indexes and ledger disagree' AS how
  FROM model_instances i
 WHERE i.id IN (SELECT x.id FROM (SELECT * FROM listed EXCEPT SELECT * FROM booked) x)
    OR i.worker_id IS NOT NULL
       AND i.id IN (SELECT x.id FROM (SELECT * FROM booked EXCEPT SELECT * FROM listed) x)""",
    ),
    AuditRule(
        5,
        "group-whole",
        """
SELECT 'group ' || group_id AS what,
       format('%s of %s members placed', count(*) FILTER (WHERE worker_id IS NOT NULL), max(group_size)) AS how
  FROM model_instances
 WHERE group_id IS NOT NULL AND group_size IS NOT NULL AND role IS DISTINCT FROM 'router'
   AND state IN ('PENDING', 'ANALYZING', 'SCHEDULED')
 GROUP BY group_id
HAVING count(*) FILTER (WHERE worker_id IS NOT NULL) > 0 AND count(*) FILTER (WHERE worker_id IS NULL) > 0""",
    ),
    AuditRule(
        6,
        "lease-while-analyzing",
        """
SELECT 'instance ' || name AS what, 'state ' || state || ' and lease disagree' AS how
  FROM model_instances
 WHERE (state = 'ANALYZING') <> (lease_owner IS NOT NULL AND lease_until IS NOT NULL)""",
    ),
    AuditRule(
        7,
        "placed-once",
        """
SELECT 'instance ' || instance_id AS what, format('epoch %s placed %s times', placement_epoch, count(*)) AS how
  FROM scheduling_decisions WHERE outcome = 'PLACED'
 GROUP BY instance_id, placement_epoch HAVING count(*) > 1""",
    ),
)
