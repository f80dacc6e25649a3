"""Models as this replica knows them: rows, facts, and the demand that follows from both."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gpustackd.daemon.surface.reporter import Reporter
from gpustackd.domain.demand import Demand
from gpustackd.domain.facts import ModelFacts
from gpustackd.domain.model_spec import ModelSpec, Source, filled
from gpustackd.domain.outcome import Cure, NoFit, Reason
from gpustackd.errors import BadRow, Contended, ModelUnreadable
from gpustackd.estimate.demand import build_demand
from gpustackd.estimate.evaluate import evaluate
from gpustackd.ports import ModelReader, ModelRecord, Store


def refusal(code: str, text: str, cures: Cure, **params: object) -> NoFit:
    """A refusal that comes before any look at the fleet."""
    return NoFit((Reason(code, "model", text, params),), text, cures)


@dataclass(frozen=True, slots=True)
class _Failure:
    version: int
    outcome: NoFit
    until: float
    times: int


_MISSING = "the model does not exist"
_SURE = 0.2
"""Seconds that a demand is given again without asking whether its facts have aged: a burst asks thousands of
times for the same few."""


class ModelCatalog:
    """`demand` answers from memory alone; `read` fetches what is missing."""

    def __init__(
        self,
        store: Store,
        reader: ModelReader,
        reports: Reporter,
        clock: Callable[[], float],
        *,
        count_draft: bool = False,
    ) -> None:
        self._store = store
        self._reader = reader
        self._reports = reports
        self._clock = clock
        self._count_draft = count_draft
        self._records: dict[int, ModelRecord] = {}
        self._stale: set[int] = set()
        self._demands: dict[int, tuple[ModelFacts, Demand]] = {}
        self._failures: dict[int, _Failure] = {}
        self._sure: dict[int, tuple[float, Demand | NoFit]] = {}
        self._fills: dict[int, tuple[int, Mapping[str, Any]]] = {}

    async def load(self, ids: Iterable[int]) -> None:
        """Read the rows of models that are not known, or were edited."""
        wanted = {i for i in ids if i in self._stale or i not in self._records}
        if not wanted:
            return
        self._stale -= wanted
        found = {r.id: r for r in await self._store.models(sorted(wanted))}
        for model_id in wanted:
            self._sure.pop(model_id, None)
            self._records[model_id] = found.get(model_id) or ModelRecord(model_id, -1, "", None, _MISSING)

    def forget(self, ids: Collection[int] | None = None) -> None:
        """These models were edited (None = perhaps all were): read their rows anew when next wanted. Until
        then the old ones serve; a commit says which version it was decided on."""
        edited = set(self._records) if ids is None else set(ids)
        self._stale |= edited & self._records.keys()
        for known in edited:
            self._failures.pop(known, None)

    def doubt(self) -> None:
        """Files or workers came: what could not be read before is read anew when next wanted."""
        self._failures.clear()
        self._sure.clear()
        self._reader.doubt()

    def prune(self, wanted: Collection[int]) -> None:
        """Keep only models that something waits for, so that memory follows the work and not its history."""
        for known in self._records.keys() - set(wanted):
            self._records.pop(known, None)
            self._stale.discard(known)
            self._demands.pop(known, None)
            self._failures.pop(known, None)
            self._sure.pop(known, None)

    def record(self, model_id: int) -> ModelRecord | None:
        return self._records.get(model_id)

    def demand(self, model_id: int) -> Demand | NoFit | None:
        """What an instance of this model asks; a refusal where that cannot be known; None = read first."""
        now = self._clock()
        sure = self._sure.get(model_id)
        if sure is not None and sure[0] > now:
            return sure[1]
        record = self._records.get(model_id)
        if record is None:
            return None
        if record.error is _MISSING:
            return refusal("model.missing", f"model {model_id} does not exist any more", Cure.MODEL)
        if record.spec is None:
            return refusal("model.invalid", f"model {record.name} cannot be used: {record.error}", Cure.MODEL)
        failure = self._failures.get(model_id)
        if failure is not None and failure.version == record.version and failure.until > now:
            return failure.outcome
        facts = self._reader.cached(record.spec)
        if facts is None:
            return None
        demand = self._built(record, record.spec, facts)
        self._sure[model_id] = (now + _SURE, demand)
        return demand

    def last(self, model_id: int) -> Demand | None:
        """The demand as last known for the row as it is, though its facts may have aged: good enough to see
        whether a waiting instance would fit."""
        record, kept = self._records.get(model_id), self._demands.get(model_id)
        if record is None or kept is None or kept[1].spec != record.spec or kept[1].need.vram is None:
            return None
        return kept[1]

    async def read(self, model_id: int) -> Demand | NoFit:
        """Read the files of a model. Never raises for what is wrong with the model."""
        found = self.demand(model_id)
        if found is not None:
            return found
        await self.load([model_id])
        record = self._records[model_id]
        if record.spec is None:
            return self.demand(model_id) or refusal("model.missing", "the model is gone", Cure.MODEL)
        try:
            facts = await self._reader.facts(record.spec)
        except ModelUnreadable as error:
            return self._failed(record, error)
        except Exception as error:  # a model that trips a reader must not stop the others
            self._reports.unexpected("reading a model", error, model=record.name)
            said = f"{type(error).__name__}: {error}"[:500]
            return self._failed(record, ModelUnreadable("model.failed", said, retryable=True))
        self._failures.pop(model_id, None)
        return self._built(record, record.spec, facts)

    def _built(self, record: ModelRecord, spec: ModelSpec, facts: ModelFacts) -> Demand | NoFit:
        kept = self._demands.get(record.id)
        if kept is not None and kept[0] is facts and kept[1].spec == spec:
            return kept[1]
        try:
            spec = self._evaluated(spec, facts)
            demand = build_demand(spec, facts, count_draft=self._count_draft)
        except BadRow as error:
            return refusal("model.invalid", f"model {record.name} cannot be used: {error}", Cure.MODEL)
        except Exception as error:  # nor one that trips an estimate
            self._reports.unexpected("estimate", error, model=record.name)
            text = f"the need of model {record.name} could not be estimated: {type(error).__name__}: {error}"
            return refusal("estimate.failed", text[:1000], Cure.MODEL | Cure.FILES)
        for warning in demand.need.warnings:
            self._reports.event("warning", "model.noted", model=record.name, reason=warning)
        self._demands[record.id] = (facts, demand)
        return demand

    def _evaluated(self, spec: ModelSpec, facts: ModelFacts) -> ModelSpec:
        """The row with what its files say filled in where it is empty; `fill` writes that down. What speaks
        against the model is told, not held against it: the engine has the last word."""
        found = evaluate(spec, facts)
        for problem in found.problems:
            self._reports.event("warning", "model.doubtful", model=spec.name, reason=problem.text)
        if not found.writes:
            return spec
        self._fills[spec.id] = (spec.version, found.writes)
        return filled(spec, found.writes)

    async def fill(self) -> None:
        """Write down what was found out since the last call."""
        fills, self._fills = self._fills, {}
        for model_id, (version, writes) in fills.items():
            try:
                await self._store.autofill(model_id, version, writes)
            except Contended:
                self._fills.setdefault(model_id, (version, writes))

    def _failed(self, record: ModelRecord, error: ModelUnreadable) -> NoFit:
        """Remember a failure for a while, so that many instances of one model do not read it again each."""
        before = self._failures.get(record.id)
        times = before.times + 1 if before and before.version == record.version else 1
        outcome = NoFit(
            (
                Reason(
                    error.code,
                    "model",
                    f"model {record.name} could not be read: {error}",
                    {"model": record.name, "retryable": error.retryable},
                ),
            ),
            f"model {record.name} could not be read: {error}",
            Cure.TIME | Cure.MODEL | Cure.FILES | (Cure.WORKER if self._on_workers(record) else Cure.NONE),
        )
        self._failures[record.id] = _Failure(
            record.version, outcome, self._clock() + min(0.5 * 2**times, 30.0), times
        )
        return outcome

    @staticmethod
    def _on_workers(record: ModelRecord) -> bool:
        """Whether workers are asked for the files where this host does not have them."""
        return record.spec is not None and record.spec.source is Source.LOCAL_PATH
