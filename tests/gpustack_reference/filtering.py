"""Cases of single filters: `filter.backend_framework`, `filter.label_matching` and others by their names."""

from __future__ import annotations

from collections.abc import Iterator

from tests.gpustack_reference.cases import Case, known, one_of
from tests.gpustack_reference.judgement import Finding, OneOf
from tests.gpustack_reference.production import filters

CODES = {
    "no_backend_version_for_device": ("backend.no_version_cpu", "backend.no_version_accel"),
    "backend_version_unsupported": ("backend.version_unsupported",),
}
OWN = {
    "label_matching": "labels", "cluster": "cluster", "gpu_matching": "gpu_selector", "status": "status",
    "local_path": "local_path",
}  # fmt: skip
INPUTS = {"backends", "runner_catalogue", "owner", "backend_name_unknown"}


def judge(case: Case) -> Iterator[Finding]:
    """Findings of one case."""
    expect = case["expect"]
    known(case.get("inputs") or {}, INPUTS, "inputs")
    known(expect, {"kept", "dropped", "message_facts"}, "expect")
    name = case["area"].removeprefix("filter.")
    if name == "backend_framework":
        kept, dropped = filters.kept_by_framework({"inputs": {}, **case})
    else:
        kept, dropped = filters.kept_by(case, one_of(name, OWN, "area") and OWN[name])
    if "kept" in expect:
        yield Finding("kept", expect["kept"], kept)
    if "dropped" in expect:
        yield Finding("dropped", expect["dropped"], list(dropped))
    for n, fact in enumerate(expect.get("message_facts") or []):
        known(
            fact,
            {"k", "worker", "reason", "version", "device", "matched", "total"},
            f"expect.message_facts[{n}]",
        )
        if fact["k"] != "filtered":
            continue
        code, params, text = dropped.get(fact["worker"], ("", {}, ""))
        codes = CODES[one_of(fact["reason"], CODES, f"expect.message_facts[{n}].reason")]
        yield Finding(f"reason {fact['worker']}", OneOf(codes), code)
        yield Finding(f"named {fact['worker']}", True, fact["worker"] in text)
        for theirs, own in (("version", "version"), ("device", "runtime")):
            if theirs in fact:
                yield Finding(f"reason {fact['worker']}.{theirs}", fact[theirs], params.get(own))
