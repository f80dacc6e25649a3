"""What is loaded beside a model: adapters, and a projector for images and sound. Bytes."""

from __future__ import annotations

from gpustackd.domain.gguf_facts import GgufFacts
from gpustackd.engines.llama_cpp.flags import LlamaServing
from gpustackd.estimate.llama_cpp.tensors import tensor_bytes

LARGEST_SIDE = 1024
"""Pixels of an image's side where the encoder takes any size."""


def extras(facts: GgufFacts, serving: LlamaServing) -> tuple[int, int]:
    """Bytes on the first device, and on the host."""
    vram = ram = 0
    for adapter in facts.adapters:
        vram += tensor_bytes(adapter)
    if facts.projector is not None:
        size = projector_bytes(facts.projector, flash=serving.flash_attention != "off")
        if serving.projector_offload:
            vram += size
        else:
            ram += size
        ram += facts.projector.metadata_bytes
    return vram, ram


def projector_bytes(facts: GgufFacts, *, flash: bool) -> int:
    """A projector with its buffers: weights, and what one image (or 30 s of sound) takes in the encoder."""
    size = tensor_bytes(facts)
    if facts.values.get("clip.has_vision_encoder") or _number(facts, "clip.vision.embedding_length"):
        size += _encoder(facts, "clip.vision", _patches(facts), 3 * _side(facts) ** 2, flash=flash)
    if facts.values.get("clip.has_audio_encoder"):
        positions = next((t.shape[-1] for t in facts.tensors if "position_embd" in t.name), 1500)
        size += _encoder(facts, "clip.audio", min(positions, 3000), 0, flash=flash)
    return size


def _encoder(facts: GgufFacts, prefix: str, patches: int, pixels: int, *, flash: bool) -> int:
    """Input and intermediate results of an encoder over so many patches."""
    width = _number(facts, f"{prefix}.embedding_length")
    heads = _number(facts, f"{prefix}.attention.head_count") or 1
    merged = 4 if "qwen" in projector_type(facts) else 1
    positions = (patches + any("class_embd" in t.name for t in facts.tensors)) * merged
    given = 4 * (pixels + patches * width + positions + patches)
    scores = 2 * positions**2 if flash else 4 * positions**2 * heads
    return given + 16 * width * positions + scores


def projector_type(facts: GgufFacts) -> str:
    """`clip.projector_type`, or that of its part; `mlp` where nothing is said."""
    for key in ("clip.projector_type", "clip.vision.projector_type", "clip.audio.projector_type"):
        if found := facts.text(key):
            return found
    return "mlp"


def _side(facts: GgufFacts) -> int:
    stated = _number(facts, "clip.vision.image_size")
    kind = projector_type(facts)
    if "qwen" in kind or kind == "pixtral" or not stated:
        return LARGEST_SIDE
    return min(stated, 2 * LARGEST_SIDE)


def _patches(facts: GgufFacts) -> int:
    patch = _number(facts, "clip.vision.patch_size") or 14
    return (_side(facts) // patch) ** 2


def _number(facts: GgufFacts, key: str) -> int:
    found = facts.values.get(key)
    return int(found) if isinstance(found, (int, float)) else 0
