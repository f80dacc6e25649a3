"""`gpustackd estimate --card`: the estimate on cards of one size, as the daemon would place it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gpustackd.errors import BadRow

if TYPE_CHECKING:
    from gpustackd.domain.facts import ModelFacts
    from gpustackd.domain.model_spec import ModelSpec
    from gpustackd.estimate.breakdown import Breakdown
    from gpustackd.placement.on_cards import OnCards


def with_cards(spec: ModelSpec, facts: ModelFacts, memory: int) -> tuple[Breakdown, OnCards]:
    """The need on as many cards of `memory` bytes as it takes, and what is booked there. Raise BadRow for
    flags that cannot be read."""
    from gpustackd.engines.flags import parse_flags
    from gpustackd.engines.parallelism import Parallel
    from gpustackd.engines.registry import parallel_of
    from gpustackd.estimate.breakdown import breakdown
    from gpustackd.estimate.demand import build_demand
    from gpustackd.placement.on_cards import on_cards

    flags = parse_flags(spec.backend_parameters)
    stated = parallel_of(spec.effective_backend, flags)
    placed = on_cards(build_demand(spec, facts), memory, stated.world)
    if not placed.gpus:
        return breakdown(spec, facts), placed
    chosen = Parallel(placed.gpus // placed.workers, placed.workers, placed.gpus)
    layout = stated if stated.world is not None else chosen
    of_one_copy = placed.booked * layout.tp * layout.pp // placed.gpus
    return breakdown(spec, facts, booked=of_one_copy, layout=chosen), placed


def with_refusal(need: Breakdown, spec: ModelSpec, facts: ModelFacts) -> Breakdown:
    """With a warning where no place would be searched for: flags that cannot be used, or not together, or
    that do not divide the model. The figures stay as they are."""
    from gpustackd.estimate.demand import build_demand
    from gpustackd.placement.rules.registry import rules_of

    try:
        rules_of(build_demand(spec, facts))
    except BadRow as error:
        return replace(need, warnings=(*need.warnings, f"no instance would be placed: {error}"))
    return need
