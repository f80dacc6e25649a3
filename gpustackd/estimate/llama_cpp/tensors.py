"""The tensors of a GGUF model: sorted by layer, and their sizes as buffers count them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gpustackd.domain.gguf_facts import GgufFacts, GgufTensor

ALIGNMENT = 32
"""Bytes: buffers hand out memory in steps of it (`GGML_MEM_ALIGN`, `TENSOR_ALIGNMENT` of ggml)."""
_OUTPUTS = ("output", "cls", "dense_2", "dense_3", "altup_proj", "altup_unembd_proj", "enc.output_norm",
            "dec.output_norm", "nextn.post_projection", "fc.", "d2t", "markov_", "conf_proj",
            "selector_")  # fmt: skip
_BLOCK = re.compile(r"blk\.(\d{1,5})\.(.+)\Z")


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """The tensors of a model: those of each layer by the end of their name, and all others by name."""

    layers: tuple[Mapping[str, GgufTensor], ...]
    others: Mapping[str, GgufTensor]


def sort_tensors(facts: GgufFacts, layers: int) -> ModelTensors:
    """Sort the tensors of a header."""
    found: list[dict[str, GgufTensor]] = [{} for _ in range(layers)]
    others: dict[str, GgufTensor] = {}
    for tensor in facts.tensors:
        match = _BLOCK.match(tensor.name)
        if match and int(match[1]) < layers:
            found[int(match[1])][match[2]] = tensor
        else:
            others[tensor.name] = tensor
    return ModelTensors(tuple(MappingProxyType(f) for f in found), MappingProxyType(others))


def is_output(name: str) -> bool:
    """Whether a tensor belongs to the output."""
    return name.startswith(_OUTPUTS)


def has_head(facts: GgufFacts) -> bool:
    """Whether the model writes tokens; encoders have no output matrix at all."""
    return facts.architecture not in {
        "bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3", "modern-bert",
        "eurobert", "t5encoder", "wavtokenizer-dec",
    }  # fmt: skip


def tensor_bytes(facts: GgufFacts) -> int:
    """Bytes of all tensors."""
    return sum(padded(t.size) for t in facts.tensors)


def padded(size: int) -> int:
    """Bytes rounded up to what a buffer hands out for them."""
    return -(-size // ALIGNMENT) * ALIGNMENT
