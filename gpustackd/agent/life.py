"""The life of workers in one process: they beat and, where simulated, take what is placed on them."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import anyio
from anyio.abc import TaskStatus

from gpustackd.agent.simulated import Script, Steps
from gpustackd.domain.lifecycle import InstanceState
from gpustackd.errors import Contended, DatabaseUnavailable, Refused
from gpustackd.observe.logging import Log
from gpustackd.store.postgres import worker_reports
from gpustackd.store.postgres.connect import Connection, connected

LOOK = 0.25
"""Seconds between two looks at what is placed on simulated workers."""
AGAIN = 1.0
"""Seconds until a database that is gone is tried again."""

NAME = "gpustackd-worker"
"""Of the sessions, so that they are told from those of daemons (`gpustackd …`)."""

Setup = Callable[[Connection], Awaitable[Sequence[str]]]


@dataclass
class Life:
    """`script` None = heartbeats only. `interval`: seconds between two heartbeats."""

    url: str
    log: Log
    interval: float
    script: Script | None = None

    async def live(self, setup: Setup) -> None:
        """From the registration (`setup` gives the workers' names) until SIGTERM or SIGINT.

        Raise DatabaseUnavailable or WrongRevision where it cannot begin, Refused where no worker is left.
        """
        async with anyio.create_task_group() as tasks:
            stop = anyio.Event()
            await tasks.start(self._watch, stop)
            tasks.start_soon(self._until, stop, tasks.cancel_scope)
            names: list[str] = []
            async with connected(self.url, NAME, **worker_reports.CONNECTION) as connection:
                names += await setup(connection)
            lost_at: float | None = None
            while True:
                try:
                    async with connected(self.url, NAME, **worker_reports.CONNECTION) as connection:
                        if lost_at is not None:
                            self.log.info("database.back", after_s=round(anyio.current_time() - lost_at, 1))
                            lost_at = None
                        there = await worker_reports.worker_states(connection, names)
                        await self._work(connection, {name: id_ for name, (id_, _) in there.items()})
                except DatabaseUnavailable as error:
                    if lost_at is None:
                        lost_at = anyio.current_time()
                        self.log.warning("database.lost", reason=error.problem)
                await anyio.sleep(AGAIN)

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

    async def _work(self, connection: Connection, workers: dict[str, int]) -> None:
        steps = Steps(self.script.delay if self.script else 0.0)
        names = {id_: name for name, id_ in workers.items()}
        states: dict[int, str] = {}
        beat_at = look_at = anyio.current_time()
        while True:
            now = anyio.current_time()
            try:
                if now >= beat_at:
                    beat_at = now + self.interval
                    await self._beat(connection, names, states)
                if self.script is not None:
                    look_at = await self._look(connection, self.script, steps, names)
            except Contended as error:
                beat_at, look_at = now + AGAIN, now + LOOK
                self.log.warning("database.error", reason=error.problem)
            until = beat_at if self.script is None else min(beat_at, look_at)
            await anyio.sleep(max(0.0, until - anyio.current_time()))

    async def _beat(self, connection: Connection, names: dict[int, str], states: dict[int, str]) -> None:
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

    async def _look(
        self, connection: Connection, script: Script, steps: Steps, names: dict[int, str]
    ) -> float:
        """Move on what is due; the moment of the next look."""
        tasks = await worker_reports.tasks_of(connection, list(names))
        now = anyio.current_time()
        due, later = steps.due(tasks, now)
        for task in due:
            state, message = script.step(task)
            if not await worker_reports.report(connection, task, state, message):
                self.log.info(
                    "instance.left", instance=task.name, instance_id=task.id, reason="not ours any more"
                )
                continue
            tell = self.log.warning if state is InstanceState.ERROR else self.log.info
            tell(
                "instance.reported",
                instance=task.name,
                instance_id=task.id,
                worker=names[task.worker_id],
                reason=message,
                state=state.value,
                epoch=task.epoch,
            )
        return min(now + LOOK, later if later is not None else now + LOOK)
