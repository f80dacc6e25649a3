"""What a simulated worker reports next about an instance, and when."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpustackd.domain.lifecycle import TAKEN, InstanceState
from gpustackd.store.postgres.worker_reports import AgentTask

_NEXT = dict(zip((InstanceState.SCHEDULED, *TAKEN), TAKEN, strict=False))


@dataclass(frozen=True, slots=True)
class SimulatedBehavior:
    """`delay`: seconds between two states. `fail_rate`: share of starts that end in ERROR instead of RUNNING.

    Which starts fail depends on the seed and the start alone, not on the order in which starts come.
    """

    delay: float = 0.5
    fail_rate: float = 0.0
    fail_message: str = "simulated failure"
    seed: int = 0

    def step(self, task: AgentTask) -> tuple[InstanceState, str | None]:
        """The next state, and its message."""
        if task.state is InstanceState.UNREACHABLE:  # it kept running
            return InstanceState.RUNNING, None
        if task.state is InstanceState.STARTING and self._fails(task):
            return InstanceState.ERROR, self.fail_message
        return _NEXT[task.state], None

    def _fails(self, task: AgentTask) -> bool:
        chance = random.Random(f"{self.seed}/{task.name}/{task.epoch}/{task.restarts}")
        return chance.random() < self.fail_rate


@dataclass
class TaskTimer:
    """Which tasks are due: a SCHEDULED one at once, each later state after `delay` seconds. Tasks that are no
    longer listed, or have another epoch, are forgotten."""

    delay: float
    _since: dict[tuple[int, int, InstanceState], float] = field(default_factory=dict)

    def due(self, tasks: Sequence[AgentTask], now: float) -> tuple[list[AgentTask], float | None]:
        """Tasks that are due at `now`, and when the next of the others is (None = there is no other)."""
        self._since = {k: self._since.get(k, now) for k in ((t.id, t.epoch, t.state) for t in tasks)}
        at = {
            t.id: self._since[t.id, t.epoch, t.state]
            + (0 if t.state in (InstanceState.SCHEDULED, InstanceState.UNREACHABLE) else self.delay)
            for t in tasks
        }
        return [t for t in tasks if at[t.id] <= now], min((v for v in at.values() if v > now), default=None)
