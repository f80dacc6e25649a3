"""Writes a model as a sparse directory: real `config.json`, real safetensors headers, holes for weights.

A safetensors file is 8 bytes (the header's length, little endian), the header as JSON, and the data. The
header may be padded with spaces at its end. Tensors are laid out as the common writer does it, by the
alignment of their type and then by name, so that sizes agree with published files to the byte.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpustackd.demo.models.architectures import DTYPE_BYTES, Tensor, tensors_of

SINGLE_FILE = "model.safetensors"
DEFAULT_SHARD_BYTES = 5_000_000_000


class Unexplained(ValueError):
    """The stated size of the files is not the sum of their tensors and headers."""


@dataclass(frozen=True, slots=True)
class SparseModel:
    """What is written for one model (`x-files` of an example). Sizes in bytes.

    `weight_bytes` None = whatever tensors and headers come to. `beside` are other weight files, names
    to sizes, such as the same weights in an older format.
    """

    config: Mapping[str, Any]
    weight_bytes: int | None = None
    basis: str = "approximate"
    shard_bytes: int = DEFAULT_SHARD_BYTES
    bare: bool = False
    stored_head: bool | None = None
    beside: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> SparseModel:
        """Raise TypeError for a key that is not a field."""
        return cls(**raw)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, in the order of the checkpoint."""
        return tensors_of(self.config, bare=self.bare, stored_head=self.stored_head)


def write_model(directory: Path, files: SparseModel) -> int:
    """Write `config.json`, weights and their index into `directory`; return the bytes of all weight files
    of the safetensors format. Needs next to no disk on file systems with holes.

    Raise Unexplained where a stated size leaves no room for the headers, or leaves more than 1 %.
    """
    directory.mkdir(parents=True, exist_ok=True)
    shards = shard(files.tensors, files.shard_bytes)
    headers = [header(tensors) for tensors in shards]
    data = [sum(t.nbytes for t in tensors) for tensors in shards]
    total = sum(8 + len(h) for h in headers) + sum(data)
    if files.weight_bytes is not None:
        headers[-1] += b" " * _padding(files.weight_bytes, total)
        total = files.weight_bytes
    names = shard_names(len(shards))
    for name, head, size in zip(names, headers, data, strict=True):
        _write_sparse(directory / name, len(head).to_bytes(8, "little") + head, size)
    if len(shards) > 1:
        owners = {t.name: name for name, tensors in zip(names, shards, strict=True) for t in tensors}
        index = {"metadata": {"total_size": sum(data)}, "weight_map": owners}
        (directory / f"{SINGLE_FILE}.index.json").write_text(json.dumps(index, separators=(",", ":")))
    for name, size in files.beside.items():
        _write_sparse(directory / name, b"", size)
    (directory / "config.json").write_text(json.dumps(files.config, indent=2) + "\n")
    return total


def shard(tensors: Iterable[Tensor], limit: int) -> list[list[Tensor]]:
    """Cut a checkpoint in order into files of at most `limit` bytes of data; a larger tensor stands alone."""
    shards: list[list[Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.nbytes
    return shards


def shard_names(count: int) -> list[str]:
    """File names of so many shards."""
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]


def header(tensors: Sequence[Tensor]) -> bytes:
    """The JSON header of one file, padded to a multiple of 8 bytes, without the length before it."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for t in sorted(tensors, key=lambda t: (-DTYPE_BYTES[t.dtype], t.name)):
        end = offset + t.nbytes
        entries[t.name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _padding(stated: int, explained: int) -> int:
    if not explained <= stated <= explained * 1.01:
        raise Unexplained(f"tensors and headers come to {explained} bytes, {stated} are stated")
    return stated - explained


def _write_sparse(path: Path, head: bytes, data_bytes: int) -> None:
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + data_bytes)
