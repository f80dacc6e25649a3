"""Headers of safetensors files, as writers lay them out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpustackd.sources.formats.safetensors_header import LENGTH_BYTES, METADATA, tensor_bytes


def encode(
    tensors: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The first bytes of a safetensors file (length and JSON) for tensors `(name, dtype, shape)` laid out one
    after the other. A file is complete when `len(encode(t)) + data_bytes(t)` long; it may be sparse."""
    entries: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + tensor_bytes(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    body = json.dumps(entries, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)  # writers pad so that the data starts aligned
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def data_bytes(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> int:
    """Bytes of all tensors `(name, dtype, shape)` together, without the header."""
    return sum(tensor_bytes(dtype, shape) for _, dtype, shape in tensors)
