"""GGUF headers as they lie in the cache on disk: what is kept of them, as JSON."""

from __future__ import annotations

import json
from types import MappingProxyType

from gpustackd.domain.gguf_facts import GgufTensor
from gpustackd.sources.formats.gguf_header import GgufHeader

FORM = 1
"""Rises with every change of the form, so that an older entry is read anew."""


def as_json(header: GgufHeader) -> bytes:
    """A header in bytes."""
    told = [
        FORM, header.version, header.big_endian, header.alignment, header.data_offset, header.file_bytes,
        dict(header.values), dict(header.lengths), list(header.warnings),
        [[t.name, t.shape, t.type, t.size, t.offset] for t in header.tensors],
    ]  # fmt: skip
    return json.dumps(told, separators=(",", ":")).encode()


def from_json(body: bytes, file_bytes: int) -> GgufHeader:
    """The header of a file of that size. Raise ValueError, KeyError or TypeError where it is none."""
    form, version, big, alignment, offset, size, values, lengths, warnings, tensors = json.loads(body)
    if form != FORM or size != file_bytes:
        raise ValueError("another form or another file")
    return GgufHeader(
        version=version,
        big_endian=big,
        values=MappingProxyType({k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}),
        lengths=MappingProxyType(lengths),
        tensors=tuple(GgufTensor(name, tuple(shape), kind, n, at) for name, shape, kind, n, at in tensors),
        alignment=alignment,
        data_offset=offset,
        file_bytes=size,
        warnings=tuple(warnings),
    )
