"""Registered inference backends, and the kinds of devices that decide whether an image can run.

Rows of `inference_backends` as checked values. What cannot be read is left out: a version without a readable
framework supports nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from types import MappingProxyType
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class VersionEntry:
    """One version of a backend: the frameworks it runs on, in lower case (`cuda`, `cpu`, `any`, …)."""

    custom: str = ""
    """`custom_framework`: the image is the user's own; empty = not declared."""
    built_in: frozenset[str] = frozenset()
    """`built_in_frameworks`: the image is in the catalog."""


Versions = Mapping[str, VersionEntry]


@dataclass(frozen=True, slots=True)
class BackendRow:
    """One row. `owner` None = it belongs to the platform, and every model may use it."""

    name: str
    owner: str | None = None
    versions: Versions = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Backends:
    """All rows at one time. Two values with the same content are equal, so cached results of one hold for the
    other."""

    rows: tuple[BackendRow, ...] = field(default=(), compare=False)
    digest: str = ""

    @classmethod
    def of(cls, rows: Iterable[BackendRow]) -> Backends:
        """From rows in the order of their ids."""
        kept = tuple(rows)
        content = [
            (r.name, r.owner, [(v, e.custom, sorted(e.built_in)) for v, e in sorted(r.versions.items())])
            for r in kept
        ]
        return cls(kept, sha256(repr(content).encode()).hexdigest())

    def visible(self, name: str, owner: str | None) -> list[Versions]:
        """Versions of the rows of that name that a model of `owner` may use: the platform's, then the
        owner's, which override them. A model without an owner sees only the platform's."""
        wanted = name.casefold()
        mine = [r for r in self.rows if r.name.casefold() == wanted]
        versions = [r.versions for r in mine if r.owner is None]
        return versions + [r.versions for r in mine if owner is not None and r.owner == owner]


def backend_row(name: str, owner: str | None, versions: Any) -> BackendRow:
    """One row of `inference_backends`; never raises."""
    entries: dict[str, VersionEntry] = {}
    for version, raw in versions.items() if isinstance(versions, Mapping) else ():
        if isinstance(raw, Mapping):
            entries[str(version)] = VersionEntry(
                _word(raw.get("custom_framework")), _words(raw.get("built_in_frameworks"))
            )
    return BackendRow(name, owner or None, MappingProxyType(entries))


def _word(raw: Any) -> str:
    return raw.strip().lower() if isinstance(raw, str) else ""


def _words(raw: Any) -> frozenset[str]:
    if isinstance(raw, str):
        raw = [raw]
    return frozenset(filter(None, map(_word, raw))) if isinstance(raw, (list, tuple)) else frozenset()


class DeviceKind(NamedTuple):
    """What devices that can run the same images have in common; empty text = not reported."""

    type: str
    """Runtime: `cuda`, `rocm`, `cann`, …"""
    level: str = ""
    """Level of the runtime on the host."""
    soc: str = ""
    """Name of the chip, where images differ by it (Ascend)."""
    product: str = ""
    """Name of the product, where the chip is not reported."""


@lru_cache(maxsize=1024)
def device_kind(
    type_: str, runtime_version: str | None, arch_family: str | None, name: str | None
) -> DeviceKind:
    """The kind of one row of `gpu_devices`."""
    kind, level = type_.strip().lower(), (runtime_version or "").strip()
    if kind != "cann":
        return DeviceKind(kind, level)
    soc = (arch_family or "").strip()
    return DeviceKind(kind, level, soc, "" if soc else (name or "").strip())


_ARCHITECTURES = {
    "x86_64": "amd64", "x86-64": "amd64", "x64": "amd64", "aarch64": "arm64", "armv8": "arm64",
}  # fmt: skip


def architecture(text: str | None) -> str:
    """A CPU architecture under one name (`amd64`, `arm64`, …); empty = not reported."""
    word = (text or "").strip().lower().rpartition("/")[2]
    return _ARCHITECTURES.get(word, word)
