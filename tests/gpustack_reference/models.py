"""Cases of models before scheduling: `evaluate`, `config_parse`, `gpu_count`, `tp_divisibility`,
`vgpu_quantity`, `local_path_config`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anyio

from tests.gpustack_reference import cases
from tests.gpustack_reference.cases import Case, Unreadable, known, needed, one_of
from tests.gpustack_reference.judgement import Finding, Tells
from tests.gpustack_reference.messages import said
from tests.gpustack_reference.production import filters, models

SKIP = "GPUSTACK_SKIP_GPU_COUNT_CHECK"
FILES = {"config_ref", "config", "diffusers"}


def evaluate(case: Case) -> Iterator[Finding]:
    """Whether a model is accepted, why not, and its categories."""
    inputs, expect = case.get("inputs") or {}, case["expect"]
    if "same_spec_for_owners" in inputs:
        yield from _owners(inputs, expect)
        return
    known(inputs, {"needs_remote_code", "remote_code_import_fails", "diffusers"}, "inputs")
    known(expect, {"accepted", "compatible", "reason", "reasons", "categories"}, "expect")
    asked = needed(case, "model", "case")
    entry = {}
    if ref := asked.get("config_ref"):
        entry = cases.fixture("models.json", "models", ref, "model.config_ref")
    diffusers = inputs.get("diffusers", asked.get("diffusers", entry.get("diffusers", False)))
    columns = {k: v for k, v in asked.items() if k not in FILES}
    accepted, codes, categories = models.evaluated(
        columns,
        cases.config_of(case),
        diffusers=bool(diffusers),
        remote_code=inputs.get("needs_remote_code", False),
    )
    for name in ("accepted", "compatible"):
        if name in expect:
            yield Finding(name, expect[name], accepted)
    if "reason" in expect:
        yield Finding("reason", [] if expect["reason"] is None else [expect["reason"]], codes)
    if "reasons" in expect:
        yield Finding("reasons", expect["reasons"], codes)
    if "categories" in expect:
        yield Finding("categories", expect["categories"], categories)


def _owners(inputs: dict[str, Any], expect: dict[str, Any]) -> Iterator[Finding]:
    """What was worked out for one owner's model is not told to another owner's."""
    known(expect, {"distinct_cache_keys", "same_owner_same_spec_same_key"}, "expect")
    owners = inputs["same_spec_for_owners"]
    first, again = filters.kept_for_owners(owners), filters.kept_for_owners(owners)
    if "distinct_cache_keys" in expect:
        yield Finding("distinct_cache_keys", expect["distinct_cache_keys"], len(set(first)))
    if "same_owner_same_spec_same_key" in expect:
        yield Finding("same key", expect["same_owner_same_spec_same_key"], first == again)


def config_parse(case: Case) -> Iterator[Finding]:
    """Dimensions that are read out of a configuration."""
    known(case["inputs"], {"config"}, "inputs")
    for name, value in case["expect"].items():
        one_of(name, models.DIMENSIONS, "expect")
        yield Finding(name, value, models.dimension(case["inputs"]["config"], name))


def gpu_count(case: Case) -> Iterator[Finding]:
    """How many GPUs a replica takes, by its flags and by the GPUs picked for it."""
    inputs, expect = case.get("inputs") or {}, case["expect"]
    known(inputs, {"world_size", "strategies", "gpus_per_replica", "skip_count_check"}, "inputs")
    known(expect, {"skip_count_check", "gpu_count", "error", "gpus_per_replica"}, "expect")
    columns = _picked(dict(case.get("model") or {}), inputs)
    if case.get("backend") in {"vLLM", "SGLang", "MindIE", "VoxBox", "Custom"}:
        columns.setdefault("backend", case["backend"])
    if "skip_count_check" in expect:
        yield Finding("skip_count_check", expect["skip_count_check"], models.skips_count_check(columns))
    if "gpus_per_replica" in expect:
        yield Finding("gpus_per_replica", expect["gpus_per_replica"], models.filled_in(columns))
    strategies = inputs.get("strategies") or []
    if "gpu_count" in expect:
        found = models.count_of(columns, inputs.get("world_size"), strategies)
        yield Finding("gpu_count", expect["gpu_count"], found)
    if "error" in expect:
        one_of(expect["error"], {"world_size_mismatch"}, "expect.error")
        found = models.count_of(columns, inputs.get("world_size"), strategies)
        yield Finding("error", Tells(("/".join(strategies), str(inputs["world_size"]), SKIP)), found)


def _picked(columns: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """The model with what the inputs say of its picked GPUs."""
    if (per := inputs.get("gpus_per_replica")) is not None:
        selector = dict(columns.get("gpu_selector") or {})
        selector.setdefault("gpu_ids", [f"w:cuda:{n}" for n in range(per)])
        columns["gpu_selector"] = selector | {"gpus_per_replica": per}
    if inputs.get("skip_count_check"):
        columns["env"] = {**(columns.get("env") or {}), SKIP: "1"}
    return columns


def tp_divisibility(case: Case) -> Iterator[Finding]:
    """Whether a model splits over so many GPUs."""
    inputs, expect = case["inputs"], case["expect"]
    sizes = {"num_attention_heads", "vision_num_attention_heads", "vocab_size", "tp_size"}
    known(inputs, sizes, "inputs")
    known(expect, {"divisible", "message_facts"}, "expect")
    parameters = (case.get("model") or {}).get("backend_parameters") or []
    divisible, complaint = models.divides(case.get("backend", "vLLM"), parameters, inputs)
    yield Finding("divisible", needed(expect, "divisible", "expect"), divisible)
    facts = expect.get("message_facts") or []
    for fact in facts:
        words = tuple(said(k, v) for k, v in fact.items() if k != "k")
        yield Finding(f"message.{fact.get('k')}", Tells(words), complaint)
    if not facts:
        yield Finding("message", None, complaint)


def vgpu_quantity(case: Case) -> Iterator[Finding]:
    """Quantities of memory in MiB."""
    known(case["inputs"], {"quantities"}, "inputs")
    known(case["expect"], {"mib"}, "expect")
    found = models.mebibytes(case["inputs"]["quantities"])
    yield Finding("mib", [m or 0 for m in case["expect"]["mib"]], found)


def local_path_config(case: Case) -> Iterator[Finding]:
    """A file that only workers have."""
    inputs, expect = case["inputs"], case["expect"]
    known(inputs, {"file", "workers"}, "inputs")
    known(expect, {"result_from", "returned", "unfinished_requests_left", "error"}, "expect")
    path = f"{case['model']['local_path']}/{needed(inputs, 'file', 'inputs')}"
    workers = needed(inputs, "workers", "inputs")
    for n, worker in enumerate(workers):
        known(worker, {"name", "answers_after_s", "ok", "error"}, f"inputs.workers[{n}]")
        if worker.get("error") and worker.get("ok"):
            raise Unreadable(f"inputs.workers[{n}]", "is ok and has an error")
        worker.setdefault("ok", not worker.get("error"))
    content = {"architectures": ["Qwen2ForCausalLM"]}
    winner, problem, running = anyio.run(models.file_from_workers, path, workers, content)
    if "returned" in expect:
        yield Finding("returned", expect["returned"], winner is not None)
    if "result_from" in expect:
        yield Finding("result_from", expect["result_from"], winner)
    if "unfinished_requests_left" in expect:
        yield Finding("unfinished_requests_left", expect["unfinished_requests_left"], running)
    if "error" in expect:
        yield Finding("error", bool(expect["error"]), bool(problem))
        if problem:  # the refusal names the file and whom it asked
            names = [w["name"] for w in workers[:3]]
            yield Finding("error text", Tells((inputs["file"], *names)), problem)
