"""What the files of one model say, whatever they are read from: configuration, pipeline parts, weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import anyio

from gpustackd.errors import ModelUnreadable
from gpustackd.sources.files import ModelFiles
from gpustackd.sources.formats import bounded_json, safetensors_header, weight_files

CONFIG = "config.json"
MODEL_INDEX = "model_index.json"
DEAR_HEADERS = 16
"""Headers of one model that are read from a hub; beyond that its listing has to do."""
FIRST_READ = 64 * 1024
"""From a hub the length and most headers come in one request."""
HEADERS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files that an engine loads. `total` in bytes on disk."""

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
    files: ModelFiles, model_index: Any | None = None, *, big: anyio.Semaphore
) -> WeightFiles:
    """Size the weights: of the directory itself, or of a pipeline's components with its `model_index`.

    Raise ModelUnreadable where there are none, some are missing, or a header cannot be true. `big` lets one
    large header at a time into memory.
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
        raise ModelUnreadable("no_weights", f"{files.label} holds no weight files ({kinds})", retryable=True)
    sizes = {name: files.sizes[name] for name in chosen}
    with_header = [name for name in chosen if name.endswith(".safetensors")]
    by_dtype: dict[str, int] = {}
    warnings: list[str] = []
    if files.cheap or len(with_header) <= DEAR_HEADERS:
        for header in await _headers(files, with_header, big, warnings):
            for dtype, size in header.bytes_by_dtype.items():
                by_dtype[dtype] = by_dtype.get(dtype, 0) + size
    if not any(sizes.values()):
        raise ModelUnreadable("no_weights", f"the weight files of {files.label} are empty", retryable=True)
    return WeightFiles(sum(sizes.values()), chosen, MappingProxyType(by_dtype), tuple(warnings))


async def read_header(
    files: ModelFiles, name: str, big: anyio.Semaphore
) -> safetensors_header.SafetensorsHeader:
    """The header of one file: its length first, then as many bytes as it says, if the file has them."""
    label, size = f"{files.label}/{name}", files.sizes[name]
    first = await files.read_range(name, 0, safetensors_header.LENGTH_BYTES if files.cheap else FIRST_READ)
    length = safetensors_header.header_length(first, size, label)
    start = safetensors_header.LENGTH_BYTES
    if len(first) >= start + length:
        return await _parse(files, first[start : start + length], size, label)
    if length <= 4 * bounded_json.CONFIG.size // 10:
        return await _rest(files, name, first, length, label)
    async with big:
        return await _rest(files, name, first, length, label)


async def _rest(
    files: ModelFiles, name: str, first: bytes, length: int, label: str
) -> safetensors_header.SafetensorsHeader:
    have = first[safetensors_header.LENGTH_BYTES :] if not files.cheap else b""
    start = safetensors_header.LENGTH_BYTES + len(have)
    rest = await files.read_range(name, start, length - len(have))
    if len(have) + len(rest) < length:
        raise ModelUnreadable("bad_header", f"{label} is cut off inside its header", retryable=True)
    return await _parse(files, have + rest, files.sizes[name], label)


async def _parse(
    files: ModelFiles, header: bytes, size: int, label: str
) -> safetensors_header.SafetensorsHeader:
    if len(header) < 256 * 1024:
        return safetensors_header.parse(header, size, label)
    return await anyio.to_thread.run_sync(safetensors_header.parse, header, size, label)


async def _headers(
    files: ModelFiles, names: Sequence[str], big: anyio.Semaphore, warnings: list[str]
) -> list[safetensors_header.SafetensorsHeader]:
    """Headers of several files at once. A header that cannot be true is an error; where a hub does not hand
    one out, its listing has the sizes too."""
    found: dict[str, safetensors_header.SafetensorsHeader] = {}
    errors: dict[str, ModelUnreadable] = {}
    limit = anyio.Semaphore(HEADERS_AT_ONCE)

    async def one(name: str, scope: anyio.CancelScope) -> None:
        async with limit:
            try:
                found[name] = await read_header(files, name, big)
            except ModelUnreadable as e:
                errors[name] = e
                if not _only_hub(files, e):
                    scope.cancel()

    async with anyio.create_task_group() as group:
        for name in names:
            group.start_soon(one, name, group.cancel_scope)
    for name in names:
        if name in errors:
            if not _only_hub(files, errors[name]):
                raise errors[name]
            warnings.append(f"sized by the hub's listing: {errors[name].problem}")
            return []
    return [found[name] for name in names]


def _only_hub(files: ModelFiles, e: ModelUnreadable) -> bool:
    return not files.cheap and e.code.startswith(("hub_", "no_ranges"))


async def _indexes(files: ModelFiles, *, deep: bool) -> dict[str, tuple[str, ...]]:
    found = {}
    for path in files.sizes:
        folder, _, name = path.rpartition("/")
        if name not in weight_files.INDEXES or (folder and not deep):
            continue
        data = await files.read(path, bounded_json.INDEX.size)
        document = await anyio.to_thread.run_sync(
            bounded_json.parse_object, data, f"{files.label}/{path}", bounded_json.INDEX
        )
        found[path] = weight_files.names_in_index(document, f"{files.label}/{path}")
    return found


def as_json(weights: WeightFiles) -> bytes:
    """For the cache on disk."""
    return json.dumps(
        {"total": weights.total, "files": weights.files, "by_dtype": dict(weights.by_dtype),
         "warnings": weights.warnings}
    ).encode()  # fmt: skip


def from_json(data: bytes) -> WeightFiles:
    """The reverse of `as_json`. Raise ValueError or KeyError for anything else."""
    raw = json.loads(data)
    by_dtype = {str(k): int(v) for k, v in raw["by_dtype"].items()}
    return WeightFiles(
        int(raw["total"]), tuple(map(str, raw["files"])), MappingProxyType(by_dtype), tuple(raw["warnings"])
    )
