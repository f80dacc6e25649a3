"""Where production keeps other workers."""

from __future__ import annotations

from typing import Any

from tests.gpustack_reference import cases
from tests.gpustack_reference.cases import Case
from tests.gpustack_reference.differences.difference import KEEP, Difference
from tests.gpustack_reference.judgement import Finding
from tests.gpustack_reference.oracles.images import able
from tests.gpustack_reference.production.filters import images


def _by_images(case: Case, finding: Finding) -> Any:
    if case["area"] != "filter.backend_framework":
        return KEEP
    kept = able(case, images(case))
    if finding.what == "kept":
        return kept
    return [w["name"] for w in cases.workers(case) if w["name"] not in kept]


def _older_host(case: Case, finding: Finding) -> Any:
    """Hosts that the peer keeps and on which no image would start."""
    if case["area"] != "filter.backend_framework":
        return KEEP
    lost = set(case["expect"].get("kept") or ()) - set(able(case, images(case)))
    return _by_images(case, finding) if lost else KEEP


def _cpu_entries(case: Case, finding: Finding) -> Any:
    entries = [
        e
        for r in (case.get("inputs") or {}).get("backends") or []
        for e in (r.get("versions") or {}).values()
    ]
    cpu = any("cpu" in (e.get("custom_framework"), *(e.get("frameworks") or ())) for e in entries)
    return _older_host(case, finding) if cpu else KEEP


def _spelling(case: Case, finding: Finding) -> Any:
    """Workers that the peer drops because it compares versions as text."""
    if case["area"] != "filter.backend_framework":
        return KEEP
    gained = set(able(case, images(case))) - set(case["expect"].get("kept") or ())
    return _by_images(case, finding) if gained and case["model"].get("backend_version") else KEEP


def _known_backend(case: Case, finding: Finding) -> Any:
    return _by_images(case, finding) if (case.get("inputs") or {}).get("backend_name_unknown") else KEEP


def _cluster(case: Case, finding: Finding) -> Any:
    if case["area"] != "filter.cluster" or case["model"].get("cluster_id") is not None:
        return KEEP
    names = [w["name"] for w in cases.workers(case)]
    return names if finding.what == "kept" else []


FILTERS = (
    Difference(
        "backend_is_always_known",
        "a model without a backend is one of vLLM, and is held to its images",
        "The peer lets every worker pass where it cannot tell the backend. Here the backend in effect is "
        "always known.",
        "who leaves the backend out: the model does not land where its engine cannot start",
        ("kept", "dropped"),
        _known_backend,
    ),
    Difference(
        "cpu_is_no_accelerator",
        "a version that is registered for the CPU admits workers without accelerators",
        "With the peer it admits every worker, whatever accelerators it has. A version for `any` does so "
        "here.",
        "who registers a backend for the CPU: it is not placed on GPUs that it cannot use",
        ("kept", "dropped"),
        _cpu_entries,
    ),
    Difference(
        "same_version",
        "versions are compared as versions",
        "The peer compares text: v0.11.0 is not 0.11.0, and nothing is left.",
        "who pins a version as the release is named",
        ("kept", "dropped"),
        _spelling,
    ),
    Difference(
        "image_that_starts",
        "a worker stays only if some image of the engine starts on its runtime",
        "The peer looks for any image of that runtime, whatever level it was built for. On a host whose "
        "runtime is of an older major the engine is then placed and fails at its start.",
        "who has hosts with old drivers: the refusal names the level that is needed",
        ("kept", "dropped"),
        _older_host,
    ),
    Difference(
        "no_cluster_is_any_cluster",
        "a model without a cluster may go to any cluster",
        "The peer compares with null, and no worker is left.",
        "who has one cluster and names none",
        ("kept", "dropped"),
        _cluster,
    ),
)
