"""Scheduling: ready work is decided in memory, committed in batches, and every outcome has its way back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from uuid import UUID

import anyio
import anyio.lowlevel
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from gpustackd.daemon.queue.instance_queue import InstanceQueue
from gpustackd.daemon.scheduling.analysis import Analysis
from gpustackd.daemon.scheduling.backoff import Backoff
from gpustackd.daemon.scheduling.decider import Decider, codes, signature
from gpustackd.daemon.scheduling.fleet_feed import FleetFeed
from gpustackd.daemon.scheduling.model_catalog import ModelCatalog
from gpustackd.daemon.scheduling.stale_decisions import clashing_places, still_fits
from gpustackd.daemon.scheduling.work_state import Work, WorkState
from gpustackd.daemon.surface.reporter import Reporter
from gpustackd.domain.demand import Demand
from gpustackd.domain.outcome import Cure, NoFit, Placed, Reason
from gpustackd.domain.placement_hints import with_claim_raise
from gpustackd.errors import Contended, DatabaseUnavailable
from gpustackd.ports import CommitCode, CommitResult, Proposal, Refusal, Store

_BATCH = 64
_CLASHES_MOST = 5
"""Decisions made anew after a conflict before the instance goes back to the queue (design section 2)."""
_FEED_EVERY = 0.05
"""Seconds between looks at what others changed, while nobody seems to change anything."""


@dataclass(slots=True)
class _Planned:
    work: Work
    proposal: Proposal
    news: int
    """Of the view, when the decision began."""


class Scheduling:
    """Two loops: `decide` makes batches, `commit` writes them; at most one batch waits between them."""

    def __init__(
        self,
        *,
        owner: UUID,
        replica: str,
        store: Store,
        queue: InstanceQueue,
        desk: WorkState,
        view: FleetFeed,
        catalogue: ModelCatalog,
        judge: Decider,
        analysis: Analysis,
        reports: Reporter,
        beat: Callable[[], None],
        clock: Callable[[], float],
        chance: random.Random,
    ) -> None:
        self._owner = owner
        self._replica = replica
        self._store = store
        self._queue = queue
        self._desk = desk
        self._view = view
        self._catalogue = catalogue
        self._judge = judge
        self._analysis = analysis
        self._reports = reports
        self._beat = beat
        self._clock = clock
        self._chance = chance
        self._backoff = Backoff(chance)
        self._fed = 0.0
        self._under_way = 0
        self._idle = anyio.Event()
        streams: tuple[MemoryObjectSendStream[list[_Planned]], MemoryObjectReceiveStream[list[_Planned]]]
        streams = anyio.create_memory_object_stream(1)
        self._planned, self._to_commit = streams

    # -- deciding ---------------------------------------------------------------------------------------

    async def decide(self) -> None:
        """Until cancelled. Its turns are the sign of life of the daemon."""
        while True:
            self._beat()
            self._rest()
            work = await self._desk.take(_BATCH, wait=1.0)
            if work:
                self._under_way += 1
                try:
                    await self._look_up()
                    await self._round(work)
                finally:
                    self._under_way -= 1

    async def _look_up(self) -> None:
        """See what other replicas did while this one was idle: commits notify nobody, and what fits still may
        not be the best place any more."""
        if self._under_way == 1:
            self._fed = 0.0
            await self._feed(())

    async def _round(self, work: list[Work]) -> None:
        placed: list[tuple[Work, Placed, float, int]] = []
        refused: list[tuple[Work, NoFit, float]] = []
        unread: list[Work] = []
        fleet, news = self._view.fleet, self._view.news
        started = self._clock()
        for n, item in enumerate(work, 1):
            demand = self._catalogue.demand(item.model_id)
            if demand is None and item.claim is None:
                demand = self._catalogue.last(item.model_id)
            if demand is None:
                unread.append(item)  # edited meanwhile, or the facts fell out of the cache: read again
                continue
            if isinstance(demand, Demand):
                demand = with_claim_raise(demand, item.hints.claim_raise)
            item.group = self._judge.group(demand) if isinstance(demand, Demand) else ("model", item.model_id)
            if isinstance(demand, NoFit):
                refused.append((item, demand, 0.0))
                continue
            # After a clash equal places are ranked anew: the one that failed may be held by somebody's open
            # transaction, of which no figure tells.
            name = f"{item.name} {item.clashes}" if item.clashes else item.name
            shunned = item.shunned if item.clashes >= self._judge.patience(demand) else ()
            avoid = (*item.hints.avoid, *shunned)
            outcome, took = self._judge.decide(demand, item.id, name, avoid)
            if isinstance(outcome, NoFit):
                refused.append((item, outcome, took))
            else:
                fleet.assume(outcome.placement, item.id, item.model_id, demand.spec.effective_backend)
                placed.append((item, outcome, took, demand.spec.version))
            if n % 16 == 0:
                self._beat()
                await anyio.lowlevel.checkpoint()
        self._reports.phase("decide", self._clock() - started)
        for item in unread:
            self._analysis.read_then(item)
        if refused:
            await self._refuse(refused)
        if placed:
            await self._plan(placed, news)

    async def _plan(self, placed: list[tuple[Work, Placed, float, int]], news: int) -> None:
        """Claim what was only tried in memory, then hand the batch to the commit loop."""
        tried = [p[0] for p in placed if p[0].claim is None]
        if tried:
            await self._analysis.claim_only(tried)
        batch: list[_Planned] = []
        for item, outcome, took, version in placed:
            if item.claim is None:
                self._view.fleet.forget(item.id)
                continue
            batch.append(_Planned(item, Proposal(item.claim, version, outcome, took), news))
        if batch:
            self._under_way += 1
            await self._planned.send(batch)

    async def _refuse(self, refused: list[tuple[Work, NoFit, float]]) -> None:
        """Write refusals that say something new; park the rest as they are."""
        news: list[tuple[Work, NoFit, float]] = []
        for item, outcome, took in refused:
            if item.claim is None and _same(item, outcome):
                self._park(item, outcome, item.signature)
            else:
                news.append((item, outcome, took))
        unclaimed = [w for w, _, _ in news if w.claim is None]
        if unclaimed:
            await self._analysis.claim_only(unclaimed)
        batch = [self._refusal(w, o, t) for w, o, t in news if w.claim is not None]
        if batch:
            await self._write_refusals(batch, {w.id: w for w, _, _ in news})

    def _refusal(self, work: Work, outcome: NoFit, took: float) -> Refusal:
        assert work.claim is not None
        retry = self._backoff.seconds(work.attempts - 1) if Cure.TIME & outcome.cures else None
        return Refusal(work.claim, outcome, retry_in=retry, duration_ms=took)

    async def _write_refusals(self, batch: list[Refusal], works: dict[int, Work]) -> None:
        written = await self._patiently(self._store.refuse, self._owner, self._replica, batch)
        for refusal in batch:
            work = works[refusal.claim.id]
            self._desk.let_go(work.id)
            if work.id not in written:
                self._reports.lost(work)
                self._drop(work)
                continue
            self._reports.unschedulable(work, refusal)
            self._park(work, refusal.outcome, signature(refusal.outcome), refusal.retry_in)

    def _park(self, work: Work, outcome: NoFit, told: str | None, retry_in: float | None = None) -> None:
        self._judge.flowing.discard(work.group)
        if retry_in is None and Cure.TIME in outcome.cures:
            retry_in = self._backoff.seconds(work.attempts)
        row = self._desk.rows.get(work.id)
        if row is not None:
            self._desk.rows[work.id] = replace(
                row, epoch=work.epoch, attempts=work.attempts, signature=told, due_in=retry_in or 0.0
            )
        if retry_in is not None:
            self._queue.retry(work.id, retry_in, outcome.cures)
        else:
            self._queue.park(work.id, work.group, outcome.cures, told)

    def _drop(self, work: Work) -> None:
        """Not ours any more: a scan finds it again if it still waits."""
        self._desk.let_go(work.id)
        self._desk.rows.pop(work.id, None)
        self._queue.done(work.id)

    # -- committing -------------------------------------------------------------------------------------

    async def commit(self) -> None:
        """Until cancelled."""
        async for batch in self._to_commit:
            try:
                await self._commit(batch)
            finally:
                self._under_way -= 1
                self._rest()

    async def _commit(self, batch: list[_Planned]) -> None:
        batch = self._without_overtaken(batch)
        if not batch:
            return
        by_id = {p.work.id: p for p in batch}
        started = self._clock()
        proposals = [p.proposal for p in batch]
        async with self._view.lock:
            try:
                results = await self._store.commit(self._owner, self._replica, proposals)
            except Contended:
                results = [CommitResult(i, CommitCode.CONFLICT) for i in by_id]
            except DatabaseUnavailable:
                raise
            except Exception as error:
                self._reports.unexpected("commit", error, instance=batch[0].work.name)
                results = await self._one_by_one(proposals)
            await self._view.committed(proposals, results)
        self._reports.committed(len(batch), self._clock() - started)
        clashed: list[Work] = []
        for result in results:
            planned = by_id[result.instance_id]
            if result.code is None:
                self._scheduled(planned)
            elif result.code is CommitCode.LOST:
                self._reports.lost(planned.work)
                self._drop(planned.work)
            else:
                if result.code is CommitCode.MODEL_CHANGED:
                    self._catalogue.forget([planned.work.model_id])
                else:
                    self._reports.conflict(planned.work, planned.proposal, result)
                    if planned.work.clashes:  # not the first one, so not just another replica's luck
                        planned.work.shunned += clashing_places(planned.proposal.decision.placement, result)
                clashed.append(planned.work)
        await self._feed(
            [(by_id[r.instance_id].proposal, r) for r in results if r.code is CommitCode.CONFLICT]
        )
        if clashed:
            await self._decide_anew(clashed)

    def _without_overtaken(self, batch: list[_Planned]) -> list[_Planned]:
        """What still has a chance; the rest is decided anew."""
        fleet, news = self._view.fleet, self._view.news
        kept: list[_Planned] = []
        again: list[Work] = []
        for planned in batch:
            if planned.news == news or still_fits(fleet, planned.proposal.decision.placement):
                kept.append(planned)
            else:
                fleet.forget(planned.work.id)
                again.append(planned.work)
        if again:
            self._reports.overtaken(again)
            self._desk.push(again, front=True)
        return kept

    async def _one_by_one(self, proposals: list[Proposal]) -> list[CommitResult]:
        """One proposal made the statement fail: the others are not to suffer."""
        results: list[CommitResult] = []
        for proposal in proposals:
            try:
                results.extend(await self._store.commit(self._owner, self._replica, [proposal]))
            except DatabaseUnavailable:
                raise
            except Exception as error:
                self._reports.unexpected("commit", error, instance=proposal.claim.name)
                results.append(CommitResult(proposal.claim.id, CommitCode.CONFLICT))
        return results

    def _scheduled(self, planned: _Planned) -> None:
        work = planned.work
        self._desk.let_go(work.id)
        self._desk.rows.pop(work.id, None)
        self._reports.scheduled(work, planned.proposal)
        self._queue.done(work.id)
        if work.group in self._judge.flowing:
            self._queue.activate(work.group, 1)

    async def _feed(self, clashes: Sequence[tuple[Proposal, CommitResult]]) -> None:
        """See what others did: at once after a clash or while others are busy, else now and then."""
        now = self._clock()
        if not clashes and not self._view.foreign and now - self._fed < _FEED_EVERY:
            return
        self._fed = now
        try:
            await self._view.refresh()
            # A row that clashed and yet is as the decision saw it is gone, or our view of it is wrong.
            if any(self._version(g) == v for p, r in clashes for g, v in _decided_on(p) if g in r.gpu_ids):
                await self._view.load()
        except Contended:
            self._reports.contended("feed")

    def _version(self, gpu_id: int) -> int | None:
        place = self._view.fleet.slot.get(gpu_id)
        return None if place is None else int(self._view.fleet.gpu_version[place])

    async def _decide_anew(self, clashed: list[Work]) -> None:
        again: list[Work] = []
        given_up: list[tuple[Work, Refusal]] = []
        await self._catalogue.load({w.model_id for w in clashed})
        for work in clashed:
            work.clashes += 1
            if work.clashes <= _CLASHES_MOST:
                again.append(work)
                continue
            assert work.claim is not None
            outcome = NoFit(
                (Reason("commit.conflict", "commit", _BUSY, {"tries": work.clashes}),), _BUSY, Cure.ANY
            )
            retry = self._backoff.seconds(0)
            given_up.append((work, Refusal(work.claim, outcome, "CONFLICT", retry_in=retry)))
        if given_up:
            await self._write_refusals([r for _, r in given_up], {w.id: w for w, _ in given_up})
        if again and any(w.clashes > 1 for w in again):
            await anyio.sleep(self._chance.uniform(0, 0.01) * max(w.clashes for w in again))
        self._desk.push(again, front=True)

    async def _patiently(self, call: Callable[..., object], *arguments: object) -> set[int]:
        """A write that the database makes wait is tried again: it is conditional, so once is all it does."""
        while True:
            try:
                return await call(*arguments)  # type: ignore[misc,no-any-return]
            except Contended:
                self._reports.contended(getattr(call, "__name__", "write"))
                await anyio.sleep(self._chance.uniform(0.05, 0.5))

    # -- stopping ---------------------------------------------------------------------------------------

    def _rest(self) -> None:
        if self._under_way == 0 and not len(self._desk):
            self._idle.set()
            self._idle = anyio.Event()

    async def finished(self) -> None:
        """Wait until nothing is being decided or committed."""
        while self._under_way or len(self._desk):
            await self._idle.wait()


def _same(work: Work, outcome: NoFit) -> bool:
    """Whether the row tells this already. Byte counts in the text are brought up to date by rescans alone:
    else each placement would write every waiting row."""
    if work.from_rescan:
        return work.signature == signature(outcome)
    return codes(work.signature) == codes(signature(outcome))


def _decided_on(proposal: Proposal) -> Iterator[tuple[int, int]]:
    """GPUs of a placement and their versions when it was decided."""
    for part in proposal.decision.placement.parts:
        yield from zip(part.gpu_ids, part.gpu_versions, strict=True)


_BUSY = "every place that was chosen was taken by others or held by an open transaction; it is tried again"
