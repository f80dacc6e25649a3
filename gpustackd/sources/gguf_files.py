"""GGUF models in listings of files: which files one model consists of, and what their headers say together.

Large models lie in shards, `<prefix>-NNNNN-of-MMMMM.gguf`, each a GGUF file with a part of the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from types import MappingProxyType

import anyio
from anyio import to_thread

from gpustackd.domain.gguf_facts import GgufFacts, Value
from gpustackd.errors import ModelUnreadable
from gpustackd.sources.cache import gguf_headers
from gpustackd.sources.files import ModelFiles
from gpustackd.sources.formats.gguf_header import GgufHeader, header
from gpustackd.sources.formats.gguf_window import Range
from gpustackd.sources.library import PINNED_SECONDS, Library

SUFFIX = ".gguf"
LOCAL_WINDOW = 1024**2
HUB_WINDOW = 4 * 1024**2
AT_ONCE = 8
"""Headers being read, over all models: each holds about two windows in memory."""
ARCHITECTURE = "llama"
"""Where a file names none (spec section 2)."""

_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def named(sizes: Mapping[str, int], wanted: str, label: str) -> tuple[str, tuple[str, ...]]:
    """The file that a row names, and what has to be said about the choice: by its path, else by a pattern as
    in `*Q4_K_M*.gguf`, of whose matches the first one counts. Raise ModelUnreadable."""
    if wanted in sizes:
        return wanted, ()
    found = sorted(n for n in sizes if n.endswith(SUFFIX) and fnmatchcase(n, wanted))
    if not found:
        raise ModelUnreadable(
            "no_such_file", f"{label} has no file {wanted[:200]}", "check the name", retryable=True
        )
    models = {_prefix(name) for name in found}
    more = f"{wanted} fits {len(models)} models in {label}: {found[0]} is taken"
    return found[0], (more,) if len(models) > 1 else ()


def shards(sizes: Mapping[str, int], name: str, label: str) -> tuple[str, ...]:
    """All files of the model that `name` is a part of, in order. Raise ModelUnreadable (`incomplete`) where
    one is missing."""
    found = _SHARD.fullmatch(name)
    if found is None or not (total := int(found[3])) or not int(found[2]):
        return (name,)
    have = {n for n in sizes if n.startswith(found[1])}
    parts = []
    for i in range(1, total + 1):
        part = f"{found[1]}-{i:05}-of-{total:05}{SUFFIX}"
        if part not in have:
            raise ModelUnreadable(
                "incomplete", f"{label} lacks {part}, one of {total} parts", "finish the download",
                retryable=True,
            )  # fmt: skip
        parts.append(part)
    return tuple(parts)


def _prefix(name: str) -> str:
    found = _SHARD.fullmatch(name)
    return found[1] if found else name


class GgufReading:
    """Reads models of one file or many; `places` bounds how many headers are in memory at once."""

    def __init__(self, library: Library, places: anyio.Semaphore) -> None:
        self._library = library
        self._places = places

    async def model(self, files: ModelFiles, name: str) -> GgufFacts:
        """All shards of the model that `name` is a part of. Raise ModelUnreadable."""
        parts = shards(files.sizes, name, files.label)
        found: dict[str, GgufHeader] = {}
        wrong: list[ModelUnreadable] = []

        async def one(part: str) -> None:
            try:
                found[part] = await self._header(files, part)
            except ModelUnreadable as e:
                wrong.append(e)

        async with anyio.create_task_group() as group:
            for part in parts:
                group.start_soon(one, part)
        if wrong:
            raise wrong[0]
        return merged([found[part] for part in parts], f"{files.label}/{name}")

    async def _header(self, files: ModelFiles, name: str) -> GgufHeader:
        async with self._places:
            return await self._library.timed(files, lambda: self._kept_or_read(files, name))

    async def _kept_or_read(self, files: ModelFiles, name: str) -> GgufHeader:
        size = files.sizes[name]
        key = f"{files.key}/{name}/@header"
        if not files.cheap and (kept := await self._library.kept(key)) is not None:
            with suppress(ValueError, KeyError, TypeError):
                return await to_thread.run_sync(gguf_headers.from_json, kept, size)
        found = await read_header(files, name)
        if not files.cheap:
            await self._library.keep(
                key, await to_thread.run_sync(gguf_headers.as_json, found), PINNED_SECONDS
            )
        return found


async def read_header(files: ModelFiles, name: str) -> GgufHeader:
    """The header of one file, by ranges; parsing runs in a thread, a long vocabulary takes its time."""
    window = LOCAL_WINDOW if files.cheap else HUB_WINDOW
    reading = header(files.sizes[name], f"{files.label}/{name}", largest_window=window)
    wanted = next(reading)
    while True:
        data = await files.read_range(name, wanted.start, wanted.length)
        more = await to_thread.run_sync(_next, reading, data)
        if isinstance(more, GgufHeader):
            return more
        wanted = more


def _next(reading: Generator[Range, bytes, GgufHeader], data: bytes) -> Range | GgufHeader:
    """The next range that is wanted, or the header at the end."""
    try:
        return reading.send(data)
    except StopIteration as stop:
        found: GgufHeader = stop.value
        return found


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
            raise ModelUnreadable("bad_header", f"{label} has a tensor in two of its parts")
        promised = values.get("split.tensors.count")
        if isinstance(promised, int) and promised != len(tensors):
            raise ModelUnreadable(
                "bad_header", f"{label} has {len(tensors)} tensors in its parts, {promised} are promised"
            )
    first = headers[0]
    architecture = values.get("general.architecture")
    kind = values.get("general.type")
    return GgufFacts(
        architecture=architecture if isinstance(architecture, str) and architecture else ARCHITECTURE,
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
