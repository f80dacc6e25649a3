"""What a placement books: its ledger rows, and the bytes it takes from each worker's own row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpustackd.domain.outcome import Part, Placement


@dataclass(frozen=True, slots=True)
class Booking:
    """One ledger row (`instance_claims`): bytes on a GPU, or in a worker's RAM where `gpu_id` is None."""

    instance_id: int
    model_id: int
    worker_id: int
    gpu_id: int | None
    vram: int
    ram: int
    part: str = "main"
    """`main` or `subordinate`."""
    occupies: bool = True
    """False for the RAM row of a part that has GPUs: that part is counted by its GPU rows."""
    backend: str = ""
    """Backend of the instance's model; empty = unknown."""


def ledger_rows(placement: Placement) -> Iterator[tuple[Part, str, int | None, int, int, int]]:
    """The ledger rows of a placement as (part, part name, GPU id, version of the GPU's row, VRAM, RAM).

    One row for each GPU; one for the worker's RAM (GPU id None, version 0) where a part books RAM or has no
    GPU.
    """
    name = "main"
    for part in placement.parts:
        for gpu_id, version, vram in zip(part.gpu_ids, part.gpu_versions, part.vram, strict=True):
            yield part, name, gpu_id, version, vram, 0
        if part.ram or not part.gpu_ids:
            yield part, name, None, 0, 0, part.ram
        name = "subordinate"


def bookings(placement: Placement, instance_id: int, model_id: int, backend: str = "") -> list[Booking]:
    """The ledger rows of one instance's placement."""
    return [
        Booking(
            instance_id,
            model_id,
            part.worker_id,
            gpu_id,
            vram,
            ram,
            name,
            gpu_id is not None or not part.gpu_ids,
            backend,
        )
        for part, name, gpu_id, _, vram, ram in ledger_rows(placement)
    ]


def worker_booking(part: Part) -> int | None:
    """Bytes that a part takes from its worker's own row; None where it does not touch that row.

    On unified memory, VRAM comes out of the worker's one pool. A part without GPUs touches the row even with
    0 bytes: the row says whether the worker is READY.
    """
    if part.unified:
        return part.ram + sum(part.vram)
    if part.ram or not part.gpu_ids:
        return part.ram
    return None


def worker_bookings(placement: Placement) -> list[tuple[Part, int]]:
    """For each worker's row that a placement touches: the first part there, and the bytes of all parts."""
    by_worker: dict[int, tuple[Part, int]] = {}
    for part in placement.parts:
        if (amount := worker_booking(part)) is not None:
            first, before = by_worker.get(part.worker_id, (part, 0))
            by_worker[part.worker_id] = (first, before + amount)
    return list(by_worker.values())
