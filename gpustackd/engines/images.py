"""The catalogue of engine images: which exist for which runtime, level, chip, architecture and version.

The packaged rows are `images.json`. `choose` picks as a worker does, so that the filter and the worker agree.
Ascend chips have images by variant.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from gpustackd.domain.backends import architecture
from gpustackd.engines.versions import major, order


@dataclass(frozen=True, slots=True)
class Runner:
    """One image. `level` is that of the runtime inside, `variant` the chip it is built for (empty = all)."""

    runtime: str
    level: str
    variant: str
    service: str
    version: str
    arch: str
    image: str
    deprecated: bool = False


class EngineImages:
    """Images by runtime and service. Never changed once made."""

    def __init__(self, runners: Iterable[Runner]) -> None:
        by_service: dict[tuple[str, str], list[Runner]] = {}
        for runner in runners:
            by_service.setdefault((runner.runtime, runner.service), []).append(runner)
        self._by_service: Mapping[tuple[str, str], tuple[Runner, ...]] = {
            k: tuple(v) for k, v in by_service.items()
        }

    def offered(self, runtime: str, service: str) -> tuple[Runner, ...]:
        """Every image of an engine (name in lower case) for a runtime."""
        return self._by_service.get((runtime, service), ())


@cache
def packaged() -> EngineImages:
    """The catalogue that comes with this package, read once."""
    raw = json.loads((files("gpustackd.engines") / "images.json").read_text("utf-8"))
    return EngineImages(runners_of(raw["columns"], raw["rows"]))


def runners_of(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[Runner]:
    """Images from rows as the data file has them."""
    found = []
    for row in rows:
        r = dict(zip(columns, row, strict=True))
        found.append(
            Runner(r["runtime"], r["runtime_level"], r["variant"] or "", r["service"], r["service_version"],
                   architecture(r["platform"]), r["image"], bool(r["deprecated"]))
        )  # fmt: skip
    return found


def choose(runners: Sequence[Runner], host_level: str) -> Runner | None:
    """The image that a worker takes among these: the newest level that its host has, else the newest of the
    host's major, else the oldest; the newest of all where the host's level is not known. Of one level the
    newest version of the engine. None = there is none."""
    if not runners:
        return None
    levels = {order(r.level): r.level for r in runners}
    if not host_level:
        level = levels[max(levels)]
    else:
        host = order(host_level)
        older = [k for k in levels if k <= host]
        alike = [k for k, text in levels.items() if major(text) == major(host_level)]
        level = levels[max(older or alike or [min(levels)])]
    mine = [r for r in runners if order(r.level) == order(level)]
    return max(mine, key=lambda r: order(r.version))


def runs(runner: Runner, host_level: str) -> bool:
    """Whether a host of that level runs the image: its level is no newer, or of the same major, within
    which drivers keep compatible. A level that is not known speaks against nothing."""
    if not host_level or not runner.level:
        return True
    return order(runner.level) <= order(host_level) or major(runner.level) == major(host_level)


FALLBACK = "910b"
"""What a worker takes for a chip that it cannot name."""

_NAMES: Sequence[tuple[str, str]] = (
    (r"910(pro)?[ab]|910premiuma", "910"),
    (r"310p\d+\w*", "310p"),
    (r"910b\d\w*(-\d+)?", "910b"),
    (r"310b\d\w*", "310b"),
    (r"910_?93\w*|910", "a3"),
    (r"910_?95\w*|950\w*", "950"),
)
_PATTERNS = tuple((re.compile(pattern), variant) for pattern, variant in _NAMES)


def variant(soc: str) -> str | None:
    """The variant for the name of a chip (`Ascend910B3` -> `910b`); None where the chip is not known."""
    name = soc.strip().lower().removeprefix("ascend").lstrip(" -_")
    return next((v for pattern, v in _PATTERNS if pattern.fullmatch(name)), None)


def variant_of_product(product: str) -> str | None:
    """The variant that the name of a product tells, where it names the chip. `910B` without a number stands
    for two generations and says nothing."""
    return None if re.fullmatch(r"(?i)(ascend)?[ -_]*910b?", product.strip()) else variant(product)
