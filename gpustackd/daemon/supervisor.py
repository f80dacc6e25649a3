"""One replica as a process: long-lived services around one session after another."""

from __future__ import annotations

import random
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from time import monotonic

import anyio
from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskStatus

from gpustackd.daemon.service import Service, running
from gpustackd.daemon.session import Session
from gpustackd.daemon.status import DaemonStatus
from gpustackd.daemon.surface.reporter import Reporter
from gpustackd.daemon.surface.systemd import Systemd
from gpustackd.errors import Contended, DatabaseUnavailable, GpustackdError

_RECONNECT = (0.2, 1.0)
"""First and longest wait between tries to reach a database that is gone: work goes on within 5 s of its
return."""
_LONG_SESSION = 30.0
"""Seconds after which a session counts as one that worked: the next wait is a short one again."""
_FAILURES_MAX = 10
"""Sessions a minute that may end by a mistake of ours before the process ends, for others to restart it."""


class StopSignal:
    """SIGTERM and SIGINT, from the first moment on. A service, which sets `event` at the first signal.

    Until `startup_done` a signal just cancels the start (`start_scope`): nothing is in progress then.
    """

    name = "signals"

    def __init__(self) -> None:
        self.event = anyio.Event()
        self.signal_name = ""
        self.start_scope = anyio.CancelScope()
        self._starting = True

    def startup_done(self) -> None:
        """From now on whoever waits for `event` stops in order."""
        self._starting = False

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Until cancelled."""
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            async for received in signals:
                if self.event.is_set():
                    continue
                self.signal_name = signal.Signals(received).name
                self.event.set()
                if self._starting:
                    self.start_scope.cancel()


@dataclass(frozen=True, slots=True)
class Observers:
    """Who is told how the daemon is."""

    status: DaemonStatus
    reporter: Reporter
    systemd: Systemd


class Supervisor:
    """Runs until the stop signal; then stops in order, within ten seconds."""

    def __init__(
        self,
        *,
        new_session: Callable[[Callable[[str, Exception], None]], Session],
        services: Sequence[Service],
        stop: StopSignal,
        observers: Observers,
        drop_connections: Callable[[], Awaitable[None]],
        rng: random.Random,
    ) -> None:
        """`new_session` is given what to call with the name and the error of a service that fails;
        `services` live as long as the process."""
        self._new_session = new_session
        self._stop = stop
        self._status = observers.status
        self._reporter = observers.reporter
        self._systemd = observers.systemd
        self._drop_connections = drop_connections
        self._rng = rng
        self._services = [*services, _StopAnnouncement(stop, observers)]
        self._failed_service = ""
        self._lost_at: float | None = None
        self._failures: deque[float] = deque(maxlen=_FAILURES_MAX + 1)

    async def run(self) -> None:
        """Raise what one of the long-lived services raised, or what ended a session for good."""
        async with running(self._services, self._on_failure):
            await self._run_sessions()
        self._reporter.event("info", "daemon.stopped")

    async def _run_sessions(self) -> None:
        first_wait, longest = _RECONNECT
        wait = first_wait
        while not self._stop.event.is_set():
            session = self._new_session(self._on_failure)
            began = monotonic()
            try:
                await session.run(self._stop.event, self._on_started)
            except (DatabaseUnavailable, Contended) as error:
                await self._on_lost(error)
            except GpustackdError:
                raise
            except Exception as error:
                self._count_failure(error)
                await self._on_lost(error)
            else:
                if handed_back := await session.hand_back():
                    self._reporter.event("info", "instance.handed_back", count=handed_back)
                return
            if monotonic() - began > _LONG_SESSION:
                wait = first_wait
            with anyio.move_on_after(wait * self._rng.uniform(0.5, 1.0)):
                await self._stop.event.wait()
            wait = min(wait * 2, longest)
            self._status.beat()

    def _on_started(self) -> None:
        self._status.problem = ""
        if self._lost_at is not None:
            milliseconds = round((monotonic() - self._lost_at) * 1000)
            self._lost_at = None
            self._reporter.metrics.database_up(True)
            self._reporter.event("info", "database.back", duration_ms=milliseconds)
        self._systemd.ready("scheduling")

    async def _on_lost(self, error: Exception) -> None:
        """A session ended: logged once until the next one starts."""
        if self._lost_at is None:
            self._lost_at = monotonic()
            self._reporter.metrics.database_up(False)
            self._reporter.event("error", "database.lost", reason=str(error))
            self._systemd.status("database lost")
        self._status.problem = str(error)
        self._status.health = None
        await self._drop_connections()

    def _on_failure(self, service: str, error: Exception) -> None:
        """A service ended with an error; those that only lost the database are reported together."""
        if not isinstance(error, GpustackdError):
            self._reporter.unexpected(service, error)

    def _count_failure(self, error: Exception) -> None:
        self._failures.append(monotonic())
        if len(self._failures) > _FAILURES_MAX and self._failures[-1] - self._failures[0] < 60:
            self._reporter.event("error", "daemon.failed", reason=repr(error)[:2000])
            raise GpustackdError(
                f"the daemon failed {len(self._failures)} times within a minute: {error!r}", "see the log"
            ) from error


class _StopAnnouncement:
    """Says at once that a stop was asked for; what is in progress may take seconds."""

    name = "stop announcement"

    def __init__(self, stop: StopSignal, observers: Observers) -> None:
        self._stop = stop
        self._observers = observers

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Until the stop."""
        task_status.started()
        await self._stop.event.wait()
        self._observers.status.stopping = True
        self._observers.reporter.event("info", "daemon.stopping", reason=self._stop.signal_name)
        self._observers.systemd.stopping()
