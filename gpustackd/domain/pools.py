"""Pools of cards that `gpu_type_selector` may name, and what clusters report of their nodes' cards.

Rows of `instance_types` and `clusters.devices` as checked values. What cannot be read is left out or None; a
pool without a readable memory matters only where it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from gpustackd.domain.sizes import MIB, quantity

FULL = 1_000_000
"""`remaining` of an unused card: shares of a card are counted in millionths."""


@dataclass(frozen=True, slots=True)
class GpuPool:
    """A pool: one kind of card in one cluster (`cluster_id` None = in any). Sizes in bytes."""

    name: str
    cluster_id: int | None = None
    manufacturer: str = ""
    product: str = ""
    memory: int | None = None
    """Of one card; None or 0 = not reported."""
    profiles: Mapping[str, int | None] = field(default_factory=lambda: MappingProxyType({}))
    """Hardware partitions that it offers: name -> memory (None = not stated)."""
    described: bool = True
    """Whether the row has a `detail`."""

    @property
    def label(self) -> str:
        """Its name for people: product, else manufacturer, else the name of the pool."""
        return self.product or self.manufacturer or self.name


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A card in the cluster's inventory; `remaining` and `full` in millionths of a card."""

    index: int | None
    remaining: int
    full: int = FULL


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Cards of one kind on one node, and how they may be shared."""

    id: str
    manufacturer: str
    product: str
    logical_count: int = 0
    """Slices into which software divides a card; 0 = none."""
    physical_count: int = 0
    """Hardware partitions of a card."""
    profiles: frozenset[str] = frozenset()
    accelerators: tuple[Accelerator, ...] = ()


Inventory = Mapping[str, tuple[DeviceGroup, ...]]
"""Name of the node, which is the name of the worker -> its groups."""


@dataclass(frozen=True, slots=True, eq=False)
class Pools:
    """Everything known of pools at one time."""

    types: Mapping[str, tuple[GpuPool, ...]] = field(default_factory=lambda: MappingProxyType({}))
    devices: Mapping[int, Inventory] = field(default_factory=lambda: MappingProxyType({}))
    """By cluster id; a cluster whose inventory cannot be read is absent."""

    @classmethod
    def of(cls, types: Iterable[GpuPool], devices: Mapping[int, Any] = MappingProxyType({})) -> Pools:
        """From pools and the raw inventories of clusters (cluster id -> `clusters.devices`)."""
        by_name: dict[str, list[GpuPool]] = {}
        for t in types:
            by_name.setdefault(t.name, []).append(t)
        read = {c: inventory(raw) for c, raw in devices.items()}
        return cls(
            MappingProxyType({n: tuple(ts) for n, ts in by_name.items()}),
            MappingProxyType({c: i for c, i in read.items() if i is not None}),
        )

    def named(self, name: str, cluster_id: int | None) -> GpuPool | None:
        """The pool of that name in the cluster, else one that belongs to no cluster; for None the first pool
        of that name in any cluster."""
        pools = self.types.get(name, ())
        if cluster_id is None:
            return pools[0] if pools else None
        own = next((t for t in pools if t.cluster_id == cluster_id), None)
        return own or next((t for t in pools if t.cluster_id is None), None)

    def names_in(self, cluster_id: int | None) -> list[str]:
        """Names of the pools that a model of the cluster may ask for."""
        here = (None, cluster_id)
        return sorted(n for n, ts in self.types.items() if any(t.cluster_id in here for t in ts))

    def nodes(self, cluster_id: int | None) -> Inventory | None:
        """The inventory of a cluster; None where it cannot be read."""
        return None if cluster_id is None else self.devices.get(cluster_id)


NO_POOLS = Pools()


def gpu_pool(name: str, cluster_id: int | None, detail: Any) -> GpuPool:
    """One row of `instance_types`; never raises."""
    if not isinstance(detail, Mapping):
        return GpuPool(name, cluster_id, described=False)
    sliced = _map(detail.get("sliced_detail"))
    physical = _map(sliced.get("physical"))
    profiles: dict[str, int | None] = {}
    for p in _maps(physical.get("profiles")):
        if isinstance(p.get("name"), str):
            mib = p.get("memory_mib")
            memory = _count(mib, 0)
            profiles[p["name"]] = memory * MIB if 0 < memory < 2**42 else None
    return GpuPool(
        name,
        cluster_id,
        _text(detail.get("manufacturer")),
        _text(detail.get("product")),
        quantity(detail.get("memory")),
        MappingProxyType(profiles),
    )


def inventory(raw: Any) -> Inventory | None:
    """`clusters.devices`: node name -> groups; None where it cannot be read. A group that cannot be read
    offers nothing."""
    if not isinstance(raw, Mapping):
        return None
    return MappingProxyType(
        {str(node): tuple(_group(g) for g in _maps(groups)) for node, groups in raw.items()}
    )


def _group(raw: Mapping[str, Any]) -> DeviceGroup:
    profiles = [p for p in _maps(raw.get("physical_profiles")) if isinstance(p.get("name"), str)]
    counted = sum(_count(p.get("count"), 1) for p in profiles)
    return DeviceGroup(
        id=_text(raw.get("id")),
        manufacturer=_text(raw.get("manufacturer")),
        product=_text(raw.get("product")) or _text(raw.get("name")),
        logical_count=_count(raw.get("logical_count"), 0),
        physical_count=_count(raw.get("physical_count"), counted),
        profiles=frozenset(p["name"] for p in profiles),
        accelerators=tuple(_accelerator(a) for a in _maps(raw.get("accelerators"))),
    )


def _accelerator(raw: Mapping[str, Any]) -> Accelerator:
    index = raw.get("index")
    known = isinstance(index, int) and not isinstance(index, bool)
    return Accelerator(
        index if known else None, _count(raw.get("remaining"), 0), _count(raw.get("capacity"), FULL) or FULL
    )


def _count(raw: Any, default: int) -> int:
    number = isinstance(raw, (int, float)) and not isinstance(raw, bool) and 0 <= raw < 2**53
    return int(raw) if number else default


def _text(raw: Any) -> str:
    return raw.strip() if isinstance(raw, str) else ""


def _map(raw: Any) -> Mapping[str, Any]:
    return raw if isinstance(raw, Mapping) else {}


def _maps(raw: Any) -> Sequence[Mapping[str, Any]]:
    return [x for x in raw if isinstance(x, Mapping)] if isinstance(raw, (list, tuple)) else []
