"""How many GPUs an engine's flags ask for, what each is booked, and the best places of that kind on one
worker."""

from __future__ import annotations

import re
from itertools import combinations, islice, pairwise
from math import prod
from typing import Any

from tests.gpustack_reference.cases import Case
from tests.gpustack_reference.oracles import scores
from tests.gpustack_reference.oracles.room import Card, Host, fits, hosts, parts_of

SIZES = {
    "selector.vllm": ({"tensor-parallel-size", "tp"}, {"pipeline-parallel-size", "pp"},
                      {"data-parallel-size", "dp"}),
    "selector.sglang": ({"tp-size", "tensor-parallel-size", "tp"}, {"pp-size", "pipeline-parallel-size"},
                        {"dp-size", "data-parallel-size", "dp"}),
}  # fmt: skip
SHARES = {"selector.vllm": "gpu-memory-utilization", "selector.sglang": "mem-fraction-static"}
MANY = 2000
GIB = 1024**3


def flag(case: Case, *names: str) -> str | None:
    """The last value of a flag under any of its names."""
    tokens = " ".join(case["model"].get("backend_parameters") or []).replace("=", " ").split()
    found = [v for t, v in pairwise(tokens) if t.startswith("-") and t.lstrip("-") in names]
    return found[-1] if found else None


def sizes(case: Case) -> list[int]:
    """The parallel sizes that are given, tensor parallelism first (1 where it is not)."""
    found = [flag(case, *names) for names in SIZES.get(case["area"], ())]
    if not any(found):
        return []
    return [int(v) if v and v.isdigit() else 1 for v in found]


def world(case: Case) -> int:
    """GPUs that the flags ask for; 0 = they do not say."""
    return prod(sizes(case)) if sizes(case) else 0


def share(case: Case, kind: str) -> float | None:
    """The share of a card that the engine takes, as flags, candidates or figures on the way have it; 0 = what
    the model needs; None = not known."""
    derived = case["expect"].get("derived") or {}
    if (given := flag(case, SHARES.get(case["area"], ""))) and re.fullmatch(r"[\d.]+", given):
        return float(given)
    if "gpu_memory_utilization" in derived:
        return float(derived["gpu_memory_utilization"])
    if kind in (derived.get("fraction_by_gpu_type") or {}):
        return float(derived["fraction_by_gpu_type"][kind])
    for c in case["expect"].get("candidates") or []:
        if (c["claim"] or {}).get("vram_utilization") and c.get("gpu_type") == kind:
            return float(c["claim"]["vram_utilization"])
    if case["area"] == "selector.vllm":
        return 0.9 if "llm" in (case["model"].get("categories") or ["llm"]) else 0.0
    return None


def divides(case: Case, count: int) -> bool:
    """Whether heads and vocabulary split over so many GPUs, as far as they are known."""
    parsed = case["model"].get("parsed") or {}
    known = [parsed.get("num_attention_heads"), parsed.get("vocab_size")]
    return all(not v or v % count == 0 for v in known)


def need(case: Case) -> int | None:
    """Bytes that all GPUs have to offer together."""
    return (case["expect"].get("derived") or {}).get("vram_claim")


def booked(case: Case, card: Card, count: int) -> int:
    """What is booked on a card of so many: its share, or an even part of the need."""
    u = share(case, card.type)
    if u:
        return int((card.total or 0) * u)
    return -(-(need(case) or 0) // count)


def places(case: Case, count: int) -> list[dict[str, Any]]:
    """Places on so many GPUs of one worker that hold the model."""
    found: list[dict[str, Any]] = []
    for host in hosts(case).values():
        for kind in {c.type for c in host.cards}:
            if share(case, kind) is None:
                continue
            able = [c for c in host.cards if c.type == kind and c.total and booked(case, c, count) <= c.free]
            for some in islice(combinations(able, count), MANY):
                place = _place(case, host, list(some))
                if sum(place["claim"]["vram"].values()) >= (need(case) or 0) and fits(case, place) is None:
                    found.append(place)
    return found


def _place(case: Case, host: Host, cards: list[Card]) -> dict[str, Any]:
    vram = {str(c.index): booked(case, c, len(cards)) for c in cards}
    claim = {"ram": _ram(case, sum(vram.values())), "vram": vram}
    return {
        "worker": host.name,
        "gpu_type": cards[0].type,
        "gpu_indexes": [c.index for c in cards],
        "claim": claim,
    }


def _ram(case: Case, vram: int) -> int:
    cache = case["model"].get("extended_kv_cache") or {}
    if not cache.get("enabled") or cache.get("mode") == "shared":
        return 0
    if cache.get("ram_size"):
        return int(cache["ram_size"] * GIB)
    return int(vram * (cache.get("ram_ratio") or 1.2))


def complaint(case: Case, got: dict[str, Any] | None, count: int) -> str | None:
    """What is wrong with a place that is to have so many GPUs."""
    if got is None:
        return "is no place"
    total = sum(len(p.get("gpu_indexes") or ()) for p in parts_of(got))
    if total != count:
        return f"has {total} GPUs, not {count}"
    if (wrong := fits(case, got)) is not None:
        return wrong
    there, held = hosts(case), 0
    for p in parts_of(got):
        for index, claim in p["claim"]["vram"].items():
            card = there[p["worker"]].card(int(index), p.get("gpu_type"))
            assert card is not None
            if claim != booked(case, card, count):
                return f"books {claim} on {p['worker']}:{index}, not {booked(case, card, count)}"
            held += claim
    if held < (need(case) or 0):
        return f"holds {held} of {need(case)}"
    if not got.get("subordinates") and case["model"].get("placement_strategy") == "binpack":
        best = max(scores.binpack(case, p) for p in places(case, count))
        value = scores.binpack(case, got)
        if value < best * (1 - 1e-6):
            return f"scores {value}, another one {best}"
    return None


# -- Ascend --------------------------------------------------------------------------------------------------


def ascend_need(case: Case) -> int:
    """Weights, 3 GiB, the cache of one longest sequence, and the activations of a full batch."""
    parsed, model = case["model"].get("parsed") or {}, case["model"]
    kv = parsed.get("num_key_value_heads") or 1
    layers, size = parsed.get("num_hidden_layers") or 0, parsed.get("head_dim") or 0
    if parsed.get("kv_lora_rank"):
        width = parsed["kv_lora_rank"] + (parsed.get("qk_rope_head_dim") or 0)
    else:
        width = 2 * kv * size
    length = int(flag(case, "max-seq-len") or min(parsed.get("derived_max_seq_len") or 8192, 8192))
    batch = int(flag(case, "max-batch-size") or 200)
    weights = (model.get("weight_bytes") or 0) + sum((model.get("lora_weight_bytes") or {}).values())
    return weights + 3 * GIB + 2 * width * layers * (length + batch * 128)


def ascend_holds(case: Case, need: int, heads: int) -> bool:
    """Whether two or more workers hold it, each with as many NPUs, all of which divide the heads."""
    if not case["model"].get("distributed_inference_across_workers"):
        return False
    fraction = float(flag(case, "npu-memory-fraction") or 0.8)
    able: list[list[int]] = []
    for host in hosts(case).values():
        if host.ram < GIB // 2:
            continue
        sizes = [int((c.total or 0) * fraction) for c in host.cards if c.type == "cann" and c.address]
        free = [c.free for c in host.cards if c.type == "cann" and c.address]
        able.append(sorted((s for s, f in zip(sizes, free, strict=True) if 0 < s <= f), reverse=True))
    for each in (1, 2, 4, 8, 16):
        offers = sorted((sum(a[:each]) for a in able if len(a) >= each), reverse=True)
        for count in range(2, len(offers) + 1):
            if sum(offers[:count]) >= need and not (heads and heads % (count * each)):
                return True
    return False
