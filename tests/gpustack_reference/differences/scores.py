"""Where a place, or a replica that is there, is worth something else."""

from __future__ import annotations

from typing import Any

from tests.gpustack_reference import cases
from tests.gpustack_reference.cases import Case
from tests.gpustack_reference.differences.difference import KEEP, Difference
from tests.gpustack_reference.judgement import Finding
from tests.gpustack_reference.oracles import scores

ALIKE = 1e-9
SAME = {"StatusScorer": "status", "OffloadLayerScorer": "offload_layers", "PlacementScorer": "placement"}


def _scorers(case: Case) -> list[dict[str, Any]]:
    found = (case.get("inputs") or {}).get("scorers") or []
    return [{**s, "type": SAME.get(s["type"], s["type"])} for s in found]


def _listed(case: Case) -> list[dict[str, Any]]:
    return [*(case["expect"].get("candidates") or []), *((case.get("inputs") or {}).get("candidates") or [])]


def _strategy(case: Case) -> str:
    named = next((s["strategy"] for s in _scorers(case) if s.get("strategy")), None)
    return named or (case.get("model") or {}).get("placement_strategy") or "spread"


def _right(case: Case, finding: Finding) -> Any:
    """The right scores of what a finding speaks of, whatever makes them differ."""
    if finding.what in ("score", "total") and "candidates" in case["expect"]:
        top = max(case["expect"]["candidates"], key=lambda c: c.get("placement_score") or 0)
        if _strategy(case) == "binpack":
            return scores.binpack(case, top)
        return KEEP
    if finding.what == "scores" and "candidates" in case["inputs"]:
        return _of_candidates(case)
    if finding.what == "score":
        return 0.0 if _silent(case["inputs"]) else KEEP
    only = finding.what.removeprefix("part ") if finding.what.startswith("part ") else None
    worth = _worth(case, only)
    if finding.what == "order":
        finer = scores.finer(case)
        ids = [i["id"] for i in cases.existing(case) if str(i["id"]) in worth]
        return sorted(ids, key=lambda i: (round(worth[str(i)], 9), *finer[i]))
    return worth


def _worth(case: Case, only: str | None) -> dict[str, float]:
    maxima = {s["type"]: s.get("max_score") or 0.0 for s in _scorers(case) if only in (None, s["type"])}
    total = case["inputs"].get("total_max_score") if only is None else None
    return scores.retention(case, maxima, _strategy(case), total)


def _of_candidates(case: Case) -> list[float]:
    candidates = case["inputs"]["candidates"]
    names = {w["id"]: w["name"] for w in cases.workers(case)}
    places = [_named(c, names) for c in candidates]
    sums = [0.0] * len(candidates)
    for scorer in _scorers(case):
        most = scorer.get("max_score") or 0.0
        if scorer["type"] == "given":
            values = [v or 0.0 for v in scorer["scores"]]
        elif scorer["type"] == "file_locality":
            main, draft = (set(scorer.get(k) or ()) for k in ("ready_main", "ready_draft"))
            values = [
                scores.locality({q["worker_id"] for q in cases.parts(c)}, main, draft, most)
                for c in candidates
            ]
        elif _strategy(case) == "binpack":
            values = [min(most, scores.binpack(case, p, most)) for p in places]
        else:
            values = scores.spread(case, places, most)
        sums = [a + b for a, b in zip(sums, values, strict=True)]
    return sums


def _named(candidate: dict[str, Any], names: dict[int, str]) -> dict[str, Any]:
    """A candidate whose parts name their workers and have claims."""
    main, *others = ({**p, "worker": names.get(p["worker_id"], "?")} for p in cases.parts(candidate))
    return {**main, "subordinates": others}


def _silent(holder: dict[str, Any]) -> bool:
    """Whether a claim on GPUs does not tell what it holds there."""
    claim = holder.get("claim") or holder.get("computed_resource_claim") or {}
    return bool(holder.get("gpu_indexes")) and claim.get("vram") is None


# -- predicates ----------------------------------------------------------------------------------------------


def _several_workers(case: Case, finding: Finding) -> Any:
    spans = any(
        len(p) > 2 for p in map(cases.parts, [*_listed(case), *(case.get("existing_instances") or [])])
    )
    return _right(case, finding) if spans and _strategy(case) == "binpack" else KEEP


def _bounded(case: Case, finding: Finding) -> Any:
    most = sum(s.get("max_score") or 0.0 for s in _scorers(case) if s["type"] != "given")
    if not most or any(s["type"] == "given" for s in _scorers(case)):
        return KEEP
    values = finding.expected
    if isinstance(values, dict):
        values = list(values.values())
    values = values if isinstance(values, list) else [values]
    return _right(case, finding) if any(v is not None and v > most * (1 + ALIKE) for v in values) else KEEP


def _untold(case: Case, finding: Finding) -> Any:
    down = any(s.get("scale") == "scale_down" for s in _scorers(case)) or case["area"] == "scale_down"
    holders = [case.get("inputs") or {}, *(case.get("existing_instances") or [])]
    return _right(case, finding) if down and any(map(_silent, holders)) else KEEP


def _undeployed(case: Case, finding: Finding) -> Any:
    spreads = any(s["type"] == "placement" and s.get("strategy") == "spread" for s in _scorers(case))
    if scores.model_of(case) is not None or not spreads or "candidates" not in case["inputs"]:
        return KEEP
    return _right(case, finding)


def _equal_ones(case: Case, finding: Finding) -> Any:
    values = [round(v, 9) for v in _worth(case, None).values()]
    return _right(case, finding) if len(set(values)) < len(values) else KEEP


SCORES = (
    Difference(
        "mean_over_workers",
        "binpack takes the mean over subordinate workers, not their sum",
        "The peer multiplies the sum of the subordinates' scores by their number, so that five loosely "
        "filled workers beat one that fits exactly, and a score may be more than its maximum.",
        "who packs: a model is not spread over more workers than it needs",
        ("score", "total", "scores", "part placement", "order"),
        _several_workers,
    ),
    Difference(
        "within_the_maximum",
        "a scorer never gives more than its maximum",
        "A claim larger than what is free scores above the maximum with the peer, and outweighs other "
        "scorers.",
        "who sets the weights of scorers",
        ("score", "scores", "part placement"),
        _bounded,
    ),
    Difference(
        "claims_that_do_not_tell",
        "a replica whose claim does not tell what it holds on its GPUs has a place worth nothing",
        "Of such a row nobody knows what it holds; the peer scores it by its RAM alone.",
        "who scales down: broken rows go before whole ones",
        ("score", "scores", "part placement", "order"),
        _untold,
    ),
    Difference(
        "planned_like_deployed",
        "a model that is only planned is held against what is there",
        "Without an id the peer counts nobody and gives every place the full score.",
        "who plans: the answer is the one that the deployed model will get",
        ("scores",),
        _undeployed,
    ),
    Difference(
        "order_of_equals",
        "of replicas that score alike the one goes whose loss is least",
        "The peer leaves them in the order of rows. Here what never started goes first, then what sits on a "
        "worker that takes nothing new, then what does not serve yet, then the youngest.",
        "who scales down: no serving replica goes while one that is starting stays",
        ("order",),
        _equal_ones,
    ),
)
