"""Writes the record: every decision of every scene, and the words of refusals and suggestions apart.

`make golden` (`python -m tests.golden`) renews both files. A change that decides otherwise on purpose renews
them in a commit of its own that says why; a change of wording touches `wording.jsonl` alone.

Of scenes that come in numbers (`sum/…` and most of `seed/…`) the record has how many decisions they are and a
digest of their lines. To see what differs, print them on both commits: `python -m tests.golden sum/mindie/7`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

from gpustackd.domain.demand import Demand
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.model_spec import ModelSpec
from gpustackd.domain.outcome import NoFit, Outcome, Part, Placed, Placement, Reason
from gpustackd.placement.advice.changes import Holder
from gpustackd.placement.advice.suggestions import Advice, advise
from gpustackd.placement.advice.trials import TrialCase
from gpustackd.placement.decide import decide
from gpustackd.placement.policy import Subject
from gpustackd.placement.search_cache import SearchCache
from tests.golden import demo, seeded, situations
from tests.golden.scenes import Scene, all_scenes

HERE = Path(__file__).parent
DECISIONS, WORDING = HERE / "decisions.jsonl", HERE / "wording.jsonl"
ADVISED = ("refused/", "gguf/no-place", "seed/1", "seed/2")
"""Scenes whose refusals are asked for suggestions, besides those that say so themselves."""

Line = tuple[str, dict[str, Any], dict[str, Any]]
"""Name of a decision, what was decided, and its words."""


def record() -> tuple[str, str]:
    """The two files as they are now: decisions, wording."""
    decisions: list[str] = []
    wording: list[str] = []
    for name, decided, words in _lines():
        decisions.append(_line({"id": name, **decided}))
        if words:
            wording.append(_line({"id": name, **words}))
    return "".join(decisions), "".join(wording)


def lines_of(prefix: str) -> Iterator[str]:
    """Every line of the scenes whose name begins so, also of those that are recorded by a digest."""
    wanted = (s for s in _scenes() if f"{s.name}/".startswith(prefix) or prefix.startswith(f"{s.name}/"))
    for name, decided, words in chain.from_iterable(map(_decide, wanted)):
        if name.startswith(prefix):
            yield _line({"id": name, **decided, "words": words})


def _scenes() -> Iterator[Scene]:
    yield from all_scenes()
    yield from situations.scenes()
    yield from seeded.scenes()


def _lines() -> Iterator[Line]:
    for scene in _scenes():
        lines = _decide(scene)
        yield from [_summed(scene.name, lines)] if scene.summed else lines
    with tempfile.TemporaryDirectory() as folder:
        for name, outcome, advice in demo.decided(Path(folder)):
            yield _without(folder, _told(f"demo/{name}", outcome, advice))


def _summed(name: str, lines: Iterator[Line]) -> Line:
    found = list(lines)
    decided, said = sha256(), sha256()
    for line in found:
        decided.update(_line({"id": line[0], **line[1]}).encode())
        said.update(_line({"id": line[0], **line[2]}).encode())
    placed = sum("placed" in d for _, d, _ in found)
    refused = sum("refused" in d for _, d, _ in found)
    counts = {"placed": placed, "refused": refused, "digest": decided.hexdigest()[:16]}
    return name, counts, {"digest": said.hexdigest()[:16]}


def _without(folder: str, line: Line) -> Line:
    name, decided, words = line
    return name, decided, json.loads(json.dumps(words, default=_plain).replace(folder, "…"))


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_plain) + "\n"


def _plain(value: object) -> object:
    if hasattr(value, "item"):
        return value.item()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return list(value) if isinstance(value, tuple) else str(value)


def _decide(scene: Scene) -> Iterator[Line]:
    cache: SearchCache[Any] = SearchCache()
    instance = 0
    advised = scene.advised or scene.name.startswith(ADVISED)
    for n, wanted in enumerate(scene.demands):
        if not isinstance(wanted, Demand):
            wanted(scene.fleet)
            continue
        for turn in range(scene.repeat):
            instance += 1
            subject = Subject(instance, f"{scene.name}-{instance}")
            outcome = decide(scene.fleet, wanted, subject, scene.policy, cache)
            name = f"{scene.name}/{n}.{turn}"
            if isinstance(outcome, Placed):
                scene.fleet.assume(outcome.placement, instance, wanted.spec.id)
            advice = _advice(scene, wanted, subject) if advised and isinstance(outcome, NoFit) else None
            _, decided, words = _told(name, outcome, advice)
            yield name, _sized(wanted) | decided if scene.sized else decided, words
            if isinstance(outcome, NoFit):
                break  # the next one of this demand is refused alike
    for n in list(scene.fleet.occupancy.assumed):
        scene.fleet.confirm(n)
    if held := _held(scene.fleet):
        yield f"{scene.name}/held", {"held": held}, {}


def _told(name: str, outcome: Outcome, advice: Advice | None) -> Line:
    if isinstance(outcome, Placed):
        return name, _placed(outcome), _words(outcome.placement.warnings)
    decided = _refused(outcome)
    words = {"message": outcome.message, **_words(outcome.reasons)}
    if advice is not None:
        decided["advice"] = [
            [s.change.kind.value, _number(s.change.cost), _numbers(s.change.as_json()),
             [[p.worker_name, p.gpu_type, p.gpu_indexes, p.vram] for p in s.placed.placement.parts]]
            for s in advice.suggestions
        ]  # fmt: skip
        words["advice"] = [s.change.text for s in advice.suggestions]
        if advice.misses:
            decided["misses"] = [_numbers(m.as_json()) for m in advice.misses]
            words["misses"] = [m.text for m in advice.misses]
    return name, decided, words


def _sized(wanted: Demand) -> dict[str, Any]:
    need = wanted.need
    return {"engine": wanted.engine.value, "need": [need.vram, need.ram, need.ram_static, need.sequence]}


def _held(on: Fleet) -> dict[str, Any]:
    """RAM and the VRAM of each GPU that is taken afterwards, by worker."""
    found = {}
    for name, w in sorted(on.by_name.items()):
        vram = [int(on.vram_allocated[w, s]) for s in range(len(on.gpu_id[w])) if on.gpu_id[w, s]]
        ram = int(on.ram_allocated[w])
        if ram or any(vram):
            found[name] = [ram, *vram]
    return found


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


def _advice(scene: Scene, wanted: Demand, subject: Subject) -> Advice:
    def build(spec: ModelSpec) -> Demand:
        return replace(wanted, spec=spec)

    case = TrialCase(scene.fleet, scene.policy, subject, wanted, wanted.spec, build)
    holders = {n: Holder(n, f"other-{n}", f"model-{n}", n) for n in (900, 901)}
    return advise(case, holders)
