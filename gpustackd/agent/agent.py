"""The agent of one or more workers: heartbeats and, for simulated workers, reports on their instances."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import anyio
from anyio.abc import TaskStatus

from gpustackd.agent.simulated import SimulatedBehavior, TaskTimer
from gpustackd.domain.lifecycle import InstanceState
from gpustackd.errors import Contended, DatabaseUnavailable, Refused
from gpustackd.observe.logging import Log
from gpustackd.store.postgres import worker_reports
from gpustackd.store.postgres.connect import Connection, connected
from gpustackd.store.postgres.worker_reports import CONNECTION

POLL_INTERVAL = 0.25
"""Seconds between two reads of the instances on simulated workers."""
RETRY_INTERVAL = 1.0
"""Seconds before a lost database is tried again."""

APPLICATION_NAME = "gpustackd-worker"
"""Of the agent's connections; those of daemons are `gpustackd …`."""

Setup = Callable[[Connection], Awaitable[Sequence[str]]]


@dataclass
class WorkerAgent:
    """`behavior` None = heartbeats only. `interval`: seconds between two heartbeats."""

    url: str
    log: Log
    interval: float
    behavior: SimulatedBehavior | None = None

    async def run(self, setup: Setup) -> None:
        """Register (`setup` returns the workers' names), then run until SIGTERM or SIGINT.

        Raises DatabaseUnavailable or WrongRevision where it cannot start, Refused where no worker is left.
        """
        async with anyio.create_task_group() as tasks:
            stop = anyio.Event()
            await tasks.start(self._watch, stop)
            tasks.start_soon(self._until, stop, tasks.cancel_scope)
            names: list[str] = []
            async with connected(self.url, APPLICATION_NAME, **CONNECTION) as connection:
                names += await setup(connection)
            lost_at: float | None = None
            while True:
                try:
                    async with connected(
                        self.url, APPLICATION_NAME, **worker_reports.CONNECTION
                    ) as connection:
                        if lost_at is not None:
                            self.log.info("database.back", after_s=round(anyio.current_time() - lost_at, 1))
                            lost_at = None
                        workers = await worker_reports.worker_states(connection, names)
                        await self._work(connection, {id_: name for name, (id_, _) in workers.items()})
                except DatabaseUnavailable as error:
                    if lost_at is None:
                        lost_at = anyio.current_time()
                        self.log.warning("database.lost", reason=error.problem)
                await anyio.sleep(RETRY_INTERVAL)

    async def _watch(self, stop: anyio.Event, *, task_status: TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            async for received in signals:
                if not stop.is_set():
                    self.log.info("worker.stopped", reason=signal.Signals(received).name)
                    stop.set()

    async def _until(self, stop: anyio.Event, scope: anyio.CancelScope) -> None:
        await stop.wait()
        scope.cancel()

    async def _work(self, connection: Connection, names: dict[int, str]) -> None:
        """Heartbeats and reports over one connection. `names`: worker id -> name."""
        timer = TaskTimer(self.behavior.delay if self.behavior else 0.0)
        states: dict[int, str] = {}
        beat_at = poll_at = anyio.current_time()
        while True:
            now = anyio.current_time()
            try:
                if now >= beat_at:
                    beat_at = now + self.interval
                    await self._send_heartbeats(connection, names, states)
                if self.behavior is not None:
                    poll_at = await self._report(connection, self.behavior, timer, names)
            except Contended as error:
                beat_at, poll_at = now + RETRY_INTERVAL, now + POLL_INTERVAL
                self.log.warning("database.error", reason=error.problem)
            until = beat_at if self.behavior is None else min(beat_at, poll_at)
            await anyio.sleep(max(0.0, until - anyio.current_time()))

    async def _send_heartbeats(
        self, connection: Connection, names: dict[int, str], states: dict[int, str]
    ) -> None:
        for id_, name in list(names.items()):
            state = await worker_reports.heartbeat(connection, id_)
            if state is None:
                self.log.warning("worker.gone", worker=name)
                del names[id_]
            elif states.get(id_) != state:
                self.log.info("worker.beats", worker=name, state=state)
                states[id_] = state
        if not names:
            raise Refused("the rows of all workers here were deleted", "start it again to register anew")

    async def _report(
        self, connection: Connection, behavior: SimulatedBehavior, timer: TaskTimer, names: dict[int, str]
    ) -> float:
        """Report what is due. Returns when to look next, by the event loop's clock."""
        tasks = await worker_reports.tasks_of(connection, list(names))
        now = anyio.current_time()
        due, later = timer.due(tasks, now)
        for task in due:
            state, message = behavior.step(task)
            if not await worker_reports.report(connection, task, state, message):
                self.log.info(
                    "instance.left",
                    instance=task.name,
                    instance_id=task.id,
                    reason="it was moved or is on another worker",
                )
                continue
            log = self.log.warning if state is InstanceState.ERROR else self.log.info
            log(
                "instance.reported",
                instance=task.name,
                instance_id=task.id,
                worker=names[task.worker_id],
                reason=message,
                state=state.value,
                epoch=task.epoch,
            )
        return min(now + POLL_INTERVAL, later if later is not None else now + POLL_INTERVAL)
