"""What the header of a GGUF file says: architecture, numbers, tensors and their sizes. Sizes are bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

Scalar: TypeAlias = int | float | bool | str
Value: TypeAlias = Scalar | tuple[Scalar, ...]


@dataclass(frozen=True, slots=True)
class ElementType:
    """A tensor element type: `elements` neighbours of a row share one block of `size` bytes."""

    id: int
    name: str
    elements: int
    size: int

    @property
    def quantised(self) -> bool:
        """Whether several elements share a block."""
        return self.elements > 1

    def bytes_of(self, count: int) -> int:
        """Bytes of `count` elements, a multiple of a block."""
        return count // self.elements * self.size


_PLAIN = "F32:0:4 F16:1:2 I8:24:1 I16:25:2 I32:26:4 I64:27:8 F64:28:8 BF16:30:2"
_BLOCKS = (
    "Q4_0:2:32:18 Q4_1:3:32:20 Q5_0:6:32:22 Q5_1:7:32:24 Q8_0:8:32:34 Q8_1:9:32:36 Q2_K:10:256:84"
    " Q3_K:11:256:110 Q4_K:12:256:144 Q5_K:13:256:176 Q6_K:14:256:210 Q8_K:15:256:292 IQ2_XXS:16:256:66"
    " IQ2_XS:17:256:74 IQ3_XXS:18:256:98 IQ1_S:19:256:50 IQ4_NL:20:32:18 IQ3_S:21:256:110 IQ2_S:22:256:82"
    " IQ4_XS:23:256:136 IQ1_M:29:256:56 Q4_0_4_4:31:32:18 Q4_0_4_8:32:32:18 Q4_0_8_8:33:32:18 TQ1_0:34:256:54"
    " TQ2_0:35:256:66 IQ4_NL_4_4:36:32:18 IQ4_NL_4_8:37:32:18 IQ4_NL_8_8:38:32:18 MXFP4:39:32:17"
    " NVFP4:40:64:36 Q1_0:41:128:18 Q2_0:42:64:18"
)


def _types() -> dict[int, ElementType]:
    types = {}
    for text in _PLAIN.split():
        name, number, size = text.split(":")
        types[int(number)] = ElementType(int(number), name, 1, int(size))
    for text in _BLOCKS.split():
        name, number, elements, size = text.split(":")
        types[int(number)] = ElementType(int(number), name, int(elements), int(size))
    return types


TYPES: Mapping[int, ElementType] = MappingProxyType(_types())
"""By number, as in `enum ggml_type` of https://github.com/ggml-org/ggml (include/ggml.h)."""
BY_NAME: Mapping[str, ElementType] = MappingProxyType({t.name.lower(): t for t in TYPES.values()})
F32, F16, I32, I64 = TYPES[0], TYPES[1], TYPES[26], TYPES[27]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor. `shape` begins with the row length; `size` is bytes without padding."""

    name: str
    shape: tuple[int, ...]
    type: int
    size: int
    offset: int = 0
    """Bytes from the start of the tensor data of its file."""
    file: int = 0
    """Index of the shard."""


@dataclass(frozen=True, slots=True)
class GgufFacts:
    """A model in the GGUF format, over all its shards. Sizes in bytes."""

    architecture: str
    kind: str = "model"
    """`general.type`: model, adapter, imatrix, mmproj."""
    values: Mapping[str, Value] = field(default_factory=lambda: MappingProxyType({}))
    """Scalars, and arrays of at most 4,096 numbers as tuples."""
    lengths: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Number of items of every array, whether its values are in `values` or not."""
    tensors: tuple[GgufTensor, ...] = ()
    version: int = 3
    alignment: int = 32
    shards: int = 1
    file_bytes: int = 0
    data_bytes: int = 0
    """From the start of the tensor data to the end of the file, over all shards."""
    projector: GgufFacts | None = None
    """The multimodal projector that is loaded with it."""
    draft: GgufFacts | None = None
    """The draft model of speculative decoding."""
    adapters: tuple[GgufFacts, ...] = ()
    """LoRA adapters and control vectors."""
    warnings: tuple[str, ...] = ()

    @property
    def metadata_bytes(self) -> int:
        """Everything before the tensor data: keys, vocabulary, tensor list."""
        return self.file_bytes - self.data_bytes

    def value(self, key: str) -> Value | None:
        """Value of `<architecture>.<key>`."""
        return self.values.get(f"{self.architecture}.{key}")

    def integer(self, key: str, default: int = 0) -> int:
        """Whole number at `<architecture>.<key>`, the first one of an array; the default where there is
        none."""
        value = self.value(key)
        if isinstance(value, tuple):
            value = value[0] if value else None
        return int(value) if isinstance(value, (int, float)) else default

    def number(self, key: str, default: float = 0.0) -> float:
        """Number at `<architecture>.<key>`."""
        value = self.value(key)
        return float(value) if isinstance(value, (int, float)) else default

    def per_layer(self, key: str, layers: int, default: int = 0) -> tuple[int, ...]:
        """One whole number for every layer, from an array or from one number for all."""
        value = self.value(key)
        if isinstance(value, tuple):
            numbers = [int(x) for x in value if isinstance(x, (int, float))][:layers]
            return tuple(numbers + [default] * (layers - len(numbers)))
        return (int(value) if isinstance(value, (int, float)) else default,) * layers

    def text(self, key: str) -> str:
        """A string by its full key; empty where there is none."""
        value = self.values.get(key)
        return value if isinstance(value, str) else ""

    @property
    def vocabulary(self) -> int:
        """Tokens: the length of the token list, else `<architecture>.vocab_size`."""
        return self.lengths.get("tokenizer.ggml.tokens") or self.integer("vocab_size")
