"""Architectures to categories (estimate spec section 9), speech facts (section 10), kinds of models (1)."""

from __future__ import annotations

import json
from collections import Counter
from importlib.resources import files

import pytest

from gpustackd.estimate.categories import detect, guess, is_llm, is_multimodal, is_omni, meta_of
from tests.specs import a_model, known_models


@pytest.mark.parametrize(
    ("architecture", "category"),
    [
        ("BertModel", "embedding"),
        ("DeciLMForCausalLM", "embedding"),
        ("GPT2ForSequenceClassification", "embedding"),
        ("Qwen3ForSequenceClassification", "reranker"),
        ("JinaVLForRanking", "reranker"),
        ("WhisperForConditionalGeneration", "speech_to_text"),
        ("Qwen3ASRRealtimeGeneration", "speech_to_text"),
        ("Qwen3TTSForConditionalGeneration", "text_to_speech"),
        ("Qwen2ForCausalLM", "llm"),
        ("GPT2LMHeadModel", "llm"),
        ("ChatGLMModel", "llm"),
        ("Qwen2_5_VLForConditionalGeneration", "llm"),
        ("RForConditionalGeneration", "llm"),
        ("T5ForConditionalGeneration", "unknown"),
        ("qwen2forcausallm", "unknown"),
    ],
)
def test_an_architecture_has_the_category_of_its_table(architecture: str, category: str) -> None:
    assert detect([architecture]) == category


def test_the_first_known_architecture_decides() -> None:
    assert detect(["Nobody", "BertModel", "Qwen2ForCausalLM"]) == "embedding"
    assert detect([]) == "unknown"


def test_no_architecture_stands_in_two_tables() -> None:
    raw = json.loads((files("gpustackd.estimate") / "architectures.json").read_text("utf-8"))["tables"]
    names = Counter(
        stem + suffix for table in raw.values() for suffix, stems in table.items() for stem in stems
    )
    assert [name for name, times in names.items() if times > 1] == []
    assert len(names) > 350


def test_only_the_multimodal_table_counts_as_multimodal() -> None:
    assert is_multimodal(["Qwen2VLForConditionalGeneration"])
    assert not is_multimodal(["Qwen2ForCausalLM"])
    assert not is_multimodal(["TransformersForMultimodalLM"])


@pytest.mark.parametrize(
    ("architecture", "category"),
    [
        ("BrandNewForCausalLM", "llm"),
        ("BrandNewForSequenceClassification", "reranker"),
        ("BrandNewBertModel", "embedding"),
        ("BrandNewForConditionalGeneration", "llm"),
        ("Mystery", "unknown"),
    ],
)
def test_the_ending_of_an_unknown_name_is_a_guess(architecture: str, category: str) -> None:
    assert detect([architecture]) == "unknown"
    assert guess([architecture]) == category


def test_every_language_model_of_the_fixtures_is_recognised() -> None:
    for name, known in known_models().items():
        found = detect(known["hf_config"].get("architectures", []))
        if known["hf_config"] and name != "google-t5/t5-base":
            assert found in {"llm", "embedding"}, name


def test_no_category_counts_as_a_language_model() -> None:
    assert is_llm([])
    assert is_llm(["embedding", "llm"])
    assert not is_llm(["embedding"])


@pytest.mark.parametrize(
    ("columns", "omni"),
    [
        ({"backend": "vLLM", "backend_parameters": ["--omni"]}, True),
        ({"backend": "vLLM", "backend_parameters": ["--omni=false"]}, False),
        ({"backend": "SGLang", "backend_parameters": ["--omni"]}, False),
        ({"categories": ["image"]}, True),
        ({"categories": ["text_to_speech"]}, True),
        ({"categories": ["speech_to_text"]}, False),
    ],
)
def test_image_and_speech_output_and_the_flag_of_vllm_make_a_model_omni(
    columns: dict[str, object], omni: bool
) -> None:
    spec = a_model(**columns)
    assert is_omni(spec, spec.categories) is omni


def test_whisper_knows_57_languages_and_voxtral_nine() -> None:
    whisper = meta_of(["WhisperForConditionalGeneration"], {})
    assert len(whisper["languages"]) == 57
    assert whisper["languages"][:3] == ["en", "zh", "af"]
    voxtral = meta_of(["VoxtralForConditionalGeneration"], {})["languages"]
    assert " ".join(voxtral) == "en ar nl fr de hi it pt es"


def test_the_first_row_of_the_table_wins_for_meta() -> None:
    names = ["WhisperForConditionalGeneration", "VoxtralForConditionalGeneration"]
    assert len(meta_of(names, {})["languages"]) == 9


def test_speech_output_has_voices_and_a_task_in_camel_case() -> None:
    meta = meta_of(["Qwen3TTSForConditionalGeneration"], {"tts_model_type": "voice_design"})
    assert meta["task_type"] == "VoiceDesign"
    assert "Uncle_Fu" in meta["voices"]
    assert "task_type" not in meta_of(["Qwen3TTSForConditionalGeneration"], {})


def test_other_models_have_no_meta() -> None:
    assert meta_of(["Qwen2ForCausalLM"], {}) == {}
