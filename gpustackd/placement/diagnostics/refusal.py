"""Why there is no place: the facts of filters and selectors, for people and as data.
Text is made here only, for the answer that is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpustackd.domain.demand import Demand
from gpustackd.domain.model_spec import Source
from gpustackd.domain.outcome import Cure, NoFit, PoolStep, Reason
from gpustackd.errors import BadRow
from gpustackd.placement.diagnostics.faults import StageFault
from gpustackd.placement.diagnostics.wording import workers

LIMIT = 3500
"""Bytes of a message, so that the row and the log stay readable at any fleet size."""


def unusable(problem: BadRow) -> NoFit:
    """A model that asks for something that cannot be: only an edit helps."""
    reason = Reason("model.unusable", "parameters", str(problem), {"field": problem.field})
    return answer([reason], Cure.MODEL, ())


def unknown_size(demand: Demand) -> NoFit:
    """A model whose size is not known: nothing is placed on a guess."""
    why = demand.need.unknown_because or demand.facts.unknown_because or "its files could not be read"
    reason = Reason("estimate.unknown", "estimate", f"the size of the model is unknown: {why}"[:600], {})
    cures = Cure.TIME | Cure.MODEL | Cure.FILES
    if demand.spec.source is Source.LOCAL_PATH:  # workers are asked for files that are not on this host
        cures |= Cure.WORKER
    return answer([reason], cures, ())


def answer(reasons: Sequence[Reason], cures: Cure, pool: tuple[PoolStep, ...]) -> NoFit:
    """Reasons as one message that people read."""
    lines = [r.text for r in reasons]
    if pool:
        total = pool[0].total
        head = f"No place among {workers(total)}" if total else "No place: there are no workers"
        lines = [f"{head}{':' if lines else '.'}", *(f"- {line}" for line in lines)]
    return NoFit(tuple(reasons), clipped("\n".join(lines)), cures, pool)


def with_faults(outcome: NoFit, found: Mapping[str, StageFault]) -> NoFit:
    """The refusal with what failed on the way to it first: perhaps it is the cause."""
    if not found:
        return outcome
    faults = tuple(f.as_reason() for f in found.values())
    head, _, rest = outcome.message.partition("\n")
    message = "\n".join(filter(None, (head, *(f"- {f.text}" for f in faults), rest)))
    return replace(outcome, reasons=(*faults, *outcome.reasons), message=clipped(message), faults=faults,
                   cures=outcome.cures | Cure.TIME)  # fmt: skip


def clipped(text: str) -> str:
    """The text, cut where it would be longer than a message may be (in bytes)."""
    raw = text.encode()
    return text if len(raw) <= LIMIT else raw[:LIMIT].decode(errors="ignore") + " …"
