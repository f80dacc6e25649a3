"""What kind of GGUF file it is: for text, vectors, ranks or images; whether it can be served, and spread."""

from __future__ import annotations

from gpustackd.domain.gguf_facts import GgufFacts
from gpustackd.engines.llama_cpp.flags import ENCODERS
from gpustackd.estimate.categories import EMBEDDING, IMAGE, LLM, RERANKER
from gpustackd.estimate.llama_cpp.architecture import is_causal

RANK = 4
_DIFFUSION = (
    "model.diffusion_model.",
    "double_blocks.",
    "joint_blocks.",
    "decoder.",
    "encoder.",
    "text_model.",
)
_OTHER = {
    "adapter": "an adapter",
    "imatrix": "an importance matrix",
    "mmproj": "a multimodal projector",
    "projector": "a multimodal projector",
}


def is_image(facts: GgufFacts) -> bool:
    """Whether it makes images (stable-diffusion.cpp)."""
    if facts.architecture in {"diffusion", "flux", "sd1", "sd2", "sd3", "sdxl", "pixart"}:
        return True
    return any(t.name.startswith(_DIFFUSION[:3]) for t in facts.tensors) or (
        not facts.lengths.get("tokenizer.ggml.tokens")
        and any(t.name.startswith(_DIFFUSION[3:]) for t in facts.tensors)
        and facts.architecture not in ENCODERS
    )


def answers_with_vectors(facts: GgufFacts) -> bool:
    """Not causal, or pooled in a way that only vectors need."""
    return not is_causal(facts) or facts.architecture in ENCODERS or facts.integer("pooling_type") > 2


def ranks(facts: GgufFacts) -> bool:
    """Whether it compares texts: it has a head for that, or pools for it."""
    heads = {"cls.weight", "cls.bias"}
    return answers_with_vectors(facts) and (
        facts.integer("pooling_type") == RANK or any(t.name in heads for t in facts.tensors)
    )


def categories_of(facts: GgufFacts) -> tuple[str, ...]:
    """The one category of the file."""
    if ranks(facts):
        return (RERANKER,)
    if answers_with_vectors(facts):
        return (EMBEDDING,)
    return (IMAGE,) if is_image(facts) else (LLM,)


def not_a_model(facts: GgufFacts) -> str | None:
    """Why the file cannot be served; None where it can."""
    kind = facts.kind.lower()
    if kind not in {"model", ""}:
        what = _OTHER.get(kind, f"of the type {kind[:40]}")
        return f"this file is {what}, not a model"
    if facts.architecture in {"clip", "controlvector"}:
        what = _OTHER["mmproj"] if facts.architecture == "clip" else "a control vector"
        return f"this file is {what}, not a model"
    if is_image(facts):
        names = [t.name for t in facts.tensors]
        lacking = [
            what
            for what, prefixes in (
                (
                    "text encoders",
                    ("cond_stage_model.", "conditioner.", "text_encoders.", "text_model.", "te."),
                ),
                ("an autoencoder", ("first_stage_model.", "vae.", "decoder.")),
            )
            if not any(n.startswith(prefixes) for n in names)
        ]
        if lacking:
            return f"this image model lacks {' and '.join(lacking)}: it cannot be served by itself"
    return None


def distributable(facts: GgufFacts) -> bool:
    """Whether layers may lie on several workers: every model's may."""
    return facts.kind.lower() in {"model", ""}
