"""Other shares of a card that an engine could take: the nearest ones, above and below, that could do.

A lower share fits into cards that are partly taken; a higher one makes fewer or smaller cards enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from gpustackd.domain.demand import Engine
from gpustackd.domain.fleet.columns import Bools, Ints
from gpustackd.engines import sglang, vllm
from gpustackd.engines.flags import parse_flags
from gpustackd.errors import BadRow
from gpustackd.placement.advice.changes import EditModel
from gpustackd.placement.advice.model_edits import Editor
from gpustackd.placement.context.cards import Cards, read_cards
from gpustackd.placement.rules.resource_rules import ClaimPolicy, ResourceRules
from gpustackd.placement.search import Search

FLAGS: Mapping[Engine, str] = {
    Engine.VLLM: vllm.SHARE,
    Engine.SGLANG: sglang.FRACTION,
    Engine.MINDIE: "npu-memory-fraction",
    Engine.CUSTOM: vllm.SHARE,
}
LEAST, MOST = 5, 98
"""Percent: engines need a little besides what they are told to take."""
LOOKED_AT = 512
"""Workers."""
STEPS = 4
"""Values tried on either side."""


def shares(search: Search, editor: Editor) -> Iterator[EditModel]:
    """Edits of the share, the nearest to what it is now first."""
    rules, flag = search.context.rules, FLAGS.get(search.context.rules.engine)
    if flag is None or rules.claim_policy not in (ClaimPolicy.SHARE, ClaimPolicy.AT_LEAST):
        return
    if rules.engine is Engine.CUSTOM and not _given(search):
        return
    now = max((*rules.share_of_type.values(), rules.share), default=0.0)
    if now <= 0:
        return
    kinds = search.ladder.kinds
    known = bool({"one_gpu", "one_worker"} & kinds) and rules.engine is not Engine.MINDIE
    below = list(range(min(int(now * 100 + 0.5), MOST + 1) - 1, LEAST - 1, -1))
    above = list(range(max(int(now * 100 + 0.5), LEAST - 1) + 1, MOST + 1))
    if known:
        cards = read_cards(search.context.fleet, _emptiest(search), rules)
        down = [p for p in below if _could(search, cards, p / 100, kinds)][:STEPS]
        up = [p for p in above if _could(search, cards, p / 100, kinds)][:STEPS]
    else:  # no figures of our own: a few values further and further away
        down, up = below[4 : 5 * STEPS : 5], above[4 : 5 * STEPS : 5]
    for percent in sorted([*down, *up], key=lambda p: abs(p / 100 - now)):
        value = percent / 100
        text = f"set --{flag} to {value:g} (it is {now:g})"
        cost = 3.4 + abs(value - now)
        side = "lower share" if value < now else "higher share"
        yield editor.flag((flag,), f"{value:g}", text, cost, side, less_memory=value < now)


def _emptiest(search: Search) -> Ints:
    """Workers with the most free memory of those that passed every filter: ideas come from them."""
    rows = np.flatnonzero(search.context.bits == 0)
    if len(rows) <= LOOKED_AT:
        return rows
    free = search.context.fleet.free_vram(rows).sum(axis=1)
    return np.sort(rows[np.argpartition(-free, LOOKED_AT)[:LOOKED_AT]])


def _given(search: Search) -> bool:
    try:
        return parse_flags(search.context.demand.spec.backend_parameters).has(vllm.SHARE, sglang.FRACTION)
    except BadRow:
        return False


def _could(search: Search, cards: Cards, share: float, kinds: set[str]) -> bool:
    """Whether cards of one worker would hold the model at this share, RAM and executors aside."""
    rules = search.context.rules
    claim: Ints = (cards.total * share).astype(np.int64)
    if rules.claim_policy is ClaimPolicy.AT_LEAST:
        claim = np.maximum(claim, rules.vram)
        return bool((cards.usable & (claim <= cards.free)).any())
    good = cards.usable & (claim > 0) & (claim <= cards.free) & (cards.ratio >= share)
    if not good.any():
        return False
    if "one_gpu" in kinds and (good & (claim >= rules.vram)).any():
        return True
    return "one_worker" in kinds and _several(search, cards, good, claim, rules)


def _several(search: Search, cards: Cards, good: Bools, claim: Ints, rules: ResourceRules) -> bool:
    for code in np.unique(cards.type[good]).tolist():
        mine = np.where(good & (cards.type == code), claim, 0)
        sums = np.cumsum(-np.sort(-mine, axis=1), axis=1)
        have = np.count_nonzero(mine, axis=1)
        for n in (rules.gpu_count,) if rules.gpu_count else range(2, sums.shape[1] + 1):
            if n < 1 or n > sums.shape[1] or (not rules.fixed_world and not rules.divisors.allows(n)):
                continue
            if ((have >= n) & (sums[:, n - 1] >= rules.vram)).any():
                return True
    return False
