"""Which workers to ask for files that lie on workers alone (estimate spec section 6.3)."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from gpustackd.domain.fleet.rows import WorkerRow
from gpustackd.domain.model_spec import ModelSpec
from gpustackd.errors import BadRow
from gpustackd.placement.filters.labels import LabelFilter
from gpustackd.sources.workers.file_api import Hosts, WorkerHost

READY = "READY"


def hosts_of(spec: ModelSpec, workers: Iterable[WorkerRow], having_file: Collection[int] = ()) -> Hosts:
    """READY workers with a file API that the model may use: of its cluster, among its picked GPUs, by its
    labels. Those in `having_file` (ids with a READY copy of the model) are asked first."""
    picked = {g.worker for g in spec.gpu_ids}
    try:
        terms = LabelFilter.of(spec.worker_selector).terms if spec.worker_selector is not None else ()
    except BadRow as e:
        return Hosts(dropped=(str(e),))
    hosts: list[tuple[bool, WorkerHost]] = []
    dropped: list[str] = []
    for row in workers:
        if spec.cluster_id is not None and row.cluster_id != spec.cluster_id:
            continue  # of another cluster: nothing to explain
        address = row.advertise_address or row.ip
        if picked and row.name not in picked:
            dropped.append(f"{row.name} has none of the selected GPUs")
        elif (term := next((t for t in terms if not t.holds(row.labels)), None)) is not None:
            dropped.append(f"{row.name} lacks label {term}")
        elif row.state != READY:
            dropped.append(f"{row.name} is {row.state}")
        elif not address or not row.port:
            dropped.append(f"{row.name} has no address or port")
        else:
            host = f"[{address}]" if ":" in address else address
            hosts.append((row.id not in having_file, WorkerHost(row.name, f"http://{host}:{row.port}")))
    hosts.sort(key=lambda pair: pair[0])
    return Hosts(tuple(host for _, host in hosts), tuple(dropped))
