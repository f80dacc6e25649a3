"""Cases of whole decisions: areas `selector.*`.

The peer lists candidates, production chooses one place. So a case asks of production: is there a place
where the list has one; is it on the list, with the same claims, among those that score best; does it score
the same; is each place of the list taken when it is the only one left; does a refusal have the same
figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tests.gpustack_reference.cases import Case, known, parts, workers
from tests.gpustack_reference.judgement import Finding, OneOf
from tests.gpustack_reference.messages import figures
from tests.gpustack_reference.production.decisions import Answer, Only, answer, ready
from tests.gpustack_reference.production.filters import FILTERS, kept_by

EXPECTED = {
    "candidates", "final", "message_facts",
    "derived",  # figures on the way: the need is compared, the rest shows in claims
    "final_workers",  # a list that a defect has made shorter
    "candidate_count", "filters_kept",
    "only_first_listed",  # there were more candidates
}  # fmt: skip
ALIKE = 1e-6
"""Scores nearer than this to each other are the same: claims are cut to whole bytes."""


def judge(case: Case) -> Iterator[Finding]:
    """Findings of one case."""
    expect = case["expect"]
    known(expect, EXPECTED, "expect")
    candidates = [entry(c) for c in _named(case)]
    as_given = answer(case)
    if "filters_kept" in expect:
        yield from _filters(case, expect["filters_kept"])
    past = answer(ready(case))
    if "vram_claim" in (expect.get("derived") or {}) and past.need is not None and candidates:
        yield Finding("need", expect["derived"]["vram_claim"], past.need)
    yield from places(case, past, candidates)
    if "final" in expect:
        yield from _final(case, as_given if expect["final"] is None else past, expect["final"])
    yield from figures(case, past)
    if candidates and past.place is None and case["model"].get("gpu_selector"):
        yield from _with_consent(case, candidates)


def _named(case: Case) -> list[dict[str, Any]]:
    """The candidates of the list, of whose parts some say their worker's id alone."""
    there = {w["id"]: w["name"] for w in workers(case)}

    def named(part: Mapping[str, Any]) -> dict[str, Any]:
        made = {**part, "worker": part.get("worker") or there.get(part.get("worker_id", -1))}
        if part.get("subordinates"):
            made["subordinates"] = [named(s) for s in part["subordinates"]]
        return made

    return [named(c) for c in case["expect"]["candidates"]]


def _with_consent(case: Case, candidates: list[dict[str, Any]]) -> Iterator[Finding]:
    """The peer over-commits selected GPUs unasked, production where the model says that it may."""
    selector = {**case["model"]["gpu_selector"], "allow_overcommit": True}
    may = ready(case) | {"model": {**case["model"], "gpu_selector": selector}}
    found = answer(may)
    got = found.place and entry(found.place, like=candidates[0])
    flagged = [c | {"overcommit": True} for c in candidates]  # the peer sets its mark in some cases only
    yield Finding("place with consent", OneOf.of(flagged), got)
    yield from figures(case, found, "message with consent")


def places(case: Case, found: Answer, candidates: list[dict[str, Any]]) -> Iterator[Finding]:
    """What there is to say of the place against the list."""
    yield Finding("placed", bool(candidates), found.place is not None)
    if not candidates:
        return
    best = _best(case["expect"]["candidates"], candidates)
    got = found.place and entry(found.place, like=candidates[0])
    yield Finding("place", OneOf.of(best), got)
    same = [c for c, e in zip(case["expect"]["candidates"], candidates, strict=True) if e == got]
    scores = [c["placement_score"] for c in same if "placement_score" in c]
    if scores:
        yield Finding("score", scores[0], found.parts.get("placement"), ALIKE)
    if case["model"].get("gpu_selector") is None:
        for n, candidate in enumerate(candidates):
            alone = answer(ready(case), only=gpus_of(candidate))
            yield Finding(
                f"candidate {n} alone", candidate, alone.place and entry(alone.place, like=candidate)
            )


def _best(listed: list[Mapping[str, Any]], candidates: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of the list that score best; all, where it gives no scores."""
    scores = [c.get("placement_score") for c in listed]
    if None in scores:
        return candidates
    top = max(s for s in scores if s is not None)
    return [
        e for e, s in zip(candidates, scores, strict=True) if s is not None and s >= top - ALIKE * abs(top)
    ]


def _final(case: Case, found: Answer, final: Mapping[str, Any] | None) -> Iterator[Finding]:
    got = found.place and entry(found.place, like=final or {})
    yield Finding("final", final and entry(final), got)
    if final and got == entry(final) and "score" in final:
        yield Finding("total", final["score"], found.score, ALIKE)


def _filters(case: Case, expected: Mapping[str, list[str]]) -> Iterator[Finding]:
    known(expected, FILTERS, "expect.filters_kept")
    for name, kept in expected.items():
        yield Finding(f"filter {name}", kept, kept_by(case, FILTERS[name])[0])


def gpus_of(candidate: Mapping[str, Any]) -> Only:
    """The GPUs that a candidate takes on each worker; None where it leaves them open."""
    found: dict[str, set[tuple[str | None, int]] | None] = {}
    for p in parts(candidate):
        taken = {(p.get("gpu_type"), i) for i in p.get("gpu_indexes") or ()}
        found[p["worker"]] = (found.get(p["worker"]) or set()) | taken if taken else None
    return found


# -- one shape for both --------------------------------------------------------------------------------------


def entry(candidate: Mapping[str, Any], like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A candidate without scores and without what is not applicable (zero, null, absent).

    `like`: leave out what that one does not say: a share of the card that the peer tells on some claims only,
    and addresses that it tells of some candidates only.
    """
    made = _part(candidate, like)
    theirs = (like or {}).get("subordinates") or []
    subordinates = candidate.get("subordinates") or []
    if subordinates:
        made["subordinates"] = [
            _part(s, theirs[n] if n < len(theirs) else (like and made)) | _of_subordinate(s)
            for n, s in enumerate(subordinates)
        ]
    if candidate.get("overcommit"):
        made["overcommit"] = True
    return made


def _part(part: Mapping[str, Any], like: Mapping[str, Any] | None) -> dict[str, Any]:
    claim = part.get("claim") or {}
    kept: dict[str, Any] = {
        "ram": claim.get("ram") or 0,
        "vram": {str(k): v for k, v in (claim.get("vram") or {}).items()},
    }
    share = claim.get("vram_utilization")
    if share and (like is None or (like.get("claim") or {}).get("vram_utilization")):
        kept["vram_utilization"] = share
    for name in ("offload_layers", "total_layers", "tensor_split", "uma"):
        if claim.get(name) is not None and (like is None or (like.get("claim") or {}).get(name) is not None):
            kept[name] = claim[name]
    made: dict[str, Any] = {
        "worker": part.get("worker"),
        "gpu_type": part.get("gpu_type") if like is None or like.get("gpu_type") else None,
        "gpu_indexes": part.get("gpu_indexes") or None,
        "claim": kept,
    }
    if part.get("gpu_addresses") and (like is None or like.get("gpu_addresses")):
        made["gpu_addresses"] = part["gpu_addresses"]
    return made


def _of_subordinate(part: Mapping[str, Any]) -> dict[str, Any]:
    return {k: part[k] for k in ("worker_ip", "total_gpus") if part.get(k) is not None}
