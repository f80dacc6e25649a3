"""PostgreSQL servers for tests: quick ones, and ones that go down and come back."""

from __future__ import annotations

import signal
from collections.abc import Mapping

from gpustackd.store.embedded import EmbeddedPostgres

QUICK: Mapping[str, bool] = {"fsync": False, "synchronous_commit": False, "full_page_writes": False}
"""Commits do not wait for the disk: a crash of the machine loses the data."""


class Server(EmbeddedPostgres):
    """One that a test stops at will."""

    def crash(self) -> None:
        """Stop it at once, nothing written: the next start has to recover."""
        self._halt(signal.SIGQUIT)

    def restart(self, *, crash: bool = False) -> None:
        """Stop it and start it again at the same address."""
        self._halt(signal.SIGQUIT if crash else signal.SIGINT)
        self.start()
