"""Where production takes another place."""

from __future__ import annotations

import re
from itertools import combinations
from typing import Any

from tests.gpustack_reference import cases
from tests.gpustack_reference.cases import Case
from tests.gpustack_reference.differences.difference import KEEP, Difference
from tests.gpustack_reference.judgement import Finding, Holds, OneOf, Tells
from tests.gpustack_reference.oracles import scores, worlds
from tests.gpustack_reference.oracles.room import Card, fits, hosts, parts_of

ALIKE = 1e-6


def _listed(case: Case) -> list[dict[str, Any]]:
    return case["expect"].get("candidates") or []


def _top(values: list[float]) -> list[bool]:
    most = max(values)
    return [v >= most - ALIKE * abs(most) for v in values]


# -- ties ----------------------------------------------------------------------------------------------------


def _ties(case: Case, finding: Finding) -> Any:
    listed = _listed(case)
    values = [c.get("placement_score") for c in listed]
    if finding.expected is None or len(listed) < 2 or None in values:
        return KEEP
    best = [c for c, top in zip(listed, _top([v or 0.0 for v in values]), strict=True) if top]
    if len(best) < 2:
        return KEEP
    names = [(c["worker"], c.get("gpu_type"), c.get("gpu_indexes")) for c in best]

    def complaint(got: Any) -> str | None:
        if got is None or (got["worker"], got["gpu_type"], got["gpu_indexes"]) not in names:
            return f"is none of {names}"
        return fits(case, got)

    return Holds("one of those that score best", complaint)


# -- Ascend --------------------------------------------------------------------------------------------------


def _ascend_single(case: Case, finding: Finding) -> Any:
    """On each worker of the list any of the freest NPUs do, of all workers those that score best."""
    listed = _listed(case)
    if case["area"] != "selector.mindie" or case["model"].get("gpu_selector") or not listed:
        return KEEP
    if any(c.get("subordinates") for c in listed):
        return KEEP
    if finding.what.startswith("candidate"):
        return Holds("the same NPUs in some order", lambda got: _same_cards(case, finding.expected, got))
    there = hosts(case)
    found: list[dict[str, Any]] = []
    for candidate in listed:
        host, claims = there[candidate["worker"]], candidate["claim"]["vram"]
        size = max(claims.values())
        able = [c for c in host.cards if c.type == "cann" and c.free >= size]
        freest = sorted((c.free for c in able), reverse=True)[: len(claims)]
        found += [
            _of_cards(candidate, list(some), size)
            for some in combinations(able, len(claims))
            if sum(c.free for c in some) == sum(freest)
        ]
    if case["model"].get("placement_strategy") == "binpack":
        values = [scores.binpack(case, p) for p in found]
    else:
        values = scores.spread(case, found)
    return OneOf.of(p for p, top in zip(found, _top(values), strict=True) if top)


def _same_cards(case: Case, wanted: dict[str, Any], got: Any) -> str | None:
    """NPUs and their addresses come in one order, whichever."""
    if got is None:
        return "is no place"
    pairs = [list(zip(p["gpu_indexes"], p.get("gpu_addresses") or p["gpu_indexes"], strict=True))
             for p in (wanted, got)]  # fmt: skip
    if got["worker"] != wanted["worker"] or sorted(pairs[0]) != sorted(pairs[1]):
        return f"is not {wanted}"
    return None if got["claim"] == wanted["claim"] else f"claims {got['claim']}"


def _of_cards(like: dict[str, Any], cards: list[Card], size: int | dict[int, int]) -> dict[str, Any]:
    vram = {str(c.index): size if isinstance(size, int) else size[c.index] for c in cards}
    made: dict[str, Any] = {
        "worker": like["worker"],
        "gpu_type": like["gpu_type"],
        "gpu_indexes": [c.index for c in cards],
        "claim": {"ram": like["claim"].get("ram") or 0, "vram": vram},
    }
    if share := like["claim"].get("vram_utilization"):
        made["claim"]["vram_utilization"] = share
    if like.get("gpu_addresses"):
        made["gpu_addresses"] = [c.address for c in cards]
    return made


def _main(case: Case, finding: Finding) -> Any:
    """Parts like those of the list, worth no less, with the main worker of which the strategy thinks most."""
    listed = _listed(case)
    if case["area"] not in ("selector.mindie", *worlds.SIZES) or case["model"].get("gpu_selector"):
        return KEEP
    if not listed or not all(c.get("subordinates") for c in listed):
        return KEEP
    if case["model"].get("placement_strategy") != "binpack":
        return KEEP
    wanted = [finding.expected] if finding.what.startswith("candidate") else listed
    shapes = [sorted(len(p["gpu_indexes"]) for p in parts_of(c)) for c in wanted]
    least = max(scores.binpack(case, c) for c in wanted)
    there = hosts(case)
    booked = {
        _size(there, p, i): v for c in wanted for p in parts_of(c) for i, v in p["claim"]["vram"].items()
    }

    def complaint(got: Any) -> str | None:
        if got is None:
            return "is no place"
        mine = parts_of(got)
        if sorted(len(p["gpu_indexes"]) for p in mine) not in shapes:
            return f"has not as many GPUs on as many workers as those of the list: {shapes}"
        value = scores.binpack(case, got)
        if value < least * (1 - ALIKE):
            return f"scores {value}, one of the list {least}"
        for n in range(1, len(mine)):
            main, *rest = mine[n], *mine[:n], *mine[n + 1 :]
            other = scores.binpack(case, {**main, "subordinates": rest})
            if other > value * (1 + ALIKE):
                return f"scores {value}; with {main['worker']} as its main worker {other}"
        for p in mine:
            for index, size in p["claim"]["vram"].items():
                if size != booked.get(_size(there, p, index), size):
                    return f"books {size} on {p['worker']}:{index}"
        held = sum(v for p in mine for v in p["claim"]["vram"].values())
        if held < (worlds.need(case) or 0):
            return f"holds {held} of {worlds.need(case)}"
        return fits(case, got)

    return Holds("the best main worker of such parts", complaint)


def _size(there: dict[str, Any], part: dict[str, Any], index: str) -> Any:
    """The size of a card, by which its share is booked."""
    card = there[part["worker"]].card(int(index), part.get("gpu_type"))
    return card and card.total


# -- custom engines ------------------------------------------------------------------------------------------


def _fraction(case: Case) -> float:
    """The share that a custom engine's own flags name, the last one that can be used."""
    words = (
        f"{case['model'].get('run_command') or ''} {' '.join(case['model'].get('backend_parameters') or [])}"
    )
    found = re.findall(r"--?(?:gpu[-_]memory[-_]utilization|mem[-_]fraction[-_]static)[= ]([\d.]+)", words)
    usable = [float(f) for f in found if 0 < float(f) <= 1]
    return usable[-1] if usable else 0.0


def _fewest(case: Case, finding: Finding) -> Any:
    """As few cards of one worker as hold the need, each with room for its even part."""
    listed, need = _listed(case), (case["expect"].get("derived") or {}).get("vram_claim")
    if case["area"] != "selector.custom" or case["model"].get("gpu_selector") or not listed or not need:
        return KEEP
    if any(len(c.get("gpu_indexes") or ()) == 1 for c in listed):
        return KEEP
    only = finding.expected["worker"] if finding.what.startswith("candidate") else None
    found: list[dict[str, Any]] = []
    least, fraction = 10**9, _fraction(case)
    for host in hosts(case).values():
        if only not in (None, host.name) or host.ram < (listed[0]["claim"].get("ram") or 0):
            continue
        for kind in {c.type for c in host.cards}:
            cards = [c for c in host.cards if c.type == kind and c.total]
            for count in range(2, len(cards) + 1):
                parts = {c.index: max(-(-need // count), int((c.total or 0) * fraction)) for c in cards}
                able = [c for c in cards if c.free >= parts[c.index]]
                if len(able) >= count:
                    least = min(least, count)
                    like = {**listed[0], "worker": host.name, "gpu_type": kind}
                    found += [_of_cards(like, list(some), parts) for some in combinations(able, count)]
                    break
    found = [p for p in found if len(p["gpu_indexes"]) == least]
    if not found:
        return KEEP
    if case["model"].get("placement_strategy") == "binpack" and only is None:
        values = [scores.binpack(case, p) for p in found]
        found = [p for p, top in zip(found, _top(values), strict=True) if top]
    if finding.expected is not None and not listed[0].get("gpu_type"):
        found = [{**p, "gpu_type": None} for p in found]
    return OneOf.of(found)


# -- worlds --------------------------------------------------------------------------------------------------


def _world(case: Case, finding: Finding) -> Any:
    """Exactly as many GPUs as the flags ask for, though that number does not divide the model's heads."""
    count = worlds.world(case)
    if not count or case["model"].get("gpu_selector") or worlds.need(case) is None:
        return KEEP
    listed = _listed(case)
    counts = {sum(len(p.get("gpu_indexes") or ()) for p in parts_of(c)) for c in listed}
    even = bool(listed) and worlds.share(case, listed[0].get("gpu_type") or "") == 0
    if (counts == {count} and not even) or not worlds.divides(case, worlds.sizes(case)[0]):
        return KEEP
    on = _alone(case, finding)
    if not listed and not worlds.places(case, count):
        return KEEP
    if finding.what == "placed":
        return True
    if finding.what.startswith("candidate") and max(counts) < count:
        return None
    return Holds("so many GPUs as asked for", lambda got: worlds.complaint(on, got, count))


def _alone(case: Case, finding: Finding) -> Case:
    """The case with the GPUs of one candidate alone, where a finding is of one."""
    if not finding.what.startswith("candidate"):
        return case
    names = {p["worker"]: set(p.get("gpu_indexes") or ()) for p in parts_of(finding.expected)}
    kept = []
    for one in cases.workers(case):
        if one["name"] in names:
            gpus = [g for g in one.get("gpus") or [] if g["index"] in names[one["name"]]]
            kept.append({"inline": {**one, "gpus": gpus}})
    return case | {"workers": kept}


def _absolute(case: Case, finding: Finding) -> Any:
    """A need that is no share of the cards is split evenly, over as few of them as hold it."""
    listed = _listed(case)
    if case["area"] not in worlds.SIZES or case["model"].get("gpu_selector") or worlds.world(case):
        return KEEP
    if not listed or worlds.need(case) is None or "image" in (case["model"].get("categories") or ()):
        return KEEP
    kind = listed[0].get("gpu_type") or ""
    if worlds.share(case, kind) != 0 or any(len(c.get("gpu_indexes") or ()) < 2 for c in listed):
        return KEEP
    on = _alone(case, finding)
    for count in range(2, 17):
        if worlds.divides(case, count) and worlds.places(on, count):
            return Holds("an even part on each", lambda got, n=count: worlds.complaint(on, got, n))
    return KEEP


def _image(case: Case, finding: Finding) -> Any:
    """A diffusion model claims all of its weights on every GPU, and never more."""
    listed = _listed(case)
    if case["area"] != "selector.sglang" or "image" not in (case["model"].get("categories") or ()):
        return KEEP
    if not listed or case["model"].get("gpu_selector") or not worlds.need(case):
        return KEEP
    need, there = worlds.need(case) or 0, hosts(case)
    claims = [(p["worker"], p.get("gpu_type"), i, v) for c in listed for p in parts_of(c)
              for i, v in p["claim"]["vram"].items()]  # fmt: skip
    cards = [(there[w].card(int(i), k), v) for w, k, i, v in claims]
    if all(v == need and c is not None and c.free >= v for c, v in cards):
        return KEEP
    able = any(c.free >= need for h in there.values() for c in h.cards)
    if finding.what == "placed":
        return able

    def complaint(got: Any) -> str | None:
        if got is None:
            return "is no place" if able else None
        if any(v != need for p in parts_of(got) for v in p["claim"]["vram"].values()):
            return f"does not claim {need} on each GPU"
        return fits(case, got)

    return Holds("its weights on each GPU", complaint)


# -- cards that are alike ------------------------------------------------------------------------------------


def _alike(case: Case, finding: Finding) -> Any:
    """Of a worker's cards with as much room any do, in one of the places that score best."""
    listed, selector = _listed(case), case["model"].get("gpu_selector") or {}
    if case["area"] not in ("selector.vllm", "selector.sglang", "selector.mindie", "selector.custom"):
        return KEEP
    if not listed or finding.expected is None:
        return KEEP
    if any(c.get("subordinates") or not c.get("gpu_indexes") or fits(case, c) for c in listed):
        return KEEP
    ids = {tuple(i.rsplit(":", 2)) for i in selector.get("gpu_ids") or ()}
    there = hosts(case)

    def room(place: dict[str, Any]) -> list[tuple[int, int]]:
        cards = [(there[place["worker"]].card(int(i), place.get("gpu_type")), v)
                 for i, v in place["claim"]["vram"].items()]  # fmt: skip
        return sorted((c.free if c else 0, v) for c, v in cards)

    if not any(_choice(there[c["worker"]], c, ids) for c in listed):
        return KEEP
    values = [c.get("placement_score") for c in listed]
    best = listed
    if None not in values:
        best = [c for c, top in zip(listed, _top([v or 0.0 for v in values]), strict=True) if top]

    def complaint(got: Any) -> str | None:
        if got is None:
            return "is no place"
        taken = {(got["worker"], got["gpu_type"], str(i)) for i in got["gpu_indexes"] or ()}
        if ids and not taken <= ids:
            return f"takes GPUs that are not selected: {taken - ids}"
        if not any(c["worker"] == got["worker"] and room(c) == room(got) for c in best):
            return "has other room or claims than those that score best"
        return fits(case, got)

    return Holds("cards with as much room", complaint)


def _picked_fraction(case: Case, finding: Finding) -> Any:
    """A share that the engine's own flags name holds for hand-picked GPUs too."""
    listed, selector = _listed(case), case["model"].get("gpu_selector") or {}
    fraction = _fraction(case)
    if case["area"] != "selector.custom" or not selector.get("gpu_ids") or not listed or not fraction:
        return KEEP
    need, count = worlds.need(case) or 0, len(listed[0].get("gpu_indexes") or ())
    there, ids = hosts(case), {tuple(i.rsplit(":", 2)) for i in selector["gpu_ids"]}

    def claim(worker: str, kind: str, index: int) -> int:
        card = there[worker].card(index, kind)
        return max(-(-need // count), int((card.total or 0) * fraction)) if card else -1

    able = sum(there[w].card(int(i), k).free >= claim(w, k, int(i))  # type: ignore[union-attr]
               for w, k, i in ids if w in there and there[w].card(int(i), k))  # fmt: skip
    if able < count:
        return False if finding.what == "placed" else None
    if finding.what == "placed":
        return True

    def complaint(got: Any) -> str | None:
        if got is None:
            return "is no place"
        taken = {(got["worker"], got["gpu_type"], str(i)) for i in got["gpu_indexes"] or ()}
        if not taken <= ids or len(taken) != count:
            return f"does not take {count} of the selected GPUs"
        for index, size in got["claim"]["vram"].items():
            if size != claim(got["worker"], got["gpu_type"], int(index)):
                return f"books {size} on {index}"
        return fits(case, got)

    return Holds("the engine's share of picked GPUs", complaint)


def _choice(host: Any, candidate: dict[str, Any], ids: set[tuple[str, ...]]) -> bool:
    """Whether its worker has another card with as much room as one that is taken."""
    own = [c for c in host.cards if c.type == candidate.get("gpu_type")]
    if ids:
        own = [c for c in own if (host.name, c.type, str(c.index)) in ids]
    taken = {c.index for c in own} & set(candidate["gpu_indexes"])
    room = {c.free for c in own if c.index in taken}
    return any(c.index not in taken and c.free in room for c in own)


PARALLEL = (
    "tp", "pp", "dp", "cp", "sp", "moe-tp", "moe-ep", "tensor-parallel-size", "pipeline-parallel-size",
    "data-parallel-size", "context-parallel-size", "sequence-parallel-size", "moe-tensor-parallel-size",
    "moe-expert-parallel-size",
)  # fmt: skip


def _prefix(case: Case, finding: Finding) -> Any:
    """As few workers as hold an Ascend model; the peer takes all of a kind."""
    listed = _listed(case)
    if case["area"] != "selector.mindie" or case["model"].get("gpu_selector"):
        return KEEP
    if any(worlds.flag(case, name) for name in PARALLEL):
        return KEEP
    need, heads = (
        worlds.ascend_need(case),
        (case["model"].get("parsed") or {}).get("num_attention_heads") or 0,
    )
    if finding.what == "placed":
        return True if not listed and worlds.ascend_holds(case, need, heads) else KEEP
    if not listed or not all(c.get("subordinates") for c in listed):
        return KEEP
    if len(listed) == 1 and len(parts_of(listed[0])) <= 2:
        return KEEP
    wanted = [finding.expected] if finding.what.startswith("candidate") else listed
    fewest = min(len(parts_of(c)) for c in wanted)

    def complaint(got: Any) -> str | None:
        if got is None:
            return "is no place"
        held = [sum(p["claim"]["vram"].values()) for p in parts_of(got)]
        total = sum(len(p["gpu_indexes"]) for p in parts_of(got))
        if len(held) > fewest:
            return f"takes {len(held)} workers, the peer {fewest}"
        if sum(held) < need:
            return f"holds {sum(held)} of {need}"
        if heads and heads % total:
            return f"{heads} heads do not divide by {total}"
        return fits(case, got)

    return Holds("no more workers than hold it", complaint)


# -- pools of cards ------------------------------------------------------------------------------------------


def _cards_of_pools(case: Case, finding: Finding) -> Any:
    """The workers and claims of a listed candidate, on cards of the instance type with room for them."""
    listed, model = _listed(case), case["model"]
    if case["area"] != "selector.vgpu" or not listed:
        return KEEP
    types = [t for t in model.get("instance_types") or [] if t["name"] == model["gpu_type_selector"]["type"]]
    detail = types[0].get("detail") or {} if types else {}

    def complaint(got: Any) -> str | None:
        if got is None:
            return "is no place"
        wanted = [finding.expected] if finding.what.startswith("candidate") else listed
        # which of the workers is the main one is a matter of taste: all hold one slice
        shapes = [_claims_by_worker(c) for c in wanted]
        mine = _claims_by_worker(got)
        if mine not in shapes:
            return f"takes {mine}, none of {shapes}"
        there = hosts(case)
        for p in parts_of(got):
            for index in p["gpu_indexes"] or ():
                card = there[p["worker"]].card(index, p["gpu_type"])
                if card is None or not _of_type(card, detail):
                    return f"{p['worker']}:{index} is no card of the instance type"
        return fits(case, got)

    return Holds("cards of the instance type", complaint)


def _claims_by_worker(place: dict[str, Any]) -> dict[str, list[int]]:
    return {p["worker"]: sorted(p["claim"]["vram"].values()) for p in parts_of(place)}


def _of_type(card: Card, detail: dict[str, Any]) -> bool:
    """Vendor and product as the instance type has them: equal but for case and punctuation, or at the end."""

    def plain(text: str) -> str:
        return " ".join(re.findall("[a-z0-9]+", text.lower()))

    product = plain(detail.get("product") or "")
    name = plain(card.product)
    same_vendor = card.vendor.lower() == (detail.get("manufacturer") or "").lower()
    return same_vendor and bool(product) and (name == product or name.endswith(f" {product}"))


# -- figures of refusals -------------------------------------------------------------------------------------


def _once(case: Case, finding: Finding) -> Any:
    if case["area"] != "selector.mindie":
        return KEEP
    fact = next(f for f in case["expect"]["message_facts"] if f["k"] == "largest_worker")
    return Tells((f"{fact['allocatable_gib']:.2f}",))


def _most_there_is(case: Case, finding: Finding) -> Any:
    fact = next(f for f in case["expect"]["message_facts"] if f["k"] == "best_combination")
    if case["area"] != "selector.mindie" or fact["workers"]:
        return KEEP
    rule = next(f for f in case["expect"]["message_facts"] if f["k"] == "fraction_rule")
    able = [
        int(c.total * rule["fraction"])
        for h in hosts(case).values()
        for c in h.cards
        if c.type == "cann" and c.total and c.free >= int(c.total * rule["fraction"]) and c.address
    ]
    return Tells((f"{sum(able) / 1024**3:.2f}",))


PLACES = (
    Difference(
        "cards_of_pools",
        "cards of a pool are picked and booked here; the peer leaves that to the node",
        "A placeholder at index 0 is held against whatever lies there, or against nothing. Cards that are "
        "picked at once are booked at once, with or without a cluster that reports its devices.",
        "who shares cards: two instances are never sent to one slice",
        ("place", "final", "candidate *"),
        _cards_of_pools,
    ),
    Difference(
        "fewest_cards",
        "a custom engine gets as few cards of a worker as hold it; the peer takes all of them",
        "The peer books every card of the worker, each with a part of the need, and looks only whether their "
        "free memory adds up.",
        "whoever comes next: whole cards stay free",
        ("place", "final", "candidate *"),
        _fewest,
    ),
    Difference(
        "exact_world_size",
        "an engine gets exactly the GPUs that its flags ask for; only the tensor-parallel size divides heads",
        "The peer goes on to a number of GPUs that divides the model's heads: with three pipeline stages "
        "it books four GPUs, of which the engine uses three, or it finds nothing.",
        "who sets parallel sizes: what is booked is what the engine takes",
        ("placed", "place", "final", "candidate *"),
        _world,
    ),
    Difference(
        "even_part_of_the_need",
        "a need that is no share of the cards is booked in even parts",
        "The peer books all that is free on each card, or over several workers nothing at all.",
        "whoever comes next on these cards",
        ("place", "final", "candidate *"),
        _absolute,
    ),
    Difference(
        "image_model_claims_its_weights",
        "a diffusion model claims its weights on each GPU, and needs them free there",
        "The peer compares with the card's whole memory, though others may hold it, and over several GPUs "
        "books all that is free.",
        "who shares cards with image models: nothing is overbooked, nothing taken in vain",
        ("placed", "place", "final", "candidate *"),
        _image,
    ),
    Difference(
        "no_more_workers_than_needed",
        "an Ascend model is spread over no more workers than hold it",
        "The peer takes every worker of a kind, and refuses where all of them together do not divide the "
        "heads.",
        "whoever comes next: whole workers stay free",
        ("placed", "place", "final", "candidate *"),
        _prefix,
    ),
    Difference(
        "any_npus_of_a_worker",
        "of a worker's freest NPUs any will do; the peer lists the first ones",
        "Of NPUs with as much free memory the peer takes the first ones by their index. Here the instance's "
        "name decides among them, and among workers that score alike.",
        "who runs several schedulers: instances decided at one time do not all run for one card",
        ("place", "final", "candidate *"),
        _ascend_single,
    ),
    Difference(
        "main_worker_by_strategy",
        "the main worker of a distributed placement is the one that the strategy values most",
        "The peer takes the first worker of its walk, by its number of GPUs and the order of rows.",
        "who packs: partly used workers are filled first",
        ("place", "final", "candidate *"),
        _main,
    ),
    Difference(
        "share_of_picked_gpus",
        "the share of a card that a custom engine's flags name is booked on hand-picked GPUs too",
        "The peer reads it for GPUs that it chooses itself, and books less of picked ones than the engine "
        "takes.",
        "who picks GPUs for an engine of his own, and his neighbours on them",
        ("placed", "place", "final"),
        _picked_fraction,
    ),
    Difference(
        "any_gpus_alike",
        "of a worker's GPUs with as much room any will do; the peer takes the first ones",
        "The instance's name decides among places that are worth the same.",
        "who runs several schedulers: instances decided at one time do not all run for the first GPUs",
        ("place", "final"),
        _alike,
    ),
    Difference(
        "ties_by_name",
        "of places that score alike the instance's name decides; the peer takes the first of its list",
        "The order of rows would send all instances that are decided at one time to one card.",
        "who runs several schedulers: fewer conflicts at the commit",
        ("final",),
        _ties,
    ),
    Difference(
        "fraction_once",
        "the memory of the largest worker is told with the fraction taken off once",
        "The peer takes the NPU memory fraction off figures that have it off already.",
        "who reads the refusal",
        ("message.largest_worker.effective_gib",),
        _once,
    ),
    Difference(
        "most_there_is",
        "the best combination of workers is told even where it is too small",
        "Where no combination reaches the number of NPUs asked for, the peer tells 0.00 GiB.",
        "who reads the refusal: the figure says how much is missing",
        ("message.best_combination.vram_gib",),
        _most_there_is,
    ),
)
