"""What earlier placements of an instance taught: places to avoid, and the least memory to book.

Both come as JSON from the instance's row (columns `avoid` and `claim_raise`), and anybody may have written
that row: what cannot be read counts as absent.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gpustackd.domain.demand import Demand
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.gguf_levels import Level, LevelSizes, Share


@dataclass(frozen=True, slots=True)
class AvoidedPlace:
    """A place where the instance failed: these GPUs, or the whole worker where none is named."""

    worker_id: int
    gpu_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ClaimRaise:
    """The least to book after out-of-memory failures, in bytes, for one version of the model.

    `vram` is over all GPUs together, `ram` on each worker. `first_vram` and `first_ram` were booked before
    the first raise; `times` counts the raises.
    """

    vram: int = 0
    ram: int = 0
    first_vram: int = 0
    first_ram: int = 0
    times: int = 0
    model_version: int = -1

    def as_json(self) -> dict[str, int]:
        """The value of the column `claim_raise`."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class PlacementHints:
    """Empty for almost every instance. Avoided places are used only where no other place fits."""

    avoid: tuple[AvoidedPlace, ...] = ()
    claim_raise: ClaimRaise | None = None


NO_HINTS = PlacementHints()

_CLAIM_RAISE_FIELDS = ("vram", "ram", "first_vram", "first_ram", "times", "model_version")


def placement_hints(avoid: Any, claim_raise: Any) -> PlacementHints:
    """Hints from the decoded columns `avoid` and `claim_raise`. Never raises."""
    if avoid is None and claim_raise is None:
        return NO_HINTS
    return PlacementHints(tuple(_avoided_places(avoid)), _claim_raise(claim_raise))


def _avoided_places(raw: Any) -> Iterable[AvoidedPlace]:
    for item in raw if isinstance(raw, list) else ():
        if not isinstance(item, Mapping) or not _is_count(item.get("worker_id")):
            continue
        gpus = item.get("gpu_ids")
        yield AvoidedPlace(
            item["worker_id"], tuple(g for g in gpus if _is_count(g)) if isinstance(gpus, list) else ()
        )


def _claim_raise(raw: Any) -> ClaimRaise | None:
    if not isinstance(raw, Mapping) or not all(_is_count(raw.get(n)) for n in _CLAIM_RAISE_FIELDS):
        return None
    return ClaimRaise(*(raw[n] for n in _CLAIM_RAISE_FIELDS))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def with_claim_raise(demand: Demand, claim_raise: ClaimRaise | None) -> Demand:
    """The demand, raised to at least these amounts; unchanged where they hold for another version of the
    model."""
    need = demand.need
    if claim_raise is None or claim_raise.model_version != demand.spec.version or need.vram is None:
        return demand
    vram, ram = claim_raise.vram, claim_raise.ram
    digest = f"{demand.digest}+{vram}+{ram}"
    need = replace(need, vram=max(need.vram, vram))
    if ram:
        need = replace(need, ram=max(need.ram, ram), ram_static=max(need.ram_static or 0, ram))
    gguf = demand.gguf
    if gguf is not None and vram > claim_raise.first_vram > 0:
        gguf = replace(gguf, sizes=_ScaledSizes(gguf.sizes, vram / claim_raise.first_vram))
    return replace(demand, need=need, digest=digest, gguf=gguf)


@dataclass(frozen=True, slots=True)
class _ScaledSizes:
    """Sizes of a GGUF model with every device's share multiplied by `factor`; host memory is unchanged."""

    sizes: LevelSizes
    factor: float

    @property
    def total_layers(self) -> int:
        return self.sizes.total_layers

    @property
    def layer_bytes(self) -> Sequence[int]:
        return [int(b * self.factor) for b in self.sizes.layer_bytes]

    def levels(self, split: tuple[float, ...] = (), remotes: int = 0) -> Sequence[Level]:
        return [self._scaled(x) for x in self.sizes.levels(split, remotes)]

    def level(self, offload_layers: int, split: tuple[float, ...] = (), remotes: int = 0) -> Level:
        return self._scaled(self.sizes.level(offload_layers, split, remotes))

    def _scaled(self, level: Level) -> Level:
        devices = (
            Share(d.layers, int(d.vram * self.factor), int(d.unified * self.factor)) for d in level.devices
        )
        return replace(level, devices=tuple(devices))


def without_places(fleet: Fleet, avoid: Sequence[AvoidedPlace]) -> Fleet:
    """The fleet as if these places were closed: a view for one decision, never to be changed."""
    view = copy.copy(fleet)
    for name in ("ready", "gpu_open", "touched", "described", "usable", "free", "ratio", "ram_free"):
        setattr(view, name, getattr(fleet, name).copy())
    for place in avoid:
        w = view.position.get(place.worker_id)
        if w is None:
            continue
        if place.gpu_ids:
            for slot in (view.slot[g] for g in place.gpu_ids if g in view.slot):
                view.gpu_open[slot] = False
        else:
            view.ready[w] = False
            view.gpu_open[w] = False
        view.describe(w)
    return view
