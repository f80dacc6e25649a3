"""The step for hand-picked GPUs: choose among the selected cards, or say why they do not serve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gpustackd.domain.model_spec import GpuId
from gpustackd.domain.outcome import Reason
from gpustackd.placement.context.distributed_limit import busy
from gpustackd.placement.context.gpu_allocation import Candidate
from gpustackd.placement.context.resource_rules import ClaimPolicy, ResourceRules
from gpustackd.placement.diagnostics.needs import needs
from gpustackd.placement.diagnostics.wording import gib, gib_number, some
from gpustackd.placement.selectors import blocked_workers
from gpustackd.placement.selectors.manual.gpu_choice import (
    PickedGpu,
    PickedGpus,
    Selection,
    candidates,
    resolve,
)

if TYPE_CHECKING:
    from gpustackd.placement.context.search import PlacementContext

SHOWN = 8
TELLING = ("backend", "local_path")
"""Filters whose reasons say more than their names."""


class ManualSelector:
    """Looks at the selected cards only; nothing of it is kept between decisions, they are few."""

    step = "manual"

    def __init__(self, search: PlacementContext) -> None:
        self.search = search
        self.rules = search.rules
        self.spec = search.demand.spec

    def choose(self, turn: int) -> Candidate | None:
        """The best use of the selection; over-committed only where that is asked for and allowed."""
        found = self.choices(turn)
        return self.search.pick(found, turn) if found else None

    def choices(self, turn: int) -> list[Candidate]:
        """Every use of the selection that may be made, not scored yet."""
        selection, found = self.look(turn)
        allowed, over = self.allowed(found)
        warnings: tuple[Reason, ...] = ()
        if over:
            told = self.over_commit_reason(allowed[0], selection.cards, "warning")
            warnings = (told, needs(self.search.demand, self.rules))
        return [Candidate(c.seats, self.step, over_commit=over, warnings=warnings) for c in allowed]

    def look(self, turn: int) -> tuple[Selection, list[PickedGpus]]:
        """The selection as it is now, and every way to use it."""
        search, rules = self.search, self.rules
        selection = resolve(search.fleet, self.spec.gpu_ids, rules, search.bits)
        if self.heterogeneous():
            return selection, []
        full = [] if rules.gpu_count < 2 else busy(search.fleet, [c.w for c in selection.cards], rules.engine)
        return selection, candidates(selection.cards, rules, search.fleet, full, turn)

    def heterogeneous(self) -> bool:
        """All of the selection is needed at once, and it is of several types."""
        ids = self.spec.gpu_ids
        return len({g.type for g in ids}) > 1 and self.rules.gpu_count == len(ids) and len(ids) > 1

    def allowed(self, found: Sequence[PickedGpus]) -> tuple[list[PickedGpus], bool]:
        """Candidates that may be taken, and whether they over-commit."""
        clean = [c for c in found if not c.over]
        if clean:
            return clean, False
        if not found or not self._may_over_commit():
            return [], False
        best = found[0]
        for c in found[1:]:
            if c.effective >= best.effective:
                best = c
        return [best], True

    def _may_over_commit(self) -> bool:
        selector = self.spec.gpu_selector
        asked = selector is not None and selector.allow_overcommit
        return asked and self.rules.replicas <= 1

    # -- why not -------------------------------------------------------------------------------------------

    def reasons(self) -> list[Reason]:
        """Why the selection does not serve, most telling first."""
        selection, found = self.look(0)
        reasons = self.unreachable(selection)
        if self.heterogeneous():
            kinds = ", ".join(sorted({g.type for g in self.spec.gpu_ids}))
            text = (
                f"the selected GPUs are of several types ({kinds}), which one instance cannot use together: "
                "select one type, or fewer GPUs per replica"
            )
            return [*reasons, _reason("heterogeneous", text, types=kinds)]
        cards = selection.cards
        if found:
            reasons.extend(self._over_commit_refused(found, cards))
        elif cards:
            reasons.append(self._too_few(cards))
        return reasons

    def unreachable(self, selection: Selection) -> list[Reason]:
        """Selected GPUs that cannot be looked at, and what is in the way of each."""
        fleet = self.search.fleet
        reasons: list[Reason] = []
        for w, gpus in selection.dropped.items():
            row = fleet.row(w)
            bits = int(self.search.bits[w])
            failing = [f.name for n, f in enumerate(self.search.filters) if bits >> n & 1]
            why = f"is {row.state}" if not fleet.ready[w] else f"does not pass: {', '.join(failing)}"
            text = f"selected GPU{_s(gpus)} {_names(gpus)}: worker {row.name} {why}"
            reasons.append(_reason("worker_out", text, worker=row.name, state=row.state, failing=failing,
                                   count=len(gpus)))  # fmt: skip
            for n, f in enumerate(self.search.filters):
                if bits >> n & 1 and f.name in TELLING:
                    reasons.extend(f.reasons(fleet, np.array([w]), 0, 1))
        if selection.absent:
            gpus = selection.absent
            text = f"selected GPU{_s(gpus)} {_names(gpus)}: no such worker or GPU is known"
            reasons.append(_reason("absent", text, gpus=[str_of(g) for g in gpus[:SHOWN]], count=len(gpus)))
        if selection.shut:
            gpus = selection.shut
            text = f"selected GPU{_s(gpus)} {_names(gpus)}: closed, over-committed, or of unknown memory"
            reasons.append(_reason("shut", text, gpus=[str_of(g) for g in gpus[:SHOWN]], count=len(gpus)))
        if selection.foreign:
            gpus = selection.foreign
            text = f"selected GPU{_s(gpus)} {_names(gpus)}: {self.spec.effective_backend} does not run there"
            reasons.append(
                _reason("wrong_type", text, gpus=[str_of(g) for g in gpus[:SHOWN]], count=len(gpus))
            )
        return reasons

    def _too_few(self, cards: Sequence[PickedGpu]) -> Reason:
        """No candidate at all: the cards lie too scattered, or RAM is short."""
        fleet = self.search.fleet
        count = max(self.rules.gpu_count, 1)
        by_worker: dict[int, int] = {}
        for c in cards:
            by_worker[c.w] = by_worker.get(c.w, 0) + 1
        most = max(by_worker, key=lambda w: by_worker[w])
        name = fleet.row(most).name
        n = by_worker[most]
        params = {"usable": len(cards), "needed": count, "worker": name, "on_worker": n}
        if len(cards) < count:
            text = (
                f"{len(cards)} of the {len(self.spec.gpu_ids)} selected GPUs can be used, {count} are needed"
            )
            return _reason("too_few", text, **params)
        if n >= count or (len(by_worker) > 1 and self.rules.spans):
            booked = {w: sum(c.claim for c in cards if c.w == w) // by_worker[w] * min(k, count)
                      for w, k in by_worker.items()}  # fmt: skip
            full = [] if n >= count else busy(fleet, by_worker, self.rules.engine)
            cause = blocked_workers.picked(fleet, self.rules, booked, full)
            if cause is not None:
                return cause
        if not self.rules.spans and len(by_worker) > 1:
            text = (
                f"this engine cannot span workers: {count} of the selected GPUs must lie on one worker, "
                f"the most are on {name} ({n})"
            )
            return _reason("scattered", text, **params)
        text = f"worker {name} has {n} of the selected GPUs, {count} are needed on one worker"
        return _reason("too_few", text, **params)

    def _over_commit_refused(self, found: Sequence[PickedGpus], cards: Sequence[PickedGpu]) -> list[Reason]:
        rules = self.rules
        count = max(rules.gpu_count, 1)
        reasons: list[Reason] = []
        could = sum(_fits_when_empty(c, rules) for c in cards)
        satisfied = sum(c.satisfied for c in cards)
        booked = max(sum(c.claim for c in f.used) for f in found)
        if could >= count and booked >= rules.vram:
            text = (
                f"the selected GPUs are in use: {satisfied} of {len(cards)} have the memory free that is "
                f"needed, {count} are needed"
            )
            reasons.append(_reason("in_use", text, satisfied=satisfied, selected=len(cards), needed=count))
        best = max(found, key=lambda f: f.effective)
        reasons.append(self.over_commit_reason(best, cards, "reject"))
        if rules.replicas > 1:
            text = (
                f"over-commit is never done for a model of several replicas ({len(found)} "
                f"candidate{'s' if len(found) > 1 else ''} would)"
            )
            reasons.append(_reason("replicas", text, candidates=len(found), replicas=rules.replicas))
        else:
            reasons.append(
                _reason("overcommit_off", "allow_overcommit is not set in the model's gpu_selector")
            )
        return reasons

    def over_commit_reason(self, candidate: PickedGpus, cards: Sequence[PickedGpu], level: str) -> Reason:
        """The facts of an over-committing choice."""
        used, rules = candidate.used, self.rules
        partly = len(used) != len(cards)
        counted = used if partly else cards
        ok = sum(c.satisfied for c in counted)
        free = sum(c.free for c in counted)
        text = f"the selected GPUs would be over-committed: {gib(rules.vram)} needed"
        params: dict[str, Any] = {
            "need_bytes": rules.vram,
            "effective_bytes": candidate.effective,
            "effective_gib": gib_number(candidate.effective),
            "free_bytes": free,
            "allocatable_gib": gib_number(free),
            "gpus_ok": ok,
            "gpus": len(counted),
            "selected": len(cards),
        }
        if partly:
            names = [f"{self.search.fleet.row(c.w).name}:{c.index}" for c in used]
            text += f"; {len(used)} of {len(cards)} selected GPUs would be used ({some(names, SHOWN)})"
            params["used"] = names[:SHOWN]
        if rules.taking is ClaimPolicy.SHARE:
            text += f"; {gib(free)} free, {ok} of {len(counted)} GPUs have their share free"
        text += f"; {gib(candidate.effective)} can really be used"
        return Reason("gpu_selector.overcommit", "gpu_selector", text, params, level)


def _fits_when_empty(card: PickedGpu, rules: ResourceRules) -> bool:
    if rules.taking is ClaimPolicy.SHARE and card.capacity / card.total < rules.u(card.type):
        return False
    return card.claim <= card.capacity


def str_of(gpu: GpuId) -> str:
    """`worker:type:index`, as people write it."""
    return f"{gpu.worker}:{gpu.type}:{gpu.index}"


def _names(gpus: Sequence[GpuId]) -> str:
    return some([str_of(g) for g in gpus], 4)


def _s(gpus: Sequence[GpuId]) -> str:
    return "s" if len(gpus) > 1 else ""


def _reason(code: str, text: str, **params: Any) -> Reason:
    return Reason(f"gpu_selector.{code}", "gpu_selector", text, params)
