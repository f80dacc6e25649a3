"""SGLang's static fraction for every GPU type that a search may use: its rules follow the cards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from gpustackd.domain.demand import Demand, Engine
from gpustackd.domain.fleet.columns import Ints
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.engines.flags import parse_flags
from gpustackd.engines.sglang import CardShape, Fraction, fraction, static_fraction
from gpustackd.placement.rules.resource_rules import ClaimPolicy, ResourceRules

NPU_TYPES = ("cann",)


def follows_cards(demand: Demand, rules: ResourceRules) -> bool:
    """Whether the share of a card has to be worked out from the cards."""
    if rules.engine is not Engine.SGLANG or rules.claim_policy is not ClaimPolicy.SHARE:
        return False
    return fraction(parse_flags(demand.spec.backend_parameters)) is None


def fractions(fleet: Fleet, rows: Ints, demand: Demand, rules: ResourceRules) -> Mapping[str, Fraction]:
    """GPU type -> fraction, from the cards of these worker positions (or the hand-picked ones of them)."""
    parameters = parse_flags(demand.spec.backend_parameters)
    hyper = demand.facts.hyper
    vision = hyper.vision_config if hyper else None
    found = _selected(fleet, rows, demand) if demand.spec.gpu_ids else _all(fleet, rows, rules)
    kind = str(demand.facts.config.get("model_type") or "")
    return {t: static_fraction(parameters, shape, vision, kind) for t, shape in found.items()}


def with_fractions(rules: ResourceRules, found: Mapping[str, Fraction]) -> ResourceRules:
    """The same rules with these shares; a fraction that leaves nothing of a card is 0: it never serves."""
    share = {t: min(max(f.value, 0.0), 0.999) for t, f in found.items()}
    return replace(rules, share=0.0, share_of_type=MappingProxyType(share))


def _all(fleet: Fleet, rows: Ints, rules: ResourceRules) -> dict[str, CardShape]:
    kinds, totals = fleet.gpu_type[rows], fleet.vram_total[rows]
    eligible = rules.devices(fleet, rows) if rules.devices is not None else None
    if eligible is not None:
        kinds = np.where(eligible, kinds, -1)
    found: dict[str, CardShape] = {}
    for code in np.unique(kinds[kinds >= 0]).tolist():
        known = totals[(kinds == code) & (totals > 0)]
        name = fleet.types[code]
        found[name] = CardShape(int(known.min()) if len(known) else 0, _npu(name))
    return found


def _selected(fleet: Fleet, rows: Ints, demand: Demand) -> dict[str, CardShape]:
    """Hand-picked cards: with `gpus_per_replica`, on each worker the first that many by free share."""
    fleet.renew()
    passing = set(rows.tolist())
    chosen: dict[str, dict[int, list[tuple[float, int]]]] = {}
    for gpu in demand.spec.gpu_ids:
        w = fleet.by_name.get(gpu.worker)
        if w is None or w not in passing:
            continue
        here = (fleet.gpu_id[w] != 0) & (fleet.gpu_index[w] == gpu.index)
        for s in np.flatnonzero(here).tolist():
            if fleet.types[int(fleet.gpu_type[w, s])] == gpu.type:
                card = (float(fleet.ratio[w, s]), int(fleet.vram_total[w, s]))
                chosen.setdefault(gpu.type, {}).setdefault(w, []).append(card)
    selector = demand.spec.gpu_selector
    per = (selector.gpus_per_replica if selector else None) or 0
    found: dict[str, CardShape] = {}
    for name, workers in chosen.items():
        sizes: list[int] = []
        for cards in workers.values():
            cards.sort(key=lambda c: -c[0])
            sizes.extend(total for _, total in (cards[:per] if per else cards))
        known = [s for s in sizes if s > 0]
        most = max(len(cards) for cards in workers.values())
        found[name] = CardShape(min(known, default=0), _npu(name), max(most, per), len(workers))
    return found


def _npu(gpu_type: str) -> bool:
    return gpu_type in NPU_TYPES
