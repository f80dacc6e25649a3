"""Reports that nobody reads: for deciding what would happen, where nothing does happen."""

from __future__ import annotations

from typing import Any

from gpustackd.daemon.surface.reporter import Reporter
from gpustackd.domain.outcome import Reason


class SilentReporter(Reporter):
    """What the parts would log is kept as remarks; nothing is counted."""

    def __init__(self) -> None:
        self.remarks: list[tuple[str, str]] = []
        """(event, words) in the order in which they came; each only once."""

    def event(self, level: str, name: str, **fields: Any) -> None:
        said = " ".join(str(fields[k]) for k in ("model", "reason") if k in fields)
        if (name, said) not in self.remarks:
            self.remarks.append((name, said))

    def unexpected(self, what: str, error: BaseException, **fields: Any) -> None:
        self.event("error", "daemon.error", reason=f"{what}: {error!r}"[:2000], **fields)

    def left_out(self, fault: Reason, model: str) -> None:
        self.event("error", "decision.stage_failed", model=model, reason=fault.text)

    def search_cut(self, model: str, instance_id: int, milliseconds: float) -> None:
        self.event("warning", "search.cut", model=model, reason="the search ended for its budget")
