"""What is free in a case, added up from its data alone. Sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.gpustack_reference import cases
from tests.gpustack_reference.cases import Case


@dataclass
class Card:
    """One GPU."""

    worker: str
    index: int
    type: str
    total: int | None
    held: int = 0
    reserved: int = 0
    vendor: str = ""
    product: str = ""
    address: str | None = None
    """Of its network interface; None where that is not up."""

    @property
    def free(self) -> int:
        return max((self.total or 0) - self.held - self.reserved, 0)


@dataclass
class Host:
    """One worker."""

    id: int
    name: str
    ram: int
    """Free."""
    unified: bool
    ip: str | None
    cards: list[Card] = field(default_factory=list)

    def card(self, index: int, kind: str | None = None) -> Card | None:
        """The card of this index and type; the first one where no type is said."""
        return next((c for c in self.cards if c.index == index and kind in (None, c.type)), None)


def hosts(case: Case) -> dict[str, Host]:
    """Workers by name, with what the existing instances leave: every part holds its RAM and its cards'
    memory; on unified memory both come from one pool."""
    found: dict[int, Host] = {}
    for w in cases.workers(case):
        reserved = w.get("system_reserved") or {}
        unified = bool(w.get("uma") or any(g.get("uma") for g in w.get("gpus") or []))
        vram = reserved.get("vram") or 0
        ram = (w.get("ram_total") or 0) - (reserved.get("ram") or 0) - unified * vram
        host = Host(w["id"], w["name"], ram, unified, w.get("ip"))
        for g in w.get("gpus") or []:
            up = g.get("net_ip") if g.get("net_status") == "up" else None
            host.cards.append(
                Card(w["name"], g["index"], g["type"], g.get("vram_total"), 0, vram, g.get("vendor") or "",
                     g.get("product") or "", up)
            )  # fmt: skip
        found[host.id] = host
    for instance in cases.existing(case):
        for part in instance["parts"]:
            if (at := found.get(part.get("worker_id", -1))) is not None:
                _take(at, part)
    for host in found.values():
        host.ram = max(host.ram, 0)
        for card in host.cards:
            if host.unified:
                card.held = max(card.held, (card.total or 0) - card.reserved - host.ram)
    for name, free in ((case.get("inputs") or {}).get("allocatable_given") or {}).items():
        host = next((h for h in found.values() if h.name == name), None)
        if host is not None:
            _give(host, free)
    return {h.name: h for h in found.values()}


def _give(host: Host, free: dict[str, Any]) -> None:
    """Exactly so much is free there; what is not said of a card is 0."""
    host.ram = free.get("ram") or 0
    for card in host.cards:
        card.total, card.held, card.reserved = (free.get("vram") or {}).get(str(card.index)) or 0, 0, 0


def _take(host: Host, part: dict[str, Any]) -> None:
    claim = part["claim"]
    host.ram -= claim.get("ram") or 0
    for index, size in (claim.get("vram") or {}).items():
        card = host.card(int(index), part.get("gpu_type"))
        if card is None or part.get("gpu_indexes") is None:
            continue
        card.held += size
        host.ram -= size if host.unified else 0


def parts_of(place: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of a place, the main one first."""
    return [place, *(place.get("subordinates") or ())]


def fits(case: Case, place: dict[str, Any]) -> str | None:
    """What is wrong with a place; None where every part fits: each worker once, cards that exist, of one
    type, none twice, with room for what is claimed on them, and RAM."""
    there = hosts(case)
    names = [p["worker"] for p in parts_of(place)]
    if len(set(names)) < len(names):
        return f"a worker stands in it twice: {names}"
    for p in parts_of(place):
        host = there.get(p["worker"])
        if host is None:
            return f"there is no worker {p['worker']}"
        claims = p["claim"].get("vram") or {}
        for index, size in claims.items():
            card = host.card(int(index), p.get("gpu_type"))
            if card is None:
                return f"{p['worker']} has no GPU {index} of type {p.get('gpu_type')}"
            if size > card.free:
                return f"{p['worker']}:{index} has {card.free} free of {size}"
        if sorted(map(int, claims)) != sorted(p.get("gpu_indexes") or ()):
            return f"claims of {p['worker']} are not those of its GPUs"
        pooled = sum(claims.values()) if host.unified else 0
        if (p["claim"].get("ram") or 0) + pooled > host.ram:
            return f"{p['worker']} has {host.ram} of RAM free"
    return None
