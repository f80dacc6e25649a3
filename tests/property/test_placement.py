"""Decisions hold what they promise, miss nothing that a plain search finds, and forget nothing they keep."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gpustackd.domain.demand import Demand, Engine
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.fleet.rows import GpuRow
from gpustackd.domain.model_spec import Strategy
from gpustackd.domain.outcome import NoFit, Placed, Placement
from gpustackd.engines.parallelism import Divisors
from gpustackd.placement.decide import Searches, decide
from gpustackd.placement.policy import Policy, Subject
from gpustackd.placement.search_cache import SearchCache
from tests.exploring import explored
from tests.fleets import demand, fleet, model, occupy, positions
from tests.places import places

CARDS = st.sampled_from(["A-24", "B-48", "C-80", "D-141"])
PLAIN = ["", "", ""]
ODD = ["[closed]", "[unknown]", "[state=NOT_READY]", "[cluster=2]", "[type=rocm]", "[zone=a]", "[uma,ram=64]"]
OPTIONS = st.sampled_from([*PLAIN, *ODD, "[ram=8]"])
TERMS = st.builds(lambda n, g, c, o: f"{n}x{g}x{c}{o}", st.integers(1, 3), st.integers(1, 5), CARDS, OPTIONS)
FLEETS = st.lists(TERMS, min_size=1, max_size=4).map(" + ".join)
HOLDS = st.lists(
    st.tuples(st.integers(1, 12), st.sets(st.integers(0, 4), min_size=1), st.integers(1, 60)), max_size=4
)
FLAGS = st.sampled_from(
    [
        (),
        ("--gpu-memory-utilization=0.4",),
        ("--tp=2",),
        ("--pp=3",),
        ("--tp=2", "--pp=4"),
        ("--gpu-memory-utilization=1",),
    ]
)
POLICIES = st.builds(Policy, strategy=st.sampled_from(list(Strategy)))


@st.composite
def demands(draw: st.DrawFn, engines: tuple[Engine, ...] = (Engine.VLLM,)) -> Demand:
    spec = model(
        draw(st.integers(1, 3)),
        categories=draw(st.sampled_from([("llm",), ("embedding",)])),
        backend_parameters=draw(FLAGS),
        cluster_id=draw(st.sampled_from([None, None, 1])),
        worker_selector=draw(st.sampled_from([None, None, {"zone": "a"}])),
        distributed_inference_across_workers=draw(st.booleans()),
        cpu_offloading=draw(st.booleans()),
    )
    return demand(
        draw(st.integers(1, 400)),
        spec,
        engine=draw(st.sampled_from(engines)),
        heads=draw(st.sampled_from([None, 6, 32])),
        ram=draw(st.sampled_from([0, 0, 4])),
    )


ENGINES = (Engine.VLLM, Engine.SGLANG, Engine.CUSTOM)


def build(text: str, held: list[tuple[int, set[int], int]]) -> Fleet:
    on = fleet(text)
    for n, (w, indexes, size) in enumerate(held):
        if f"w{w}" in on.by_name:
            occupy(on, f"w{w}", sorted(indexes), size, instance=800 + n, model=n % 3)
    return on


def check(on: Fleet, wanted: Demand, placed: Placement) -> None:
    """Everything that a commit will ask of the placement, and all that the model asked for."""
    spec, need = wanted.spec, wanted.need
    u = placed.vram_utilization
    seen: set[int] = set()
    for part in placed.parts:
        w = on.position[part.worker_id]
        row = on.row(w)
        assert row.state == "READY"
        assert spec.cluster_id in (None, row.cluster_id)
        assert all(row.labels.get(k) == v for k, v in (spec.worker_selector or {}).items())
        pool = int(on.free_ram(positions(on))[list(positions(on)).index(w)])
        assert part.ram <= pool
        assert part.worker_version == row.version
        for gpu_id, index, version, vram in zip(
            part.gpu_ids, part.gpu_indexes, part.gpu_versions, part.vram, strict=True
        ):
            gpu = on.gpu_rows[gpu_id]
            assert gpu_id not in seen
            seen.add(gpu_id)
            assert (gpu.worker_id, gpu.index, gpu.type, gpu.version) == (
                part.worker_id,
                index,
                part.gpu_type,
                version,
            )
            place = on.slot[gpu_id]
            assert gpu.open
            assert not gpu.over_committed
            assert 0 < vram <= gpu.capacity - int(on.vram_allocated[place])
            if u is not None and wanted.engine is Engine.CUSTOM:
                assert vram >= int(gpu.vram_total * u)
            elif u is not None:
                assert vram == int(gpu.vram_total * u)
        if row.unified_memory:
            assert sum(part.vram) + part.ram <= pool
    if placed.strategy == "cpu":
        assert wanted.engine is Engine.CUSTOM
        assert spec.cpu_offloading
        return
    assert sum(v for p in placed.parts for v in p.vram) >= need.vram
    if wanted.engine is Engine.CUSTOM:
        assert len(placed.parts) == 1
        return
    world = {("--tp=2",): 2, ("--pp=3",): 3, ("--tp=2", "--pp=4"): 8}.get(spec.backend_parameters)
    heads = wanted.facts.hyper.num_attention_heads
    if world:
        assert placed.gpu_count == world
    elif heads:
        assert heads % max(len(p.gpu_ids) for p in placed.parts) == 0


def _free(on: Fleet, gpu: GpuRow, pool: int) -> int:
    return max(0, min(gpu.capacity - int(on.vram_allocated[on.slot[gpu.id]]), pool))


def naive(on: Fleet, wanted: Demand) -> tuple[str, int] | None:
    """The first step of the ladder that has a place on one worker, and its number of GPUs; by brute force."""
    flags = wanted.spec.backend_parameters
    u = 0.0 if wanted.categories == ("embedding",) else 0.9
    u = next((float(f.partition("=")[2]) for f in flags if "utilization" in f), u)
    world = {("--tp=2",): 2, ("--pp=3",): 3, ("--tp=2", "--pp=4"): 8}.get(flags, 0)
    divides = Divisors(wanted.facts.hyper.num_attention_heads or 0)
    best = 0
    for w in positions(on).tolist():
        row = on.row(w)
        if row.state != "READY" or wanted.spec.cluster_id not in (None, row.cluster_id):
            continue
        if any(row.labels.get(k) != v for k, v in (wanted.spec.worker_selector or {}).items()):
            continue
        pool = max(0, row.ram_capacity - int(on.ram_allocated[w]))
        if wanted.need.ram > pool:
            continue
        cards = [
            (g.vram_total, _free(on, g, pool if row.unified_memory else 1 << 60), g.type)
            for g in on.gpu_rows.values()
            if g.worker_id == row.id and g.open and g.vram_total
        ]
        for n in [world] if world else range(1, len(cards) + 1):
            if world == 0 and n > 1 and not divides.allows(n):
                continue
            for kind in {c[2] for c in cards}:
                for some in itertools.combinations([c for c in cards if c[2] == kind], n):
                    part = -(-wanted.need.vram // n)
                    booked = [int(t * u) if u else part for t, _, _ in some]
                    good = all(
                        b <= f and (not u or f / t >= u) for b, (t, f, _) in zip(booked, some, strict=True)
                    )
                    if row.unified_memory and sum(booked) + wanted.need.ram > pool:
                        good = False
                    if good and sum(booked) >= wanted.need.vram and (best == 0 or n < best):
                        best = n
    if not best:
        return None
    return ("one_gpu" if best == 1 else "one_worker"), best


def test_a_placement_holds_and_none_is_missed():
    met = Counter()

    @given(FLEETS, HOLDS, demands(), POLICIES, st.text(max_size=8))
    @explored(200)
    def holds(text, held, wanted, policy, name):
        on = build(text, held)
        outcome = decide(on, wanted, Subject(1, name), policy)
        expected = naive(on, wanted)
        if isinstance(outcome, Placed):
            check(on, wanted, outcome.placement)
            met[outcome.placement.strategy] += 1
        if expected is not None:
            assert isinstance(outcome, Placed), outcome.message
            assert (outcome.placement.strategy, outcome.placement.gpu_count) == expected
        elif isinstance(outcome, Placed):
            assert outcome.placement.strategy == "many_workers"
            assert len(outcome.placement.parts) > 1

    holds()
    assert {"one_gpu", "one_worker", "many_workers"} <= met.keys(), "the examples are too poor"


def test_the_choice_is_among_the_candidates_with_the_best_score():
    met = Counter()

    @given(FLEETS, HOLDS, demands(ENGINES), POLICIES)
    @explored(120)
    def chosen(text, held, wanted, policy):
        on = build(text, held)
        outcome = decide(on, wanted, Subject(1, "a-1"), policy)
        listed = places(on, wanted, policy)
        if not isinstance(outcome, Placed) or outcome.placement.strategy not in ("one_gpu", "one_worker"):
            assert not listed
        else:
            assert outcome.placement.score >= max(p.score for p in listed) - 1e-6
            assert all(0 <= p.score <= 100 + 1e-9 for p in listed)
            for placed in listed:
                check(on, wanted, placed)
            met[outcome.placement.strategy] += len(listed) > 1

    chosen()
    assert min(met["one_gpu"], met["one_worker"]) > 0, "the examples are too poor"


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("decide"), st.integers(0, 3)),
        st.tuples(st.just("remove"), st.integers(0, 9)),
        st.tuples(st.just("state"), st.integers(1, 8), st.sampled_from(["READY", "NOT_READY"])),
        st.tuples(st.just("shut"), st.integers(1, 12)),
        st.tuples(st.just("drop"), st.integers(1, 8)),
        st.tuples(st.just("forget"), st.integers(0, 9)),
    ),
    min_size=4,
    max_size=16,
)


@given(FLEETS, st.lists(demands(ENGINES), min_size=4, max_size=4), POLICIES, ACTIONS)
@explored(100)
def test_kept_results_answer_as_fresh_ones_whatever_happened_between(text, wanted, policy, actions):
    on = build(text, [])
    wanted = [_own(d, n) for n, d in enumerate(wanted)]
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


def _own(d: Demand, n: int) -> Demand:
    return replace(d, spec=replace(d.spec, id=n + 1), digest=f"{n}")


def change(on: Fleet, action: tuple[Any, ...]) -> None:
    """One thing that happens to a fleet."""
    if action[0] == "remove":
        on.remove_instance(action[1])
    elif action[0] == "forget":
        on.forget(action[1])
    elif action[0] == "drop":
        on.drop_worker(action[1])
    elif action[0] == "state" and action[1] in on.position:
        row = on.row(on.position[action[1]])
        on.put_worker(replace(row, state=action[2], version=row.version + 1))
    elif action[0] == "shut" and action[1] in on.slot:
        gpu = on.gpu_rows[action[1]]
        on.put_gpu(replace(gpu, open=not gpu.open, version=gpu.version + 1))


@given(FLEETS, HOLDS, demands(ENGINES))
@explored(100)
def test_a_refusal_is_short_has_reasons_and_a_cure(text, held, wanted):
    on = build(text, held)
    outcome = decide(on, wanted, Subject(1, "a"), Policy())
    if isinstance(outcome, NoFit):
        assert len(outcome.message.encode()) < 4096
        assert outcome.reasons
        assert outcome.cures
