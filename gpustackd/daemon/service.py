"""What every loop of the daemon offers, and what starts and stops them.

A service has a name and one coroutine. `run` works until it is cancelled, and calls `task_status.started()`
once others may count on it. It returns when it has nothing (more) to do, and raises when it cannot go on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol, TypeVarTuple

import anyio
from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskGroup, TaskStatus

from gpustackd.errors import Contended

_ORDERLY = 1.0
"""Seconds in which services are stopped one after another; those that are left then are stopped together."""

Arguments = TypeVarTuple("Arguments")


class Service(Protocol):
    """One loop. See the module for what `run` promises."""

    @property
    def name(self) -> str:
        """For logs, when it fails."""

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Until cancelled."""


@asynccontextmanager
async def running(
    services: Sequence[Service], failed: Callable[[str, Exception], None] = lambda *_: None
) -> AsyncIterator[None]:
    """Start services in order, each when the one before it is ready; stop them in reverse order at the end.

    When one raises, `failed` is given its name and its error, the body is cancelled, the others are stopped
    (`failed` is called for those that raise meanwhile, too), and the first error is raised.
    """
    errors: list[Exception] = []
    started: list[_Running] = []
    async with anyio.create_task_group() as tasks:
        with anyio.CancelScope() as body:

            def on_error(name: str, error: Exception) -> None:
                errors.append(error)
                failed(name, error)
                body.cancel()

            try:
                for service in services:
                    one = _Running(service, on_error)
                    await tasks.start(one.run)
                    started.append(one)
                yield
            except Exception as error:
                errors.append(error)
        with anyio.move_on_after(_ORDERLY, shield=True):
            for one in reversed(started):
                await one.stop()
        tasks.cancel_scope.cancel()
    if errors:
        raise errors[0]


class _Running:
    """One service under way."""

    def __init__(self, service: Service, on_error: Callable[[str, Exception], None]) -> None:
        self._service = service
        self._on_error = on_error
        self._scope = anyio.CancelScope()
        self._ended = anyio.Event()

    async def run(self, *, task_status: TaskStatus[None]) -> None:
        try:
            with self._scope:
                await self._service.run(task_status=task_status)
        except Exception as error:
            self._on_error(self._service.name, _first(error))
        finally:
            self._ended.set()

    async def stop(self) -> None:
        self._scope.cancel()
        await self._ended.wait()


def _first(error: Exception) -> Exception:
    """The first error of a group."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


class BackgroundTasks:
    """What loops start and do not wait for: reads of models and of their paths. A service that starts before
    them and stops after them."""

    name = "background tasks"

    def __init__(self, contended: Callable[[str], None]) -> None:
        """`contended(name)` is called where a task ends because the database made it wait too long."""
        self._contended = contended
        self._tasks: TaskGroup | None = None

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Until cancelled. Raises what a task raises."""
        async with anyio.create_task_group() as self._tasks:
            task_status.started()
            await anyio.sleep_forever()

    def start_soon(self, task: Callable[[*Arguments], Awaitable[None]], *arguments: *Arguments) -> None:
        """Start a task. Raise RuntimeError where the service does not run."""
        if self._tasks is None:
            raise RuntimeError(f"{self.name} are not running")
        self._tasks.start_soon(self._run, task, *arguments)

    async def _run(self, task: Callable[[*Arguments], Awaitable[None]], *arguments: *Arguments) -> None:
        try:
            await task(*arguments)
        except Contended:
            self._contended("reading a model")
