"""Refusals: instances without a place go back to PENDING with the reason, and wait for a cure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import anyio

from gpustackd.daemon.backoff import Backoff
from gpustackd.daemon.scheduling.claims import Claims
from gpustackd.daemon.scheduling.context import SchedulingContext
from gpustackd.daemon.scheduling.decider import codes, signature
from gpustackd.daemon.scheduling.work_state import WorkItem
from gpustackd.domain.outcome import Cure, NoFit, Reason
from gpustackd.errors import Contended
from gpustackd.ports import Refusal

_CONFLICTS = "every place that was chosen was taken by others or held by an open transaction; retrying"


class RefusedItem(NamedTuple):
    """One refused instance; `took` is the decision's time in milliseconds."""

    item: WorkItem
    outcome: NoFit
    took: float


class Refusals:
    """Writes refusals that say something new, parks the rest as they are. Used by both loops."""

    def __init__(self, context: SchedulingContext, claims: Claims) -> None:
        self._context = context
        self._claims = claims
        self._backoff = Backoff(context.rng)

    async def refuse(self, refused: Sequence[RefusedItem]) -> None:
        """These have no place now. Raise DatabaseUnavailable."""
        changed: list[RefusedItem] = []
        for r in refused:
            if r.item.claim is None and _says_the_same(r.item, r.outcome):
                self._park(r.item, r.outcome, r.item.signature)
            else:
                changed.append(r)
        unclaimed = [r.item for r in changed if r.item.claim is None]
        if unclaimed:
            await self._claims.claim(unclaimed)
        await self._write(
            [(item, self._refusal(item, o, t)) for item, o, t in changed if item.claim is not None]
        )

    async def give_up(self, items: Sequence[WorkItem]) -> None:
        """These conflicted too often; they are tried again after a while. Raise DatabaseUnavailable."""
        batch: list[tuple[WorkItem, Refusal]] = []
        for item in items:
            assert item.claim is not None
            reason = Reason("commit.conflict", "commit", _CONFLICTS, {"tries": item.conflicts})
            outcome = NoFit((reason,), _CONFLICTS, Cure.ANY)
            retry = self._backoff.seconds(0)
            batch.append((item, Refusal(item.claim, outcome, "CONFLICT", retry_in=retry)))
        await self._write(batch)

    def lose(self, item: WorkItem) -> None:
        """The claim is not ours any more: a scan finds the instance again if it still waits."""
        self._context.reporter.lost(item)
        self._context.work.release(item.id)
        self._context.work.drop_row(item.id)
        self._context.queue.done(item.id)

    def _refusal(self, item: WorkItem, outcome: NoFit, took: float) -> Refusal:
        assert item.claim is not None
        retry = self._backoff.seconds(item.attempts - 1) if Cure.TIME & outcome.cures else None
        return Refusal(item.claim, outcome, retry_in=retry, duration_ms=took)

    async def _write(self, batch: Sequence[tuple[WorkItem, Refusal]]) -> None:
        if not batch:
            return
        written = await self._refuse_patiently([refusal for _, refusal in batch])
        for item, refusal in batch:
            if item.id not in written:
                self.lose(item)
                continue
            self._context.work.release(item.id)
            self._context.reporter.unschedulable(item, refusal)
            self._park(item, refusal.outcome, signature(refusal.outcome), refusal.retry_in)

    def _park(
        self, item: WorkItem, outcome: NoFit, signature: str | None, retry_in: float | None = None
    ) -> None:
        self._context.work.block(item.group)
        if retry_in is None and Cure.TIME in outcome.cures:
            retry_in = self._backoff.seconds(item.attempts)
        self._context.work.refused(item, signature, retry_in or 0.0)
        if retry_in is not None:
            self._context.queue.retry(item.id, retry_in, outcome.cures)
        else:
            self._context.queue.park(item.id, item.group, outcome.cures, signature)

    async def _refuse_patiently(self, batch: list[Refusal]) -> set[int]:
        """Retry for as long as others hold the rows: the write is conditional, so it happens once at most."""
        while True:
            try:
                return await self._context.store.refuse(
                    self._context.identity.owner, self._context.identity.name, batch
                )
            except Contended:
                self._context.reporter.contended("refuse")
                await anyio.sleep(self._context.rng.uniform(0.05, 0.5))


def _says_the_same(item: WorkItem, outcome: NoFit) -> bool:
    """Whether the row says this already. Byte counts in the text are brought up to date by rescans alone:
    else each placement would write every waiting row."""
    if item.from_rescan:
        return item.signature == signature(outcome)
    return codes(item.signature) == codes(signature(outcome))
