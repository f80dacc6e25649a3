"""Keeps workers with a device that the model's engine runs on, and says which devices these are.

A worker with cards of two vendors stays, and only the cards that the engine runs on are offered to the fit. A
worker without any device stays where the engine has a version for the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpustackd.domain.backends import Backends, DeviceKind
from gpustackd.domain.demand import Demand, Engine
from gpustackd.domain.fleet.columns import Bools, Ints
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.outcome import Cure, Reason
from gpustackd.engines.images import EngineImages, packaged
from gpustackd.placement.diagnostics.wording import plural, some, workers
from gpustackd.placement.filters.framework_verdict import CPU_KIND, Cause, Verdict, Verdicts, verdicts

CUSTOM = "Custom"
SHOWN = 3
GROUPS = 8
"""Causes told one by one; more of them are counted together."""
WITHOUT_CARDS = frozenset({Engine.CUSTOM, Engine.GGUF, Engine.ROUTER})
"""Engines that may be placed on a worker's CPU though it has cards."""


def framework_filter(
    demand: Demand, backends: Backends | None, catalogue: EngineImages | None = None
) -> FrameworkFilter | None:
    """The filter that a demand calls for; None where any worker will do: nothing is known of backends, the
    image is the user's own, the engine is `Custom`, or the role takes no accelerator (it has its own image).

    Raises BadRow where the pinned version cannot be read.
    """
    spec = demand.spec
    if backends is None or spec.image_name:
        return None
    name = spec.effective_backend
    if name == CUSTOM or demand.engine is Engine.ROUTER:
        return None
    known = verdicts(catalogue or packaged(), backends, name, spec.backend_version, spec.owner)
    return FrameworkFilter(known, cpu_too=demand.engine in WITHOUT_CARDS and bool(spec.cpu_offloading))


@dataclass(frozen=True, slots=True)
class Miss:
    """Why a worker was dropped: its nearest miss."""

    verdict: Verdict
    kind: DeviceKind
    arch: str


class FrameworkFilter:
    """A device of the worker is supported by the engine's registered versions or by the image catalogue."""

    name = "backend"
    cure = Cure.BACKENDS | Cure.WORKER | Cure.MODEL

    def __init__(self, known: Verdicts, *, cpu_too: bool) -> None:
        """`cpu_too`: a worker with devices may serve by its CPU, which it is then not needed for."""
        self.known = known
        self.cpu_too = cpu_too
        self._table: Bools = np.zeros((1, 0), np.bool_)
        """(kinds + 1, architectures); the last row stands for "no card"."""
        self._cpu: Bools = np.zeros(0, np.bool_)
        self._everything = False

    # -- keeping -----------------------------------------------------------------------------------------

    def keep(self, fleet: Fleet, rows: Ints) -> Bools:
        self._renew(fleet)
        kept: Bools = np.any(self._look_up(self._table, fleet, rows), axis=1)
        rest = (~kept).nonzero()[0]
        if len(rest) and self._cpu.any():
            some_device = np.any(fleet.gpu_kind[rows[rest]] >= 0, axis=1)
            kept[rest] = self._cpu[fleet.arch[rows[rest]]] & (~some_device | self.cpu_too)
        return kept

    def devices(self, fleet: Fleet, rows: Ints) -> Bools | None:
        """(R, S) devices of these positions that may be used; None = all of them."""
        self._renew(fleet)
        if self._everything:
            return None
        return self._look_up(self._table, fleet, rows)

    @staticmethod
    def _look_up(table: Bools, fleet: Fleet, rows: Ints) -> Bools:
        """(R, S) what a table of kinds by architectures says of the devices of these positions."""
        places = fleet.gpu_kind[rows] * np.int32(table.shape[1])
        places += fleet.arch[rows][:, None]
        found: Bools = table.take(places, mode="wrap")  # no card is kind -1, and wraps to the last row
        return found

    def by_cpu(self, fleet: Fleet, rows: Ints) -> Bools:
        """(R,) positions where the engine runs without an accelerator."""
        self._renew(fleet)
        found: Bools = self._cpu[fleet.arch[rows]]
        return found

    def _renew(self, fleet: Fleet) -> None:
        """Kinds and architectures are only ever added to a fleet."""
        shape = (len(fleet.kinds) + 1, len(fleet.architectures))
        if self._table.shape == shape:
            return
        table = np.zeros(shape, np.bool_)
        for a, arch in enumerate(fleet.architectures):
            for k, kind in enumerate(fleet.kinds):
                table[k, a] = self.known.of(kind, arch).ok
        self._table = table
        self._everything = bool(table[:-1].all())
        self._cpu = np.array([self.known.of(CPU_KIND, arch).ok for arch in fleet.architectures], np.bool_)

    # -- why not -----------------------------------------------------------------------------------------

    def miss(self, fleet: Fleet, w: int) -> Miss:
        """The nearest miss of a worker that was dropped."""
        arch = fleet.architectures[int(fleet.arch[w])]
        kinds = [fleet.kinds[k] for k in dict.fromkeys(fleet.gpu_kind[w].tolist()) if k >= 0]
        misses = [Miss(self.known.of(kind, arch), kind, arch) for kind in kinds or [CPU_KIND]]
        return max(misses, key=lambda m: m.verdict.cause or 0)

    def reasons(self, fleet: Fleet, dropped: Ints, left: int, of: int) -> list[Reason]:
        groups: dict[Miss, list[int]] = {}
        known: dict[bytes, Miss] = {}
        for w in dropped.tolist():
            key = fleet.gpu_kind[w].tobytes() + fleet.arch[w].tobytes()
            miss = known.get(key) or known.setdefault(key, self.miss(fleet, w))
            groups.setdefault(miss, []).append(w)
        in_order = sorted(groups.items(), key=lambda g: -len(g[1]))
        found = [self._group(fleet, miss, ws, left, of) for miss, ws in in_order[:GROUPS]]
        rest = [w for _, ws in in_order[GROUPS:] for w in ws]
        if rest:
            count, names = len(rest), [fleet.row(w).name for w in rest[:SHOWN]]
            text = f"{plural(count, 'more worker')} of other kinds cannot run {self._engine()} either"
            params = {"dropped": count, "left": left, "of": of, "workers": names}
            found.append(Reason("backend.others", self.name, text, params))
        return found

    def remarks(self, fleet: Fleet, kept: Ints) -> list[Reason]:
        """What is taken on trust of workers that stay: cards whose runtime level or chip is not reported."""
        self._renew(fleet)
        trusted = np.zeros(self._table.shape, np.bool_)
        for k, kind in enumerate(fleet.kinds):
            for a, arch in enumerate(fleet.architectures):
                trusted[k, a] = self.known.of(kind, arch).guessed
        ws = kept[np.any(self._look_up(trusted, fleet, kept), axis=1)]
        if not len(ws):
            return []
        count, names = len(ws), [fleet.row(w).name for w in ws[:SHOWN].tolist()]
        verb, they = ("does", "it") if count == 1 else ("do", "they")
        text = f"{workers(count)} ({some(names, SHOWN, count)}) {verb} not report a runtime version or chip; "
        text += f"assuming that {they} can run {self._engine()}"
        params = {"workers": names, "count": count}
        return [Reason("backend.level_unknown", self.name, text, params, "info")]

    def _group(self, fleet: Fleet, miss: Miss, ws: Sequence[int], left: int, of: int) -> Reason:
        return self._told(miss, [fleet.row(w).name for w in ws[:SHOWN]], len(ws), left, of)

    def _told(self, miss: Miss, names: list[str], count: int, left: int, of: int) -> Reason:
        kind, verdict = miss.kind, miss.verdict
        text = (
            f"{workers(count)} ({some(names, SHOWN, count)}) cannot run {self._engine()}: {self._why(miss)}"
        )
        params: dict[str, Any] = {
            "dropped": count,
            "left": left,
            "of": of,
            "workers": names,
            "worker": names[0],
            "backend": self.known.name,
            "cause": (verdict.cause or Cause.NO_VERSION).name.lower(),
            "runtime": kind.type,
            "level": kind.level or None,
        }
        optional = {
            "version": self.known.pin and str(self.known.pin),
            "needs_level": verdict.needs,
            "arch": miss.arch if verdict.cause is Cause.ARCH else "",
            "soc": kind.soc,
        }
        params |= {k: v for k, v in optional.items() if v}
        if verdict.instead:
            text += f"; the deprecated version {verdict.instead} would run if requested explicitly"
            params["would_run"] = verdict.instead
        return Reason(self._code(kind), self.name, text, params)

    def _code(self, kind: DeviceKind) -> str:
        if self.known.pin is not None:
            return "backend.version_unsupported"
        return "backend.no_version_cpu" if kind is CPU_KIND else "backend.no_version_accel"

    def _engine(self) -> str:
        return self.known.name + (f" {self.known.pin}" if self.known.pin is not None else "")

    def _why(self, miss: Miss) -> str:
        kind, verdict = miss.kind, miss.verdict
        if kind is CPU_KIND:
            return "no accelerator, and no known version runs on the CPU"
        on = f"{kind.type} {kind.level}".strip()[:64]
        chip = (kind.soc or kind.product)[:64]
        match verdict.cause:
            case Cause.LEVEL:
                return f"the runtime is {on}; every image needs {verdict.needs} or newer"
            case Cause.ARCH:
                return f"no image for {kind.type} is built for {miss.arch}"
            case Cause.VARIANT:
                return f"no image is built for the chip {chip}"
            case Cause.SOC_UNKNOWN:
                return f"unknown chip {chip}"
            case Cause.DEPRECATED:
                return f"all versions for {on} are deprecated"
            case Cause.PIN:
                return f"that version does not exist for {on}"
        return f"no known version runs on {on}"
