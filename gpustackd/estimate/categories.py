"""What kind of model it is: from the architectures that its configuration names, and from the row."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

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
"""Engines whose models are checked; `Custom` and any other name are a person's own business."""

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
    """A version or an image of a person's choice: what the tables say need not hold for it."""
    return bool(spec.backend_version or spec.image_name)
