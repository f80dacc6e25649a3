"""What an operator set, as one value: strategy, maxima of the scorers, checks, preferences, files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from gpustackd.domain.backends import Backends
from gpustackd.domain.model_spec import Strategy
from gpustackd.domain.outcome import Check
from gpustackd.domain.paths import Paths
from gpustackd.domain.pools import NO_POOLS, Pools
from gpustackd.engines.images import EngineImages
from gpustackd.placement.mix import UNKNOWN_MIX, Mix

Files = Mapping[str, Mapping[int, int]]


@dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """Settings that a decision depends on. Score maxima are those of the settings."""

    strategy: Strategy = Strategy.SPREAD
    """Where a model names none."""
    placement_max: float = 100.0
    locality_max: float = 5.0
    """0 or less: no file locality."""
    commit_check: Check = Check.FITS
    prefer: frozenset[str] = frozenset()
    """Opt-in preferences (`preferences`)."""
    ready_files: Files = field(default_factory=lambda: MappingProxyType({}))
    """source_index, or `path:<resolved path>`, of READY files -> {worker id: size}; and the same by
    `downloading:<source_index>` of files that are on their way."""
    paths: Paths = field(default_factory=lambda: MappingProxyType({}))
    """What workers said of the local paths of models."""
    pools: Pools = NO_POOLS
    """Instance types and what clusters report of their cards, for `gpu_type_selector`."""

    backends: Backends | None = None
    """Registered inference backends; None = nothing is known, so no worker is dropped for its runtime."""
    catalogue: EngineImages | None = None
    """Images of engines; None = the packaged ones."""
    mix: Mix = UNKNOWN_MIX
    """Demands to come, as far as known; strategy `fragmentation` keeps capacity for them."""
    rpc_ram: int = 512 * 2**20
    """Bytes of RAM booked for every process that serves a GPU to another worker (GGUF)."""

    @property
    def key(self) -> tuple[Any, ...]:
        """What kept results depend on; files, paths, pools and mix are looked at anew in every decision."""
        return (self.strategy, self.placement_max, self.locality_max, self.commit_check, self.prefer,
                self.backends, self.catalogue, self.rpc_ram)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Subject:
    """The instance that a place is sought for."""

    id: int
    name: str
    leave_out: bool = False
    """Decide as if what it holds now were free (a placement anew, or a what-if)."""
