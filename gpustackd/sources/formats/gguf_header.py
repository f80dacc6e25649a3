"""The header of one GGUF file. Its sizes are claims: they are compared with the file before they are used.
Contents that nobody needs are skipped, so that memory stays near one window.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The reader does no IO: `header` is a
generator that asks for ranges and is sent their bytes, so that files, hubs and tests feed the same code.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, NoReturn

from gpustackd.domain.gguf_facts import TYPES, GgufTensor, Scalar, Value
from gpustackd.errors import ModelUnreadable
from gpustackd.sources.formats.gguf_window import Range, Window

MAGIC = b"GGUF"
OTHER_MAGICS = frozenset({b"lmgg", b"fmgg", b"tjgg", b"algg", b"ggml", b"ggmf", b"ggjt", b"ggla"})
LONGEST_ARRAY = 4096
"""Items of the longest array of numbers that is read; of longer ones, and of strings, only the length is."""
LONGEST_TEXT = 4096
"""Bytes of the longest string that is read (chat templates are longer)."""
MAX_NAME = 65_535
MAX_TENSOR_NAME = 255
MAX_KEYS = 20_000
MAX_TENSORS = 100_000
MAX_NESTED = 20_000
"""Arrays inside arrays; no known writer makes any."""
MAX_MEMORY = 48 * 1024**2
"""Bytes for all that is read of one header, roughly counted; a 671B model needs 1 million."""
MAX_STRINGS = 8_000_000
"""Items of all string arrays of one header; real vocabularies with their merges stay below 2 million."""
MAX_HEADER = 512 * 1024**2
MAX_DIMENSIONS = 4
MAX_NESTING = 4
LARGEST = 2**60

STRING, ARRAY = 8, 9
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_BOOL = 7


class GgufLayout(NamedTuple):
    """How numbers are written in this file."""

    order: str
    """`<` or `>`."""
    wide: str
    """`I` in version 1, which has counts of 32 bits, else `Q`."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What one file says. Bytes; `data_offset` is where the tensor data begins."""

    version: int
    big_endian: bool
    values: Mapping[str, Value]
    lengths: Mapping[str, int]
    tensors: tuple[GgufTensor, ...]
    alignment: int
    data_offset: int
    file_bytes: int
    warnings: tuple[str, ...] = field(default=())

    @property
    def data_bytes(self) -> int:
        """Bytes of the file after the header."""
        return self.file_bytes - self.data_offset


def header(file_bytes: int, name: str, *, largest_window: int) -> Generator[Range, bytes, GgufHeader]:
    """Read one header. Yields ranges (never beyond the file) and expects their bytes; returns the header.

    Raise ModelUnreadable: `bad_header` where it cannot be true, `cut_off` (retryable) where the file ends too
    early, `lfs_pointer` and `not_gguf` for other things in its place.
    """
    reader = _Reader(file_bytes, name, largest_window)
    return (yield from reader.read())


class _Reader:
    def __init__(self, file_bytes: int, name: str, largest_window: int) -> None:
        self._window = Window(file_bytes, min(MAX_HEADER, file_bytes), largest_window, self._cut_off)
        self._size = file_bytes
        self._name = name
        self._layout = GgufLayout("<", "Q")
        self._strings = 0
        self._nested = 0
        self._memory = 0
        self._values: dict[str, Value] = {}
        self._lengths: dict[str, int] = {}
        self._warnings: list[str] = []

    def read(self) -> Generator[Range, bytes, GgufHeader]:
        version = yield from self._begin()
        tensor_count = yield from self._number(self._layout.wide)
        key_count = yield from self._number(self._layout.wide)
        small = version == 1
        self._plausible(key_count, MAX_KEYS, 12 if small else 13, "keys")
        self._plausible(tensor_count, MAX_TENSORS, 20 if small else 24, "tensors")
        for _ in range(key_count):
            yield from self._pair()
        alignment = self._alignment()
        raw: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(tensor_count):
            raw += ((yield from self._tensor()),)
        data = -(-self._window.at // alignment) * alignment
        return GgufHeader(
            version=version,
            big_endian=self._layout.order == ">",
            values=MappingProxyType(self._values),
            lengths=MappingProxyType(self._lengths),
            tensors=self._placed(raw, data, alignment),
            alignment=alignment,
            # a file without tensors may end before the padding does
            data_offset=min(data, self._size),
            file_bytes=self._size,
            warnings=tuple(self._warnings),
        )

    def _begin(self) -> Generator[Range, bytes, int]:
        if self._size < 8:
            self._cut_off()
        first = yield from self._window.take(8)
        magic = first[:4]
        if first == b"version ":
            raise ModelUnreadable(
                "lfs_pointer", f"{self._name} is a git-lfs pointer, not the model",
                "fetch the files with `git lfs pull`",
            )  # fmt: skip
        if magic in OTHER_MAGICS:
            raise ModelUnreadable(
                "not_gguf", f"{self._name} is in an older format than GGUF", "convert it to GGUF"
            )
        if magic not in {MAGIC, MAGIC[::-1]}:
            raise ModelUnreadable("not_gguf", f"{self._name} is not a GGUF file")
        order = "<"
        version = int.from_bytes(first[4:], "little")
        if magic == MAGIC[::-1] or version & 0xFFFF == 0:  # the number shows which end comes first
            order = ">"
            version = int.from_bytes(first[4:], "big")
        if not 1 <= version <= 3:
            self._bad(f"has version {version}; supported are 1 to 3")
        self._layout = GgufLayout(order, "I" if version == 1 else "Q")
        return version

    def _pair(self) -> Generator[Range, bytes, None]:
        key = yield from self._text(MAX_NAME, "a key")
        if key in self._values or key in self._lengths:
            self._bad(f"names {_shown(key)} twice")
        self._charge(200 + len(key))
        kind = yield from self._number("I")
        if kind == ARRAY:
            yield from self._array(key, 0)
        elif kind == STRING:
            length = yield from self._length("a value")
            if length > LONGEST_TEXT:
                self._window.skip(length)
                self._lengths[key] = length
            else:
                raw = yield from self._window.take(length)
                self._charge(length)
                self._values[key] = raw.decode("utf-8", "replace")
        elif kind in _CODES:
            self._values[key] = yield from self._scalar(kind)
        else:
            self._bad(f"gives {_shown(key)} the unknown value type {kind}")

    def _array(self, key: str, depth: int) -> Generator[Range, bytes, None]:
        kind = yield from self._number("I")
        count = yield from self._number(self._layout.wide)
        if depth == 0:
            self._lengths[key] = count
        if kind in _CODES:
            size = struct.calcsize(_CODES[kind])
            self._room(count * size, f"array {_shown(key)}")
            if count > LONGEST_ARRAY or depth:
                self._window.skip(count * size)
                return
            raw = yield from self._window.take(count * size)
            self._charge(40 * count)
            numbers = struct.unpack(f"{self._layout.order}{count}{_CODES[kind]}", raw)
            self._values[key] = tuple(map(bool, numbers)) if kind == _BOOL else numbers
        elif kind == STRING:
            self._room(count * (4 if self._layout.wide == "I" else 8), f"array {_shown(key)}")
            self._strings += count
            if self._strings > MAX_STRINGS:
                self._bad(f"holds more than {MAX_STRINGS} strings")
            yield from self._window.skip_strings(count, f"{self._layout.order}{self._layout.wide}")
        elif kind == ARRAY and depth < MAX_NESTING:
            self._plausible(count, MAX_NESTED, 8, f"arrays in {_shown(key)}")
            self._nested += count  # over all keys; those that were read are not in the bytes left
            if self._nested > MAX_NESTED:
                self._bad(f"holds more than {MAX_NESTED} arrays in arrays")
            for _ in range(count):
                yield from self._array(key, depth + 1)
        else:
            self._bad(f"gives {_shown(key)} an array of the unknown type {kind}")

    def _tensor(self) -> Generator[Range, bytes, tuple[str, tuple[int, ...], int, int]]:
        name = yield from self._text(MAX_TENSOR_NAME, "the name of a tensor")
        dimensions = yield from self._number("I")
        if dimensions > MAX_DIMENSIONS:
            self._bad(f"gives tensor {_shown(name)} {dimensions} dimensions")
        code = self._layout.wide
        tail = yield from self._numbers(f"{dimensions}{code}IQ" if dimensions else "IQ")
        shape = tuple(tail[:-2]) or (1,)
        if math.prod(shape) > LARGEST:
            self._bad(f"gives tensor {_shown(name)} a size beyond any memory")
        self._charge(450 + len(name))
        return name, shape, tail[-2], tail[-1]

    def _placed(
        self, raw: list[tuple[str, tuple[int, ...], int, int]], data: int, alignment: int
    ) -> tuple[GgufTensor, ...]:
        """Sizes of all tensors, which have to lie in the file without overlap."""
        room = self._size - data
        order = sorted(range(len(raw)), key=lambda i: raw[i][3])
        ends = {i: raw[j][3] for i, j in itertools.pairwise(order)}
        tensors: list[GgufTensor] = []
        names: set[str] = set()
        derived = 0
        for i, (name, shape, kind, offset) in enumerate(raw):
            if name in names:
                self._bad(f"names tensor {_shown(name)} twice")
            names.add(name)
            if offset % alignment:
                self._bad(f"puts tensor {_shown(name)} at {offset}, not a multiple of {alignment}")
            end = ends.get(i, room)
            if (known := TYPES.get(kind)) is not None:
                if shape[0] % known.elements:
                    self._bad(f"has rows of {shape[0]} in {_shown(name)}, not a multiple of {known.elements}")
                size = known.bytes_of(math.prod(shape))
            else:
                size = max(end - offset, 0)
                derived += 1
            if offset + size > max(room, 0):
                self._cut_off(f"tensor {_shown(name)} ends at byte {data + offset + size}")
            if offset + size > end:
                self._bad(f"lets tensor {_shown(name)} overlap the next one")
            tensors.append(GgufTensor(name, shape, kind, size, offset))
        if derived:
            self._warnings.append(f"{derived} tensors are of an unknown type: sized by where the next begins")
        return tuple(tensors)

    def _alignment(self) -> int:
        alignment = self._values.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            self._bad(f"has the alignment {str(alignment)[:20]}, not a power of two")
        if alignment > 2**20:
            self._bad(f"has an alignment of {alignment}")
        return alignment

    # -- small parts -------------------------------------------------------------------------------------

    def _number(self, code: str) -> Generator[Range, bytes, int]:
        return (yield from self._numbers(code))[0]

    def _numbers(self, codes: str) -> Generator[Range, bytes, tuple[int, ...]]:
        form = self._layout.order + codes
        raw = yield from self._window.take(struct.calcsize(form))
        return struct.unpack(form, raw)

    def _scalar(self, kind: int) -> Generator[Range, bytes, Scalar]:
        form = self._layout.order + _CODES[kind]
        raw = yield from self._window.take(struct.calcsize(form))
        (value,) = struct.unpack(form, raw)
        return bool(value) if kind == _BOOL else value

    def _length(self, what: str) -> Generator[Range, bytes, int]:
        length = yield from self._number(self._layout.wide)
        self._room(length, what)
        return length

    def _text(self, longest: int, what: str) -> Generator[Range, bytes, str]:
        length = yield from self._length(what)
        if length > longest:
            self._bad(f"has {what} of {length} bytes")
        raw = yield from self._window.take(length)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self._bad(f"has {what} that is not UTF-8")

    # -- refusals ----------------------------------------------------------------------------------------

    def _plausible(self, count: int, most: int, least_bytes: int, what: str) -> None:
        if count > most:
            self._bad(f"claims {count} {what}; the limit is {most}")
        self._room(count * least_bytes, f"{count} {what}")

    def _room(self, size: int, what: str) -> None:
        left = self._size - self._window.at
        if size > left:
            self._cut_off(f"{what} would take {size} bytes of the {left} that are left")

    def _charge(self, size: int) -> None:
        self._memory += size
        if self._memory > MAX_MEMORY:
            self._bad(f"has more keys and tensors than fit into {MAX_MEMORY} bytes")

    def _bad(self, what: str) -> NoReturn:
        raise ModelUnreadable("bad_header", f"{self._name} {what}")

    def _cut_off(self, what: str = "") -> NoReturn:
        if self._window_passed():
            self._bad(f"has a header of more than {MAX_HEADER} bytes")
        where = f": {what}" if what else " inside its header"
        raise ModelUnreadable(
            "cut_off", f"{self._name} is cut off at {self._size} bytes{where}",
            "finish the download", retryable=True,
        )  # fmt: skip

    def _window_passed(self) -> bool:
        return self._size > MAX_HEADER and self._window.at >= MAX_HEADER


def _shown(name: str) -> str:
    return repr(name if len(name) <= 60 else name[:57] + "...")
