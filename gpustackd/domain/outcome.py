"""What a decision answers: a placement, or the reasons why there is none and what could cure that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, Flag, auto
from types import MappingProxyType
from typing import Any


class Cure(Flag):
    """Kinds of events that could help a waiting instance; a parked item knows which ones."""

    NONE = 0
    CAPACITY = auto()
    """VRAM or RAM given back, a total raised, a reserve lowered, a GPU made schedulable."""
    WORKER = auto()
    """A worker or GPU added, or a worker's state, labels or cluster changed."""
    MODEL = auto()
    """The model was edited (always a cure: every edit re-queues its instances)."""
    FILES = auto()
    """A model file became ready somewhere."""
    BACKENDS = auto()
    """An inference backend or instance type changed."""
    TIME = auto()
    """Trying again later, unchanged (hub down, nothing known yet)."""
    ANY = CAPACITY | WORKER | MODEL | FILES | BACKENDS | TIME


@dataclass(frozen=True, slots=True)
class Reason:
    """One fact of an answer. `code` and `params` are stable data; `text` is the sentence for people.

    `filter` names the stage that dropped workers (`cluster`, `gpu_selector`, `labels`, `status`,
    `backend`, `local_path`, `fit`, `estimate`, …). `signature` of a refusal uses code and filter only,
    so that a changed byte count alone does not make a waiting row be written again.
    """

    code: str
    filter: str
    text: str
    params: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    level: str = "reject"

    def as_json(self) -> dict[str, Any]:
        return {"code": self.code, "filter": self.filter, "level": self.level, "text": self.text,
                "params": dict(self.params)}  # fmt: skip


class Check(Enum):
    """What a commit demands of the rows it books on: that the need still fits, or that they did not
    change."""

    FITS = "fits"
    UNCHANGED = "unchanged"


@dataclass(frozen=True, slots=True)
class Part:
    """What a placement takes on one worker. All GPUs of a part are of one type. Sizes in bytes."""

    worker_id: int
    worker_name: str
    gpu_type: str | None
    gpu_ids: tuple[int, ...]
    """`gpu_devices.id`, in the order of `gpu_indexes`."""
    gpu_indexes: tuple[int, ...]
    gpu_versions: tuple[int, ...]
    """Row versions that the decision saw (commit check `unchanged`)."""
    vram: tuple[int, ...]
    ram: int
    worker_version: int
    unified: bool = False
    total_gpus: int | None = None
    """GPUs of that type on the worker that were considered (subordinates of distributed placements)."""
    gpu_addresses: tuple[str, ...] = ()
    worker_ip: str | None = None
    worker_advertise_address: str | None = None
    worker_ifname: str | None = None
    offload_layers: int | None = None
    """Layers that run on this part's GPUs, where that is not the placement's number (GGUF over workers)."""


@dataclass(frozen=True, slots=True)
class Placement:
    """One way to place one instance. `parts[0]` is the main worker, the rest are subordinates."""

    parts: tuple[Part, ...]
    check: Check = Check.FITS
    vram_utilization: float | None = None
    offload_layers: int | None = None
    total_layers: int | None = None
    tensor_split: tuple[int, ...] | None = None
    sized_for: Mapping[str, Any] | None = None
    over_commit: bool = False
    """Asked for by the model's gpu_selector; the rows booked get marked."""
    mode: str | None = None
    """Coordination of a distributed instance (`initialize_later`, `delegated`)."""
    strategy: str = ""
    score: float = 0.0
    score_parts: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    warnings: tuple[Reason, ...] = ()

    @property
    def gpu_count(self) -> int:
        return sum(len(p.gpu_ids) for p in self.parts)


@dataclass(frozen=True, slots=True)
class PoolStep:
    """How many workers were left after one filter."""

    filter: str
    kept: int
    total: int

    def as_json(self) -> dict[str, Any]:
        return {"filter": self.filter, "kept": self.kept, "total": self.total}


@dataclass(frozen=True, slots=True)
class Placed:
    """A decision for a place."""

    placement: Placement
    pool: tuple[PoolStep, ...] = ()
    candidates: tuple[Mapping[str, Any], ...] = ()
    """The best five as JSON-ready maps with their score parts."""
    cut: bool = False
    """The search ended for its budget: another place might have been better."""
    faults: tuple[Reason, ...] = ()
    """Filters and scorers that failed, and without which it was decided."""


@dataclass(frozen=True, slots=True)
class NoFit:
    """No place now. `message` is what people read; `cures` says which events are worth another try."""

    reasons: tuple[Reason, ...]
    message: str
    cures: Cure
    pool: tuple[PoolStep, ...] = ()
    cut: bool = False
    """The search ended for its budget: there might be a place that it did not see."""
    faults: tuple[Reason, ...] = ()
    """As of a placement; told among the reasons too."""

    @property
    def signature(self) -> str:
        """Equal for refusals that tell the same story, whatever the byte counts in it."""
        return ";".join(f"{r.filter}:{r.code}" for r in self.reasons)


Outcome = Placed | NoFit
