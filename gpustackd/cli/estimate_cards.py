"""`gpustackd estimate --card`: the estimate on cards of one size, as the daemon would place it."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from gpustackd.cli.output import console
from gpustackd.errors import BadRow, UsageError

if TYPE_CHECKING:
    from gpustackd.domain.facts import ModelFacts
    from gpustackd.domain.model_spec import ModelSpec
    from gpustackd.estimate.breakdown import Breakdown
    from gpustackd.placement.on_cards import OnCards

MOST = 2**50


def card_memory(text: str) -> int:
    """Bytes of one card. Raise UsageError for what is no size of a card."""
    from gpustackd.store.documents.fields import size

    try:
        memory = size(text)
    except ValueError as error:
        raise UsageError(f"--card {error}", "give the memory of one GPU, as in --card=80GiB") from None
    if not 0 < memory <= MOST:
        raise UsageError(
            f"--card is {text[:40]}, no card has that", "give the memory of one GPU, as in 80GiB"
        )
    return memory


def with_cards(spec: ModelSpec, facts: ModelFacts, memory: int) -> tuple[Breakdown, OnCards]:
    """The need taken apart on as many cards as it takes, and what is booked there. Raise BadRow for flags
    that cannot be read."""
    from gpustackd.engines.flags import parse_flags
    from gpustackd.engines.parallel_sizes import Parallel, parallel_of
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


def with_refusal(found: Breakdown, spec: ModelSpec, facts: ModelFacts) -> Breakdown:
    """With a warning where no search for a place would go on: flags that cannot be used, or not together, or
    that do not divide the model. The figures stand."""
    from gpustackd.estimate.demand import build_demand
    from gpustackd.placement.rules.registry import rules_of

    try:
        rules_of(build_demand(spec, facts))
    except BadRow as error:
        return replace(found, warnings=(*found.warnings, f"no instance would be placed: {error}"))
    return found


def as_json(found: OnCards) -> dict[str, Any]:
    """`gpus` 0 = no place, for the reason that `message` gives."""
    return asdict(found)


def show_cards(found: OnCards) -> None:
    """What it takes of such cards, in a sentence."""
    out = console()
    size = f"{found.memory / 2**30:.2f} GiB"
    if not found.gpus:
        out.print(f"\non cards of {size}:\n{found.message}", markup=False)
        return
    hosts = f" of {found.workers} workers" if found.workers > 1 else ""
    cards = f"{found.gpus} cards" if found.gpus > 1 else "one card"
    each = f"{found.booked / found.gpus / 2**30:.2f} GiB booked on {'each' if found.gpus > 1 else 'it'}"
    out.print(f"on cards of {size} it takes {cards}{hosts}, {each}", markup=False, style="bold")
