"""The commit loop: decided placements are written in batches; what conflicts is decided anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import anyio
from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskStatus
from anyio.streams.memory import MemoryObjectReceiveStream

from gpustackd.daemon.scheduling.context import SchedulingContext
from gpustackd.daemon.scheduling.decide_loop import DecidedPlacement
from gpustackd.daemon.scheduling.refusals import Refusals
from gpustackd.daemon.scheduling.stale_decisions import conflicting_places, still_fits
from gpustackd.daemon.scheduling.work_state import WorkItem
from gpustackd.errors import Contended, DatabaseUnavailable
from gpustackd.ports import CommitCode, CommitResult, Proposal

_CONFLICTS_MAX = 5
"""Decisions made anew after a conflict before the instance goes back to the queue."""
_REFRESH_EVERY = 0.05
"""Seconds between looks at what others changed, while nobody seems to change anything."""


class CommitLoop:
    """Takes the batches of the decide loop, in their order. Every outcome has its way back: placed, decided
    anew, given up for a while, or lost to another replica."""

    name = "commit loop"

    def __init__(
        self,
        context: SchedulingContext,
        *,
        refusals: Refusals,
        batches: MemoryObjectReceiveStream[list[DecidedPlacement]],
    ) -> None:
        self._context = context
        self._refusals = refusals
        self._batches = batches

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Until cancelled."""
        task_status.started()
        async with self._batches:
            async for batch in self._batches:
                try:
                    await self._commit(batch)
                finally:
                    self._context.work.end()

    async def _commit(self, batch: list[DecidedPlacement]) -> None:
        batch = self._without_stale(batch)
        if not batch:
            return
        by_id = {d.item.id: d for d in batch}
        started = self._context.clock()
        proposals = [d.proposal for d in batch]
        async with self._context.fleet_feed.lock:
            results = await self._write(proposals)
            await self._context.fleet_feed.committed(results)
        self._context.reporter.committed(len(batch), self._context.clock() - started)
        again: list[WorkItem] = []
        conflicts: list[tuple[Proposal, CommitResult]] = []
        for result in results:
            decided = by_id[result.instance_id]
            if result.code is None:
                self._scheduled(decided)
            elif result.code is CommitCode.LOST:
                self._refusals.lose(decided.item)
            elif result.code is CommitCode.MODEL_CHANGED:
                self._context.catalog.forget([decided.item.model_id])
                again.append(decided.item)
            else:
                self._conflict(decided, result)
                conflicts.append((decided.proposal, result))
                again.append(decided.item)
        await self._refresh(conflicts)
        if again:
            await self._decide_anew(again)

    def _without_stale(self, batch: list[DecidedPlacement]) -> list[DecidedPlacement]:
        """What still has a chance; the rest is decided anew."""
        fleet, generation = self._context.fleet_feed.fleet, self._context.fleet_feed.generation
        fresh: list[DecidedPlacement] = []
        stale: list[WorkItem] = []
        for decided in batch:
            if decided.generation == generation or still_fits(fleet, decided.proposal.decision.placement):
                fresh.append(decided)
            else:
                fleet.forget(decided.item.id)
                stale.append(decided.item)
        if stale:
            self._context.reporter.stale(stale)
            self._context.work.push_front(stale)
        return fresh

    # -- writing --------------------------------------------------------------------------------------

    async def _write(self, proposals: list[Proposal]) -> Sequence[CommitResult]:
        try:
            return await self._context.store.commit(
                self._context.identity.owner, self._context.identity.name, proposals
            )
        except Contended:
            return [CommitResult(p.claim.id, CommitCode.CONFLICT) for p in proposals]
        except DatabaseUnavailable:
            raise
        except Exception as error:
            self._context.reporter.unexpected("commit", error, instance=proposals[0].claim.name)
            return await self._write_one_by_one(proposals)

    async def _write_one_by_one(self, proposals: list[Proposal]) -> list[CommitResult]:
        """One proposal made the statement fail: the others are not to suffer."""
        results: list[CommitResult] = []
        for proposal in proposals:
            try:
                results.extend(
                    await self._context.store.commit(
                        self._context.identity.owner, self._context.identity.name, [proposal]
                    )
                )
            except DatabaseUnavailable:
                raise
            except Exception as error:
                self._context.reporter.unexpected("commit", error, instance=proposal.claim.name)
                results.append(CommitResult(proposal.claim.id, CommitCode.CONFLICT))
        return results

    # -- outcomes -------------------------------------------------------------------------------------

    def _scheduled(self, decided: DecidedPlacement) -> None:
        item = decided.item
        self._context.work.release(item.id)
        self._context.work.drop_row(item.id)
        self._context.reporter.scheduled(item, decided.proposal)
        self._context.queue.done(item.id)
        if self._context.work.is_unblocked(item.group):
            self._context.queue.activate(item.group, 1)

    def _conflict(self, decided: DecidedPlacement, result: CommitResult) -> None:
        item, proposal = decided.item, decided.proposal
        self._context.reporter.conflict(item, proposal, result)
        if item.conflicts:  # not the first one, so not just another replica's luck
            item.avoid += conflicting_places(proposal.decision.placement, result)

    async def _decide_anew(self, items: list[WorkItem]) -> None:
        await self._context.catalog.load({item.model_id for item in items})
        for item in items:
            item.conflicts += 1
        if given_up := [item for item in items if item.conflicts > _CONFLICTS_MAX]:
            await self._refusals.give_up(given_up)
        again = [item for item in items if item.conflicts <= _CONFLICTS_MAX]
        most = max((item.conflicts for item in again), default=0)
        if most > 1:
            await anyio.sleep(self._context.rng.uniform(0, 0.01) * most)
        self._context.work.push_front(again)

    # -- the fleet after it ---------------------------------------------------------------------------

    async def _refresh(self, conflicts: Sequence[tuple[Proposal, CommitResult]]) -> None:
        """See what others did: at once after a conflict or while others are busy, else now and then."""
        feed = self._context.fleet_feed
        if not conflicts and not feed.changed_by_others and feed.age() < _REFRESH_EVERY:
            return
        try:
            await feed.refresh()
            # A row that conflicted and yet is as the decision saw it is gone, or our view of it is wrong.
            if any(self._version(g) == v for p, r in conflicts for g, v in _decided_on(p) if g in r.gpu_ids):
                await feed.load()
        except Contended:
            self._context.reporter.contended("feed")

    def _version(self, gpu_id: int) -> int | None:
        place = self._context.fleet_feed.fleet.slot.get(gpu_id)
        return None if place is None else int(self._context.fleet_feed.fleet.gpu_version[place])


def _decided_on(proposal: Proposal) -> Iterator[tuple[int, int]]:
    """GPUs of a placement and their versions when it was decided."""
    for part in proposal.decision.placement.parts:
        yield from zip(part.gpu_ids, part.gpu_versions, strict=True)
