"""Edits of the model that could help it to a place: parallel sizes, context, offload, selectors.

Each is only an idea: whether it helps is for a trial to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from types import MappingProxyType
from typing import Any

import numpy as np

from gpustackd.domain.demand import Demand, Engine
from gpustackd.domain.fleet.columns import Bools, Ints
from gpustackd.domain.gguf_facts import GgufFacts
from gpustackd.domain.model_spec import GpuSelector, ModelSpec
from gpustackd.engines import sglang, vllm
from gpustackd.engines.flags import is_key, parse_flags
from gpustackd.errors import BadRow
from gpustackd.placement.advice.changes import EditModel
from gpustackd.placement.context.cards import Cards, read_cards
from gpustackd.placement.filters.labels import structured as structured_selector
from gpustackd.placement.rules.resource_rules import ClaimPolicy, ResourceRules
from gpustackd.placement.search import Search

SIZES = (1, 2, 4, 8, 16, 32)
"""Parallel sizes that are tried."""
GGUF_CONTEXT = 8192
"""Tokens that a GGUF model is served with where no flag says it."""
SHORTEST = 2048
"""Tokens: no shorter context is suggested."""

PARALLEL: Mapping[Engine, tuple[str, ...]] = {
    Engine.VLLM: vllm.TP,
    Engine.SGLANG: sglang.TP,
    Engine.MINDIE: ("tensor-parallel-size", "tp"),
}
LENGTH: Mapping[Engine, tuple[str, ...]] = {
    Engine.VLLM: ("max-model-len",),
    Engine.SGLANG: ("context-length",),
    Engine.MINDIE: ("max-seq-len",),
    Engine.GGUF: ("ctx-size", "c"),
}
FRACTION_FLAGS: Mapping[Engine, str] = {
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

LAYERS = ("gpu-layers", "n-gpu-layers", "ngl")


@dataclass(slots=True)
class Editor:
    """Makes edits of one model; each edited model has a version of its own, as kept results ask for it."""

    spec: ModelSpec
    demand: Demand
    versions: Iterator[int] = field(default_factory=lambda: count(-1, -1))

    def edit(
        self, columns: Mapping[str, Any], text: str, cost: float, family: str, *, less_memory: bool = False,
        **values: Any,
    ) -> EditModel:  # fmt: skip
        """One edit: `columns` as the row would hold them, `values` as the model would."""
        spec = replace(self.spec, version=next(self.versions), **values)
        return EditModel(MappingProxyType(dict(columns)), spec, text, cost, family, less_memory)

    def flag(
        self, names: tuple[str, ...], value: str, text: str, cost: float, family: str, **more: Any
    ) -> EditModel:
        """An edit of one engine flag."""
        parameters = with_flag(self.spec.backend_parameters, names, value)
        return self.edit(
            {"backend_parameters": list(parameters), **more.pop("columns", {})}, text, cost, family,
            backend_parameters=parameters, **more,
        )  # fmt: skip

    # -- ideas --------------------------------------------------------------------------------------------

    def parallel(self) -> Iterator[EditModel]:
        """Other numbers of GPUs: by the engine's flag, and where GPUs are picked by hand for each replica."""
        names = PARALLEL.get(self.demand.engine)
        given = self._number(names) if names else None
        picked = self.spec.gpu_selector
        per = picked.gpus_per_replica if picked is not None else None
        if names and given is not None:
            for size in sorted((s for s in SIZES if s != given), key=lambda s: (abs(s - given), s)):
                more: dict[str, Any] = {}
                if picked is not None and per is not None and picked.gpu_ids:
                    if size > len(picked.gpu_ids):
                        continue
                    more = self._per_replica(picked, size)
                text = f"set --{names[0]} to {size} (now {given})"
                yield self.flag(names, str(size), text, 3.0 + 0.01 * abs(size - given), "parallel", **more)
            parameters = without_flag(self.spec.backend_parameters, names)
            if parameters is not None and per is None:
                yield self.edit(
                    {"backend_parameters": list(parameters)},
                    f"remove --{names[0]} (now {given}), so that it takes as few GPUs as it needs",
                    3.2, "parallel", backend_parameters=parameters,
                )  # fmt: skip
        elif picked is not None and picked.gpu_ids:
            now = per or len(picked.gpu_ids)
            for size in sorted(s for s in range(1, len(picked.gpu_ids) + 1) if s != now):
                more = self._per_replica(picked, size)
                columns = more.pop("columns")
                text = f"set gpu_selector.gpus_per_replica to {size} (now {now})"
                yield self.edit(columns, text, 3.0 + 0.01 * abs(size - now), "parallel", **more)

    def length(self) -> Iterator[EditModel]:
        """Shorter contexts, the longest first."""
        names = LENGTH.get(self.demand.engine)
        if names is None:
            return
        given = self._number(names)
        now = given or self._own_length(given)
        if now <= SHORTEST:
            return
        sizes = [s for s in (2**n for n in range(11, 21)) if SHORTEST <= s < now]
        for n, size in enumerate(sorted(sizes, reverse=True)):
            text = f"set --{names[0]} to {size} (now {now})"
            yield self.flag(names, str(size), text, 4.0 + 0.05 * n, "length")

    def offload(self) -> Iterator[EditModel]:
        """Parts of the model in RAM, or on several workers."""
        spec = self.spec
        if not spec.cpu_offloading and self.demand.engine in (Engine.GGUF, Engine.CUSTOM):
            yield self.edit({"cpu_offloading": True}, "allow cpu_offloading", 3.6, "offload",
                            cpu_offloading=True)  # fmt: skip
        if self.demand.engine is Engine.GGUF:
            parameters = without_flag(spec.backend_parameters, LAYERS)
            if parameters is not None:
                yield self.edit(
                    {"backend_parameters": list(parameters), "cpu_offloading": True},
                    f"remove --{LAYERS[0]} and allow cpu_offloading, so that GPUs take the layers that fit",
                    3.7, "offload", backend_parameters=parameters, cpu_offloading=True,
                )  # fmt: skip
        if self.demand.spec.distributed_inference_across_workers is False or (
            self.demand.engine is Engine.GGUF and not self.demand.spec.distributed_inference_across_workers
        ):
            yield self.edit(
                {"distributed_inference_across_workers": True},
                "allow distributed_inference_across_workers", 3.8, "distributed",
                distributed_inference_across_workers=True,
            )  # fmt: skip

    def selectors(self) -> Iterator[EditModel]:
        """Labels, picked GPUs and the cluster asked for less strictly."""
        spec = self.spec
        if spec.worker_selector:
            yield from self._labels(dict(spec.worker_selector))
        if spec.gpu_selector is not None and spec.gpu_selector.gpu_ids:
            yield self.edit({"gpu_selector": None}, "remove gpu_selector, so that any GPUs can be used", 4.4,
                            "gpu_selector", gpu_selector=None)  # fmt: skip
        if spec.cluster_id is not None and spec.gpu_type_selector is None:
            yield self.edit({"cluster_id": None}, "clear cluster_id, so that any cluster can be used",
                            4.6, "cluster", cluster_id=None)  # fmt: skip

    def _labels(self, selector: dict[str, Any]) -> Iterator[EditModel]:
        structured = structured_selector(selector)
        given, listed = (selector.get("match"), selector.get("terms")) if structured else (selector, None)
        match: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {}
        terms = [t for t in listed if isinstance(t, Mapping)] if isinstance(listed, list) else []

        def made(left: Mapping[str, Any], kept: list[Any]) -> dict[str, Any] | None:
            if not structured:
                return dict(left) or None
            whole = {**selector, "match": dict(left), "terms": kept}
            filled = {k: v for k, v in whole.items() if v}
            return filled or None

        for key, value in match.items():
            left = {k: v for k, v in match.items() if k != key}
            yield self._selector(made(left, terms), f"remove {key}={value} from worker_selector", 4.0)
        for n, term in enumerate(terms):
            kept = [t for m, t in enumerate(terms) if m != n]
            said = f"{term.get('key')} {term.get('operator')} {term.get('values') or ''}".strip()
            yield self._selector(made(match, kept), f"remove the term {said} from worker_selector", 4.0)
        if len(match) + len(terms) > 1:
            yield self._selector(made({}, []), "remove every required label from worker_selector", 4.2)

    def _selector(self, value: dict[str, Any] | None, text: str, cost: float) -> EditModel:
        return self.edit({"worker_selector": value}, text, cost, "labels", worker_selector=value)

    def _per_replica(self, picked: GpuSelector, size: int) -> dict[str, Any]:
        names = [f"{g.worker}:{g.type}:{g.index}" for g in picked.gpu_ids]
        column: dict[str, Any] = {"gpu_ids": names, "gpus_per_replica": size}
        if picked.allow_overcommit:
            column["allow_overcommit"] = True
        return {
            "columns": {"gpu_selector": column},
            "gpu_selector": replace(picked, gpus_per_replica=size),
        }

    def _own_length(self, given: int | None) -> int:
        """Tokens that are served where no flag says it; 0 = not known. llama.cpp takes 0 for all it can."""
        header, hyper = self.demand.facts.gguf, self.demand.facts.hyper
        if isinstance(header, GgufFacts):
            trained = header.integer("context_length") or 0
            return trained if given == 0 else min(trained, GGUF_CONTEXT)
        return hyper.max_sequence_length if hyper is not None else 0

    def _number(self, names: tuple[str, ...]) -> int | None:
        try:
            return parse_flags(self.spec.backend_parameters).integer(*names)
        except BadRow:
            return None


def shares(search: Search, editor: Editor) -> Iterator[EditModel]:
    """Edits of the share, the nearest to what it is now first."""
    rules, flag = search.context.rules, FRACTION_FLAGS.get(search.context.rules.engine)
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
        text = f"set --{flag} to {value:g} (now {now:g})"
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


def with_flag(parameters: Sequence[str], names: Sequence[str], value: str) -> tuple[str, ...]:
    """The list with the flag (under any of its names) set to a value.

    Where it stands as an element of its own it is replaced; one that is written together with others stays
    and is overruled by a last element, as engines take the last of several.
    """
    kept, where = _without(parameters, names)
    element = f"--{_spelt(parameters, names)}={value}"
    if any(parse_flags([p]).has(*names) for p in kept):
        return (*kept, element)
    at = len(kept) if where is None else where
    return (*kept[:at], element, *kept[at:])


def without_flag(parameters: Sequence[str], names: Sequence[str]) -> tuple[str, ...] | None:
    """The list without the flag; None where it is written together with others and cannot be taken out."""
    kept, where = _without(parameters, names)
    return None if where is None or parse_flags(kept).has(*names) else kept


def _without(parameters: Sequence[str], names: Sequence[str]) -> tuple[tuple[str, ...], int | None]:
    """What is left, and where the first element that went was."""
    kept: list[str] = []
    where: int | None = None
    at = 0
    while at < len(parameters):
        element = parameters[at]
        flags = parse_flags([element]).flags
        alone = len(flags) == 1 and parse_flags([element]).has(*names)
        at += 1
        if not alone:
            kept.append(element)
            continue
        where = len(kept) if where is None else where
        bare = flags[0].value is None
        if bare and at < len(parameters) and not is_key(parameters[at].strip()):
            at += 1  # its value
    return tuple(kept), where


def _spelt(parameters: Sequence[str], names: Sequence[str]) -> str:
    """The name by which the list calls the flag, else its first one."""
    found = parse_flags(parameters)
    return next((n for n in names if found.has(n)), names[0])
