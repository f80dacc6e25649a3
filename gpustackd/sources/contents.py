"""The files of one model, as every source offers them, and what they say: configuration, pipeline,
weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import anyio

from gpustackd.errors import ModelUnreadable
from gpustackd.sources.formats import bounded_json, safetensors_header, weight_files
from gpustackd.sources.formats.safetensors_header import SafetensorsHeader

CONFIG = "config.json"
MODEL_INDEX = "model_index.json"
MAX_HUB_HEADERS = 16
"""Headers of one model that are read from a hub; with more files, the sizes in its listing are enough."""
FIRST_READ = 64 * 1024
"""Bytes of the first request to a hub: holds the length of the header, and mostly all of it."""
HEADERS_AT_ONCE = 8
LARGE_HEADER = 4_000_000
"""Bytes of a header from which on one at a time is in memory."""


class ModelFiles(Protocol):
    """What was listed once; reads are bounded and raise ModelUnreadable, retryable where a later try may
    succeed. Names are relative paths with `/`, always out of `sizes`."""

    @property
    def key(self) -> str:
        """Identity for caches: source, name and resolved revision (a fingerprint for a local path)."""

    @property
    def label(self) -> str:
        """How messages call the model: a path or a repository."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Relative path -> bytes on disk."""

    @property
    def is_local(self) -> bool:
        """Whether these are files of this host, where many small reads cost little."""

    async def read(self, name: str, limit: int) -> bytes:
        """A whole file of at most `limit` bytes."""

    async def read_range(self, name: str, start: int, length: int) -> bytes:
        """At most `length` bytes from `start` on."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The weight files that an engine loads. `total`: bytes on disk."""

    total: int
    files: tuple[str, ...]
    by_dtype: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Bytes of tensors per type; empty where no header was read."""
    warnings: tuple[str, ...] = ()


async def read_config(files: ModelFiles) -> Mapping[str, Any] | None:
    """`config.json` of a model; None where it has none."""
    if CONFIG not in files.sizes:
        return None
    data = await files.read(CONFIG, bounded_json.CONFIG.size)
    return bounded_json.parse_object(data, f"{files.label}/{CONFIG}")


async def read_model_index(files: ModelFiles) -> Any | None:
    """`model_index.json` of a pipeline; None where there is none."""
    if MODEL_INDEX not in files.sizes:
        return None
    data = await files.read(MODEL_INDEX, bounded_json.CONFIG.size)
    return bounded_json.parse(data, f"{files.label}/{MODEL_INDEX}")


async def read_weights(
    files: ModelFiles, model_index: Any | None = None, *, large_headers: anyio.Semaphore
) -> Weights:
    """Size the weights: of the directory itself, or of a pipeline's components with its `model_index`.

    Raise ModelUnreadable where there are none (`no_weights`), some are missing (`incomplete`), or a header
    cannot be true. `large_headers` lets one large header at a time into memory.
    """
    indexes = await _indexes(files, deep=model_index is not None)
    if model_index is None:
        root = {n: s for n, s in files.sizes.items() if "/" not in n}
        chosen = weight_files.pick(root, indexes)
    else:
        components = weight_files.components_of(model_index)
        chosen = weight_files.pick_components(files.sizes, components, indexes)
    if not chosen:
        kinds = ", ".join(s for group in weight_files.FORMATS for s in group)
        raise ModelUnreadable("no_weights", f"{files.label} has no weight files ({kinds})", retryable=True)
    sizes = {name: files.sizes[name] for name in chosen}
    safetensors = [name for name in chosen if name.endswith(".safetensors")]
    by_dtype: dict[str, int] = {}
    warnings: list[str] = []
    if files.is_local or len(safetensors) <= MAX_HUB_HEADERS:
        for header in await _headers(files, safetensors, large_headers, warnings):
            for dtype, size in header.bytes_by_dtype.items():
                by_dtype[dtype] = by_dtype.get(dtype, 0) + size
    if not any(sizes.values()):
        raise ModelUnreadable("no_weights", f"the weight files of {files.label} are empty", retryable=True)
    return Weights(sum(sizes.values()), chosen, MappingProxyType(by_dtype), tuple(warnings))


async def read_header(files: ModelFiles, name: str, large_headers: anyio.Semaphore) -> SafetensorsHeader:
    """The header of one file: its length first, then as many bytes as it says, if the file has them. Raise
    ModelUnreadable."""
    label, size = f"{files.label}/{name}", files.sizes[name]
    start = safetensors_header.LENGTH_BYTES
    first = await files.read_range(name, 0, start if files.is_local else FIRST_READ)
    length = safetensors_header.header_length(first, size, label)
    if len(first) >= start + length:
        return await _parse(first[start : start + length], size, label)
    if length <= LARGE_HEADER:
        return await _rest_of_header(files, name, first, length, label)
    async with large_headers:
        return await _rest_of_header(files, name, first, length, label)


async def _rest_of_header(
    files: ModelFiles, name: str, first: bytes, length: int, label: str
) -> SafetensorsHeader:
    start = safetensors_header.LENGTH_BYTES
    begun = first[start:]
    rest = await files.read_range(name, start + len(begun), length - len(begun))
    if len(begun) + len(rest) < length:
        raise ModelUnreadable("bad_header", f"{label} is cut off inside its header", retryable=True)
    return await _parse(begun + rest, files.sizes[name], label)


async def _parse(header: bytes, size: int, label: str) -> SafetensorsHeader:
    """In a thread where it would hold up the event loop."""
    if len(header) < 256 * 1024:
        return safetensors_header.parse(header, size, label)
    return await anyio.to_thread.run_sync(safetensors_header.parse, header, size, label)


async def _headers(
    files: ModelFiles, names: Sequence[str], large_headers: anyio.Semaphore, warnings: list[str]
) -> list[SafetensorsHeader]:
    """Headers of several files at once; none of them where a hub does not hand one out, since its listing has
    the sizes too. Raise ModelUnreadable for a header that cannot be true."""
    headers: dict[str, SafetensorsHeader] = {}
    errors: dict[str, ModelUnreadable] = {}
    limit = anyio.Semaphore(HEADERS_AT_ONCE)

    async def read_one(name: str, scope: anyio.CancelScope) -> None:
        async with limit:
            try:
                headers[name] = await read_header(files, name, large_headers)
            except ModelUnreadable as e:
                errors[name] = e
                if not _hub_refuses(files, e):
                    scope.cancel()

    async with anyio.create_task_group() as group:
        for name in names:
            group.start_soon(read_one, name, group.cancel_scope)
    for name in names:
        if name in errors:
            if not _hub_refuses(files, errors[name]):
                raise errors[name]
            warnings.append(f"sizes are those of the hub's listing: {errors[name].problem}")
            return []
    return [headers[name] for name in names]


def _hub_refuses(files: ModelFiles, e: ModelUnreadable) -> bool:
    return not files.is_local and e.code.startswith(("hub_", "no_ranges"))


async def _indexes(files: ModelFiles, *, deep: bool) -> dict[str, tuple[str, ...]]:
    """Index file -> names that it lists; `deep`: of directories below the root too."""
    indexes = {}
    for path in files.sizes:
        folder, _, name = path.rpartition("/")
        if name not in weight_files.INDEXES or (folder and not deep):
            continue
        data = await files.read(path, bounded_json.INDEX.size)
        document = await anyio.to_thread.run_sync(
            bounded_json.parse_object, data, f"{files.label}/{path}", bounded_json.INDEX
        )
        indexes[path] = weight_files.names_in_index(document, f"{files.label}/{path}")
    return indexes


def as_json(weights: Weights) -> bytes:
    """For the cache on disk."""
    return json.dumps(
        {"total": weights.total, "files": weights.files, "by_dtype": dict(weights.by_dtype),
         "warnings": weights.warnings}
    ).encode()  # fmt: skip


def from_json(data: bytes) -> Weights:
    """The reverse of `as_json`. Raise ValueError or KeyError for anything else."""
    raw = json.loads(data)
    by_dtype = {str(k): int(v) for k, v in raw["by_dtype"].items()}
    return Weights(
        int(raw["total"]), tuple(map(str, raw["files"])), MappingProxyType(by_dtype), tuple(raw["warnings"])
    )
