"""Whether a kind of device can run an engine, and in which image.

The image is looked up as the worker will do it at the start, with runtime level, chip and CPU architecture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache

from gpustackd.domain.backends import Backends, DeviceKind, VersionEntry
from gpustackd.engines.images import FALLBACK, EngineImages, Runner, choose, runs, variant, variant_of_product
from gpustackd.engines.versions import Pin, canonical, order

CPU = "cpu"
ANY = "any"
CPU_KIND = DeviceKind(CPU)


class Cause(IntEnum):
    """Why not, the nearest miss last."""

    NO_VERSION = 0
    """The engine has no version for the runtime."""
    PIN = 1
    """It has, but not the one that is asked for."""
    DEPRECATED = 2
    """All that it has are deprecated, and none is asked for by name."""
    SOC_UNKNOWN = 3
    VARIANT = 4
    """None for this chip."""
    ARCH = 5
    """None for this CPU architecture."""
    LEVEL = 6
    """All that it has need a newer runtime than the host's."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`cause` None = it runs. `runner` is the image that the worker will take, where the catalogue has it."""

    cause: Cause | None = None
    runner: Runner | None = None
    needs: str = ""
    """Lowest runtime level that would do."""
    instead: str = ""
    """A deprecated version that would run, if it were asked for by name."""
    guessed: bool = False
    """The host's level or chip is not reported: it is taken to be able."""

    @property
    def ok(self) -> bool:
        return self.cause is None


class Verdicts:
    """Answers for one engine, one pin, one owner; each is worked out once."""

    def __init__(
        self, catalogue: EngineImages, backends: Backends, name: str, pin: Pin | None, owner: str | None
    ) -> None:
        self.catalogue = catalogue
        self.backends = backends
        self.name = name
        self.pin = pin
        self.owner = owner
        self._known: dict[tuple[DeviceKind, str], Verdict] = {}

    def of(self, kind: DeviceKind, arch: str) -> Verdict:
        """What a device of this kind on a host of this architecture (empty = not known) can run."""
        found = self._known.get((kind, arch))
        if found is None:
            found = self._known[kind, arch] = self._judge(kind, arch)
        return found

    def _judge(self, kind: DeviceKind, arch: str) -> Verdict:
        best: Verdict | None = None
        for verdict in self._stored(kind, arch):
            if verdict.ok:
                return verdict
            best = verdict if best is None or (verdict.cause or 0) > (best.cause or 0) else best
        verdict = self._catalogued(self._offered(kind), kind, arch)
        return verdict if verdict.ok or best is None or (verdict.cause or 0) >= (best.cause or 0) else best

    def _offered(self, kind: DeviceKind) -> tuple[Runner, ...]:
        return self.catalogue.offered(kind.type, self.name.lower())

    def _stored(self, kind: DeviceKind, arch: str) -> Iterator[Verdict]:
        """What registered versions say. `any` runs everywhere, `cpu` only without an accelerator."""
        for version, entry in self.entries():
            if self.pin is not None and not self.pin.admits(version):
                continue
            if entry.custom in (kind.type, ANY):
                yield Verdict()
            elif entry.built_in & {kind.type, ANY}:
                images = [r for r in self._offered(kind) if canonical(r.version) == canonical(version)]
                # an image of the platform's that the catalogue here does not know: nothing speaks against it
                yield self._image(images, kind, arch) if images else Verdict()

    def entries(self) -> list[tuple[str, VersionEntry]]:
        """Registered versions that the model sees; an owner's go before the platform's of the same name."""
        merged: dict[object, tuple[str, VersionEntry]] = {}
        for versions in self.backends.visible(self.name, self.owner):
            merged |= {canonical(version): (version, entry) for version, entry in versions.items()}
        return list(merged.values())

    def _catalogued(self, offered: Sequence[Runner], kind: DeviceKind, arch: str) -> Verdict:
        if not offered:
            return Verdict(Cause.NO_VERSION)
        if self.pin is not None:
            wanted = [r for r in offered if self.pin.admits(r.version)]
            return self._image(wanted, kind, arch) if wanted else Verdict(Cause.PIN)
        active = [r for r in offered if not r.deprecated]
        verdict = self._image(active, kind, arch) if active else Verdict(Cause.DEPRECATED)
        if verdict.ok:
            return verdict
        old = self._image(offered, kind, arch)
        return replace(verdict, instead=old.runner.version) if old.runner is not None else verdict

    def _image(self, runners: Sequence[Runner], kind: DeviceKind, arch: str) -> Verdict:
        """The image among these that the worker will take, or why it can take none."""
        chip, guessed = self._chip(kind)
        if chip is None:
            return Verdict(Cause.SOC_UNKNOWN)
        mine = [r for r in runners if r.variant in ("", chip)] if kind.type == "cann" else list(runners)
        if not mine:
            return Verdict(Cause.VARIANT)
        mine = [r for r in mine if not arch or not r.arch or r.arch == arch]
        if not mine:
            return Verdict(Cause.ARCH)
        found = choose(mine, kind.level)
        if found is None or not runs(found, kind.level):
            return Verdict(Cause.LEVEL, needs=min((r.level for r in mine), key=order))
        return Verdict(None, found, guessed=guessed or not kind.level)

    @staticmethod
    def _chip(kind: DeviceKind) -> tuple[str | None, bool]:
        """The variant of an Ascend chip and whether it is a guess; None where its name is not known. A chip
        that is not reported is taken for the one that the worker falls back to."""
        if kind.type != "cann":
            return "", False
        if kind.soc:
            return variant(kind.soc), False
        named = variant_of_product(kind.product)
        return named or FALLBACK, named is None


@lru_cache(maxsize=512)
def verdicts(
    catalogue: EngineImages, backends: Backends, name: str, version: str | None, owner: str | None
) -> Verdicts:
    """Answers for one engine; equal questions share them. Raise BadRow where the version cannot be read."""
    return Verdicts(catalogue, backends, name, None if not version else Pin.of(version), owner)
