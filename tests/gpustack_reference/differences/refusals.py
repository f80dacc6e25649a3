"""Where the peer places and production refuses, with a reason."""

from __future__ import annotations

from typing import Any

from tests.gpustack_reference.cases import Case
from tests.gpustack_reference.differences.difference import KEEP, Difference
from tests.gpustack_reference.judgement import Finding, Tells
from tests.gpustack_reference.oracles.room import fits, hosts, parts_of

GIB = 1024**3
WHERE = ("placed", "place", "final", "candidate *")


def _refused(finding: Finding) -> Any:
    return False if finding.what == "placed" else None


def _picked(case: Case) -> list[dict[str, Any]]:
    """Candidates of hand-picked GPUs."""
    return case["expect"].get("candidates") or [] if case["model"].get("gpu_selector") else []


def _overcommit(case: Case, finding: Finding) -> Any:
    listed = _picked(case)
    if not listed or not all(c.get("overcommit") or fits(case, c) for c in listed):
        return KEEP
    if case["model"]["gpu_selector"].get("allow_overcommit"):
        return KEEP
    return _refused(finding)


def _short_of_ram(case: Case) -> list[tuple[str, int, int]]:
    """(worker, RAM free, RAM claimed) where hand-picked GPUs lie on a worker that lacks RAM."""
    there = hosts(case)
    found = []
    for candidate in _picked(case):
        short = [
            (p["worker"], there[p["worker"]].ram, p["claim"].get("ram") or 0)
            for p in parts_of(candidate)
            if (p["claim"].get("ram") or 0) > there[p["worker"]].ram
        ]
        if not short:
            return []
        found += short
    return found


def _ram(case: Case, finding: Finding) -> Any:
    short = _short_of_ram(case)
    if not short:
        return KEEP
    if finding.what.startswith("message"):
        if "model_needs" in finding.what or "fraction_rule" in finding.what:
            return KEEP
        worker, free, claimed = short[0]
        return Tells((worker, f"{free / GIB:.2f}", f"{claimed / GIB:.2f} GiB"))
    return _refused(finding)


def _pool(case: Case, finding: Finding) -> Any:
    model = case["model"]
    if not model.get("gpu_type_selector") or model.get("cluster_id") is not None:
        return KEEP
    return _refused(finding)


REFUSALS = (
    Difference(
        "selected_ram",
        "RAM is checked for hand-picked GPUs",
        "The peer compares the memory of hand-picked GPUs alone. A worker without the RAM that the engine "
        "needs kills the engine, or another one on it.",
        "who picks GPUs, and everybody else on that worker",
        (*WHERE, "place with consent", "message*"),
        _ram,
    ),
    Difference(
        "consent_to_overcommit",
        "hand-picked GPUs are over-committed only where gpu_selector.allow_overcommit says so",
        "The peer starts an engine on hand-picked GPUs that cannot hold it, with a warning. Here that is "
        "refused with the same figures and the name of the switch; with the switch the place is the "
        "peer's.",
        "who picks GPUs by mistake: nothing of a neighbour's is overbooked unasked",
        WHERE,
        _overcommit,
    ),
    Difference(
        "pool_of_a_cluster",
        "an instance type is looked up in the model's cluster, which has to be set",
        "Names of instance types are unique in a cluster only. Without a cluster the peer takes any type of "
        "that name, possibly of a cluster where the model will not run.",
        "who has two clusters with a type of the same name",
        WHERE,
        _pool,
    ),
)
