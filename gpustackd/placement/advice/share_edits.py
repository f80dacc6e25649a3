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
from gpustackd.placement.context.cards import Cards, cards
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
    if flag is None or rules.taking not in (ClaimPolicy.SHARE, ClaimPolicy.AT_LEAST):
        return
    if rules.engine is Engine.CUSTOM and not _given(search):
        return
    now = max((*rules.share_of_type.values(), rules.share), default=0.0)
    if now <= 0:
        return
    steps = search.ladder.kinds
    known = bool({"one_gpu", "one_worker"} & steps) and rules.engine is not Engine.MINDIE
    below = list(range(min(int(now * 100 + 0.5), MOST + 1) - 1, LEAST - 1, -1))
    above = list(range(max(int(now * 100 + 0.5), LEAST - 1) + 1, MOST + 1))
    if known:
        found = cards(search.context.fleet, _emptiest(search), rules)
        down = [p for p in below if _could(search, found, p / 100, steps)][:STEPS]
        up = [p for p in above if _could(search, found, p / 100, steps)][:STEPS]
    else:  # no figures of our own: a few values further and further away
        down, up = below[4 : 5 * STEPS : 5], above[4 : 5 * STEPS : 5]
    for percent in sorted([*down, *up], key=lambda p: abs(p / 100 - now)):
        value = percent / 100
        text = f"set --{flag} to {value:g} (it is {now:g})"
        cost = 3.4 + abs(value - now)
        side = "lower share" if value < now else "higher share"
        yield editor.flag((flag,), f"{value:g}", text, cost, side, lean=value < now)


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


def _could(search: Search, found: Cards, share: float, steps: set[str]) -> bool:
    """Whether cards of one worker would hold the model at this share, RAM and executors aside."""
    rules = search.context.rules
    claim: Ints = (found.total * share).astype(np.int64)
    if rules.taking is ClaimPolicy.AT_LEAST:
        claim = np.maximum(claim, rules.vram)
        return bool((found.usable & (claim <= found.free)).any())
    good = found.usable & (claim > 0) & (claim <= found.free) & (found.ratio >= share)
    if not good.any():
        return False
    if "one_gpu" in steps and (good & (claim >= rules.vram)).any():
        return True
    return "one_worker" in steps and _several(search, found, good, claim, rules)


def _several(search: Search, found: Cards, good: Bools, claim: Ints, rules: ResourceRules) -> bool:
    for code in np.unique(found.type[good]).tolist():
        mine = np.where(good & (found.type == code), claim, 0)
        sums = np.cumsum(-np.sort(-mine, axis=1), axis=1)
        have = np.count_nonzero(mine, axis=1)
        for n in (rules.gpu_count,) if rules.gpu_count else range(2, sums.shape[1] + 1):
            if n < 1 or n > sums.shape[1] or (not rules.fixed_world and not rules.divisors.allows(n)):
                continue
            if ((have >= n) & (sums[:, n - 1] >= rules.vram)).any():
                return True
    return False
