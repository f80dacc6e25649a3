"""Scores of places, by the formulas that the strategies are documented with (README of
`placement/scoring`)."""

from __future__ import annotations

from typing import Any

from tests.gpustack_reference import cases
from tests.gpustack_reference.cases import Case
from tests.gpustack_reference.oracles.room import Host, hosts, parts_of


def share(part: float, whole: float) -> float:
    """`part / whole`, 0 where there is nothing or it is not known."""
    return part / whole if whole > 0 else 0.0


def packed(cards: list[tuple[float, float]], ram: float, free_ram: float, most: float = 100.0) -> float:
    """Binpack on one worker: (claim, free) of each card; one part of RAM, two of VRAM, the fullest card
    counts. A score never exceeds its maximum."""
    r = share(ram, free_ram)
    if not cards:
        return min(most, most * r)
    return min(most, max(most * (r + 2 * share(claim, free)) / 3 for claim, free in cards))


def mean(main: float, subordinates: list[float]) -> float:
    """The main worker counts five times, each subordinate once."""
    return (5 * main + sum(subordinates)) / (5 + len(subordinates))


def binpack(case: Case, place: dict[str, Any], most: float = 100.0) -> float:
    """Binpack of a whole place on the workers of a case."""
    there = hosts(case)
    scores = [_packed_part(there[p["worker"]], p, most) for p in parts_of(place)]
    return mean(scores[0], scores[1:])


def _packed_part(host: Host, part: dict[str, Any], most: float) -> float:
    cards = []
    for index, claim in (part["claim"].get("vram") or {}).items():
        card = host.card(int(index), part.get("gpu_type"))
        cards.append((float(claim), float(card.free if card else 0)))
    return packed(cards, part["claim"].get("ram") or 0, host.ram, most)


def spread(
    case: Case, places: list[dict[str, Any]], most: float = 100.0, among: set[str] | None = None
) -> list[float]:
    """Spread of main parts: how few of this model, then of others, sit on the worker and on its cards; an
    instance counts once for each card (once without cards). `among`: workers that are compared, where they
    are not those of the places."""
    mine, others = _seats(case)
    seen = sorted(among or {p["worker"] for p in places})
    own = {w: _count(mine, w) for w in seen}
    rest = {w: _count(others, w) for w in seen}
    found = []
    for p in places:
        w = p["worker"]
        room = _emptiness(rest[w], rest.values())
        if min(own.values()) > 0:
            value = 0.50 + 0.25 * _emptiness(own[w], own.values()) + 0.15 * room
        elif own[w] == 0:
            value = 0.85 + 0.15 * room
        else:
            value = 0.45 + 0.35 * _emptiness(own[w], own.values()) + 0.20 * room
        if indexes := p.get("gpu_indexes"):
            on = [
                1 / (1 + _on(mine, w, i, p.get("gpu_type")) + 0.2 * _on(others, w, i, p.get("gpu_type")))
                for i in indexes
            ]
            value = 0.85 * value + 0.15 * sum(on) / len(on)
        found.append(most * value)
    return found


Seat = tuple[str, list[int], str | None]


def _seats(case: Case) -> tuple[list[Seat], list[Seat]]:
    """(worker, indexes, type) of parts of this model's instances, and of those of others."""
    names = {w["id"]: w["name"] for w in cases.workers(case)}
    model = model_of(case)
    mine, others = [], []
    for instance in cases.existing(case):
        side = mine if instance.get("model_id") == model and model is not None else others
        for part in instance["parts"]:
            if part.get("worker_id") in names:
                side.append((names[part["worker_id"]], part.get("gpu_indexes") or [], part.get("gpu_type")))
    return mine, others


def _count(seats: list[Seat], worker: str) -> int:
    return sum(max(len(i), 1) for w, i, _ in seats if w == worker)


def _on(seats: list[Seat], worker: str, index: int, kind: str | None) -> int:
    return sum(w == worker and index in i and (None in (t, kind) or t == kind) for w, i, t in seats)


def _emptiness(count: int, counts: Any) -> float:
    low, high = min(counts), max(counts)
    return 1.0 if high <= low else 1 - (count - low) / (high - low)


def model_of(case: Case) -> int | None:
    """The id of the case's model; None where it is not deployed yet."""
    found = (case.get("model") or {}).get("id")
    return int(found) if found is not None else None


# -- file locality -------------------------------------------------------------------------------------------


def locality(workers: set[int], main: set[int], draft: set[int], most: float) -> float:
    """The share of a place's workers that have the files; the draft model counts half, where anybody has
    it."""
    weight = 0.5 if draft else 0.0
    ratio = len(workers & main) / len(workers) + weight * len(workers & draft) / len(workers)
    return most * ratio / (1 + weight)


# -- what a replica is worth keeping -------------------------------------------------------------------------

NEVER_STARTED = {"pending", "analyzing", "error", "unschedulable"}
PROGRESS = ["scheduled", "initializing", "downloading", "starting", "running"]


def retention(case: Case, maxima: dict[str, float], strategy: str, total: float | None) -> dict[str, float]:
    """Status, layers on GPUs and placement of each instance of the model, added up; scaled to `total`."""
    used = {k: v for k, v in maxima.items() if v > 0}
    factor = total / sum(used.values()) if total is not None and used else 1.0
    there, states = hosts(case), {w["id"]: w["state"] for w in cases.workers(case)}
    names = {w["id"]: w["name"] for w in cases.workers(case)}
    model = model_of(case) or next((i.get("model_id") for i in cases.existing(case)), None)
    found = {}
    for instance in cases.existing(case):
        if instance.get("model_id", model) != model:
            continue
        state = states.get(instance.get("worker_id"))
        value = used.get("status", 0.0) * _status(state, instance.get("state"))
        value += used.get("offload_layers", 0.0) * _offload(instance["parts"][0]["claim"])
        if state is not None and "placement" in used:
            value += _kept_place(case, instance, there, names, strategy, used["placement"])
        found[str(instance["id"])] = factor * value
    return found


def _status(worker: str | None, state: str | None) -> float:
    if worker is None or worker == "not_ready" or state == "error":
        return 0.0
    return 1.0 if worker == "ready" and state == "running" else 0.5


def _offload(claim: dict[str, Any]) -> float:
    total, on = claim.get("total_layers"), claim.get("offload_layers")
    return on / total if total and on is not None else 0.0


def _kept_place(
    case: Case,
    instance: dict[str, Any],
    there: dict[str, Host],
    names: dict[int, str],
    strategy: str,
    most: float,
) -> float:
    main, *others = ({**p, "worker": names.get(p.get("worker_id", -1))} for p in instance["parts"])
    silent = (
        main["claim"].get("vram") is None if main.get("gpu_indexes") else main["claim"].get("ram") is None
    )
    if silent:
        return 0.0
    if strategy == "spread":
        return min(most, spread(case, [main], most, set(there))[0])
    values = [_kept_part(there[p["worker"]], p, most) if p["worker"] else 0.0 for p in (main, *others)]
    return min(most, mean(values[0], values[1:]))


def _kept_part(host: Host, part: dict[str, Any], most: float) -> float:
    """Binpack with what the instance holds counted as free."""
    ram = part["claim"].get("ram") or 0
    cards = []
    for index in part.get("gpu_indexes") or ():
        own = (part["claim"].get("vram") or {}).get(str(index)) or 0
        card = host.card(index, part.get("gpu_type"))
        cards.append((float(own), float((card.free if card else 0) + own)))
    return packed(cards, ram, host.ram + ram, most)


def finer(case: Case) -> dict[int, tuple[Any, ...]]:
    """The order within equal scores, by instance: never started first, then on a worker that takes nothing
    new, then not yet serving, then the youngest."""
    states = {w["id"]: w["state"] for w in cases.workers(case)}
    found = {}
    for n, instance in enumerate(cases.existing(case)):
        state = instance.get("state") or ""
        progress = PROGRESS.index(state) + 1 if state in PROGRESS else 0
        ready = states.get(instance.get("worker_id")) == "ready"
        found[instance["id"]] = (progress > 0, ready, progress, -n, -instance["id"])
    return found
