"""What an instance learnt where it was: places that any other is preferred to, memory to book at least.

Both come as data from its row (columns `avoid` and `claim_raise`) and are never trusted to be well-formed.
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
class Avoided:
    """A place where the instance failed: some GPUs, or with none named the whole worker."""

    worker_id: int
    gpu_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Raise:
    """The least to book, in bytes: `vram` over all GPUs together, `ram` on each worker. `first_…` is what was
    booked before the first raise, `times` how often it was raised; all for one version of the model."""

    vram: int = 0
    ram: int = 0
    first_vram: int = 0
    first_ram: int = 0
    times: int = 0
    model_version: int = -1

    def as_json(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class PlacementHints:
    """Empty for almost every instance."""

    avoid: tuple[Avoided, ...] = ()
    more: Raise | None = None


NONE = PlacementHints()


def placement_hints(avoid: Any, claim_raise: Any) -> PlacementHints:
    """Read the two columns; what cannot be read counts as not there."""
    if avoid is None and claim_raise is None:
        return NONE
    return PlacementHints(tuple(_avoided(avoid)), raised(claim_raise))


def _avoided(raw: Any) -> Iterable[Avoided]:
    for item in raw if isinstance(raw, list) else ():
        if not isinstance(item, Mapping) or not _whole(item.get("worker_id")):
            continue
        gpus = item.get("gpu_ids")
        yield Avoided(
            item["worker_id"], tuple(g for g in gpus if _whole(g)) if isinstance(gpus, list) else ()
        )


def raised(raw: Any) -> Raise | None:
    """The column `claim_raise`."""
    if not isinstance(raw, Mapping):
        return None
    names = ("vram", "ram", "first_vram", "first_ram", "times", "model_version")
    if not all(_whole(raw.get(n)) for n in names):
        return None
    return Raise(*(raw[n] for n in names))


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def with_more(demand: Demand, more: Raise | None) -> Demand:
    """The demand with the least amounts that were learnt, where they are for the model as it is."""
    need = demand.need
    if more is None or more.model_version != demand.spec.version or need.vram is None:
        return demand
    digest = f"{demand.digest}+{more.vram}+{more.ram}"
    need = replace(need, vram=max(need.vram, more.vram))
    if more.ram:
        need = replace(need, ram=max(need.ram, more.ram), ram_static=max(need.ram_static or 0, more.ram))
    gguf = demand.gguf
    if gguf is not None and more.vram > more.first_vram > 0:
        gguf = replace(gguf, sizes=_Larger(gguf.sizes, more.vram / more.first_vram))
    return replace(demand, need=need, digest=digest, gguf=gguf)


@dataclass(frozen=True, slots=True)
class _Larger:
    """Sizes of a GGUF model, each device's by a factor; host memory as it is."""

    of: LevelSizes
    factor: float

    @property
    def total_layers(self) -> int:
        return self.of.total_layers

    @property
    def layer_bytes(self) -> Sequence[int]:
        return [int(b * self.factor) for b in self.of.layer_bytes]

    def levels(self, split: tuple[float, ...] = (), remotes: int = 0) -> Sequence[Level]:
        return [self._level(x) for x in self.of.levels(split, remotes)]

    def level(self, offload_layers: int, split: tuple[float, ...] = (), remotes: int = 0) -> Level:
        return self._level(self.of.level(offload_layers, split, remotes))

    def _level(self, level: Level) -> Level:
        devices = (
            Share(d.layers, int(d.vram * self.factor), int(d.unified * self.factor)) for d in level.devices
        )
        return replace(level, devices=tuple(devices))


def elsewhere(fleet: Fleet, avoid: Sequence[Avoided]) -> Fleet:
    """The fleet as if these places were closed: a view for deciding, never to be changed."""
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
