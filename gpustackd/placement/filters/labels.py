"""Keeps workers whose labels fit the model's `worker_selector`; preferred terms add to the score.

The selector is a map (every key present with exactly that value), or
`{"match": {}, "terms": [{"key", "operator", "values"}], "preferred": [{…, "weight"}]}` with the operators
In, NotIn, Exists and DoesNotExist. NotIn keeps a worker without the key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpustackd.domain.fleet.columns import Bools, Ints
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.outcome import Cure, Reason
from gpustackd.errors import BadRow
from gpustackd.placement.diagnostics.wording import workers

COLUMN = "worker_selector"
OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist")

_TESTS: Mapping[str, Callable[[str | None, frozenset[str]], bool]] = {
    "In": lambda value, wanted: value is not None and value in wanted,
    "NotIn": lambda value, wanted: value is None or value not in wanted,
    "Exists": lambda value, wanted: value is not None,
    "DoesNotExist": lambda value, wanted: value is None,
}


@dataclass(frozen=True, slots=True)
class Term:
    """One condition on one label."""

    key: str
    operator: str
    values: frozenset[str] = frozenset()
    weight: float = 0.0

    def holds(self, labels: Mapping[str, Any]) -> bool:
        raw = labels.get(self.key)
        return _TESTS[self.operator](None if raw is None else str(raw), self.values)

    def __str__(self) -> str:
        if self.operator in ("Exists", "DoesNotExist"):
            return f"{self.key} {self.operator}"
        values = ", ".join(sorted(self.values))
        return f"{self.key}={values}" if len(self.values) == 1 and self.operator == "In" else (
            f"{self.key} {self.operator} ({values})"
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LabelFilter:
    """All required terms hold."""

    terms: tuple[Term, ...]
    preferred: tuple[Term, ...] = ()
    name: str = "labels"
    cure: Cure = Cure.WORKER | Cure.MODEL

    @classmethod
    def of(cls, selector: Mapping[str, Any]) -> LabelFilter:
        """Read a selector. Raises BadRow naming the part that cannot be read."""
        if not structured(selector):
            return cls(_matches(selector))
        match = selector.get("match") or {}
        if not isinstance(match, Mapping):
            raise BadRow(f"{COLUMN}.match", "must be an object of label: value")
        required = _matches(match) + _terms(selector, "terms", False)
        return cls(required, _terms(selector, "preferred", True))

    def keep(self, fleet: Fleet, rows: Ints) -> Bools:
        kept: Bools = np.zeros(len(rows), np.bool_)
        for n, w in enumerate(rows.tolist()):
            row = fleet.worker_rows[w]
            kept[n] = row is not None and all(t.holds(row.labels) for t in self.terms)
        return kept

    def preference(self, fleet: Fleet, rows: Ints) -> NDArray[np.float64]:
        """Sum of the weights of the preferred terms that hold, per worker position."""
        gain = np.zeros(len(rows))
        for n, w in enumerate(rows.tolist()):
            row = fleet.worker_rows[w]
            if row is not None:
                gain[n] = sum(t.weight for t in self.preferred if t.holds(row.labels))
        return gain

    def reasons(self, fleet: Fleet, dropped: Ints, left: int, of: int) -> list[Reason]:
        count = len(dropped)
        wanted = "; ".join(str(t) for t in self.terms)
        if len(wanted) > 200:
            wanted = wanted[:197] + "..."
        text = f"{workers(count)} {'does' if count == 1 else 'do'} not match worker_selector ({wanted})"
        params = {"dropped": count, "left": left, "of": of, "selector": wanted}
        return [Reason("labels.mismatch", self.name, text, params)]


def structured(selector: Mapping[str, Any]) -> bool:
    """Whether a selector has parts, and is no plain map of labels."""
    return set(selector) <= {"match", "terms", "preferred"} and any(
        isinstance(v, (Mapping, list)) for v in selector.values()
    )


def _matches(wanted: Mapping[str, Any]) -> tuple[Term, ...]:
    return tuple(Term(str(k), "In", frozenset({_text(v)})) for k, v in wanted.items())


def _terms(selector: Mapping[str, Any], name: str, weighted: bool) -> tuple[Term, ...]:
    raw = selector.get(name) or []
    if not isinstance(raw, list):
        raise BadRow(f"{COLUMN}.{name}", "must be a list of terms")
    return tuple(_term(t, f"{COLUMN}.{name}[{n}]", weighted) for n, t in enumerate(raw))


def _term(raw: Any, where: str, weighted: bool) -> Term:
    if not isinstance(raw, Mapping) or not isinstance(raw.get("key"), str):
        raise BadRow(where, 'must be an object with a "key"')
    operator = raw.get("operator", "In")
    if operator not in OPERATORS:
        raise BadRow(f"{where}.operator", f"{operator!r} is not known", f"use one of {', '.join(OPERATORS)}")
    values = raw.get("values") or []
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise BadRow(f"{where}.values", "must be a list")
    if operator in ("In", "NotIn") and not values:
        raise BadRow(f"{where}.values", f"{operator} needs at least one value")
    weight = raw.get("weight", 1)
    if weighted and (isinstance(weight, bool) or not isinstance(weight, (int, float)) or abs(weight) > 1e6):
        raise BadRow(f"{where}.weight", f"{weight!r} is not a number")
    return Term(raw["key"], operator, frozenset(_text(v) for v in values), float(weight) if weighted else 0.0)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
