"""Writes the record: every decision of every scene, and the words of refusals and suggestions apart.

`python -m tests.golden` renews both files. A change that decides otherwise on purpose renews them in a commit
of its own that says why; a change of wording touches `wording.jsonl` alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpustackd.domain.demand import Demand
from gpustackd.domain.model_spec import ModelSpec
from gpustackd.domain.outcome import NoFit, Part, Placed, Placement, Reason
from gpustackd.placement.advice.changes import Holder
from gpustackd.placement.advice.suggestions import advise
from gpustackd.placement.advice.trials import TrialCase
from gpustackd.placement.decide import decide
from gpustackd.placement.policy import Subject
from gpustackd.placement.search_cache import SearchCache
from tests.golden.scenes import Scene, all_scenes

HERE = Path(__file__).parent
DECISIONS, WORDING = HERE / "decisions.jsonl", HERE / "wording.jsonl"
ADVISED = ("refused/", "gguf/no-place", "seed/1", "seed/2")
"""Scenes whose refusals are asked for suggestions."""


def record() -> tuple[str, str]:
    """The two files as they are now: decisions, wording."""
    decisions: list[str] = []
    wording: list[str] = []
    for scene in all_scenes():
        for name, decided, words in _decide(scene):
            decisions.append(_line({"id": name, **decided}))
            if words:
                wording.append(_line({"id": name, **words}))
    return "".join(decisions), "".join(wording)


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_plain) + "\n"


def _plain(value: object) -> object:
    if hasattr(value, "item"):
        return value.item()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return list(value) if isinstance(value, tuple) else str(value)


def _decide(scene: Scene) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    cache: SearchCache[Any] = SearchCache()
    instance = 0
    for n, wanted in enumerate(scene.demands):
        for turn in range(scene.repeat):
            instance += 1
            subject = Subject(instance, f"{scene.name}-{instance}")
            outcome = decide(scene.fleet, wanted, subject, scene.policy, cache)
            name = f"{scene.name}/{n}.{turn}"
            if isinstance(outcome, Placed):
                scene.fleet.assume(outcome.placement, instance, wanted.spec.id)
                yield name, _placed(outcome), _words(outcome.placement.warnings)
                continue
            words = {"message": outcome.message, **_words(outcome.reasons)}
            refused = _refused(outcome)
            if scene.name.startswith(ADVISED):
                advised, said = _advice(scene, wanted, subject)
                refused["advice"], words["advice"] = advised, said
            yield name, refused, words
            break  # the next one of this demand is refused alike


def _placed(outcome: Placed) -> dict[str, Any]:
    p = outcome.placement
    return {
        "placed": [_part(x) for x in p.parts], "kind": p.strategy, "score": _number(p.score),
        "scores": {k: _number(v) for k, v in p.score_parts.items()}, "check": p.check.value,
        **_given(p), "pool": [s.kept for s in outcome.pool], "cut": outcome.cut,
        "candidates": [_numbers(c) for c in outcome.candidates],
        "warnings": [_reason(r) for r in p.warnings],
    }  # fmt: skip


def _given(p: Placement) -> dict[str, Any]:
    found = {
        "vram_utilization": None if p.vram_utilization is None else _number(p.vram_utilization),
        "offload_layers": p.offload_layers, "total_layers": p.total_layers, "tensor_split": p.tensor_split,
        "over_commit": p.over_commit or None, "mode": p.mode,
        "sized_for": _numbers(p.sized_for) if p.sized_for else None,
    }  # fmt: skip
    return {k: v for k, v in found.items() if v is not None}


def _part(p: Part) -> list[Any]:
    made: list[Any] = [p.worker_name, p.gpu_type, p.gpu_indexes, p.vram, p.ram]
    more = {"total_gpus": p.total_gpus, "addresses": p.gpu_addresses or None, "layers": p.offload_layers}
    more = {k: v for k, v in more.items() if v is not None}
    return [*made, more] if more else made


def _refused(outcome: NoFit) -> dict[str, Any]:
    return {
        "refused": [_reason(r) for r in outcome.reasons], "cures": outcome.cures.value,
        "pool": [s.kept for s in outcome.pool], "cut": outcome.cut,
    }  # fmt: skip


def _reason(r: Reason) -> list[Any]:
    return [f"{r.filter}:{r.code}", _numbers(r.params)]


def _words(reasons: tuple[Reason, ...]) -> dict[str, Any]:
    return {"texts": [r.text for r in reasons]} if reasons else {}


def _number(value: float) -> float:
    return round(float(value), 6)


def _numbers(value: Any) -> Any:
    if isinstance(value, float):
        return _number(value)
    if hasattr(value, "items"):
        return {str(k): _numbers(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_numbers(v) for v in value]
    return value


def _advice(scene: Scene, wanted: Demand, subject: Subject) -> tuple[list[Any], list[str]]:
    def build(spec: ModelSpec) -> Demand:
        return replace(wanted, spec=spec)

    case = TrialCase(scene.fleet, scene.policy, subject, wanted, wanted.spec, build)
    holders = {n: Holder(n, f"other-{n}", f"model-{n}", n) for n in (900, 901)}
    found = advise(case, holders)
    made = [[s.change.kind.value, _number(s.change.cost)] for s in found.suggestions]
    return made, [s.change.text for s in found.suggestions]
