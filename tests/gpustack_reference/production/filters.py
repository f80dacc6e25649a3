"""The filters by themselves: who stays, and the reason of each that does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gpustackd.domain.backends import Backends, backend_row
from gpustackd.domain.demand import Demand, Engine, Need
from gpustackd.domain.facts import ModelFacts
from gpustackd.domain.model_spec import model_spec
from gpustackd.engines.images import EngineImages, Runner
from gpustackd.placement.filters import chain
from gpustackd.placement.filters.framework import framework_filter
from gpustackd.placement.policy import Policy
from tests.gpustack_reference.cases import Case, known, needed
from tests.gpustack_reference.production.decisions import fleet, policy, spec_of
from tests.runners import packaged_runners

FILTERS = {
    "ClusterFilter": "cluster", "GPUMatchingFilter": "gpu_selector", "GpuSelectorFilter": "gpu_selector",
    "LabelMatchingFilter": "labels", "StatusFilter": "status", "BackendFrameworkFilter": "backend",
    "LocalPathFilter": "local_path",
}  # fmt: skip
"""The peer's filters -> ours."""
QUERY = {"backend", "service", "service_version", "variant", "with_deprecated", "platform"}


def kept_by(case: Case, name: str, how: Policy | None = None) -> tuple[list[str], dict[str, Dropped]]:
    """Workers that one of our filters keeps, in their order, and for each other one (code, parameters,
    text)."""
    on = fleet(case)
    wanted = Demand(spec_of(case), ModelFacts(0), Need(0), Engine.VLLM)
    own = [f for f in chain.chain(wanted, how or policy(case)) if f.name == name]
    rows = np.arange(on.count)
    kept = own[0].keep(on, rows) if own else np.ones(on.count, np.bool_)
    dropped = {}
    for w in rows[~kept].tolist():
        reason = own[0].reasons(on, np.array([w]), 0, 1)[0]
        dropped[on.row(w).name] = (reason.code, dict(reason.params), reason.text)
    return [on.row(w).name for w in rows[kept].tolist()], dropped


Dropped = tuple[str, Mapping[str, Any], str]


def kept_by_framework(case: Case) -> tuple[list[str], dict[str, Dropped]]:
    """By the backend filter, with the backends and the engine images that the case gives."""
    asked = dict(case["model"])
    if "owner_principal_id" in asked:
        owner = asked.pop("owner_principal_id")
        asked["owner"] = None if owner is None else str(owner)
    how = Policy(backends=_backends(case), catalogue=EngineImages(images(case)))
    return kept_by(case | {"model": asked}, "backend", how)


def _backends(case: Case) -> Backends:
    rows = []
    for n, row in enumerate(case["inputs"].get("backends") or []):
        field = f"inputs.backends[{n}]"
        versions = {}
        for version, entry in (row.get("versions") or {}).items():
            known(
                entry,
                {"frameworks", "built_in_frameworks", "custom_framework"},
                f"{field}.versions.{version}",
            )
            versions[version] = {"built_in_frameworks": entry.get("frameworks"), **entry}
        owner = None if row.get("owner") is None else str(row["owner"])
        rows.append(backend_row(needed(row, "name", field), owner, versions))
    return Backends.of(rows)


def images(case: Case) -> list[Runner]:
    """The packaged images, without those that the case says are not available, and with those that are."""
    found = packaged_runners()
    for n, said in enumerate(case["inputs"].get("runner_catalogue") or []):
        field = f"inputs.runner_catalogue[{n}]"
        known(said, {"query", "available"}, field)
        query, available = needed(said, "query", field), needed(said, "available", field)
        known(query, QUERY, f"{field}.query")
        matching = [r for r in found if _answers(r, query)]
        if not available:
            found = [r for r in found if r not in matching]
        elif not matching:
            version = query.get("service_version", "1.0.0")
            found.append(Runner(query["backend"], "1.0", query.get("variant") or "", query["service"],
                                version, "amd64", "image"))  # fmt: skip
    return found


def _answers(runner: Runner, query: Mapping[str, Any]) -> bool:
    if not query.get("with_deprecated", True) and runner.deprecated:
        return False
    asked = {"backend": runner.runtime, "service": runner.service, "service_version": runner.version,
             "variant": runner.variant}  # fmt: skip
    return all(query.get(k) in (None, v) for k, v in asked.items())


def kept_for_owners(owners: list[Any]) -> list[int]:
    """Which answers about engines are kept apart: an id for each owner, equal where they share them."""
    backends, found = Backends.of([]), []
    for owner in owners:
        row = {"id": 1, "version": 1, "name": "m", "owner": None if owner is None else str(owner)}
        wanted = Demand(model_spec(row), ModelFacts(0), Need(0), Engine.VLLM)
        own = framework_filter(wanted, backends)
        found.append(id(own.known) if own else 0)
    return found
