"""What a simulated worker does next about an instance: how long each step takes, and which ones fail."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpustackd.domain.lifecycle import TAKEN, InstanceState
from gpustackd.store.postgres.worker_reports import AgentTask

_NEXT = dict(zip((InstanceState.SCHEDULED, *TAKEN), TAKEN, strict=False))


@dataclass(frozen=True, slots=True)
class Script:
    """`delay`: seconds between two steps. `fail_rate`: share of starts that end in ERROR instead of RUNNING;
    the same seed gives the same fate to the same start, in whatever order they come."""

    delay: float = 0.5
    fail_rate: float = 0.0
    fail_message: str = "simulated failure"
    seed: int = 0

    def step(self, task: AgentTask) -> tuple[InstanceState, str | None]:
        """The state after this one, and its message."""
        if task.state is InstanceState.UNREACHABLE:  # it ran all the while
            return InstanceState.RUNNING, None
        if task.state is InstanceState.STARTING and self._fails(task):
            return InstanceState.ERROR, self.fail_message
        return _NEXT[task.state], None

    def _fails(self, task: AgentTask) -> bool:
        chance = random.Random(f"{self.seed}/{task.name}/{task.epoch}/{task.restarts}")
        return chance.random() < self.fail_rate


@dataclass
class Steps:
    """Which tasks are due. A SCHEDULED one is taken at once, each later state lasts for the delay; what is
    not there any more, or under another epoch, is forgotten."""

    delay: float
    _since: dict[tuple[int, int, InstanceState], float] = field(default_factory=dict)

    def due(self, tasks: Sequence[AgentTask], now: float) -> tuple[list[AgentTask], float | None]:
        """Tasks to be moved on now, and when the next of the others is due (None = there is none)."""
        self._since = {k: self._since.get(k, now) for k in ((t.id, t.epoch, t.state) for t in tasks)}
        at = {
            t.id: self._since[t.id, t.epoch, t.state]
            + (0 if t.state in (InstanceState.SCHEDULED, InstanceState.UNREACHABLE) else self.delay)
            for t in tasks
        }
        return [t for t in tasks if at[t.id] <= now], min((v for v in at.values() if v > now), default=None)
