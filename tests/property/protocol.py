"""A fleet, its users and several replicas as a state machine over one store, or over two that act alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar
from uuid import UUID

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gpustackd.domain.fleet.rows import GpuRow, WorkerRow
from gpustackd.domain.lifecycle import InstanceState
from gpustackd.domain.outcome import Check, Cure, NoFit, Part, Placed, Placement, Reason
from gpustackd.errors import Refused
from gpustackd.ports import Claim, CommitCode, FleetChanges, Proposal, Refusal
from tests.conformance.scenes import MemoryScene, Scene
from tests.property.oracle import breaches
from tests.property.stepping import now

T = TypeVar("T")
REPLICAS = 3
NO = NoFit((Reason("no_room", "fit", "no room"),), "no room", Cure.CAPACITY)
PLACES = ("worker_id", "gpu_type", "gpu_indexes", "computed_resource_claim", "distributed_servers")
sizes = st.integers(0, 24)
perhaps = st.one_of(st.none(), sizes)
pick = st.integers(0, 10**6)
seldom = st.sampled_from([False, False, False, True])
"""Whether what ends much at once really happens: else hardly anything would ever be placed."""


@dataclass
class Plan:
    """What a replica decided for one instance, by names."""

    instance: str
    claims: list[Claim]
    parts: list[tuple[str, list[str], list[int], int]]
    """(worker, GPUs, vram of each, ram)"""
    views: list[FleetChanges]
    check: Check
    over: bool
    models: list[int]
    """Version of the model as seen, for each scene."""


@dataclass
class Replica:
    """One owner: what it saw last, and what it has decided but not committed."""

    owner: UUID
    views: list[FleetChanges] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)


class Protocol(RuleBasedStateMachine):
    """Rules act on every scene alike; `ids[name]` are the ids that a row has in each of them."""

    outcomes: ClassVar[Counter[str]]
    """How proposals ended, over all histories."""

    def __init__(self) -> None:
        super().__init__()
        self.replicas = [Replica(UUID(int=n + 1)) for n in range(REPLICAS)]
        self.ids: dict[str, list[int]] = {}
        self.model_of: dict[str, str] = {}
        self.host: dict[str, str] = {}
        self.index: dict[str, int] = {}
        self.count = 0
        self.placed_once: set[tuple[str, int]] = set()
        self.scenes: list[Scene] = self.open()

    def open(self) -> list[Scene]:
        return [MemoryScene()]

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return now(work)

    # -- names ------------------------------------------------------------------------------------------

    def names(self, kind: str) -> list[str]:
        return sorted(n for n in self.ids if n.startswith(kind))

    def one(self, kind: str, at: int) -> str | None:
        names = self.names(kind)
        return names[at % len(names)] if names else None

    def new(self, kind: str) -> str:
        self.count += 1
        return f"{kind}{self.count:03}"

    def insert(self, kind: str, table: str, refer: dict[str, str] | None = None, **columns: Any) -> str:
        name = self.new(kind)
        if table != "gpu_devices":
            columns["name"] = name
        self.ids[name] = [
            self.run(s.insert(table, **columns, **{c: self.ids[n][k] for c, n in (refer or {}).items()}))
            for k, s in enumerate(self.scenes)
        ]
        return name

    def update(self, name: str, table: str, **columns: Any) -> bool:
        """Whether it was let through: by all scenes or by none."""
        went = []
        for k, scene in enumerate(self.scenes):
            try:
                self.run(scene.update(table, self.ids[name][k], **columns))
                went.append(True)
            except Refused:
                went.append(False)
        assert len(set(went)) == 1, (name, columns, went)
        return went[0]

    def remove(self, table: str, *names: str) -> None:
        for k, scene in enumerate(self.scenes):
            self.run(scene.delete(table, *[self.ids[n][k] for n in names]))

    def forget(self, *names: str) -> None:
        for name in names:
            del self.ids[name]

    def gpus_of(self, worker: str) -> list[str]:
        return [g for g in self.names("g") if self.host[g] == worker]

    # -- users ------------------------------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        self.add_worker(40, 0, False, [16, 16])
        self.add_worker(40, 1, True, [16])
        self.add_model(1)
        self.create(0, 2)
        # every history goes on from a fleet on which something lies
        self.decide(
            0, [0], fresh=True, wide=2, vram=3, ram=1, blind=False, check=Check.FITS, over=False, at_once=True
        )

    @rule(ram=perhaps, reserve=st.integers(0, 2), unified=st.booleans(), vram=st.lists(perhaps, max_size=3))
    def add_worker(self, ram: int | None, reserve: int, unified: bool, vram: list[int | None]) -> None:
        worker = self.insert(
            "w", "workers", state="READY", ram_total=ram, vram_reserved=reserve, unified_memory=unified
        )
        for size in vram:
            self.add_gpu_to(worker, size)

    def add_gpu_to(self, worker: str, size: int | None) -> None:
        index = len(self.gpus_of(worker))
        taken = {self.index[g] for g in self.gpus_of(worker)}
        while index in taken:
            index += 1
        gpu = self.insert(
            "g", "gpu_devices", {"worker_id": worker}, index=index, type="cuda", vram_total=size
        )
        self.host[gpu], self.index[gpu] = worker, index

    @rule(at=pick, size=perhaps)
    def add_gpu(self, at: int, size: int | None) -> None:
        if worker := self.one("w", at):
            self.add_gpu_to(worker, size)

    @rule(at=pick, really=seldom)
    def lose_worker(self, at: int, really: bool) -> None:
        if not really:
            return
        if worker := self.one("w", at):
            self.remove("workers", worker)
            self.forget(worker, *self.gpus_of(worker))

    @rule(at=pick, really=seldom)
    def lose_gpu(self, at: int, really: bool) -> None:
        if not really:
            return
        if gpu := self.one("g", at):
            self.remove("gpu_devices", gpu)
            self.forget(gpu)

    @rule(at=pick, size=perhaps)
    def resize_gpu(self, at: int, size: int | None) -> None:
        if gpu := self.one("g", at):
            assert self.update(gpu, "gpu_devices", vram_total=size)

    @rule(at=pick, ram=perhaps, reserve=st.integers(0, 6))
    def resize_worker(self, at: int, ram: int | None, reserve: int) -> None:
        if worker := self.one("w", at):
            assert self.update(worker, "workers", ram_total=ram, vram_reserved=reserve)

    @rule(at=pick, unified=st.booleans())
    def switch_memory(self, at: int, unified: bool) -> None:
        if worker := self.one("w", at):
            assert self.update(worker, "workers", unified_memory=unified)

    @rule(at=pick, state=st.sampled_from(["READY", "READY", "MAINTENANCE"]))
    def switch_worker(self, at: int, state: str) -> None:
        if worker := self.one("w", at):
            assert self.update(worker, "workers", state=state)

    @rule(at=pick, schedulable=st.booleans())
    def switch_gpu(self, at: int, schedulable: bool) -> None:
        if gpu := self.one("g", at):
            assert self.update(gpu, "gpu_devices", schedulable=schedulable)

    @rule(priority=st.integers(0, 3))
    def add_model(self, priority: int) -> None:
        self.insert("m", "models", priority=priority)

    @rule(at=pick)
    def edit_model(self, at: int) -> None:
        decided = sorted({self.model_of[p.instance] for r in self.replicas for p in r.plans} & set(self.ids))
        model = decided[at % len(decided)] if decided else self.one("m", at)
        if model:
            self.count += 1
            assert self.update(model, "models", backend_version=str(self.count))

    @rule(at=pick, many=st.integers(1, 3))
    def create(self, at: int, many: int) -> None:
        if model := self.one("m", at):
            for _ in range(many):
                instance = self.insert("i", "model_instances", {"model_id": model})
                self.model_of[instance] = model

    @rule(at=pick, really=seldom)
    def delete_model(self, at: int, really: bool) -> None:
        if not really:
            return
        if model := self.one("m", at):
            self.remove("models", model)
            self.forget(model, *[i for i in self.names("i") if self.model_of[i] == model])

    @rule(some=st.lists(pick, min_size=1, max_size=3), really=seldom)
    def delete_instances(self, some: list[int], really: bool) -> None:
        if not really:
            return
        names = {n for at in some if (n := self.one("i", at))}
        if names:
            self.remove("model_instances", *sorted(names))
            self.forget(*names)

    @rule(at=pick, state=st.sampled_from(list(InstanceState)))
    def report(self, at: int, state: InstanceState) -> None:
        """A worker (or anybody) writes a state, lawful or not."""
        if instance := self.one("i", at):
            self.update(instance, "model_instances", state=state)

    @rule(
        at=pick, epoch=st.integers(-1, 1), state=st.sampled_from([InstanceState.PENDING, InstanceState.ERROR])
    )
    def send_back(self, at: int, epoch: int, state: InstanceState) -> None:
        if instance := self.one("i", at):
            row = self.run(self.scenes[0].row("model_instances", self.ids[instance][0]))
            assert row is not None
            cleared = dict.fromkeys(PLACES)
            self.update(
                instance,
                "model_instances",
                state=state,
                placement_epoch=max(0, row["placement_epoch"] + epoch),
                **cleared,
            )

    @rule(some=st.lists(pick, min_size=1, max_size=3), really=seldom)
    def evict(self, some: list[int], really: bool) -> None:
        if not really:
            return
        names = sorted({n for at in some if (n := self.one("i", at))})
        for k, scene in enumerate(self.scenes):
            self.run(scene.evict(*[self.ids[n][k] for n in names]))

    # -- replicas ---------------------------------------------------------------------------------------

    @rule(who=pick)
    def look(self, who: int) -> None:
        replica = self.replicas[who % REPLICAS]
        replica.views = [self.run(s.store.fleet_changes(None)) for s in self.scenes]

    @rule(
        who=pick,
        some=st.lists(pick, min_size=1, max_size=3),
        fresh=st.booleans(),
        wide=st.integers(0, 3),
        vram=st.integers(0, 6),
        ram=st.integers(0, 4),
        blind=seldom,
        check=st.sampled_from([Check.FITS, Check.FITS, Check.UNCHANGED]),
        over=seldom,
        at_once=st.booleans(),
    )
    def decide(
        self,
        who: int,
        some: list[int],
        fresh: bool,
        wide: int,
        vram: int,
        ram: int,
        blind: bool,
        check: Check,
        over: bool,
        at_once: bool,
    ) -> None:
        """Claim instances and decide on what was seen last; `blind`: whether it fits or not; `at_once`: and
        commit."""
        replica = self.replicas[who % REPLICAS]
        if fresh or not replica.views:
            self.look(who)
        waiting = self.waiting()
        if not waiting:
            self.add_model(0)
            self.create(len(self.names("m")) - 1, len(some))
            waiting = self.waiting()
        for at in some[: len(waiting)]:
            instance = waiting.pop(at % len(waiting))
            claims = self.claims(replica, instance)
            parts = self.chosen(replica.views[0], at, wide, vram, ram, blind or over)
            models = []
            for k, scene in enumerate(self.scenes):
                (model,) = self.run(scene.store.models([self.ids[self.model_of[instance]][k]]))
                models.append(model.version)
            replica.plans.append(Plan(instance, claims, parts, replica.views, check, over, models))
        if at_once:
            self.commit_of(replica)

    def waiting(self) -> list[str]:
        """Names of PENDING instances in the order that every store gives them."""
        told = []
        for k, scene in enumerate(self.scenes):
            named = {i[k]: n for n, i in self.ids.items() if n[0] == "i"}
            told.append([named[w.id] for w in self.run(scene.store.waiting(None))])
        assert all(sorted(t) == sorted(told[0]) for t in told)
        return told[0]

    def claims(self, replica: Replica, instance: str) -> list[Claim]:
        claims: list[Claim] = []
        for k, scene in enumerate(self.scenes):
            waiting = self.run(scene.store.waiting([self.ids[instance][k]]))
            claims += self.run(scene.store.claim(replica.owner, [(w.id, w.epoch) for w in waiting], 30))
        assert len({(c.epoch, c.attempts, c.priority) for c in claims}) == 1
        return claims

    def chosen(
        self, view: FleetChanges, at: int, wide: int, vram: int, ram: int, blind: bool
    ) -> list[tuple[str, list[str], list[int], int]]:
        """First fit by name from a place that depends on `at`, over as many GPUs as wanted."""
        named = {i[0]: n for n, i in self.ids.items() if n[0] in "wg"}
        hosts = {w.id: w for w in view.workers if w.id in named}
        cards = sorted((g for g in view.gpus if g.worker_id in hosts and g.id in named), key=lambda g: g.id)
        if wide == 0:
            able = [w for w in hosts.values() if blind or self.has_ram(w, ram)]
            return [(named[able[at % len(able)].id], [], [], ram)] if able else []
        turned = [*cards[at % len(cards) :], *cards[: at % len(cards)]] if cards else []
        fit = [
            g for g in turned
            if blind
            or (self.has_vram(g, vram + wide) and self.has_ram(hosts[g.worker_id], ram + wide * vram))
        ][:wide]  # fmt: skip
        found: dict[str, list[str]] = {}
        for g in fit:
            found.setdefault(named[g.worker_id], []).append(named[g.id])
        even = vram % 2 == 0
        return [(w, gs, [vram + (0 if even else n) for n in range(len(gs))], ram) for w, gs in found.items()]

    @staticmethod
    def has_ram(worker: WorkerRow, ram: int) -> bool:
        free = None if worker.ram_capacity is None else worker.ram_capacity - worker.ram_allocated
        return worker.state == "READY" and free is not None and free >= ram

    @staticmethod
    def has_vram(gpu: GpuRow, vram: int) -> bool:
        return gpu.open and gpu.capacity is not None and gpu.capacity - gpu.vram_allocated >= vram

    def proposal(self, plan: Plan, k: int) -> Proposal | None:
        hosts = {w.id: w for w in plan.views[k].workers}
        cards = {g.id: g for g in plan.views[k].gpus}
        parts = []
        for worker, gpus, vram, ram in plan.parts:
            if worker not in self.ids or not set(gpus) <= set(self.ids):
                return None  # a name that is gone: its ids are nobody's any more
            host = hosts[self.ids[worker][k]]
            seen = [cards[self.ids[g][k]] for g in gpus]
            parts.append(
                Part(
                    worker_id=host.id,
                    worker_name=host.name,
                    gpu_type="cuda" if gpus else None,
                    gpu_ids=tuple(g.id for g in seen),
                    gpu_indexes=tuple(g.index for g in seen),
                    gpu_versions=tuple(g.version for g in seen),
                    vram=tuple(vram),
                    ram=ram,
                    worker_version=host.version,
                    unified=host.unified_memory,
                )
            )
        placement = Placement(tuple(parts), check=plan.check, over_commit=plan.over, mode="delegated")
        return Proposal(plan.claims[k], plan.models[k], Placed(placement)) if parts else None

    @rule(who=pick)
    def commit(self, who: int) -> None:
        """Everything that a replica has decided, in one batch; what has no place is refused."""
        busy = [r for r in self.replicas if r.plans]
        if busy:
            self.commit_of(busy[who % len(busy)])

    def commit_of(self, replica: Replica) -> None:
        plans, replica.plans = replica.plans, []
        plans = list({p.instance: p for p in plans}.values())  # the last claim on an instance
        told: list[list[Any]] = []
        for k, scene in enumerate(self.scenes):
            made = [(p, self.proposal(p, k)) for p in plans]
            batch = [x for _, x in made if x is not None]
            results = {r.instance_id: r for r in self.run(scene.store.commit(replica.owner, "r", batch))}
            refused = self.run(
                scene.store.refuse(
                    replica.owner, "r", [Refusal(p.claims[k], NO) for p, x in made if x is None]
                )
            )
            again = [
                Refusal(p.claims[k], NO, "CONFLICT")
                for p, x in made
                if x is not None and results[p.claims[k].id].code is not None
            ]
            self.run(scene.store.refuse(replica.owner, "r", again))
            told.append([
                "refused" if p.claims[k].id in refused else results[p.claims[k].id].code if x else "lost"
                for p, x in made
            ])  # fmt: skip
        assert all(t == told[0] for t in told), told
        self.outcomes.update(str(x or "placed") for x in told[0])
        for plan, outcome in zip(plans, told[0], strict=True):
            if outcome is None:
                once = plan.instance, plan.claims[0].epoch
                assert once not in self.placed_once
                self.placed_once.add(once)
            assert outcome in (None, "refused", "lost", *CommitCode)

    @rule(who=pick, really=seldom)
    def crash(self, who: int, really: bool) -> None:
        """A new process takes the place of one that died with claims in its hands."""
        if not really:
            return
        self.count += 1
        self.replicas[who % REPLICAS] = Replica(UUID(int=1000 + self.count))

    @rule(who=pick, really=seldom)
    def hand_back(self, who: int, really: bool) -> None:
        if not really:
            return
        replica = self.replicas[who % REPLICAS]
        for scene in self.scenes:
            self.run(scene.store.hand_back(replica.owner))

    @rule(at=pick, swept=st.booleans())
    def expire(self, at: int, swept: bool) -> None:
        """A lease is over; whoever held it may sleep on."""
        instance = self.one("i", at)
        for k, scene in enumerate(self.scenes):
            if instance:
                self.run(scene.expire(self.ids[instance][k]))
            if swept:
                self.run(scene.store.expire_leases())

    @rule(who=pick)
    def renew(self, who: int) -> None:
        replica = self.replicas[who % REPLICAS]
        kept = []
        for k, scene in enumerate(self.scenes):
            ids = [p.claims[k].id for p in replica.plans]
            renewed = self.run(scene.store.renew(replica.owner, ids, 60))
            kept.append([i in renewed for i in ids])
        assert all(x == kept[0] for x in kept)

    # -- what always holds --------------------------------------------------------------------------------

    @invariant()
    def every_rule_holds(self) -> None:
        (scene,) = self.scenes
        assert isinstance(scene, MemoryScene)
        assert breaches(scene.memory) == []

    @invariant()
    def the_feed_tells_the_whole_fleet(self) -> None:
        for scene in self.scenes:
            whole = self.run(scene.store.fleet_changes(None))
            assert len(whole.workers) == len(self.names("w"))
            assert len(whole.gpus) == len(self.names("g"))
