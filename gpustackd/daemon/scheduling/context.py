"""What the loops of one session share, by name: each part owns its state, the loops only hold them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID

from gpustackd.daemon.queue.instance_queue import InstanceQueue
from gpustackd.daemon.scheduling.decider import Decider
from gpustackd.daemon.scheduling.fleet_feed import FleetFeed
from gpustackd.daemon.scheduling.model_catalog import ModelCatalog
from gpustackd.daemon.scheduling.work_state import WorkState
from gpustackd.daemon.service import BackgroundTasks
from gpustackd.daemon.surface.reporter import Reporter
from gpustackd.ports import Store


@dataclass(frozen=True, slots=True)
class ReplicaIdentity:
    """Who this replica is: `owner` is new at every start of the process, the name may be used again."""

    owner: UUID
    name: str


@dataclass(frozen=True, slots=True)
class SchedulingContext:
    """The parts of one session that intake, analysis, decide and commit work on."""

    identity: ReplicaIdentity
    lease: float
    """Seconds for which a claim is held without renewal."""
    store: Store
    queue: InstanceQueue
    work: WorkState
    fleet_feed: FleetFeed
    catalog: ModelCatalog
    decider: Decider
    reporter: Reporter
    tasks: BackgroundTasks
    """Where models are read while the loops go on."""
    clock: Callable[[], float]
    """Monotonic seconds."""
    rng: random.Random
