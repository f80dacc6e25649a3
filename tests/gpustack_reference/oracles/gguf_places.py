"""Whether a place of a GGUF model is right: what its devices hold fits, no more layers would fit, no fewer
GPUs do."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from tests.gpustack_reference import cases
from tests.gpustack_reference.cases import Case
from tests.gpustack_reference.oracles.layers import LayerModel
from tests.gpustack_reference.oracles.room import Card, Host, hosts, parts_of

RPC_RAM = 512 * 1024**2
"""Of the process that serves a GPU to another worker."""


def complaint(case: Case, model: LayerModel, place: dict[str, Any] | None) -> str | None:
    """What is wrong with a place by the sizes of the case; None = nothing."""
    if place is None:
        return "is no place"
    level = place["claim"]["offload_layers"]
    return (
        _devices(case, model, place)
        or _ram(case, model, place)
        or _requested(case, model, level)
        or _no_more_layers(case, model, level)
        or _no_fewer_gpus(case, model, place)
    )


def _split(place: dict[str, Any]) -> list[int]:
    """Layers on each device: remote ones first, then those of the main worker."""
    split = place["claim"].get("tensor_split")
    return list(split) if split else [place["claim"]["offload_layers"]] * bool(place.get("gpu_indexes"))


def _cards(there: dict[str, Host], place: dict[str, Any]) -> list[tuple[Host, Card, int]]:
    """(worker, card, claim) of the devices in llama.cpp's order."""
    main, *others = parts_of(place)
    found = []
    for p in (*others, main):
        host = there[p["worker"]]
        for index in p.get("gpu_indexes") or ():
            card = host.card(index, p.get("gpu_type"))
            assert card is not None, f"{p['worker']} has no GPU {index}"
            found.append((host, card, p["claim"]["vram"][str(index)]))
    return found


def _devices(case: Case, model: LayerModel, place: dict[str, Any]) -> str | None:
    cards, counts = _cards(hosts(case), place), _split(place)
    if len(cards) != len(counts) or sum(counts) != place["claim"]["offload_layers"]:
        return f"{counts} layers do not lie on its {len(cards)} GPUs"
    names = [(h.name, c.index) for h, c, _ in cards]
    if len(set(names)) < len(names):
        return f"a GPU stands in it twice: {names}"
    remotes = len(cards) - len(place.get("gpu_indexes") or ())
    right = model.devices(counts, [h.unified for h, _, _ in cards], remotes)
    for (host, card, claim), size in zip(cards, right, strict=True):
        if claim != size:
            return f"{host.name}:{card.index} books {claim}, its layers take {size}"
        if claim > card.free:
            return f"{host.name}:{card.index} has {card.free} free of {claim}"
    return None


def _ram(case: Case, model: LayerModel, place: dict[str, Any]) -> str | None:
    there, (main, *others) = hosts(case), parts_of(place)
    host, level = there[main["worker"]], place["claim"]["offload_layers"]
    own = (model.ram_unified if host.unified else model.ram)[level]
    if main["claim"]["ram"] != own:
        return f"books {main['claim']['ram']} of RAM, {level} layers on GPUs leave {own}"
    if any(p["claim"]["ram"] != RPC_RAM for p in others):
        return f"books other RAM than {RPC_RAM} for a process that serves a GPU"
    taken = {h.name: 0 for h in there.values()}
    for p in (main, *others):
        pooled = sum(p["claim"]["vram"].values()) if there[p["worker"]].unified else 0
        taken[p["worker"]] += p["claim"]["ram"] + pooled
    short = [n for n, size in taken.items() if size > there[n].ram]
    return f"{short} are short of RAM" if short else None


def requested(case: Case) -> int | None:
    """`--gpu-layers`, the last one; None = not said, or left to llama.cpp."""
    found = None
    for element in case["model"].get("backend_parameters") or []:
        name, _, value = element.lstrip("-").partition("=")
        if name in ("ngl", "gpu-layers", "n-gpu-layers"):
            found = int(value) if value.lstrip("-").isdigit() and int(value) >= 0 else None
    return found


def _requested(case: Case, model: LayerModel, level: int) -> str | None:
    asked = requested(case)
    if asked is None or min(asked, model.total_layers) == level:
        return None
    return f"has {level} layers on GPUs, {asked} are asked for"


# -- the most layers, the fewest GPUs ------------------------------------------------------------------------


def best_level(case: Case, model: LayerModel) -> int:
    """The most layers that some way of dividing them brings onto GPUs that may be used together; 0 = none."""
    ways = list(_ways(case))
    for level in range(model.total_layers, 0, -1):
        for main, cards, remotes in ways:
            if _holds(model, main, cards, remotes, level):
                return level
    return 0


def _holds(model: LayerModel, main: Host, cards: list[tuple[Host, Card]], remotes: int, level: int) -> bool:
    unified = [h.unified for h, _ in cards]
    rooms = [c.free - (RPC_RAM if h.unified and n < remotes else 0) for n, (h, c) in enumerate(cards)]
    counts = model.fill(rooms, level, unified, remotes)
    if counts is None or not any(counts[remotes:]):
        return False
    ram = (model.ram_unified if main.unified else model.ram)[level]
    if main.unified:
        ram += sum(model.devices(counts, unified, remotes)[remotes:])
    return ram <= main.ram and all(h.ram >= RPC_RAM for h, _ in cards[:remotes])


def _ways(case: Case) -> Any:
    """(main worker, devices in order, how many are remote): each worker alone, and each with all others."""
    there = _usable(case)
    workers = {h.name for h, _ in there}
    spans = case["model"].get("distributed_inference_across_workers") and case["model"].get(
        "distributable", True
    )
    for name in sorted(workers):
        own = [(h, c) for h, c in there if h.name == name]
        if not _picked(case) or len(workers) == 1:
            yield own[0][0], own, 0
        others = [(h, c) for h, c in there if h.name != name]
        if others and (spans or _picked(case)):
            for key in (lambda d: -d[1].free, lambda d: d[1].free):
                ordered = sorted(others, key=key)
                yield own[0][0], [*ordered, *own], len(ordered)


def _picked(case: Case) -> set[tuple[str, int]]:
    ids = (case["model"].get("gpu_selector") or {}).get("gpu_ids") or []
    return {(i.rsplit(":", 2)[0], int(i.rsplit(":", 2)[2])) for i in ids}


def _usable(case: Case) -> list[tuple[Host, Card]]:
    picked = _picked(case)
    return [
        (h, c)
        for h in hosts(case).values()
        for c in sorted(h.cards, key=lambda c: c.index)
        if c.total and (not picked or (h.name, c.index) in picked)
    ]


def _no_more_layers(case: Case, model: LayerModel, level: int) -> str | None:
    if requested(case) is not None:
        return None
    best = best_level(case, model)
    return f"has {level} layers on GPUs where {best} fit" if best > level else None


def _no_fewer_gpus(case: Case, model: LayerModel, place: dict[str, Any]) -> str | None:
    """Of one worker any smaller number of its GPUs would do; over workers one of those that were taken."""
    if _picked(case):
        return None
    cards = [(h, c) for h, c, _ in _cards(hosts(case), place)]
    level, remotes = place["claim"]["offload_layers"], len(cards) - len(place.get("gpu_indexes") or ())
    if level == 0:
        return None
    if not remotes:
        groups: dict[str, list[tuple[Host, Card]]] = {}
        for h, c in _usable(case):
            groups.setdefault(h.name, []).append((h, c))
        for name, own in groups.items():
            for some in combinations(own, len(cards) - 1):
                if some and _holds(model, some[0][0], list(some), 0, level):
                    return f"{[c.index for _, c in some]} of {name} would do"
        return None
    main = cards[-1][0]
    for n in range(remotes):
        fewer = [*cards[:n], *cards[n + 1 :]]
        if _holds(model, main, fewer, remotes - 1, level):
            return f"{cards[n][0].name}:{cards[n][1].index} is not needed"
    return None


# -- models of which a header is given -----------------------------------------------------------------------


def layer_weights(case: Case) -> list[int]:
    """Bytes of the weights of each layer of a header, the output last."""
    entry = cases.fixture("gguf-metadata.json", "files", header_name(case), "model.gguf_metadata_fixture")
    found: dict[int, int] = {}
    output = 0
    for name, shape, kind in entry["tensors"]:
        size = 1
        for n in shape:
            size *= n
        elements, held = BLOCKS[kind]
        size = size // elements * held
        if name.startswith("blk."):
            found[int(name.split(".")[1])] = found.get(int(name.split(".")[1]), 0) + size
        elif name.startswith("output"):
            output += size
    return [*(found[k] for k in sorted(found)), output]


BLOCKS = {0: (1, 4), 1: (1, 2), 8: (32, 34), 12: (256, 144), 14: (256, 210), 30: (1, 2)}
"""Elements and bytes of a block of these element types (F32, F16, Q8_0, Q4_K, Q6_K, BF16)."""


def header_name(case: Case) -> str:
    """The header that a case names, if it is of the model's repository; else the one that is."""
    named = str(case["model"]["gguf_metadata_fixture"])
    repository = (case["model"].get("huggingface_repo_id") or "").replace("/", "_")
    if not repository or named.startswith(repository):
        return named
    found = [n for n in cases.names("gguf-metadata.json", "files") if n.startswith(repository)]
    return found[0] if len(found) == 1 else named


def rough_complaint(case: Case, place: dict[str, Any] | None) -> str | None:
    """What is wrong with a place of which only the weights are known."""
    if place is None:
        return "is no place"
    weights, counts = layer_weights(case), _split(place)
    cards = _cards(hosts(case), place)
    if len(cards) != len(counts) or sum(counts) != place["claim"]["offload_layers"]:
        return f"{counts} layers do not lie on its {len(cards)} GPUs"
    first = len(weights) - sum(counts)
    for (host, card, claim), count in zip(cards, counts, strict=True):
        least = sum(weights[first : first + count])
        first += count
        if claim < least:
            return f"{host.name}:{card.index} books {claim}, less than the weights of its layers ({least})"
        if claim > card.free:
            return f"{host.name}:{card.index} has {card.free} free of {claim}"
    theirs = case["expect"]["candidates"][0]
    level, parts = theirs["claim"].get("offload_layers") or 0, theirs.get("subordinates") or []
    if sum(counts) < level:
        return f"has {sum(counts)} layers on GPUs, the peer {level}"
    if sum(counts) == level and len(cards) > len(theirs.get("gpu_indexes") or ()) + len(parts):
        return f"takes {len(cards)} GPUs for as many layers as the peer"
    kept = sum(weights[: len(weights) - sum(counts)])
    if place["claim"]["ram"] < kept:
        return f"books {place['claim']['ram']} of RAM, less than the weights that stay there ({kept})"
    if place["claim"]["ram"] > hosts(case)[place["worker"]].ram:
        return "is short of RAM"
    return None
