"""Figures of the peer's diagnostic messages: each has to be told here too, in words of our own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.gpustack_reference.cases import Case
from tests.gpustack_reference.judgement import Finding, Tells
from tests.gpustack_reference.production.decisions import Answer

WORDS = {
    "attention_heads": "heads",
    "vocab_size": "vocabulary entries",
    "vision_attention_heads": "vision heads",
}
PERCENT = {"percent", "per_gpu_percent"}


def figures(case: Case, found: Answer, prefix: str = "message") -> Iterator[Finding]:
    """Whether each figure is told, where production refuses or warns. (The peer words its diagnosis of places
    that it finds as well.)"""
    if found.place is not None and not found.place.get("overcommit"):
        return
    # people read the name of the product, programs that of the instance type
    types = {str(p[k]) for _, p, _ in found.reasons for k in ("type", "instance_type") if k in p}
    text = "\n".join([found.text, *sorted(types)])
    for fact in case["expect"].get("message_facts") or []:
        for name, value in fact.items():
            if name == "k":
                continue
            words = tuple(said(name, v) for v in (value if isinstance(value, list) else [value]))
            yield Finding(f"{prefix}.{fact['k']}.{name}", Tells(words), text)


def said(name: str, value: Any) -> str:
    """How a figure stands in our messages."""
    if name == "what":
        return WORDS.get(value, str(value))
    if name in PERCENT:
        return f"{value:g} %"
    if isinstance(value, float) and name != "fraction":
        return f"{value:.2f}"
    return str(value)
