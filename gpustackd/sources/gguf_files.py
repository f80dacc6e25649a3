"""The files of a GGUF model: which of a listing belong to it, and what their headers say together.

Large models lie in shards, `<prefix>-NNNNN-of-MMMMM.gguf`, each a GGUF file with a part of the tensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from types import MappingProxyType

import anyio
from anyio import to_thread

from gpustackd.domain.gguf_facts import GgufFacts, GgufTensor, Value
from gpustackd.errors import ModelUnreadable
from gpustackd.sources.access import PINNED_SECONDS, SourceAccess
from gpustackd.sources.contents import ModelFiles
from gpustackd.sources.formats.gguf_header import GgufHeader, header
from gpustackd.sources.formats.gguf_window import Range

SUFFIX = ".gguf"
LOCAL_WINDOW = 1024**2
HUB_WINDOW = 4 * 1024**2
HEADERS_AT_ONCE = 8
"""Headers being read, over all models: each takes about two windows of memory."""
DEFAULT_ARCHITECTURE = "llama"
"""What llama.cpp assumes where a file names none."""

CACHE_FORM = 1
"""Rises with every change of the form, so that an older entry is read anew."""

_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def named(sizes: Mapping[str, int], wanted: str, label: str) -> tuple[str, tuple[str, ...]]:
    """The file that a row names, and warnings about the choice: by its path, else by a pattern such as
    `*Q4_K_M*.gguf`, of whose matches the first one counts. Raise ModelUnreadable (`no_such_file`)."""
    if wanted in sizes:
        return wanted, ()
    matches = sorted(n for n in sizes if n.endswith(SUFFIX) and fnmatchcase(n, wanted))
    if not matches:
        raise ModelUnreadable(
            "no_such_file", f"{label} has no file {wanted[:200]}", "check the name", retryable=True
        )
    models = {_prefix(name) for name in matches}
    warning = f"{wanted} matches {len(models)} models in {label}; using {matches[0]}"
    return matches[0], (warning,) if len(models) > 1 else ()


def shards(sizes: Mapping[str, int], name: str, label: str) -> tuple[str, ...]:
    """All files of the model that `name` is a part of, in order. Raise ModelUnreadable (`incomplete`) where
    one is missing."""
    numbered = _SHARD.fullmatch(name)
    if numbered is None or not (total := int(numbered[3])) or not int(numbered[2]):
        return (name,)
    parts = []
    for i in range(1, total + 1):
        part = f"{numbered[1]}-{i:05}-of-{total:05}{SUFFIX}"
        if part not in sizes:
            raise ModelUnreadable(
                "incomplete", f"{label} lacks {part}, one of its {total} shards", "finish the download",
                retryable=True,
            )  # fmt: skip
        parts.append(part)
    return tuple(parts)


def _prefix(name: str) -> str:
    numbered = _SHARD.fullmatch(name)
    return numbered[1] if numbered else name


class GgufFiles:
    """Reads models of one file or many, each header in its time and through the cache on disk. One per
    reader: it bounds how many headers are in memory at once."""

    def __init__(self, access: SourceAccess) -> None:
        self._access = access
        self._limit = anyio.Semaphore(HEADERS_AT_ONCE)

    async def facts(self, files: ModelFiles, name: str) -> GgufFacts:
        """What all shards of the model say of which `name` is one. Raise ModelUnreadable."""
        parts = shards(files.sizes, name, files.label)
        headers: dict[str, GgufHeader] = {}
        errors: list[ModelUnreadable] = []

        async def read_one(part: str) -> None:
            try:
                async with self._limit:
                    headers[part] = await self._access.timed(files, lambda: self._header(files, part))
            except ModelUnreadable as e:
                errors.append(e)

        async with anyio.create_task_group() as group:
            for part in parts:
                group.start_soon(read_one, part)
        if errors:
            raise errors[0]
        return merged([headers[part] for part in parts], f"{files.label}/{name}")

    async def _header(self, files: ModelFiles, name: str) -> GgufHeader:
        if files.is_local:
            return await read_header(files, name)
        key = f"{files.key}/{name}/@header"
        if (cached := await self._access.cached(key)) is not None:
            with suppress(ValueError, KeyError, TypeError):
                return await to_thread.run_sync(from_cache, cached, files.sizes[name])
        header = await read_header(files, name)
        await self._access.cache(key, await to_thread.run_sync(to_cache, header), PINNED_SECONDS)
        return header


async def read_header(files: ModelFiles, name: str) -> GgufHeader:
    """The header of one file, by ranges; parsing runs in a thread, a long vocabulary takes its time."""
    window = LOCAL_WINDOW if files.is_local else HUB_WINDOW
    reading = header(files.sizes[name], f"{files.label}/{name}", largest_window=window)
    step: Range | GgufHeader = next(reading)
    while isinstance(step, Range):
        data = await files.read_range(name, step.start, step.length)
        step = await to_thread.run_sync(_next_step, reading, data)
    return step


def _next_step(reading: Generator[Range, bytes, GgufHeader], data: bytes) -> Range | GgufHeader:
    """The next range that is wanted, or the header at the end."""
    try:
        return reading.send(data)
    except StopIteration as stop:
        result: GgufHeader = stop.value
        return result


def merged(headers: Sequence[GgufHeader], label: str) -> GgufFacts:
    """One model from the headers of its files: the first occurrence of a key counts, tensors add up. Raise
    ModelUnreadable (`bad_header`) where the parts do not belong together."""
    values: dict[str, Value] = {}
    lengths: dict[str, int] = {}
    for part in reversed(headers):
        values |= part.values
        lengths |= part.lengths
    values.pop("split.no", None)
    tensors = tuple(replace(t, file=i) if i else t for i, part in enumerate(headers) for t in part.tensors)
    if len(headers) > 1:
        names = {t.name for t in tensors}
        if len(names) < len(tensors):
            raise ModelUnreadable("bad_header", f"{label} has a tensor in two of its shards")
        promised = values.get("split.tensors.count")
        if isinstance(promised, int) and promised != len(tensors):
            raise ModelUnreadable(
                "bad_header", f"{label} has {len(tensors)} tensors in its shards instead of {promised}"
            )
    first = headers[0]
    architecture = values.get("general.architecture")
    kind = values.get("general.type")
    return GgufFacts(
        architecture=architecture if isinstance(architecture, str) and architecture else DEFAULT_ARCHITECTURE,
        kind=kind if isinstance(kind, str) and kind else "model",
        values=MappingProxyType(values),
        lengths=MappingProxyType(lengths),
        tensors=tensors,
        version=first.version,
        alignment=first.alignment,
        shards=len(headers),
        file_bytes=sum(h.file_bytes for h in headers),
        data_bytes=sum(h.data_bytes for h in headers),
        warnings=tuple(dict.fromkeys(w for h in headers for w in h.warnings)),
    )


def to_cache(header: GgufHeader) -> bytes:
    """A header in bytes."""
    fields = [
        CACHE_FORM, header.version, header.big_endian, header.alignment, header.data_offset,
        header.file_bytes, dict(header.values), dict(header.lengths), list(header.warnings),
        [[t.name, t.shape, t.type, t.size, t.offset] for t in header.tensors],
    ]  # fmt: skip
    return json.dumps(fields, separators=(",", ":")).encode()


def from_cache(body: bytes, file_bytes: int) -> GgufHeader:
    """The header of a file of that size. Raise ValueError, KeyError or TypeError where it is none."""
    form, version, big, alignment, offset, size, values, lengths, warnings, tensors = json.loads(body)
    if form != CACHE_FORM or size != file_bytes:
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
