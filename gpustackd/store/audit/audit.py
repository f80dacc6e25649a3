"""Check every rule from the tables, in one snapshot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpustackd.store.audit.rules import RULES

_COUNTS = (
    "SELECT (SELECT count(*) FROM workers) AS workers, (SELECT count(*) FROM gpu_devices) AS gpus,"
    " (SELECT count(*) FROM model_instances) AS instances,"
    " (SELECT count(*) FROM instance_claims) AS claims,"
    " (SELECT count(*) FROM gpu_devices WHERE over_committed)"
    " + (SELECT count(*) FROM workers WHERE over_committed) AS over_committed"
)


@dataclass(frozen=True, slots=True)
class Breach:
    """One row that breaks a rule: the rule's number, which row, and how."""

    rule: int
    what: str
    how: str


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What `gpustackd audit` prints: breaches, and the number of rows looked at by kind."""

    breaches: tuple[Breach, ...]
    counts: dict[str, int]

    @property
    def clean(self) -> bool:
        """Whether every rule holds."""
        return not self.breaches


async def audit(connection: Any, limit: int = 1000) -> AuditReport:
    """Check all rules on an asyncpg connection, in one REPEATABLE READ, READ ONLY transaction.

    At most `limit` breaches of each check.
    """
    breaches: list[Breach] = []
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        for rule in RULES:
            rows = await connection.fetch(f"SELECT * FROM ({rule.sql}) r LIMIT {int(limit)}")
            breaches.extend(Breach(rule.number, r["what"], r["how"]) for r in rows)
        counts = await connection.fetchrow(_COUNTS)
    return AuditReport(tuple(breaches), dict(counts))
