"""Every shape that cases have, with small cases of our own; and what the runner says of one that it does
not know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.gpustack_reference.cases import Case, read_cases
from tests.gpustack_reference.verdict import Verdict, verdict

GIB = 2**30


def case(area: str, **parts: Any) -> Case:
    return {"id": f"{area}/own", "area": area, **parts}


def equal(found: Case) -> None:
    made = verdict(found)
    assert made.words == "equal", made.wrong


def queue(*ops: dict[str, Any], **options: Any) -> Case:
    return case(
        "queue", inputs={"queue": options, "ops": list(ops)}, expect={"all_op_expectations_hold": True}
    )


def op(what: str, key: str = "", **more: Any) -> dict[str, Any]:
    return {"op": what} | ({"key": key} if key else {}) | more


WORKERS = [
    {"inline": {"id": 1, "name": "w1", "state": "ready", "labels": {"zone": "a"}, "ram_total": 64 * GIB,
                "gpus": [{"index": 0, "type": "cuda", "vendor": "nvidia", "vram_total": 24 * GIB}]}},
    {"inline": {"id": 2, "name": "w2", "state": "not_ready", "labels": {"zone": "b"}, "ram_total": 64 * GIB,
                "gpus": [{"index": 0, "type": "cuda", "vendor": "nvidia", "vram_total": 24 * GIB}]}},
]  # fmt: skip


# -- queue ---------------------------------------------------------------------------------------------------


def test_a_key_that_is_added_again_waits_once_and_the_last_word_counts() -> None:
    equal(queue(
        op("add", "a", type="ADDED", obj="v1"), op("add", "a", type="MODIFIED", obj="v2"),
        op("len", expect=1),
        op("get", timeout_s=1, expect={"key": "a", "type": "MODIFIED", "obj": "v2"}), op("done", "a"),
        op("get_nothing", within_s=0.1), op("get", timeout_s=0.1, expect=None),
    ))  # fmt: skip


def test_a_deletion_is_not_replaced_by_a_later_change() -> None:
    equal(queue(
        op("add", "a", type="DELETED", obj="gone"), op("add", "a", type="MODIFIED", obj="late"),
        op("get", timeout_s=1, expect={"key": "a", "type": "DELETED"}),
    ))  # fmt: skip


def test_what_is_added_passes_the_window_and_replaces_what_waits_in_it() -> None:
    found = verdict(queue(
        op("add", "a", type="MODIFIED", obj="v1"), op("add", "a", type="ADDED", obj="v2"),
        op("get", timeout_s=0.05, expect={"key": "a", "type": "ADDED", "obj": "v2"}, elapsed_at_most_s=0.05),
        dedup_window=10,
    ))  # fmt: skip
    assert found.words == "equal", found.wrong


def test_a_window_and_its_longest_wait_are_read() -> None:
    found = verdict(queue(
        op("add", "a", obj=1), op("sleep", seconds=0.05), op("add", "a", obj=2),
        op("get_nothing", within_s=0.02),
        op("get", timeout_s=1, expect={"obj": 2}, elapsed_at_least_s=0.01), dedup_window=0.08,
        dedup_max_wait=0.1,
    ))  # fmt: skip
    # here the key is taken at once, so that the script's second look finds nothing
    assert found.words == "differs no_window_for_changes", found.wrong


@pytest.mark.parametrize(
    "options",
    [{"backoff": {"base": 1.0, "cap": 4.0, "jitter": 0.0}}, {"backoff_base": 1.0, "backoff_max": 4.0}],
)
def test_failures_lengthen_the_delay_until_they_are_forgotten(options: dict[str, Any]) -> None:
    equal(queue(
        *(op("backoff", "a", expect=e) for e in (1.0, 2.0, 4.0, 4.0)), op("failures", "a", expect=4),
        op("forget", "a"), op("failures", "a", expect=0), op("backoff", "a", expect=1.0), **options,
    ))  # fmt: skip


def test_what_is_added_after_a_failure_comes_after_its_delay() -> None:
    equal(queue(
        op("add_rate_limited", "a", type="MODIFIED"), op("get_nothing", within_s=0.15),
        op("failures", "a", expect=1),
        op("get", timeout_s=1, expect={"key": "a"}, elapsed_since_start_at_least_s=0.19,
           elapsed_since_start_at_most_s=0.25), backoff_base=0.2, backoff_max=1.0,
    ))  # fmt: skip


@pytest.mark.parametrize("options", [
    {"backoff": {"base": 1.0, "cap": 8.0, "jitter": 0.5, "rand": 0.5}},
    {"backoff_base": 1.0, "backoff_max": 8.0, "backoff_jitter": 0.5},
])  # fmt: skip
def test_jitter_takes_a_part_of_the_delay_by_the_draw_that_is_given(options: dict[str, Any]) -> None:
    found = verdict(queue(op("backoff", "a", rand=0.5, expect=1.25), op("backoff", "a", rand=0.5), **options))
    assert found.words == "differs jitter_shortens", found.wrong


def test_a_scheduler_starts_with_a_full_look_and_hears_of_new_instances() -> None:
    expect = {
        "subscribed_event_types": ["CREATED"],
        "replay_existing": False,
        "full_scans_before_live_at_least": 1,
    }
    for there in ([1, 2], [{"id": 1}, {"id": 2}], 2):
        inputs = {"on": "scheduler_start", "existing_pending_instances": there}
        equal(case("queue", inputs=inputs, expect=expect))


def test_events_make_one_evaluation_each_and_no_full_look() -> None:
    events = [
        {"type": "CREATED", "instance_id": 7},
        {"type": "UPDATED", "instance_id": 8},
        {"type": "HEARTBEAT"},
    ]
    for evaluations in (1, [7]):
        expect = {"full_scans": 0, "single_instance_evaluations": evaluations}
        equal(case("queue", inputs={"events": events}, expect=expect))
    events = [{"instance": {"id": 8}, "eligible": True}, {"instance_id": 8, "eligible": False}]
    equal(case("queue", inputs={"events": events}, expect={"evaluated": [[8], []]}))


# -- scorers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scores", [[10.0, None], {"1": 10.0, "2": None}])
def test_given_scores_of_instances_are_added_up_and_scaled(scores: Any) -> None:
    existing = [{"id": 1, "model_id": 1, "worker_id": 1}, {"id": 2, "model_id": 1, "worker_id": 1}]
    scorers = [{"type": "given", "max_score": 20.0, "scores": scores},
               {"type": "given", "max_score": 5.0, "scores": [5.0, 2.5]},
               {"type": "given", "max_score": None, "scores": [99.0, 99.0]}]  # fmt: skip
    inputs = {"scorers": scorers, "total_max_score": 100}
    equal(case("scorer.instance_chain", inputs=inputs, workers=WORKERS[:1], existing_instances=existing,
               expect={"scores": {"1": 60.0, "2": 10.0}}))  # fmt: skip


def test_what_is_free_may_be_given_for_a_placement_score() -> None:
    scorer = {"type": "placement", "strategy": "binpack", "max_score": 100.0, "scale": "scale_up"}
    candidate = {"worker_id": 1, "worker": "w1", "gpu_indexes": [0], "claim": {"ram": 10, "vram": {"0": 50}}}
    inputs = {"scorers": [scorer], "candidates": [candidate],
              "allocatable_given": {"w1": {"ram": 100, "vram": {"0": 100}}}}  # fmt: skip
    equal(case("scorer.placement", model={"id": 1}, inputs=inputs, workers=WORKERS[:1],
               expect={"scores": [110 / 3]}))  # fmt: skip


# -- filters, counts, schedules, models ----------------------------------------------------------------------


def test_labels_keep_workers() -> None:
    equal(case("filter.label_matching", model={"worker_selector": {"zone": "a"}}, workers=WORKERS,
               expect={"kept": ["w1"], "dropped": ["w2"], "message_facts": []}))  # fmt: skip
    equal(case("filter.status", model={}, workers=WORKERS, expect={"kept": ["w1"], "dropped": ["w2"]}))


def test_a_backend_whose_name_is_not_known() -> None:
    cpu = {"inline": {"id": 3, "name": "w3", "state": "ready", "gpus": []}}
    found = verdict(case("filter.backend_framework", model={}, workers=[WORKERS[0], cpu],
                         inputs={"backend_name_unknown": True},
                         expect={"kept": ["w1", "w3"], "dropped": []}))  # fmt: skip
    assert found.words == "differs backend_is_always_known", found.wrong


def picked(count: int, **more: Any) -> dict[str, Any]:
    return {"gpu_selector": {"gpu_ids": [f"w1:cuda:{n}" for n in range(count)], **more}}


def test_counts_of_gpus() -> None:
    equal(case("gpu_count", backend="vLLM", model=picked(8, gpus_per_replica=4), expect={"gpu_count": 4}))
    equal(case("gpu_count", model=picked(8) | {"replicas": 2}, expect={"gpus_per_replica": 4}))
    inputs = {"world_size": 16, "strategies": ["tp"], "gpus_per_replica": 8}
    equal(case("gpu_count", inputs=inputs, expect={"error": "world_size_mismatch"}))
    equal(case("gpu_count", inputs=inputs | {"skip_count_check": True},
               expect={"gpu_count": 8, "skip_count_check": True}))  # fmt: skip


RULE = {"start_cron": "0 8 * * *", "duration_seconds": 3600, "replicas": 3}


def schedule(*rules: dict[str, Any], baseline: int | None = 1, **more: Any) -> dict[str, Any]:
    return {"enabled": True, "baseline_replicas": baseline, "rules": list(rules), **more}


def test_several_models_with_schedules_and_a_rule_that_cannot_be_used() -> None:
    endless = {"start_cron": "0 0 * * *", "replicas": 9}
    models = [
        {"id": 1, "name": "a", "scaling_schedule": schedule(endless, RULE)},
        {"id": 2, "name": "b", "scaling_schedule": schedule(RULE, baseline=5, enabled=False)},
        {"id": 3, "name": "c", "scaling_schedule": None},
    ]
    expect: dict[str, Any] = {"visited": ["a"], "baseline_replicas": 1, "max_intended_replicas": 3}
    equal(case("scaling_schedule", inputs={"models": models}, expect=expect))
    equal(
        case(
            "scaling_schedule", inputs={"models": models}, expect={"visited": 1, "max_intended_replicas": [3]}
        )
    )
    checks = [
        {"schedule": schedule(endless, RULE), "now": f"2026-07-15T{hour}:30:00+00:00"}
        for hour in ("08", "12")
    ]
    equal(case("scaling_schedule", inputs={"checks": checks}, expect={"replicas": [3, 1]}))


@pytest.mark.parametrize(("more", "after"), [({}, 1), ({"paused": True}, 0), ({"enabled": False}, 7)])
def test_what_a_model_has_after_it_was_saved(more: dict[str, Any], after: int) -> None:
    inputs = {"on": "save", "submitted_replicas": 7, "schedule": schedule(RULE, **more), "now": "any time"}
    expect = {"replicas_after_save": after, "replicas_seen_by_validation": 7}
    equal(case("scaling_schedule", inputs=inputs, expect=expect))


def test_a_file_that_no_worker_has() -> None:
    workers = [{"name": "w1", "ok": False}, {"name": "w2", "error": "missing"}]
    model = {"source": "local_path", "local_path": "/m"}
    expect = {"returned": False, "error": "not_found", "unfinished_requests_left": 0}
    equal(
        case(
            "local_path_config",
            model=model,
            inputs={"file": "config.json", "workers": workers},
            expect=expect,
        )
    )


@pytest.mark.parametrize("where", ["inputs", "model"])
def test_a_pipeline_of_diffusers(where: str) -> None:
    parts: dict[str, Any] = {"inputs": {}, "model": {"source": "huggingface", "backend": "SGLang"}}
    parts[where]["diffusers"] = True
    equal(case("evaluate", **parts, expect={"accepted": True, "categories": ["image"]}))


# -- decisions -----------------------------------------------------------------------------------------------


def test_a_list_of_workers_that_a_defect_made_shorter_is_not_copied() -> None:
    model = {"id": 1, "name": "m", "source": "huggingface", "huggingface_repo_id": "a/b", "backend": "vLLM",
             "categories": ["llm"], "placement_strategy": "binpack", "weight_bytes": 8 * GIB}  # fmt: skip
    claim = {"vram": {"0": int(24 * GIB * 0.9)}}
    candidate = {"worker_id": 1, "worker": "w1", "gpu_type": "cuda", "gpu_indexes": [0], "claim": claim}
    expect = {"candidates": [candidate], "final": candidate, "final_workers": ["w1"], "message_facts": [],
              "filters_kept": {"StatusFilter": ["w1"]}}  # fmt: skip
    equal(
        case(
            "selector.vllm",
            backend="vLLM",
            model=model,
            workers=WORKERS,
            expect=expect | {"final": candidate},
        )
    )


# -- shapes that nobody knows --------------------------------------------------------------------------------


def named(make: Callable[[], Case]) -> str:
    found: Verdict = verdict(make())
    (wrong,) = found.wrong
    assert wrong.startswith("the runner cannot read ")
    return wrong


@pytest.mark.parametrize(
    ("found", "field"),
    [
        (case("selector.other", expect={}), "area"),
        (case("queue", inputs={"ops": [op("add", "a"), op("steal", "a")]}, expect={}), "inputs.ops[1].op"),
        (case("queue", inputs={"ops": [op("add", "a", colour=1)]}, expect={}), "inputs.ops[0].colour"),
        (queue(op("add", "a"), width=1), "inputs.queue.width"),
        (case("gpu_count", model={}, inputs={"teeth": 1}, expect={}), "inputs.teeth"),
        (case("gpu_count", model={}, expect={"error": "cold"}), "expect.error"),
        (case("vgpu_quantity", inputs={"quantities": []}, expect={"kib": []}), "expect.kib"),
        (case("scaling_schedule", inputs={"checks": [{"schedule": {}, "now": "", "moon": 1}]},
              expect={"replicas": [1]}), "inputs.checks[0].moon"),
        (case("scorer.chain", inputs={"scorers": [{"type": "taste"}]}, expect={}), "inputs.scorers[0].type"),
        (case("config_parse", inputs={"config": {}}, expect={"depth": 1}), "expect"),
        (case("filter.status", model={}, workers=[{"fixture": "nowhere"}], expect={}), "workers[0].fixture"),
        (case("filter.status", model={}, workers=[{"inline": {}, "gpus_patch": {"0": {}}}], expect={}),
         "workers[0].gpus_patch"),
        (case("selector.gguf", model={"gguf_estimates": []}, workers=[], expect={"candidates": []}),
         "model.gguf_estimates"),
        (case("selector.vllm", model={}, workers=[], expect={"candidates": [], "mood": 1}), "expect.mood"),
    ],
)  # fmt: skip
def test_a_shape_that_is_not_known_is_named(found: Case, field: str) -> None:
    assert f"cannot read {field}:" in named(lambda: found)


def test_a_case_that_expects_nothing_is_no_case() -> None:
    assert verdict(case("filter.status", model={}, workers=WORKERS, expect={})).wrong


def test_cases_are_read_from_the_file_that_is_set(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "cases.jsonl"
    other.write_text(
        '\n{"id": "x", "area": "vgpu_quantity", "inputs": {"quantities": ["1Gi"]}, '
        '"expect": {"mib": [1024]}}\n'
    )
    monkeypatch.setenv("GPUSTACKD_PEER_CASES", str(other))
    (only,) = read_cases()
    equal(only)
    assert len(read_cases(own=True)) == 145
    (tmp_path / "fixtures-workers.json").write_text(
        '{"fixtures": {"mine": {"id": 1, "name": "m", "state": "ready"}}}'
    )
    monkeypatch.setenv("GPUSTACKD_PEER_FIXTURES", str(tmp_path))
    for fixture, name in (("mine", "m"), ("linux_cpu_1", "host-cpu-1")):
        equal(case("filter.status", model={}, workers=[{"fixture": fixture, "set": {"state": "ready"}}],
                   expect={"kept": [name]}))  # fmt: skip
    other.write_text("{}")
    with pytest.raises(Exception, match=r"cases\.jsonl, line 1"):
        read_cases()
