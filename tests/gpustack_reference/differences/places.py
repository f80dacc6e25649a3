"""Where production takes another place."""

from __future__ import annotations

import re
from itertools import combinations
from typing import Any

from tests.gpustack_reference.cases import Case
from tests.gpustack_reference.differences.difference import KEEP, Difference
from tests.gpustack_reference.judgement import Finding, Holds, OneOf, Tells
from tests.gpustack_reference.oracles import scores
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
    there = hosts(case)
    found = []
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
    if finding.what.startswith("candidate"):
        return KEEP
    if case["model"].get("placement_strategy") == "binpack":
        values = [scores.binpack(case, p) for p in found]
    else:
        values = scores.spread(case, found)
    return OneOf.of(p for p, top in zip(found, _top(values), strict=True) if top)


def _of_cards(like: dict[str, Any], cards: list[Card], size: int) -> dict[str, Any]:
    made = {
        "worker": like["worker"], "gpu_type": like["gpu_type"], "gpu_indexes": [c.index for c in cards],
        "claim": {"ram": like["claim"].get("ram") or 0, "vram": {str(c.index): size for c in cards}},
    }  # fmt: skip
    if like.get("gpu_addresses"):
        made["gpu_addresses"] = [c.address for c in cards]
    return made


def _main(case: Case, finding: Finding) -> Any:
    """The same parts, and as main worker that of which the strategy thinks most."""
    listed = _listed(case)
    if case["area"] != "selector.mindie" or case["model"].get("gpu_selector"):
        return KEEP
    if not listed or not all(c.get("subordinates") for c in listed):
        return KEEP
    sets = [frozenset((p["worker"], tuple(p["gpu_indexes"])) for p in parts_of(c)) for c in listed]

    def complaint(got: Any) -> str | None:
        if got is None:
            return "is no place"
        mine = parts_of(got)
        if frozenset((p["worker"], tuple(p["gpu_indexes"])) for p in mine) not in sets:
            return f"has other parts than {sets}"
        value = scores.binpack(case, got)
        for n in range(1, len(mine)):
            main, *rest = mine[n], *mine[:n], *mine[n + 1 :]
            other = scores.binpack(case, {**main, "subordinates": rest})
            if other > value * (1 + ALIKE):
                return f"scores {value}; with {main['worker']} as its main worker {other}"
        return fits(case, got)

    if case["model"].get("placement_strategy") != "binpack":
        return KEEP
    return Holds("the best main worker of the same parts", complaint)


# -- custom engines ------------------------------------------------------------------------------------------


def _fewest(case: Case, finding: Finding) -> Any:
    """As few cards of one worker as hold the need, each with room for its even part."""
    listed, need = _listed(case), (case["expect"].get("derived") or {}).get("vram_claim")
    if case["area"] != "selector.custom" or case["model"].get("gpu_selector") or not listed or not need:
        return KEEP
    if any(len(c.get("gpu_indexes") or ()) < 2 for c in listed):
        return KEEP
    flags = case["model"].get("backend_parameters") or []
    if any(re.search("gpu.memory.utilization|mem.fraction.static", f) for f in flags):
        return KEEP
    only = None
    if finding.what.startswith("candidate"):
        only = finding.expected["worker"]
    found, least = [], 10**9
    for host in hosts(case).values():
        if only not in (None, host.name):
            continue
        for kind in {c.type for c in host.cards}:
            cards = [c for c in host.cards if c.type == kind]
            for count in range(2, len(cards) + 1):
                part = -(-need // count)
                able = [c for c in cards if c.free >= part]
                if len(able) >= count:
                    least = min(least, count)
                    like = {**listed[0], "worker": host.name, "gpu_type": kind}
                    found += [_of_cards(like, list(some), part) for some in combinations(able, count)]
                    break
    found = [p for p in found if len(p["gpu_indexes"]) == least]
    if not found:
        return KEEP
    values = [scores.binpack(case, p) for p in found]
    if case["model"].get("placement_strategy") == "binpack" and not finding.what.startswith("candidate"):
        found = [p for p, top in zip(found, _top(values), strict=True) if top]
    return OneOf.of(found)


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
    return Tells((f"{sum(able) / 1024**3:.2f} GiB",))


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
        "any_npus_of_a_worker",
        "of a worker's freest NPUs any will do; the peer lists the first ones",
        "Of NPUs with as much free memory the peer takes the first ones by their index. Here the instance's "
        "name decides among them, and among workers that score alike.",
        "who runs several schedulers: instances decided at one time do not all run for one card",
        ("place", "final"),
        _ascend_single,
    ),
    Difference(
        "main_worker_by_strategy",
        "the main worker of a distributed Ascend placement is the one that the strategy values most",
        "The peer takes the first worker of its walk, by its number of NPUs and the order of rows.",
        "who packs: partly used workers are filled first",
        ("place", "final", "candidate *"),
        _main,
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
