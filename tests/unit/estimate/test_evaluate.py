"""Evaluation before scheduling: what is refused and why, and what is filled in."""

from __future__ import annotations

from typing import Any

import pytest

from gpustackd.errors import ModelUnreadable
from gpustackd.estimate.evaluate import evaluate, gpus_per_replica
from tests.specs import a_model, facts, known_models

KNOWN = known_models()
QWEN = "Qwen/Qwen2.5-0.5B-Instruct"
T5 = "google-t5/t5-base"


@pytest.mark.parametrize("backend", ["vLLM", None])
def test_an_architecture_that_vllm_does_not_know_is_refused_by_name_with_remedies(
    backend: str | None,
) -> None:
    found = evaluate(a_model(backend=backend), facts(1, KNOWN[T5]["hf_config"]))
    (problem,) = found.problems
    assert problem.code == "unsupported_architecture"
    assert "T5ForConditionalGeneration" in problem.text
    assert "image" in problem.text
    assert problem.params["architectures"] == ["T5ForConditionalGeneration"]


@pytest.mark.parametrize(
    "columns",
    [
        {"backend": "SGLang"},
        {"backend": "vLLM", "backend_version": "0.11.0"},
        {"backend": "vLLM", "image_name": "my/vllm:1"},
        {"backend": "my-engine"},
        {"backend": "vLLM", "env": {"GPUSTACK_SKIP_MODEL_EVALUATION": "1"}},
        {"backend": "vLLM", "backend_parameters": ['--hf-overrides={"architectures": ["Qwen2ForCausalLM"]}']},
    ],
)
def test_another_engine_a_pin_or_an_override_lets_it_pass(columns: dict[str, Any]) -> None:
    assert not evaluate(a_model(**columns), facts(1, KNOWN[T5]["hf_config"])).problems


def test_the_last_override_of_architectures_counts_and_the_config_is_not_looked_at() -> None:
    overrides = [
        '--hf-overrides={"architectures": ["Nobody"]}',
        '--hf_overrides={"architectures": ["BertModel"]}',
    ]
    found = evaluate(
        a_model(backend="vLLM", backend_parameters=overrides), None, ModelUnreadable("x", "gone")
    )
    assert not found.problems
    assert found.categories == ("embedding",)


def test_overrides_that_are_no_json_are_a_problem_and_no_crash() -> None:
    found = evaluate(a_model(backend="vLLM", backend_parameters=["--hf-overrides={oops"]), facts(1, {"a": 1}))
    assert [p.code for p in found.problems][:1] == ["bad_parameters"]


def test_a_model_that_names_no_architecture_is_refused_unless_the_engine_is_ones_own() -> None:
    nameless = facts(1, {"hidden_size": 64})
    assert [p.code for p in evaluate(a_model(backend="vLLM"), nameless).problems] == ["architecture_unknown"]
    assert not evaluate(a_model(backend="Custom"), nameless).problems
    assert not evaluate(a_model(backend="vLLM", image_name="x"), nameless).problems


def test_an_unreadable_config_is_a_problem_unless_the_check_may_be_skipped() -> None:
    error = ModelUnreadable("hub_timeout", "the hub did not answer", "check the network")
    (problem,) = evaluate(a_model(backend="vLLM"), None, error).problems
    assert problem.params["error"] == "hub_timeout"
    assert "the hub did not answer" in problem.text
    skipped = evaluate(a_model(backend="vLLM", backend_parameters=["--tokenizer-mode=mistral"]), None, error)
    assert not skipped.problems
    assert skipped.categories == ("llm",)


def test_remote_code_is_told_from_the_config_and_the_flag_lets_it_pass() -> None:
    config = {
        "architectures": ["Phi4MMForCausalLM"],
        "model_type": "phi4mm",
        "auto_map": {"AutoConfig": "x.Y"},
    }
    refused = evaluate(a_model(backend="vLLM"), facts(1, config))
    assert [p.code for p in refused.problems] == ["needs_trust_remote_code"]
    assert "--trust-remote-code" in refused.problems[0].text
    assert not evaluate(
        a_model(backend="vLLM", backend_parameters=["--trust-remote-code"]), facts(1, config)
    ).problems
    assert not evaluate(a_model(backend="vLLM"), facts(1, {**config, "model_type": "qwen2"})).problems


def test_a_pipeline_becomes_an_image_model_unless_it_is_said_to_be_another() -> None:
    pipeline = facts(1, is_diffusers=True)
    assert evaluate(a_model(), pipeline).writes["categories"] == ["image"]
    assert "categories" not in evaluate(a_model(categories=["image"]), pipeline).writes


def test_categories_are_filled_in_only_where_they_are_empty() -> None:
    bert = facts(1, KNOWN["BAAI/bge-base-en-v1.5"]["hf_config"])
    assert evaluate(a_model(), bert).writes["categories"] == ["embedding"]
    assert "categories" not in evaluate(a_model(categories=["reranker"]), bert).writes


def test_an_unknown_architecture_of_a_pinned_engine_counts_as_an_llm() -> None:
    mystery = facts(1, {"architectures": ["Mystery"]})
    assert evaluate(a_model(backend_version="9"), mystery).categories == ("llm",)


def test_speech_models_get_their_languages() -> None:
    whisper = facts(1, {"architectures": ["WhisperForConditionalGeneration"]})
    found = evaluate(a_model(), whisper)
    assert found.writes["categories"] == ["speech_to_text"]
    assert len(found.writes["meta"]["languages"]) == 57


@pytest.mark.parametrize(
    ("backend", "distributed"),
    [("vLLM", True), (None, True), ("SGLang", True), ("MindIE", True), ("VoxBox", False), ("Custom", False)],
)
def test_engines_that_can_span_workers_are_allowed_to_where_the_row_does_not_say(
    backend: str | None, distributed: bool
) -> None:
    qwen = facts(1, KNOWN[QWEN]["hf_config"])
    written = evaluate(a_model(backend=backend), qwen).writes
    assert written["distributed_inference_across_workers"] is distributed
    said = evaluate(a_model(backend=backend, distributed_inference_across_workers=False), qwen).writes
    assert "distributed_inference_across_workers" not in said


def picked(count: int, **columns: Any) -> Any:
    ids = [f"w1:cuda:{i}" for i in range(count)]
    return a_model(gpu_selector={"gpu_ids": ids}, **columns)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (picked(8, replicas=2), 4),
        (picked(7, replicas=1), 4),
        (picked(3, replicas=4), 0),
        (picked(8, replicas=1, backend="vLLM", backend_parameters=["--tensor-parallel-size 2"]), 2),
        (picked(8, replicas=1, backend="SGLang", backend_parameters=["--tp", "2", "--pp-size", "2"]), 4),
        (picked(8, replicas=1, backend="Custom", backend_parameters=["--tensor-parallel-size 2"]), 8),
        (picked(8, replicas=1, backend="VoxBox"), 1),
        (picked(6, replicas=2, env={"GPUSTACK_SKIP_GPU_COUNT_CHECK": "yes"}), 3),
        (picked(8, replicas=0), 8),
        (picked(0), None),
        (a_model(gpu_selector={"gpu_ids": ["w:cuda:0"], "gpus_per_replica": 1}), None),
        (a_model(), None),
    ],
)
def test_gpus_per_replica_follow_from_flags_or_from_the_picked_gpus(spec: Any, expected: int | None) -> None:
    assert gpus_per_replica(spec) == expected


def test_what_is_written_keeps_the_picked_gpus_and_never_a_zero() -> None:
    written = evaluate(picked(8, replicas=2), facts(1, KNOWN[QWEN]["hf_config"])).writes["gpu_selector"]
    assert written["gpus_per_replica"] == 4
    assert written["gpu_ids"][7] == "w1:cuda:7"
    none = evaluate(picked(3, replicas=4), facts(1, KNOWN[QWEN]["hf_config"])).writes
    assert "gpu_selector" not in none
