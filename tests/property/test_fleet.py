"""The columnar fleet equals a naive model of rows and bookings, whatever happens in whatever order."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gpustackd.domain.bookings import Booking
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.fleet.rows import GpuRow, WorkerRow
from gpustackd.domain.outcome import Part, Placement
from tests.exploring import explored

WORKERS = st.integers(1, 5)
GPUS = st.integers(1, 9)
INSTANCES = st.integers(1, 6)
SIZES = st.integers(0, 100)


def home(gpu: int) -> int:
    """The worker of a GPU: two GPUs each."""
    return (gpu + 1) // 2


class FleetMachine(RuleBasedStateMachine):
    """Rows and ledger as dictionaries beside the arrays."""

    @initialize()
    def start(self) -> None:
        self.fleet = Fleet(workers=1, slots=1)
        self.workers: dict[int, WorkerRow] = {}
        self.gpus: dict[int, GpuRow] = {}
        self.ledger: list[Booking] = []
        self.assumed: dict[int, Placement] = {}

    # -- rows ----------------------------------------------------------------------------------------------

    @rule(
        w=WORKERS, ram=st.none() | SIZES, used=SIZES, unified=st.booleans(), over=st.booleans(), version=SIZES
    )
    def put_worker(self, w: int, ram: int | None, used: int, unified: bool, over: bool, version: int) -> None:
        row = WorkerRow(w, f"w{w}", 1, "READY", version, ram_capacity=ram, ram_allocated=used,
                        unified_memory=unified, over_committed=over)  # fmt: skip
        self.workers[w] = row
        self.fleet.put_worker(row)

    @rule(
        g=GPUS,
        capacity=st.none() | SIZES,
        used=SIZES,
        opened=st.booleans(),
        over=st.booleans(),
        version=SIZES,
    )
    def put_gpu(
        self, g: int, capacity: int | None, used: int, opened: bool, over: bool, version: int
    ) -> None:
        row = GpuRow(g, home(g), g % 2, "cuda", version, vram_total=capacity, capacity=capacity,
                     vram_allocated=used, open=opened, over_committed=over)  # fmt: skip
        self.fleet.put_gpu(row)
        if home(g) in self.workers:
            self.gpus[g] = row

    @rule(g=GPUS)
    def drop_gpu(self, g: int) -> None:
        self.gpus.pop(g, None)
        self.fleet.drop_gpu(g)

    @rule(w=WORKERS)
    def drop_worker(self, w: int) -> None:
        if self.workers.pop(w, None) is not None:
            self.gpus = {g: r for g, r in self.gpus.items() if r.worker_id != w}
            self.ledger = [b for b in self.ledger if b.worker_id != w]
        self.fleet.drop_worker(w)

    # -- the ledger ----------------------------------------------------------------------------------------

    @rule(i=INSTANCES, g=GPUS, vram=SIZES)
    def book_gpu(self, i: int, g: int, vram: int) -> None:
        self._book(Booking(i, i % 2, home(g), g, vram, 0))

    @rule(i=INSTANCES, w=WORKERS, ram=SIZES, occupies=st.booleans())
    def book_ram(self, i: int, w: int, ram: int, occupies: bool) -> None:
        self._book(Booking(i, i % 2, w, None, 0, ram, occupies=occupies))

    def _book(self, b: Booking) -> None:
        self.ledger.append(b)
        self.fleet.add_booking(b)

    @rule(w=WORKERS, keep=st.integers(0, 3))
    def reread_bookings(self, w: int, keep: int) -> None:
        kept = [b for b in self.ledger if b.worker_id == w][:keep]
        self.ledger = [b for b in self.ledger if b.worker_id != w] + kept
        self.fleet.set_bookings(w, kept)

    @rule(i=INSTANCES)
    def remove_instance(self, i: int) -> None:
        self.ledger = [b for b in self.ledger if b.instance_id != i]
        self.fleet.remove_instance(i)

    # -- own decisions ---------------------------------------------------------------------------------------

    @rule(i=INSTANCES, gpus=st.sets(GPUS, max_size=3), ram=SIZES, vram=SIZES, data=st.data())
    def assume(self, i: int, gpus: set[int], ram: int, vram: int, data: Any) -> None:
        known = sorted(g for g in gpus if g in self.gpus)
        if i in self.assumed or not self.workers:
            return
        homes = dict.fromkeys(home(g) for g in known) or [data.draw(st.sampled_from(sorted(self.workers)))]
        parts = []
        for w in homes:
            mine = tuple(g for g in known if home(g) == w)
            position = self.fleet.position[w]
            parts.append(
                Part(w, f"w{w}", "cuda" if mine else None, mine, tuple(g % 2 for g in mine),
                     tuple(self.gpus[g].version for g in mine), (vram,) * len(mine), ram,
                     self.workers[w].version, bool(self.fleet.unified[position]))
            )  # fmt: skip
        placement = Placement(tuple(parts))
        self.assumed[i] = placement
        self.fleet.assume(placement, i, i % 2)

    @rule(i=INSTANCES)
    def forget(self, i: int) -> None:
        self.assumed.pop(i, None)
        self.fleet.forget(i)

    @rule(i=INSTANCES)
    def confirm(self, i: int) -> None:
        placement = self.assumed.pop(i, None)
        self.fleet.confirm(i)
        if placement is None:
            return
        known = {(b.worker_id, b.gpu_id) for b in self.ledger if b.instance_id == i}
        read = {w for w, _ in known}
        for b in bookings(placement, i):
            if (b.worker_id, b.gpu_id) in known:
                continue
            self.ledger.append(b)
            worker, gpu = self.workers.get(b.worker_id), self.gpus.get(b.gpu_id or 0)
            if gpu is not None:
                self.gpus[gpu.id] = replace(
                    gpu, vram_allocated=gpu.vram_allocated + b.vram, version=gpu.version + 1
                )
            if worker is not None:
                taken = b.ram + (b.vram if worker.unified_memory else 0)
                self.workers[worker.id] = replace(worker, ram_allocated=worker.ram_allocated + taken)
        for part in placement.parts:
            worker = self.workers.get(part.worker_id)
            if (
                worker is not None
                and part.worker_id not in read
                and (part.ram or part.unified or not part.gpu_ids)
            ):
                self.workers[worker.id] = replace(worker, version=worker.version + 1)

    # -- what must hold ---------------------------------------------------------------------------------

    @invariant()
    def columns_equal_the_rows(self) -> None:
        fleet = self.fleet
        # assumed amounts follow a worker or GPU through going and coming back
        assumed = [(b, p) for i, p in self.assumed.items() for b in bookings(p, i)]
        assert set(fleet.position) == set(self.workers)
        assert set(fleet.slot) == set(self.gpus)
        fleet.renew()
        for w, row in self.workers.items():
            at = fleet.position[w]
            ram = sum(
                b.ram + (b.vram if any(q.unified for q in p.parts if q.worker_id == w) else 0)
                for b, p in assumed
                if b.worker_id == w
            )
            assert fleet.occupancy.ram_assumed[at] == ram
            assert fleet.ram_allocated[at] == row.ram_allocated
            assert fleet.worker_version[at] == row.version
            pool = 0 if row.ram_capacity is None or row.over_committed else max(
                0, row.ram_capacity - row.ram_allocated - ram)  # fmt: skip
            assert fleet.ram_free[at] == pool
            for g, gpu in self.gpus.items():
                if gpu.worker_id != w:
                    continue
                place = fleet.slot[g]
                held = sum(b.vram for b, _ in assumed if b.gpu_id == g)
                assert fleet.occupancy.vram_assumed[place] == held
                assert fleet.vram_allocated[place] == gpu.vram_allocated
                assert fleet.gpu_version[place] == gpu.version
                usable = gpu.open and not gpu.over_committed and bool(gpu.vram_total)
                free = max(0, (gpu.capacity or 0) - gpu.vram_allocated - held) if usable else 0
                assert fleet.free[place] == (min(free, pool) if row.unified_memory else free)

    @invariant()
    def counts_equal_the_bookings(self) -> None:
        fleet = self.fleet
        sitting = [*self.ledger, *(b for i, p in self.assumed.items() for b in bookings(p, i))]
        workers = Counter(b.worker_id for b in sitting if b.occupies and b.worker_id in self.workers)
        cards = Counter(b.gpu_id for b in sitting if b.occupies and b.gpu_id in self.gpus)
        for w in self.workers:
            assert fleet.occupancy.occupants[fleet.position[w]] == workers[w]
            reach: dict[int, set[int]] = {}
            for b in sitting:
                reach.setdefault(b.instance_id, set()).add(b.worker_id)
            spanning = sum(len(on) > 1 and w in on for on in reach.values())
            assert fleet.occupancy.spanning[fleet.position[w]] == spanning
        for g in self.gpus:
            assert fleet.occupancy.gpu_occupants[fleet.slot[g]] == cards[g]
        for m in (0, 1):
            mine = Counter(
                fleet.position[b.worker_id]
                for b in sitting
                if b.model_id == m and b.occupies and b.worker_id in self.workers
            )
            assert dict(fleet.occupancy.model_on_worker.get(m, {})) == dict(mine)
            slots = Counter(
                fleet.slot[b.gpu_id]
                for b in sitting
                if b.model_id == m and b.occupies and b.gpu_id in self.gpus
            )
            flat = {
                (w, s): n for w, on in fleet.occupancy.model_on_gpu.get(m, {}).items() for s, n in on.items()
            }
            assert flat == dict(slots)

    @invariant()
    def leaving_an_instance_out_changes_nothing_in_the_fleet(self) -> None:
        before = (
            self.fleet.occupancy.occupants.tolist(),
            self.fleet.vram_allocated.tolist(),
            self.fleet.tick,
        )
        view = self.fleet.without(1)
        assert before == (
            self.fleet.occupancy.occupants.tolist(),
            self.fleet.vram_allocated.tolist(),
            self.fleet.tick,
        )
        assert all(1 not in on for on in view.occupancy.instances_on_worker.values())


def bookings(placement: Placement, i: int) -> list[Booking]:
    """The ledger rows of a placement, written out independently of the fleet."""
    found: list[Booking] = []
    for n, part in enumerate(placement.parts):
        name = "subordinate" if n else "main"
        found += [
            Booking(i, i % 2, part.worker_id, g, v, 0, name)
            for g, v in zip(part.gpu_ids, part.vram, strict=True)
        ]
        if part.ram or not part.gpu_ids:
            found.append(Booking(i, i % 2, part.worker_id, None, 0, part.ram, name, not part.gpu_ids))
    return found


TestFleet = FleetMachine.TestCase
TestFleet.settings = explored(150, stateful_step_count=30)
