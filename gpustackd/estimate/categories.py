"""What kind of model it is: by the architectures that its configuration names, and by the row.

Also what follows from its architecture alone: languages and voices of speech models (`model.meta`), and
whether an engine can load it without code of its repository.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from gpustackd.domain.model_spec import ModelSpec
from gpustackd.engines.flags import parse_flags

LLM = "llm"
EMBEDDING = "embedding"
RERANKER = "reranker"
IMAGE = "image"
SPEECH_TO_TEXT = "speech_to_text"
TEXT_TO_SPEECH = "text_to_speech"
UNKNOWN = "unknown"

BUILT_IN = ("vLLM", "SGLang", "MindIE", "VoxBox")
"""Engines whose models are checked against the tables; `Custom` and any other name are not."""

_ORDER = (
    ("embedding", EMBEDDING), ("reranker", RERANKER), ("speech_to_text", SPEECH_TO_TEXT),
    ("text_to_speech", TEXT_TO_SPEECH), ("llm_text", LLM), ("llm_multimodal", LLM),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Tables:
    by_name: Mapping[str, str]
    multimodal: frozenset[str]
    guesses: tuple[tuple[str, str], ...]
    library_types: frozenset[str]


@lru_cache(maxsize=1)
def tables() -> _Tables:
    """The data file `architectures.json`, read once."""
    raw = json.loads((files("gpustackd.estimate") / "architectures.json").read_text("utf-8"))
    names = {
        table: [stem + suffix for suffix, stems in raw["tables"][table].items() for stem in stems]
        for table, _ in _ORDER
    }
    by_name = {name: category for table, category in reversed(_ORDER) for name in names[table]}
    return _Tables(
        by_name,
        frozenset(names["llm_multimodal"]),
        tuple((s, c) for s, c in raw["suffix_guesses"]),
        frozenset(raw["library_model_types"]),
    )


def detect(architectures: Iterable[str]) -> str:
    """Category of the first architecture that a table names, else `unknown`."""
    known = tables().by_name
    return next((known[name] for name in architectures if name in known), UNKNOWN)


def guess(architectures: Iterable[str]) -> str:
    """Like `detect`, and by the ending of the name where no table has it: `FooForCausalLM` is an llm."""
    names = tuple(architectures)
    if (found := detect(names)) != UNKNOWN:
        return found
    for name in names:
        for ending, category in tables().guesses:
            if name.endswith(ending):
                return category
    return UNKNOWN


def is_multimodal(architectures: Iterable[str]) -> bool:
    """Whether an architecture is in the multimodal table (what MindIE means by it)."""
    return any(name in tables().multimodal for name in architectures)


def is_llm(categories: Iterable[str]) -> bool:
    """No category at all counts as a language model."""
    known = tuple(categories)
    return not known or LLM in known


def is_omni(spec: ModelSpec, categories: Iterable[str]) -> bool:
    """Image and speech output, and vLLM with `--omni` on. Raise BadRow for unreadable flags."""
    if IMAGE in categories or TEXT_TO_SPEECH in categories:
        return True
    return spec.backend == "vLLM" and parse_flags(spec.backend_parameters).flag("omni")


def is_pinned(spec: ModelSpec) -> bool:
    """Whether the row names a version or an image: the tables need not hold for it."""
    return bool(spec.backend_version or spec.image_name)


_WHISPER = (
    "en zh af ar hy az be bs bg ca hr cs da nl et fi fr gl de el he hi hu is id it ja kn kk ko lv lt mk ms"
    " mr mi ne no fa pl pt ro ru sr sk sl es sw sv tl ta th tr uk ur vi cy"
)
_QWEN_TTS = "Auto Chinese English German Italian Portuguese Spanish Japanese Korean French Russian"
_QWEN_VOICES = "Vivian Serena Uncle_Fu Dylan Eric Ryan Aiden Ono_Anna Sohee"

_LANGUAGES = (
    ("VoxtralForConditionalGeneration", "en ar nl fr de hi it pt es"),
    ("GraniteSpeechForConditionalGeneration", "en fr de pt es"),
    ("WhisperForConditionalGeneration", _WHISPER),
    ("GlmAsrForConditionalGeneration", _WHISPER),
    ("Qwen3ASRForConditionalGeneration", _WHISPER),
)
_QWEN_TTS_NAME = "Qwen3TTSForConditionalGeneration"

NOTHING: Mapping[str, Any] = MappingProxyType({})


def meta_of(architectures: Iterable[str], config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Facts for `model.meta`; empty for models that are not in the table."""
    names = set(architectures)
    for name, languages in _LANGUAGES:
        if name in names:
            return {"languages": languages.split()}
    if _QWEN_TTS_NAME not in names:
        return NOTHING
    found: dict[str, Any] = {"languages": _QWEN_TTS.split(), "voices": _QWEN_VOICES.split()}
    kind = config.get("tts_model_type")
    if isinstance(kind, str) and kind:
        found["task_type"] = "".join(word[:1].upper() + word[1:] for word in kind.split("_"))
    return found


def needs_remote_code(config: Mapping[str, Any]) -> bool:
    """Whether the repository brings its own configuration class (`auto_map.AutoConfig`) for a model type that
    the common library does not configure by itself."""
    own = config.get("auto_map")
    if not isinstance(own, Mapping) or "AutoConfig" not in own:
        return False
    return config.get("model_type") not in tables().library_types
