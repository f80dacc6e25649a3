"""The wish to stop: SIGTERM and SIGINT, from the first moment on."""

from __future__ import annotations

import signal
from collections.abc import Callable

import anyio
from anyio.abc import TaskStatus


class Stopping:
    """`event` is set by the first signal. Until `heard` is taken over by a running daemon, which stops in
    order, a signal just ends the start (`starting` is cancelled): nothing is under way then."""

    def __init__(self, starting: anyio.CancelScope) -> None:
        self.event = anyio.Event()
        self.heard: Callable[[str], None] = lambda _: starting.cancel()

    async def watch(self, *, task_status: TaskStatus[None]) -> None:
        """Until cancelled."""
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            async for received in signals:
                if not self.event.is_set():
                    self.event.set()
                    self.heard(signal.Signals(received).name)
