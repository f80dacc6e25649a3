"""The peer's cases of the backend framework filter: who stays, and one reason for
each that does not. A case says how many images its catalogue has for a query; these are put into, or taken
out of, the packaged catalogue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gpustackd.domain.backends import Backends, backend_row
from gpustackd.domain.demand import Demand, Engine, Need
from gpustackd.domain.facts import ModelFacts
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.model_spec import model_spec
from gpustackd.domain.outcome import Reason
from gpustackd.engines.images import EngineImages, Runner
from gpustackd.placement.filters import chain
from gpustackd.placement.filters.framework import FrameworkFilter
from gpustackd.placement.policy import Policy
from tests import peer_cases as peer
from tests.runners import packaged_runners


def _older(case: dict[str, Any]) -> bool:
    """Whether a runtime is older than all images for it, which keeps a worker out here alone."""
    return any(
        g.get("runtime_version") == "6.2" for w in case["workers"] for g in w.get("gpus_patch", {}).values()
    )


CASES = [c for c in peer.cases("filter.backend_framework") if not _older(c)]
CODES = {
    "no_backend_version_for_device": ("backend.no_version_cpu", "backend.no_version_accel"),
    "backend_version_unsupported": ("backend.version_unsupported",),
}
FRAMEWORKS = "frameworks"
"""How the peer's tests name `built_in_frameworks`."""


def backends(case: dict[str, Any]) -> Backends:
    rows = []
    for row in case["inputs"].get("backends") or []:
        versions = {
            v: {"built_in_frameworks": e.get(FRAMEWORKS), **e} for v, e in (row["versions"] or {}).items()
        }
        owner = None if row.get("owner") is None else str(row["owner"])
        rows.append(backend_row(row["name"], owner, versions))
    return Backends.of(rows)


def catalogue(case: dict[str, Any]) -> EngineImages:
    found = packaged_runners()
    for said in case["inputs"].get("runner_catalogue") or []:
        query, available = said["query"], said["available"]
        matching = [r for r in found if _answers(r, query)]
        if not available:
            found = [r for r in found if r not in matching]
        elif not matching:
            version = query.get("service_version", "1.0.0")
            found.append(Runner(query["backend"], "1.0", query.get("variant") or "", query["service"],
                                version, "amd64", "image"))  # fmt: skip
    return EngineImages(found)


def _answers(runner: Runner, query: Mapping[str, Any]) -> bool:
    if not query.get("with_deprecated", True) and runner.deprecated:
        return False
    asked = {"backend": runner.runtime, "service": runner.service, "service_version": runner.version,
             "variant": runner.variant}  # fmt: skip
    return all(query.get(k) in (None, v) for k, v in asked.items())


def demand(case: dict[str, Any]) -> Demand:
    asked = dict(case["model"])
    owner = asked.pop("owner_principal_id", None)
    spec = model_spec({"id": 1, "version": 1, "name": "model", "owner": owner and str(owner)} | asked)
    return Demand(spec, ModelFacts(0), Need(0), Engine.VLLM)


def judged(case: dict[str, Any]) -> tuple[Fleet, list[str], list[tuple[str, Reason]]]:
    """The fleet, the names that stay, and for each that does not its reason."""
    fleet = peer.fleet(case)
    policy = Policy(backends=backends(case), catalogue=catalogue(case))
    own = [f for f in chain.chain(demand(case), policy) if isinstance(f, FrameworkFilter)]
    rows = np.arange(fleet.count)
    kept = own[0].keep(fleet, rows) if own else np.ones(fleet.count, np.bool_)
    dropped = [
        (fleet.row(w).name, own[0].reasons(fleet, np.array([w]), 0, 1)[0]) for w in rows[~kept].tolist()
    ]
    return fleet, [fleet.row(w).name for w in rows[kept].tolist()], dropped


@pytest.mark.parametrize("case", CASES, ids=[c["id"] for c in CASES])
def test_the_same_workers_stay_and_each_other_one_has_its_reason(case: dict[str, Any]) -> None:
    _, kept, dropped = judged(case)
    expect = case["expect"]
    assert kept == expect["kept"]
    assert [name for name, _ in dropped] == expect["dropped"]
    facts = {f["worker"]: f for f in expect["message_facts"] if f["k"] == "filtered"}
    assert set(facts) == {name for name, _ in dropped}
    for name, reason in dropped:
        assert reason.code in CODES[facts[name]["reason"]]
        assert name in reason.text
        if "version" in facts[name]:
            assert reason.params["version"] == facts[name]["version"]
        if "device" in facts[name]:
            assert reason.params["runtime"] == facts[name]["device"]


# -- what was executed on the peer, where it decides as we do ------------------------------------------------

WORKERS = {
    "cpu": None,
    "cuda11": ("cuda", "11.8", None),
    "cuda12": ("cuda", "12.9", None),
    "910b3": ("cann", "8.2", "Ascend910B3"),
    "910a": ("cann", "8.2", "Ascend910A"),
    "ascend": ("cann", "8.2", None),
    "rocm": ("rocm", "6.4", None),
    "cambricon": ("neuware", "1.0", None),
}
ALL = " ".join(WORKERS)


def eight() -> Fleet:
    """The eight workers of the matrix."""
    described = []
    for n, (name, gpu) in enumerate(WORKERS.items(), 1):
        one = {"id": n, "name": name, "state": "ready", "ram_total": 2**36, "gpus": []}
        if gpu is not None:
            kind, level, soc = gpu
            card = {"type": kind, "runtime_version": level, "arch_family": soc}
            one["gpus"] = [{"index": 0, "vram_total": 2**36, **card}]
        described.append({"inline": one})
    return peer.fleet({"workers": described})


def own(name: str, owner: str | None = None, **frameworks: str | None) -> Any:
    versions = {
        v.removeprefix("v").replace("_", "."): {"custom_framework": f} if f else {}
        for v, f in frameworks.items()
    }
    return backend_row(name, owner, versions)


TWO = own("mine", v1_0="cuda", v2_0="rocm")

MATRIX = [
    ("MindIE", {}, [], "910b3 ascend"),
    ("Custom", {}, [], ALL),
    ("vLLM", {"image_name": "mine:1"}, [], ALL),
    ("mine", {}, [TWO], "cuda11 cuda12 rocm"),
    ("mine", {"backend_version": "2.0"}, [TWO], "rocm"),
    ("mine", {"backend_version": "3.0"}, [TWO], ""),
    ("mine", {}, [own("mine", v1=None)], ""),
    ("mine", {"backend_version": "1", "owner": "b"}, [own("mine", "a", v1="cuda")], ""),
    ("mine", {"backend_version": "1", "owner": "a"}, [own("mine", "a", v1="cuda")], "cuda11 cuda12"),
]  # fmt: skip


@pytest.mark.parametrize(("backend", "fields", "rows", "kept"), MATRIX)
def test_the_outcome_matrix(backend: str | None, fields: dict[str, Any], rows: list[Any], kept: str) -> None:
    on = eight()
    spec = model_spec({"id": 1, "version": 1, "name": "m", "backend": backend} | fields)
    wanted = Demand(spec, ModelFacts(0), Need(0), Engine.VLLM)
    policy = Policy(backends=Backends.of(rows))
    filters = [f for f in chain.chain(wanted, policy) if isinstance(f, FrameworkFilter)]
    bits = chain.failures(filters, on, np.arange(on.count))
    assert " ".join(on.row(w).name for w in np.flatnonzero(bits == 0).tolist()) == kept


def test_a_catalogue_that_replaces_the_packaged_one_hides_all_of_it() -> None:
    other = EngineImages([Runner("cuda", "12.8", "", "sglang", "0.5.9", "amd64", "x")])
    on = eight()
    policy = Policy(backends=Backends.of([]), catalogue=other)
    wanted = Demand(
        model_spec({"id": 1, "name": "m", "backend": "vLLM"}), ModelFacts(0), Need(0), Engine.VLLM
    )
    [framework] = [f for f in chain.chain(wanted, policy) if isinstance(f, FrameworkFilter)]
    assert not framework.keep(on, np.arange(on.count)).any()


def test_the_order_of_the_rows_of_one_owner_changes_nothing() -> None:
    on = eight()
    platform, mine = own("mine", v1="cuda"), own("mine", "a", v1="rocm")
    for rows in ([platform, mine], [mine, platform]):
        policy = Policy(backends=Backends.of(rows))
        spec = model_spec({"id": 1, "name": "m", "backend": "mine", "owner": "a"})
        wanted = Demand(spec, ModelFacts(0), Need(0), Engine.CUSTOM)
        [framework] = [f for f in chain.chain(wanted, policy) if isinstance(f, FrameworkFilter)]
        kept = framework.keep(on, np.arange(on.count))
        assert [on.row(w).name for w in np.flatnonzero(kept).tolist()] == ["rocm"]
        with_platform = replace(wanted, spec=model_spec({"id": 1, "name": "m", "backend": "mine"}))
        [framework] = [f for f in chain.chain(with_platform, policy) if isinstance(f, FrameworkFilter)]
        kept = framework.keep(on, np.arange(on.count))
        assert [on.row(w).name for w in np.flatnonzero(kept).tolist()] == ["cuda11", "cuda12"]
