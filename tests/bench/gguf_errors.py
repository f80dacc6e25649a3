"""How far estimates of GGUF models are from what llama.cpp allocated: by group of flags, and by architecture.

No clock and no database: the runs are fixtures (`tests/gguf_truth.py`). The figure of a line is the median of
the totals' errors, in per cent of what there was; the note has the rest. `rows()` returns the figures;
`python -m tests.bench.gguf_errors` prints them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from tests.gguf_truth import Error, errors_of

MEDIAN = 0.3
"""Per cent that the median may be off."""
NINE_TENTHS = 2.0
"""Per cent within which nine of ten runs are."""
TOO_LOW = 3.0
"""Per cent that any run may be too low."""
ROW = "GGUF estimates against llama.cpp"


def rows(quick: bool = False) -> list[dict[str, Any]]:
    """Figures of all rows: `row`, `what`, `value`, `unit`, `bound`, `at_most`, `note`. The short form tells
    our own runs by group alone."""
    handed, own = errors_of("truth.jsonl"), errors_of("measured.jsonl")
    made = _lines(f"{ROW}: handed runs", "group", _by(handed, "group"))
    made += _lines(f"{ROW}: handed runs", "architecture", _by(handed, "architecture"))
    made += _lines(f"{ROW}: our own runs", "group", _by(own, "group"))
    if not quick:
        made += _lines(f"{ROW}: our own runs", "architecture", _by(own, "architecture"))
    every = [*handed, *own]
    for what, value, bound in (
        ("median of all", _percent(median(every)), MEDIAN),
        ("nine of ten within", _percent(nine_tenths(every)), NINE_TENTHS),
        ("most too low", _percent(max(0.0, -min(e.total for e in every))), TOO_LOW),
    ):
        made.append(_figure(ROW, what, value, bound, f"{len(every)} runs"))
    return made


def median(some: Sequence[Error]) -> float:
    """The middle one of the totals' errors, whichever way they are off."""
    return sorted(abs(e.total) for e in some)[len(some) // 2]


def nine_tenths(some: Sequence[Error]) -> float:
    """What nine of ten are not further off than."""
    return sorted(abs(e.total) for e in some)[max(0, -(-9 * len(some) // 10) - 1)]


def _by(some: Sequence[Error], key: str) -> Mapping[str, list[Error]]:
    found: defaultdict[str, list[Error]] = defaultdict(list)
    for error in some:
        found[str(getattr(error, key))].append(error)
    return dict(sorted(found.items()))


def _lines(row: str, kind: str, groups: Mapping[str, Sequence[Error]]) -> list[dict[str, Any]]:
    made = []
    for name, some in groups.items():
        low, high = min(e.total for e in some), max(e.total for e in some)
        worst = max(max(map(abs, e.devices), default=0.0) for e in some)
        exact = sum(e.exact for e in some)
        note = (
            f"{exact} of {len(some)} runs exact in every buffer; nine of ten within"
            f" {_percent(nine_tenths(some)):.2f} %; {_percent(low):+.2f} to {_percent(high):+.2f} %;"
            f" one device at most {_percent(worst):.2f} % off"
        )
        made.append(_figure(row, f"{kind} {name}", _percent(median(some)), MEDIAN, note))
    return made


def _percent(share: float) -> float:
    return round(100 * share, 4) + 0.0


def _figure(row: str, what: str, value: float, bound: float, note: str) -> dict[str, Any]:
    return {"row": row, "what": what, "value": value, "unit": "%", "bound": bound, "at_most": True,
            "note": note}  # fmt: skip


def main() -> None:
    for f in rows():
        print(f"{f['row']:46} {f['what']:30} {f['value']:6.2f} %  <= {f['bound']:g}  {f['note']}")


if __name__ == "__main__":
    main()
