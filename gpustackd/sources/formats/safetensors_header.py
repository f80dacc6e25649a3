"""The header of a safetensors file: 8 bytes of length (little endian), then JSON that places each tensor.

Format: https://github.com/huggingface/safetensors#format. Everything in it is a claim: the length is
compared with the file before a byte of the header is asked for, entries are decoded one at a time, and
ranges must lie inside the file without overlap."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from gpustackd.errors import ModelUnreadable

LENGTH_BYTES = 8
MAX_HEADER = 100_000_000
"""Bytes of JSON that the format allows at most."""
METADATA = "__metadata__"
"""The one entry that is no tensor."""
MAX_TENSORS = 250_000
"""Tensors of one file; a 671B mixture of experts has about 90,000 in all its files together."""

BITS: Mapping[str, int] = MappingProxyType({
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
})  # fmt: skip
"""Bits of one element. A type that is not listed is sized by its offsets alone."""

_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()
_N = r"(?:0|[1-9]\d{0,17})"
_USUAL = re.compile(
    r'\s*"([^"\\\x00-\x1f]*)"\s*:\s*\{\s*"dtype"\s*:\s*"(\w{1,32})"\s*,'
    rf'\s*"shape"\s*:\s*\[\s*((?:{_N}(?:\s*,\s*{_N}){{0,15}})?)\s*\]\s*,'
    rf'\s*"data_offsets"\s*:\s*\[\s*({_N})\s*,\s*({_N})\s*\]\s*\}}\s*([,}}])',
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """What a header says: sizes in bytes."""

    tensors: int
    header_bytes: int
    """The 8 length bytes and the JSON."""
    data_bytes: int
    """End of the last tensor, counted from the end of the header."""
    bytes_by_dtype: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))


def header_length(first: bytes, file_size: int | None, name: str) -> int:
    """Bytes of JSON that follow the first 8. Raise ModelUnreadable before anything more is read where the
    length cannot be true: cut off, beyond the format's limit, or longer than the file."""
    if first.startswith(b"version "):
        raise ModelUnreadable(
            "lfs_pointer",
            f"{name} is a git-lfs pointer, not the weights",
            "fetch the files with `git lfs pull`",
        )
    if len(first) < LENGTH_BYTES:
        what = f"{len(first)} bytes where the first {LENGTH_BYTES} hold the header's length"
        raise ModelUnreadable("cut_off", f"{name} is cut off: {what}", "finish the download", retryable=True)
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    if length > MAX_HEADER:
        raise _bad(name, f"claims a header of {length} bytes; the format allows {MAX_HEADER}")
    if length < 2:
        raise _bad(name, f"claims a header of {length} bytes")
    if file_size is not None and LENGTH_BYTES + length > file_size:
        raise _bad(name, f"claims a header of {length} bytes in a file of {file_size}")
    return length


def parse(header: bytes, file_size: int | None, name: str) -> SafetensorsHeader:
    """Read the JSON part. Raise ModelUnreadable where it is cut off, malformed, names a tensor twice, or has
    tensors that overlap or end beyond the file (`file_size` in bytes; None = not known)."""
    brackets, commas = header.count(b"{") + header.count(b"["), header.count(b",")
    if brackets > 3 * MAX_TENSORS + 16 or commas > 16 * MAX_TENSORS:
        raise _bad(name, f"lists more than {MAX_TENSORS} tensors")
    try:
        text = header.decode("utf-8")
    except UnicodeDecodeError:
        raise _bad(name, "has a header that is not UTF-8") from None
    room = None if file_size is None else file_size - LENGTH_BYTES - len(header)
    ranges: list[tuple[int, int]] = []
    by_dtype: dict[str, int] = {}
    tensors = 0
    for key, dtype, begin, end in _tensors(text, name):
        if room is not None and end > room:
            raise ModelUnreadable(
                "cut_off", f"{name}: tensor {_shown(key)} ends at byte {end} of {room}: incomplete",
                "finish the download", retryable=True,
            )  # fmt: skip
        tensors += 1
        if tensors > MAX_TENSORS:
            raise _bad(name, f"lists more than {MAX_TENSORS} tensors")
        by_dtype[dtype] = by_dtype.get(dtype, 0) + end - begin
        if end > begin:
            ranges.append((begin, end))
    ranges.sort()
    for (_, end), (begin, _) in itertools.pairwise(ranges):
        if begin < end:
            raise _bad(name, f"has tensors that overlap at byte {begin}")
    data = ranges[-1][1] if ranges else 0
    return SafetensorsHeader(tensors, LENGTH_BYTES + len(header), data, MappingProxyType(by_dtype))


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of one tensor of a known dtype; parts of a byte round up. Raise KeyError for an unknown dtype."""
    return -(-math.prod(shape) * BITS[dtype] // 8)


def _tensors(text: str, name: str) -> Iterator[tuple[str, str, int, int]]:
    """Name, type and range of each tensor, decoded one by one so that memory stays near the size of the text.

    Nearly every entry is written in one way and matched as a whole; any other is decoded as JSON.
    """
    seen: set[str] = set()
    try:
        at = _token(text, 0, "{")
        if text[_skip(text, at)] == "}":
            at = _skip(text, at) + 1
        else:
            while True:
                if (usual := _USUAL.match(text, at)) is not None and _adds_up(usual):
                    key, at = usual[1], usual.end()
                    _note(key, seen, name)
                    yield key, usual[2], int(usual[4]), int(usual[5])
                    if usual[6] == "}":
                        break
                    continue
                key, at = _DECODER.raw_decode(text, _skip(text, at))
                if not isinstance(key, str):
                    raise ValueError("a name that is not a string")
                value, at = _DECODER.raw_decode(text, _skip(text, _token(text, at, ":")))
                _note(key, seen, name)
                if key != METADATA:
                    yield key, *_tensor(key, value, name)
                at = _skip(text, at)
                if text[at] == "}":
                    at += 1
                    break
                at = _token(text, at, ",")
        if text[at:].strip(" \t\r\n\0"):
            raise ValueError("more after the end")
    except RecursionError:
        raise _bad(name, "has a header that is nested too deep") from None
    except IndexError:
        raise _bad(name, "has a header that is cut off") from None
    except ValueError as e:
        raise _bad(name, f"has a header that is not valid JSON: {str(e)[:80]}") from None


def _note(key: str, seen: set[str], name: str) -> None:
    if key in seen:
        raise _bad(name, f"names tensor {_shown(key)} twice")
    seen.add(key)


def _adds_up(usual: re.Match[str]) -> bool:
    """Whether an entry's shape fills its range (else it is decoded with care, and refused by name)."""
    size = int(usual[5]) - int(usual[4])
    bits = BITS.get(usual[2])
    if bits is None or usual[1] == METADATA:
        return False
    count = 1
    for n in usual[3].split(",") if usual[3] else ():
        count *= int(n)
    return size >= 0 and -(-count * bits // 8) == size


def _skip(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at


def _token(text: str, at: int, wanted: str) -> int:
    at = _skip(text, at)
    if text[at] != wanted:
        raise ValueError(f"{wanted!r} expected at character {at}")
    return at + 1


def _tensor(key: str, value: Any, name: str) -> tuple[str, int, int]:
    def wrong(what: str) -> ModelUnreadable:
        return _bad(name, f"has a header in which tensor {_shown(key)} {what}")

    if not isinstance(value, dict):
        raise wrong("is not an object")
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or len(dtype) > 32:
        raise wrong("has no dtype")
    if not isinstance(shape, list) or not all(_natural(n) for n in shape):
        raise wrong("has no shape of natural numbers")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_natural(n) for n in offsets):
        raise wrong("has no pair of data_offsets")
    begin, end = offsets
    if end < begin:
        raise wrong(f"ends at {end} before it begins at {begin}")
    if dtype in BITS and len(shape) <= 16 and tensor_bytes(dtype, shape) != end - begin:
        raise wrong(
            f"spans {end - begin} bytes, but {dtype} of shape {shape} takes {tensor_bytes(dtype, shape)}"
        )
    if len(shape) > 16:
        raise wrong(f"has {len(shape)} dimensions")
    return dtype, begin, end


def _natural(n: Any) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**63


def _shown(key: str) -> str:
    return repr(key if len(key) <= 80 else key[:77] + "...")


def _bad(name: str, what: str) -> ModelUnreadable:
    return ModelUnreadable("bad_header", f"{name} {what}")
