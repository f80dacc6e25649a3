"""`model.meta`: languages and voices of speech models, filled only where it is empty."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

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
