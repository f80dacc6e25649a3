"""The answer of a decision: a placement, or the reasons why there is none and which events could help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, Flag, auto
from types import MappingProxyType
from typing import Any


class Cure(Flag):
    """Kinds of events that could help a waiting instance."""

    NONE = 0
    CAPACITY = auto()
    """VRAM or RAM freed, a total raised, a reserve lowered, a GPU made schedulable."""
    WORKER = auto()
    """A worker or GPU added, or a worker's state, labels or cluster changed."""
    MODEL = auto()
    """The model was edited (this is always a cure: every edit re-queues the model's instances)."""
    FILES = auto()
    """A model file became READY on a worker."""
    BACKENDS = auto()
    """An inference backend or instance type changed."""
    TIME = auto()
    """Trying again later, with nothing changed (hub down, facts not read yet)."""
    ANY = CAPACITY | WORKER | MODEL | FILES | BACKENDS | TIME


@dataclass(frozen=True, slots=True)
class Reason:
    """One fact of an answer. `code` and `params` are stable data; `text` is the sentence for people.

    `filter` names the stage that excluded workers (`cluster`, `gpu_selector`, `labels`, `status`, `backend`,
    `local_path`, `fit`, `estimate`, …). The signature of a refusal consists of codes and filters, so that a
    changed byte count alone does not cause a waiting row to be rewritten.
    """

    code: str
    filter: str
    text: str
    params: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    level: str = "reject"

    def as_json(self) -> dict[str, Any]:
        """An element of the column `reasons`."""
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
    """Versions of the GPUs' rows that the decision saw, for the commit check `unchanged`."""
    vram: tuple[int, ...]
    ram: int
    worker_version: int
    unified: bool = False
    total_gpus: int | None = None
    """GPUs of that type on the worker that were considered; set for subordinates."""
    gpu_addresses: tuple[str, ...] = ()
    worker_ip: str | None = None
    worker_advertise_address: str | None = None
    worker_ifname: str | None = None
    offload_layers: int | None = None
    """Layers that run on this part's GPUs, where that differs from the placement's number (GGUF over several
    workers)."""


@dataclass(frozen=True, slots=True)
class Placement:
    """One way to place one instance."""

    parts: tuple[Part, ...]
    """The main worker's part first, then those of subordinates."""
    check: Check = Check.FITS
    vram_utilization: float | None = None
    offload_layers: int | None = None
    total_layers: int | None = None
    tensor_split: tuple[int, ...] | None = None
    sized_for: Mapping[str, Any] | None = None
    over_commit: bool = False
    """Allowed by the model's gpu_selector; rows that hold too much afterwards are marked."""
    mode: str | None = None
    """How a distributed instance is coordinated (`initialize_later`, `delegated`)."""
    strategy: str = ""
    score: float = 0.0
    score_parts: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    warnings: tuple[Reason, ...] = ()

    @property
    def gpu_count(self) -> int:
        """GPUs over all parts."""
        return sum(len(p.gpu_ids) for p in self.parts)


@dataclass(frozen=True, slots=True)
class PoolStep:
    """How many of `total` workers were left after one filter."""

    filter: str
    kept: int
    total: int

    def as_json(self) -> dict[str, Any]:
        """An element of the column `pool`."""
        return {"filter": self.filter, "kept": self.kept, "total": self.total}


@dataclass(frozen=True, slots=True)
class Placed:
    """The decision is a placement."""

    placement: Placement
    pool: tuple[PoolStep, ...] = ()
    candidates: tuple[Mapping[str, Any], ...] = ()
    """The best five, with their score parts, ready for JSON."""
    cut: bool = False
    """The search reached its budget: another place might have been better."""
    faults: tuple[Reason, ...] = ()
    """Filters and scorers that failed and were left out."""


@dataclass(frozen=True, slots=True)
class NoFit:
    """There is no place now. `message` is for people; `cures` are events after which a retry may succeed."""

    reasons: tuple[Reason, ...]
    message: str
    cures: Cure
    pool: tuple[PoolStep, ...] = ()
    cut: bool = False
    """The search reached its budget: there might be a place that it did not see."""
    faults: tuple[Reason, ...] = ()
    """Filters and scorers that failed and were left out; they are among the reasons too."""

    @property
    def signature(self) -> str:
        """Filters and codes of the reasons: equal for refusals that differ in numbers only."""
        return ";".join(f"{r.filter}:{r.code}" for r in self.reasons)


Outcome = Placed | NoFit
