"""What the reader of models wants to know of the fleet: whom to ask for files that only workers have."""

from __future__ import annotations

from collections.abc import Mapping

from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.model_spec import ModelSpec
from gpustackd.sources.worker_files import Hosts, WorkerHost, hosts_of


class FileLocations:
    """The session under way sets the fleet and the READY files; the reader outlives sessions."""

    def __init__(self) -> None:
        self.fleet: Fleet | None = None
        self.files: Mapping[str, Mapping[int, int]] = {}

    def hosts(self, spec: ModelSpec) -> Hosts:
        """Workers whose file API may be asked about a model, those with a READY copy first."""
        if self.fleet is None:
            return Hosts()
        rows = [row for row in self.fleet.worker_rows if row is not None]
        return hosts_of(spec, rows, self.files.get(spec.source_index, {}).keys())

    def to_ask(self, spec: ModelSpec, path: str) -> dict[int, WorkerHost]:
        """Workers, by id, that may be asked whether they have a path, and of which no READY file tells it."""
        if self.fleet is None:
            return {}
        rows = [row for row in self.fleet.worker_rows if row is not None and row.port]
        if not rows:
            return {}
        having = self.files.get(spec.source_index, {}).keys() | self.files.get(f"path:{path}", {}).keys()
        hosts = {host.name: host for host in hosts_of(spec, rows).hosts}
        return {row.id: hosts[row.name] for row in rows if row.name in hosts and row.id not in having}

    def known_size(self, source_index: str) -> int | None:
        """Bytes of a downloaded copy, None where there is none."""
        sizes = [size for size in self.files.get(source_index, {}).values() if size > 0]
        return max(sizes, default=None)
