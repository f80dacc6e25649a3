"""Where the files of models are: READY copies on workers, and workers that may be asked for the rest."""

from __future__ import annotations

from collections.abc import Mapping

from gpustackd.daemon.scheduling.fleet_feed import FleetFeed
from gpustackd.domain.fleet.rows import WorkerRow
from gpustackd.domain.model_spec import ModelSpec
from gpustackd.ports import Store
from gpustackd.sources.worker_files import Hosts, WorkerHost, hosts_of


class FileLocations:
    """One per process; the reader of models and the path probe ask it."""

    def __init__(self, store: Store, fleet_feed: FleetFeed) -> None:
        self.ready_files: Mapping[str, Mapping[int, int]] = {}
        """As `Store.ready_files` gave it last: source index -> {worker id: bytes}; a new value when read."""
        self._store = store
        self._fleet_feed = fleet_feed

    async def refresh(self) -> None:
        """Read the READY files anew. Raise Contended or DatabaseUnavailable."""
        self.ready_files = await self._store.ready_files()

    def hosts(self, spec: ModelSpec) -> Hosts:
        """Workers whose file API may be asked about a model, those with a READY copy first."""
        return hosts_of(spec, self._workers(), self.ready_files.get(spec.source_index, {}).keys())

    def to_ask(self, spec: ModelSpec, path: str) -> dict[int, WorkerHost]:
        """Workers, by id, that may be asked whether they have a path, and of which no READY file says it."""
        rows = [row for row in self._workers() if row.port]
        if not rows:
            return {}
        ready = self.ready_files
        having = ready.get(spec.source_index, {}).keys() | ready.get(f"path:{path}", {}).keys()
        hosts = {host.name: host for host in hosts_of(spec, rows).hosts}
        return {row.id: hosts[row.name] for row in rows if row.name in hosts and row.id not in having}

    def known_size(self, source_index: str) -> int | None:
        """Bytes of a downloaded copy, None where there is none."""
        sizes = [size for size in self.ready_files.get(source_index, {}).values() if size > 0]
        return max(sizes, default=None)

    def _workers(self) -> list[WorkerRow]:
        return [row for row in self._fleet_feed.fleet.worker_rows if row is not None]
