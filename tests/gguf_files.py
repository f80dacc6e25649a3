"""GGUF files for tests: headers written by hand, tensor data left as a hole."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpustackd.domain.gguf_facts import BY_NAME, TYPES, GgufFacts
from gpustackd.sources.formats.gguf_header import GgufHeader, header

CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


class Typed(NamedTuple):
    """A value with its GGUF type; arrays as a list with the type of their items."""

    type: int
    value: Any


class Writer:
    """Writes headers of any version and byte order."""

    def __init__(self, version: int = 3, order: str = "<") -> None:
        self.version = version
        self.order = order
        self.count = "I" if version == 1 else "Q"

    def number(self, code: str, value: Any) -> bytes:
        return struct.pack(self.order + code, value)

    def text(self, value: str | bytes) -> bytes:
        raw = value.encode() if isinstance(value, str) else value
        return self.number(self.count, len(raw)) + raw

    def value(self, value: Any) -> bytes:
        """A value with its type before it; Python values get the usual types."""
        if isinstance(value, Typed):
            return self.number("I", value.type) + self._body(value.type, value.value)
        if isinstance(value, bool):
            return self.number("I", 7) + self.number("B", value)
        if isinstance(value, int):
            return self.value(Typed(4 if 0 <= value < 2**32 else 11, value))
        if isinstance(value, float):
            return self.value(Typed(6, value))
        if isinstance(value, str):
            return self.value(Typed(STRING, value))
        kind = (
            STRING if value and isinstance(value[0], str) else 7 if value and value[0] in {True, False} else 5
        )
        if value and isinstance(value[0], int) and not isinstance(value[0], bool):
            kind = 5
        return self.value(Typed(ARRAY, Typed(kind, list(value))))

    def _body(self, kind: int, value: Any) -> bytes:
        if kind == STRING:
            return self.text(value)
        if kind == ARRAY:
            items = b"".join(self._body(value.type, v) for v in value.value)
            return self.number("I", value.type) + self.number(self.count, len(value.value)) + items
        return self.number(CODES[kind], value)

    def head(
        self,
        values: Mapping[str, Any],
        tensors: Sequence[tuple[str, Sequence[int], str | int]] = (),
        *,
        tensor_count: int | None = None,
        key_count: int | None = None,
    ) -> bytes:
        """Everything before the padding. `tensors`: name, shape, type by name or number."""
        out = b"GGUF" + self.number("I", self.version)
        out += self.number(self.count, len(tensors) if tensor_count is None else tensor_count)
        out += self.number(self.count, len(values) if key_count is None else key_count)
        for key, value in values.items():
            out += self.text(key) + self.value(value)
        alignment = values.get("general.alignment", 32)
        offset = 0
        for name, shape, kind in tensors:
            number = kind if isinstance(kind, int) else BY_NAME[kind.lower()].id
            out += self.text(name) + self.number("I", len(shape))
            out += b"".join(self.number(self.count, n) for n in shape)
            out += self.number("I", number) + self.number("Q", offset)
            offset += -(-size_of(shape, number) // alignment) * alignment
        return out


def size_of(shape: Sequence[int], kind: int) -> int:
    """Bytes of a tensor."""
    return TYPES[kind].bytes_of(math.prod(shape)) if kind in TYPES else 64 * math.prod(shape)


def file_bytes(
    head: bytes, tensors: Sequence[tuple[str, Sequence[int], str | int]], alignment: int = 32
) -> int:
    """How long the whole file is."""
    size = -(-len(head) // alignment) * alignment
    for _, shape, kind in tensors:
        number = kind if isinstance(kind, int) else BY_NAME[kind.lower()].id
        size += -(-size_of(shape, number) // alignment) * alignment
    return size


def write(
    path: Path,
    values: Mapping[str, Any],
    tensors: Sequence[tuple[str, Sequence[int], str | int]] = (),
    *,
    version: int = 3,
    order: str = "<",
) -> Path:
    """A file with a true header and a hole for its data."""
    head = Writer(version, order).head(values, tensors)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(max(file_bytes(head, tensors, values.get("general.alignment", 32)), len(head)))
    return path


def read(data: bytes, size: int | None = None, *, window: int = 4 * 1024**2) -> GgufHeader:
    """Read a header out of memory; the file goes on as a hole up to `size`."""
    return drive(data, len(data) if size is None else size, window=window)[0]


def drive(data: bytes, size: int, *, window: int = 4 * 1024**2) -> tuple[GgufHeader, int]:
    """The header, and how many bytes were asked for."""
    asked = 0
    reading = header(size, "m.gguf", largest_window=window)
    try:
        wanted = next(reading)
        while True:
            assert wanted.length > 0
            assert wanted.start + wanted.length <= size
            asked += wanted.length
            piece = data[wanted.start : wanted.start + wanted.length]
            wanted = reading.send(piece + bytes(wanted.length - len(piece)))
    except StopIteration as stop:
        return stop.value, asked


def facts_of(head: GgufHeader) -> GgufFacts:
    """The facts of a model of one file."""
    architecture = head.values.get("general.architecture", "llama")
    return GgufFacts(
        architecture=str(architecture),
        kind=str(head.values.get("general.type", "model")),
        values=head.values,
        lengths=head.lengths,
        tensors=head.tensors,
        version=head.version,
        alignment=head.alignment,
        file_bytes=head.file_bytes,
        data_bytes=head.data_bytes,
    )
