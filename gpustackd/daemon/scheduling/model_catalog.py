"""Models as this replica knows them: rows, facts, and the demand that follows from both."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gpustackd.daemon.scheduling.path_probe import PathProbe
from gpustackd.daemon.surface.reporter import DecisionReporter
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
    """A model that could not be read, and until when (by the catalog's clock) nobody tries again."""

    version: int
    outcome: NoFit
    until: float
    times: int


_MISSING = "the model does not exist"
_CACHED = 0.2
"""Seconds that a demand is given again without asking whether its facts have aged: a burst asks thousands of
times for the same few."""


class ModelCatalog:
    """`demand` answers from memory alone; `read` and `prepare` fetch what is missing."""

    def __init__(
        self,
        store: Store,
        reader: ModelReader,
        path_probe: PathProbe,
        reporter: DecisionReporter,
        clock: Callable[[], float],
        *,
        count_draft: bool = False,
    ) -> None:
        """`count_draft`: the weights of a draft model count in the estimate."""
        self._store = store
        self._reader = reader
        self._path_probe = path_probe
        self._reporter = reporter
        self._clock = clock
        self._count_draft = count_draft
        self._records: dict[int, ModelRecord] = {}
        self._stale: set[int] = set()
        self._demands: dict[int, tuple[ModelFacts, Demand]] = {}
        self._failures: dict[int, _Failure] = {}
        self._cached: dict[int, tuple[float, Demand | NoFit]] = {}
        self._fills: dict[int, tuple[int, Mapping[str, Any]]] = {}

    # -- rows -----------------------------------------------------------------------------------------

    async def load(self, ids: Iterable[int]) -> None:
        """Read the rows of models that are not known, or were edited. Raise Contended or
        DatabaseUnavailable."""
        wanted = {i for i in ids if i in self._stale or i not in self._records}
        if not wanted:
            return
        self._stale -= wanted
        rows = {r.id: r for r in await self._store.models(sorted(wanted))}
        for model_id in wanted:
            self._cached.pop(model_id, None)
            self._records[model_id] = rows.get(model_id) or ModelRecord(model_id, -1, "", None, _MISSING)

    def forget(self, ids: Collection[int] | None = None) -> None:
        """These models were edited (None = perhaps all were): read their rows anew when next wanted. Until
        then the old ones serve; a commit says which version it was decided on."""
        edited = set(self._records) if ids is None else set(ids)
        self._stale |= edited & self._records.keys()
        for model_id in edited:
            self._failures.pop(model_id, None)

    def retry_failures(self) -> None:
        """Files or workers came: what could not be read before is read anew when next wanted."""
        self._failures.clear()
        self._cached.clear()
        self._reader.retry_failures()

    def prune(self, wanted: Collection[int]) -> None:
        """Keep only models that something waits for, so that memory follows the work and not its history."""
        for model_id in self._records.keys() - set(wanted):
            self._records.pop(model_id, None)
            self._stale.discard(model_id)
            self._demands.pop(model_id, None)
            self._failures.pop(model_id, None)
            self._cached.pop(model_id, None)

    def record(self, model_id: int) -> ModelRecord | None:
        """The row as last read; None = never read."""
        return self._records.get(model_id)

    def spec(self, model_id: int) -> ModelSpec | None:
        """The model as its row says it; None where the row is not known or cannot be used."""
        record = self._records.get(model_id)
        return None if record is None else record.spec

    # -- demands --------------------------------------------------------------------------------------

    def demand(self, model_id: int) -> Demand | NoFit | None:
        """What an instance of this model asks; a refusal where that cannot be known; None = read first."""
        now = self._clock()
        cached = self._cached.get(model_id)
        if cached is not None and cached[0] > now:
            return cached[1]
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
        demand = self._build(record, record.spec, facts)
        self._cached[model_id] = (now + _CACHED, demand)
        return demand

    def last_demand(self, model_id: int) -> Demand | None:
        """The demand as last known for the row as it is, though its facts may have aged: good enough to see
        whether a waiting instance would fit."""
        record, built = self._records.get(model_id), self._demands.get(model_id)
        if record is None or built is None or built[1].spec != record.spec or built[1].need.vram is None:
            return None
        return built[1]

    def is_ready(self, model_id: int, *, aged: bool = False) -> bool:
        """Whether a decision has all that it needs of a model. `aged`: the last demand known will do."""
        if self.demand(model_id) is None and not (aged and self.last_demand(model_id) is not None):
            return False
        spec = self.spec(model_id)
        return spec is None or self._path_probe.current(spec)

    async def read(self, model_id: int) -> Demand | NoFit:
        """Read the files of a model. Never raises for what is wrong with the model."""
        known = self.demand(model_id)
        if known is not None:
            return known
        await self.load([model_id])
        record = self._records[model_id]
        if record.spec is None:
            return self.demand(model_id) or refusal("model.missing", "the model is gone", Cure.MODEL)
        try:
            facts = await self._reader.facts(record.spec)
        except ModelUnreadable as error:
            return self._failed(record, error)
        except Exception as error:  # a model that trips a reader must not stop the others
            self._reporter.unexpected("reading a model", error, model=record.name)
            text = f"{type(error).__name__}: {error}"[:500]
            return self._failed(record, ModelUnreadable("model.failed", text, retryable=True))
        self._failures.pop(model_id, None)
        return self._build(record, record.spec, facts)

    async def prepare(self, model_id: int) -> None:
        """Read a model and ask workers about its path: all that a decision needs. Never raises for what is
        wrong with the model or the workers."""
        await self.read(model_id)
        spec = self.spec(model_id)
        if spec is not None:
            await self._path_probe.look(spec)

    def _build(self, record: ModelRecord, spec: ModelSpec, facts: ModelFacts) -> Demand | NoFit:
        built = self._demands.get(record.id)
        if built is not None and built[0] is facts and built[1].spec == spec:
            return built[1]
        try:
            spec = self._evaluate(spec, facts)
            demand = build_demand(spec, facts, count_draft=self._count_draft)
        except BadRow as error:
            return refusal("model.invalid", f"model {record.name} cannot be used: {error}", Cure.MODEL)
        except Exception as error:  # nor one that trips an estimate
            self._reporter.unexpected("estimate", error, model=record.name)
            text = f"the need of model {record.name} could not be estimated: {type(error).__name__}: {error}"
            return refusal("estimate.failed", text[:1000], Cure.MODEL | Cure.FILES)
        for warning in demand.need.warnings:
            self._reporter.event("warning", "model.noted", model=record.name, reason=warning)
        self._demands[record.id] = (facts, demand)
        return demand

    # -- what the files say of the row ----------------------------------------------------------------

    def _evaluate(self, spec: ModelSpec, facts: ModelFacts) -> ModelSpec:
        """The row with what its files say filled in where it is empty; `fill` writes that down. What speaks
        against the model is logged, not held against it: the engine has the last word."""
        evaluation = evaluate(spec, facts)
        for problem in evaluation.problems:
            self._reporter.event("warning", "model.doubtful", model=spec.name, reason=problem.text)
        if not evaluation.writes:
            return spec
        self._fills[spec.id] = (spec.version, evaluation.writes)
        return filled(spec, evaluation.writes)

    async def fill(self) -> None:
        """Write down what was found out since the last call."""
        fills, self._fills = self._fills, {}
        for model_id, (version, writes) in fills.items():
            try:
                await self._store.autofill(model_id, version, writes)
            except Contended:
                self._fills.setdefault(model_id, (version, writes))

    # -- failures -------------------------------------------------------------------------------------

    def _failed(self, record: ModelRecord, error: ModelUnreadable) -> NoFit:
        """Remember a failure for a while, so that many instances of one model do not read it again each."""
        before = self._failures.get(record.id)
        times = before.times + 1 if before and before.version == record.version else 1
        text = f"model {record.name} could not be read: {error}"
        params = {"model": record.name, "retryable": error.retryable}
        cures = Cure.TIME | Cure.MODEL | Cure.FILES
        if record.spec is not None and record.spec.source is Source.LOCAL_PATH:
            cures |= Cure.WORKER  # workers are asked for files that this host does not have
        outcome = NoFit((Reason(error.code, "model", text, params),), text, cures)
        until = self._clock() + min(0.5 * 2**times, 30.0)
        self._failures[record.id] = _Failure(record.version, outcome, until, times)
        repeated = before is not None and before.outcome.message == text
        self._reporter.model_unreadable(record.name, record.id, str(error), repeated=repeated)
        return outcome
