"""Placements of GGUF models hold what they book, nothing that fits on a worker is missed, RAM and VRAM
together never exceed a machine, and what is kept answers as what is not."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar
from uuid import uuid4

from hypothesis import assume, given
from hypothesis import strategies as st

from gpustackd.domain.demand import Demand
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.model_spec import GpuId, GpuSelector, Strategy
from gpustackd.domain.outcome import NoFit, Placed, Placement
from gpustackd.placement.decide import Searches, decide
from gpustackd.placement.policy import Policy, Subject
from gpustackd.placement.search_cache import SearchCache
from gpustackd.ports import Proposal
from gpustackd.store.memory.store import MemoryStore
from tests.exploring import explored
from tests.fleets import GIB, fleet, model, occupy, positions
from tests.gguf_sizes import Toy, layered
from tests.property.oracle import breaches
from tests.property.test_placement import change

T = TypeVar("T")
CARDS = st.sampled_from(["A-3", "B-5", "C-8", "D-12", "E-24"])
OPTIONS = st.sampled_from(
    ["", "", "[ram=4]", "[ram=12]", "[ram=2]", "[uma,ram=10]", "[uma,ram=26]", "[type=rocm]", "[closed]",
     "[unknown]", "[state=NOT_READY]"]
)  # fmt: skip
TERMS = st.builds(lambda n, g, c, o: f"{n}x{g}x{c}{o}", st.integers(1, 2), st.integers(1, 4), CARDS, OPTIONS)
HOSTS = st.sampled_from(["1xcpu[ram=8]", "1xcpu[ram=30]"])
FLEETS = st.lists(st.one_of(TERMS, TERMS, HOSTS), min_size=1, max_size=3).map(" + ".join)
HELD = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3), st.integers(1, 20)), max_size=4)
SIZES = st.builds(
    lambda adds, out, buffer, logits: Toy(
        tuple(int(x * GIB) for x in (*adds, out)),
        int(buffer * GIB),
        int(logits * GIB),
        GIB // 8,
        GIB // 4,
        GIB,
    ),
    st.lists(st.sampled_from([0.5, 1, 1, 1, 2, 3]), min_size=1, max_size=8),
    st.sampled_from([0.25, 1, 3]),
    st.sampled_from([0.25, 1]),
    st.sampled_from([0, 0.25, 2]),
)  # fmt: skip
POLICIES = st.builds(
    Policy, strategy=st.sampled_from(list(Strategy)), rpc_ram=st.sampled_from([GIB // 2, 2 * GIB])
)


@st.composite
def demands(draw: st.DrawFn, *, flags: bool = True) -> Demand:
    sizes = draw(SIZES)
    given_flags: list[str] = []
    if flags and draw(st.integers(0, 3)) == 0:
        given_flags.append(f"-ngl={draw(st.integers(0, len(sizes.adds)))}")
    if flags and draw(st.integers(0, 3)) == 0:
        given_flags.append(
            "-ts=" + ",".join(map(str, draw(st.lists(st.integers(1, 4), min_size=2, max_size=3))))
        )
    spec = model(
        draw(st.integers(1, 3)),
        source="local_path",
        local_path="/m/x.gguf",
        cpu_offloading=draw(st.booleans()),
        distributed_inference_across_workers=draw(st.booleans()),
        backend_parameters=given_flags,
    )
    if flags and draw(st.integers(0, 3)) == 0:
        picked = draw(st.sets(st.tuples(st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=3))
        ids = tuple(GpuId(f"w{w}", "cuda", i) for w, i in sorted(picked))
        spec = replace(spec, gpu_selector=GpuSelector(ids))
    return layered(sizes, spec)


def build(text: str, held: list[tuple[int, int, int]]) -> Fleet:
    on = fleet(text)
    for n, (w, index, size) in enumerate(held):
        if f"w{w}" in on.by_name:
            occupy(on, f"w{w}", [index], size, instance=800 + n, model=50 + n % 3)
    return on


def check(on: Fleet, wanted: Demand, placed: Placement) -> None:
    """What a commit will ask, and that the figures are those of the division that is written."""
    assert wanted.gguf is not None
    sizes = wanted.gguf.sizes
    assert (placed.total_layers, placed.sized_for) == (sizes.total_layers, wanted.gguf.sized_for)
    split = placed.tensor_split
    devices = [(p, n) for p in placed.parts[1:] for n in range(len(p.gpu_ids))]
    main = placed.parts[0]
    devices += [(main, n) for n in range(len(main.gpu_ids))]
    assert (split is None) == (len(devices) < 2)
    assert placed.offload_layers is not None
    if split is not None:
        assert len(split) == len(devices)
        assert sum(split) == placed.offload_layers
    level = sizes.level(placed.offload_layers, tuple(map(float, split or ())))
    ram = level.ram_unified if main.unified else level.ram
    assert main.ram == ram
    for (part, n), share in zip(devices, level.devices if devices else (), strict=True):
        assert part.vram[n] == (share.unified if part.unified else share.vram)
        if part is not main:
            assert part.offload_layers == share.layers
            assert len(part.gpu_ids) == 1
    assert len({g for p in placed.parts for g in p.gpu_ids}) == len(devices)
    taken: dict[int, int] = {}
    for part in placed.parts:
        w = on.position[part.worker_id]
        assert on.row(w).state == "READY"
        assert (part is main) == (part.worker_id == main.worker_id)
        taken[w] = taken.get(w, 0) + part.ram + (sum(part.vram) if on.unified[w] else 0)
        for gpu_id, vram in zip(part.gpu_ids, part.vram, strict=True):
            gpu = on.gpu_rows[gpu_id]
            assert gpu.open
            assert gpu.capacity is not None
            assert vram <= gpu.capacity - int(on.vram_allocated[on.slot[gpu_id]])
            assert gpu.type == part.gpu_type
    for w, size in taken.items():
        assert size <= on.ram_capacity[w] - on.ram_allocated[w]


def test_a_placement_holds_and_its_figures_are_those_of_its_division():
    met = Counter()

    @given(FLEETS, HELD, demands(), POLICIES)
    @explored(150)
    def holds(text, held, wanted, policy):
        on = build(text, held)
        outcome = decide(on, wanted, Subject(1, "a-1"), policy)
        if isinstance(outcome, Placed):
            check(on, wanted, outcome.placement)
            for n in range(2, 6):
                other = decide(on, wanted, Subject(n, f"a-{n}"), policy)
                assert isinstance(other, Placed)
                check(on, wanted, other.placement)
            met[outcome.placement.strategy] += 1
        else:
            assert outcome.reasons
            assert outcome.cures
            assert len(outcome.message.encode()) < 4096

    holds()
    assert {"one_gpu", "one_worker", "cpu", "manual"} <= met.keys(), "the examples are too poor"


def ways(count: int, devices: int) -> list[tuple[int, ...]]:
    return [
        tuple(b - a for a, b in zip((0, *cuts), (*cuts, count), strict=False))
        for cuts in itertools.combinations(range(1, count), devices - 1)
    ]


def on_one_worker(on: Fleet, sizes: Toy, level: int) -> int | None:
    """The fewest GPUs of one worker and type that hold so many layers, by trying everything."""
    best: int | None = None
    for w in positions(on).tolist():
        if on.row(w).state != "READY":
            continue
        unified, pool = bool(on.unified[w]), int(on.ram_capacity[w] - on.ram_allocated[w])
        gpus = [g for g in on.gpu_rows.values() if g.worker_id == on.row(w).id and g.open and g.vram_total]
        free = {g.id: g.capacity - int(on.vram_allocated[on.slot[g.id]]) for g in gpus}
        for count in range(1, len(gpus) + 1):
            for some in itertools.combinations(sorted(gpus, key=lambda g: g.index), count):
                if len({g.type for g in some}) > 1 or (best is not None and count >= best):
                    continue
                for counts in ways(level, count):
                    found = sizes.level(level, tuple(map(float, counts)))
                    claims = [d.unified if unified else d.vram for d in found.devices]
                    ram = found.ram_unified + sum(claims) if unified else found.ram
                    if ram <= pool and all(c <= free[g.id] for c, g in zip(claims, some, strict=True)):
                        best = count
                        break
    return best


@given(FLEETS, HELD, demands(flags=False), POLICIES)
@explored(120)
def test_no_place_on_one_worker_is_missed_and_the_fewest_gpus_are_taken(text, held, wanted, policy):
    on = build(text, held)
    outcome = decide(on, wanted, Subject(1, "a-1"), policy)
    sizes = wanted.gguf.sizes
    fewest = on_one_worker(on, sizes, sizes.total_layers)
    if fewest is not None:
        assert isinstance(outcome, Placed), outcome.message
        assert outcome.placement.strategy == ("one_gpu" if fewest == 1 else "one_worker")
        assert outcome.placement.gpu_count == fewest
        return
    if isinstance(outcome, Placed) and outcome.placement.strategy == "many_workers":
        return
    levels = range(sizes.total_layers - 1, 0, -1) if wanted.spec.cpu_offloading else ()
    deepest = next((n for n in levels if on_one_worker(on, sizes, n)), 0)
    if deepest:
        assert isinstance(outcome, Placed), outcome.message
        placed = outcome.placement
        assert (placed.strategy, placed.offload_layers) == ("partial", deepest)
        assert placed.gpu_count == on_one_worker(on, sizes, deepest)
    elif isinstance(outcome, Placed):
        assert outcome.placement.strategy == "cpu"


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(4, 20)), min_size=2, max_size=4), st.integers(4, 60))
@explored(100)
def test_alike_layers_are_spread_over_workers_wherever_they_fit(workers, blocks):
    """With layers that are alike, what GPUs hold in whole layers decides."""
    text = " + ".join(f"1x{g}xA-{size}" for g, size in workers)
    sizes = Toy((GIB,) * (blocks + 1), GIB // 2, 0, 0, GIB // 2)
    held = [size - 1 for g, size in workers for _ in range(g)]
    assume(sum(held) >= blocks + 1)
    outcome = decide(
        fleet(text), layered(sizes, distributed_inference_across_workers=True), Subject(1, "a"), Policy()
    )
    assert isinstance(outcome, Placed), outcome.message
    check(fleet(text), layered(sizes), outcome.placement)


# -- committed ---------------------------------------------------------------------------------------------


def now(work: Coroutine[Any, Any, T]) -> T:
    """A coroutine of the store in memory, which never waits."""
    try:
        work.send(None)
    except StopIteration as done:
        found: T = done.value
        return found
    raise AssertionError("it waits")


def stored(text: str) -> MemoryStore:
    """The fleet that a text describes, as rows of a store."""
    store, drawn = MemoryStore(), fleet(text)
    for w in positions(drawn).tolist():
        row = drawn.row(w)
        reserve = row.vram_reserved if row.unified_memory else 0
        worker = store.database.insert(
            "workers", name=row.name, state=row.state, unified_memory=row.unified_memory,
            ram_total=row.ram_capacity + reserve, vram_reserved=row.vram_reserved,
        )  # fmt: skip
        for gpu in drawn.gpu_rows.values():
            if gpu.worker_id == row.id:
                store.database.insert("gpu_devices", worker_id=worker, index=gpu.index, type=gpu.type,
                             vram_total=gpu.vram_total, schedulable=gpu.schedulable)  # fmt: skip
    return store


def seen(store: MemoryStore) -> Fleet:
    """The view that a daemon has of it."""
    found = now(store.fleet_changes(None))
    on = Fleet()
    for worker in found.workers:
        on.put_worker(worker)
    for gpu in found.gpus:
        on.put_gpu(gpu)
    for booking in now(store.bookings(None)):
        on.add_booking(booking)
    return on


@given(FLEETS, st.lists(demands(), min_size=1, max_size=5), POLICIES)
@explored(100)
def test_ram_and_vram_that_are_committed_never_exceed_a_machine(text, wanted, policy):
    store, owner = stored(text), uuid4()
    on = seen(store)
    for n, each in enumerate(wanted):
        model_id = store.database.insert("models", name=f"m{n}")
        instance = store.database.insert("model_instances", name=f"i{n}", model_id=model_id)
        outcome = decide(on, each, Subject(instance, f"i{n}"), policy)
        if isinstance(outcome, NoFit):
            continue
        (claim,) = now(store.claim(owner, [(instance, 0)], 30))
        on.assume(outcome.placement, instance, model_id)
        version = store.database.models[model_id].version
        (result,) = now(store.commit(owner, "r", [Proposal(claim, version, outcome)]))
        assert result.code is None
        on.confirm(instance)
        assert breaches(store) == []
        fresh = seen(store)
        assert sorted(on.ram_allocated[on.alive]) == sorted(fresh.ram_allocated[fresh.alive])
        assert sorted(on.worker_version[on.alive]) == sorted(fresh.worker_version[fresh.alive])


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("decide"), st.integers(0, 2)),
        st.tuples(st.just("decide"), st.integers(0, 2)),
        st.tuples(st.just("remove"), st.integers(0, 9)),
        st.tuples(st.just("state"), st.integers(1, 6), st.sampled_from(["READY", "NOT_READY"])),
        st.tuples(st.just("shut"), st.integers(1, 8)),
        st.tuples(st.just("drop"), st.integers(1, 6)),
        st.tuples(st.just("forget"), st.integers(0, 9)),
    ),
    min_size=4,
    max_size=14,
)


@given(FLEETS, st.lists(demands(), min_size=3, max_size=3), POLICIES, ACTIONS)
@explored(150)
def test_kept_results_answer_as_fresh_ones_whatever_happened_between(text, wanted, policy, actions):
    on = build(text, [])
    wanted = [replace(d, spec=replace(d.spec, id=n + 1), digest=f"{n}") for n, d in enumerate(wanted)]
    memo: Searches = SearchCache()
    for n, action in enumerate(actions):
        if action[0] == "decide":
            d = wanted[action[1]]
            kept = decide(on, d, Subject(n, f"i-{n}"), policy, memo)
            assert kept == decide(on, d, Subject(n, f"i-{n}"), policy)
            if isinstance(kept, Placed):
                on.assume(kept.placement, n, d.spec.id)
                if n % 2:
                    on.confirm(n)
        else:
            change(on, action)
