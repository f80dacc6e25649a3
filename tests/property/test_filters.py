"""Filters over random fleets: no card that its engine does not run on is ever taken, whatever changes; kept
results are what fresh ones would be."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gpustackd.domain.backends import Backends, backend_row, device_kind
from gpustackd.domain.demand import Demand, Engine
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.fleet.rows import GpuRow, WorkerRow
from gpustackd.domain.model_spec import Source
from gpustackd.domain.outcome import NoFit, Placed
from gpustackd.domain.paths import PathKnowledge, Presence
from gpustackd.engines.images import packaged
from gpustackd.placement.decide import Searches, decide
from gpustackd.placement.filters.framework_verdict import verdicts
from gpustackd.placement.policy import Policy, Subject
from gpustackd.placement.search_cache import SearchCache
from tests.exploring import explored
from tests.fleets import GIB, demand, model

TYPES = st.sampled_from(["cuda", "rocm", "cann", "neuware"])
LEVELS = st.sampled_from([None, "11.8", "12.4", "12.9", "13.0", "6.4", "7.2", "8.3", "odd"])
CHIPS = st.sampled_from([None, "Ascend910B3", "Ascend310P3", "Ascend777"])
ARCHES = st.sampled_from([None, "x86_64", "arm64"])
FRAMEWORKS = st.sampled_from(["cuda", "rocm", "cpu", "any", "neuware", None])
ANSWERS = st.dictionaries(st.integers(1, 5), st.sampled_from(list(Presence)))
PATH = "/models/m"

CARD = st.tuples(TYPES, LEVELS, CHIPS, st.sampled_from([16, 24, 80]))
WORKERS = st.lists(st.tuples(ARCHES, st.lists(CARD, max_size=4)), min_size=1, max_size=5)
ENTRIES = st.dictionaries(
    st.sampled_from(["1.0", "0.11.0", "v2"]),
    st.fixed_dictionaries({"custom_framework": FRAMEWORKS}),
    max_size=3,
)


def built(workers: list[tuple[str | None, list[tuple[str, str | None, str | None, int]]]]) -> Fleet:
    made = Fleet()
    ids = iter(range(1, 1000))
    for n, (arch, cards) in enumerate(workers, 1):
        made.put_worker(
            WorkerRow(id=n, name=f"w{n}", cluster_id=1, state="READY", ram_capacity=512 * GIB, cpu_arch=arch)
        )
        for index, (kind, level, chip, size) in enumerate(cards):
            made.put_gpu(
                GpuRow(
                    id=next(ids), worker_id=n, index=index, type=kind, vram_total=size * GIB,
                    capacity=size * GIB, runtime_version=level, arch_family=chip if kind == "cann" else None,
                )
            )  # fmt: skip
    return made


def changed(on: Fleet, worker: int, level: str | None, held: int) -> None:
    """A worker reports another level, and others take some of its first card."""
    ids = [int(g) for g in on.gpu_id[worker % on.count] if g]
    for gpu_id in ids:
        row = on.gpu_rows[gpu_id]
        on.put_gpu(replace(row, runtime_version=level, version=row.version + 1))
    on.set_foreign({ids[0]: held * GIB} if ids and held else {})


@explored(150)
@given(
    WORKERS,
    st.sampled_from(["vLLM", "mine"]),
    ENTRIES,
    st.sampled_from([None, "0.11.0", "2", ">=1"]),
    st.integers(2, 60),
    st.lists(st.tuples(st.integers(0, 4), LEVELS, st.sampled_from([0, 4, 20]), ANSWERS), max_size=4),
)
def test_no_wrong_card_is_ever_taken_and_kept_results_are_fresh(workers, name, entries, pin, need, events):
    on = built(workers)
    backends = Backends.of([backend_row(name, None, entries)])
    spec = model(source=Source.LOCAL_PATH, local_path=PATH, backend=name, backend_version=pin)
    wanted: Demand = demand(need, spec, engine=Engine.CUSTOM if name == "mine" else Engine.VLLM)
    known = verdicts(packaged(), backends, name, pin, None)
    memo: Searches = SearchCache()
    for event in [None, *events]:
        answers = {}
        if event is not None:
            worker, level, held, answers = event
            changed(on, worker, level, held)
        policy = Policy(backends=backends, paths={PATH: PathKnowledge(answers)})
        outcome = decide(on, wanted, Subject(1, "x"), policy, memo)
        fresh = decide(on, wanted, Subject(1, "x"), policy)
        assert type(outcome) is type(fresh)
        if isinstance(outcome, NoFit):
            assert isinstance(fresh, NoFit)
            assert (outcome.message, outcome.cures) == (fresh.message, fresh.cures)
            continue
        assert isinstance(fresh, Placed)
        assert outcome.placement == fresh.placement
        for part in outcome.placement.parts:
            assert answers.get(part.worker_id, Presence.HERE) is Presence.HERE
            for gpu_id, booked in zip(part.gpu_ids, part.vram, strict=True):
                row = on.gpu_rows[gpu_id]
                kind = device_kind(row.type, row.runtime_version, row.arch_family, row.name)
                assert known.of(
                    kind, {"x86_64": "amd64"}.get(arch := workers[part.worker_id - 1][0] or "", arch)
                ).ok
                w, s = on.slot[gpu_id]
                assert booked + int(on.foreign[w, s]) <= row.capacity
