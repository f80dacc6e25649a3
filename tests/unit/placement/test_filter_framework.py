"""The backend framework filter as decisions use it: the right workers, the right cards, the right words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gpustackd.domain.backends import Backends, backend_row
from gpustackd.domain.demand import Demand, Engine
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.model_spec import Source
from gpustackd.domain.outcome import Cure, NoFit
from gpustackd.placement.filters import chain
from gpustackd.placement.filters.framework import FrameworkFilter
from gpustackd.placement.policy import Policy
from gpustackd.placement.search_cache import SearchCache
from tests.fleets import ask, demand, fleet, model, occupy, place, refused, seats


def told(on: Fleet, worker: str, *, arch: str | None = None, **card: Any) -> Fleet:
    """The same fleet, with what a worker and its cards report."""
    w = on.by_name[worker]
    row = on.row(w)
    on.put_worker(replace(row, cpu_arch=arch, version=row.version + 1))
    for gpu_id in on.gpu_id[w][on.gpu_id[w] != 0].tolist():
        gpu = on.gpu_rows[gpu_id]
        on.put_gpu(replace(gpu, version=gpu.version + 1, **card))
    return on


def cuda(level: str | None, arch: str | None = None) -> Fleet:
    return told(fleet("1x1xA-24"), "w1", arch=arch, runtime_version=level)


def own(name: str, owner: str | None = None, **entries: dict[str, Any]) -> Any:
    return backend_row(name, owner, {v.removeprefix("v").replace("_", "."): e for v, e in entries.items()})


def known(*rows: Any) -> Policy:
    return Policy(backends=Backends.of(rows))


CUDA = {"custom_framework": "cuda"}
ROCM = {"custom_framework": "rocm"}
CPU = {"custom_framework": "cpu"}


def vllm(need: float = 8, **fields: Any) -> Demand:
    return demand(need, model(backend="vLLM", **fields))


def no(on: Fleet, wanted: Demand, policy: Policy | None = None) -> NoFit:
    return refused(on, wanted, policy=policy or known())


# -- level, architecture, chip ----------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["12.9", "12.8", "12.4", "13.0", "v12.9.1", "99", None, ""])
def test_a_host_runs_images_of_its_level_its_major_or_an_older_one(level):
    place(cuda(level), vllm(), policy=known())


def test_a_host_older_than_every_image_is_refused_with_the_level_that_would_do():
    outcome = no(cuda("11.8"), vllm())
    [reason] = [r for r in outcome.reasons if r.filter == "backend"]
    assert reason.code == "backend.no_version_accel"
    assert "w1" in reason.text
    assert "cuda 11.8" in reason.text
    assert "12.8 or newer" in reason.text
    assert reason.params["needs_level"] == "12.8"
    assert (reason.params["runtime"], reason.params["level"]) == ("cuda", "11.8")
    assert Cure.BACKENDS in outcome.cures
    assert [s.kept for s in outcome.pool if s.filter == "backend"] == [0]


def test_a_deprecated_version_that_would_run_is_named_and_runs_when_it_is_asked_for():
    on = told(fleet("1x1xA-24[type=rocm]"), "w1", runtime_version="6.4")
    outcome = no(on, vllm())
    assert "7.0 or newer" in outcome.message
    version = next(r.params["would_run"] for r in outcome.reasons if "would_run" in r.params)
    assert version in outcome.message
    place(on, vllm(backend_version=version), policy=known())


def test_an_image_is_made_for_an_architecture():
    on = told(fleet("1x1xA-24[type=rocm]"), "w1", runtime_version="7.2", arch="aarch64")
    assert "no image for rocm is built for arm64" in no(on, vllm()).message
    told(on, "w1", runtime_version="7.2", arch="x86_64")
    place(on, vllm(), policy=known())
    place(cuda("12.9", arch="aarch64"), vllm(), policy=known())
    place(told(fleet("1x1xA-24[type=rocm]"), "w1", arch=None), vllm(), policy=known())


@pytest.mark.parametrize(
    ("soc", "engine", "words"),
    [
        ("Ascend910B3", "vLLM", None),
        ("Ascend910B3", "MindIE", None),
        ("Ascend310P3", "vLLM", None),
        ("Ascend910A", "vLLM", "no image is built for the chip Ascend910A"),
        ("Ascend310P3", "SGLang", "no image is built for the chip Ascend310P3"),
        ("Ascend777", "vLLM", "unknown chip Ascend777"),
        (None, "vLLM", None),
        (None, "MindIE", None),
    ],
)
def test_ascend_chips_have_images_of_their_own(soc, engine, words):
    on = told(fleet("1x1x910B-64[type=cann]"), "w1", arch_family=soc, runtime_version="8.3")
    spec = model(backend=engine)
    kind = {"vLLM": Engine.VLLM, "SGLang": Engine.SGLANG, "MindIE": Engine.MINDIE}[engine]
    [framework] = [f for f in chain.chain(demand(8, spec, engine=kind), known())
                   if isinstance(f, FrameworkFilter)]  # fmt: skip
    assert framework.keep(on, np.array([0]))[0] == (words is None)
    if words:
        assert words in framework.reasons(on, np.array([0]), 0, 1)[0].text


def test_a_chip_that_is_not_known_does_not_matter_with_an_image_of_ones_own():
    on = told(fleet("1x1xX-64[type=cann]"), "w1", arch_family="Ascend777")
    place(on, vllm(image_name="mine:1"), policy=known())


def test_the_image_that_the_worker_will_take_is_known():
    on = told(fleet("1x1xA-24 + 1x1xA-24"), "w1", runtime_version="12.8", arch="amd64")
    [framework] = [f for f in chain.chain(vllm(), known()) if isinstance(f, FrameworkFilter)]
    first, second = (
        framework.known.of(on.kinds[int(on.gpu_kind[w, 0])], on.architectures[int(on.arch[w])])
        for w in (0, 1)
    )
    assert first.runner is not None
    assert second.runner is not None
    assert (first.runner.level, first.runner.arch, first.guessed) == ("12.8", "amd64", False)
    assert (second.runner.level, second.guessed) == ("13.0", True)


def test_levels_that_are_not_reported_are_told_where_others_fell_out():
    on = told(fleet("1x1xA-8 + 1x1xA-8"), "w1", runtime_version="11.8")
    outcome = no(on, vllm(20))
    [info] = [r for r in outcome.reasons if r.code == "backend.level_unknown"]
    assert info.level == "info"
    assert "w2" in info.text
    assert "level_unknown" not in str(no(fleet("1x1xA-8"), vllm(20)).reasons)


# -- the right card --------------------------------------------------------------------------------------


def mixed(cuda_gib: int = 24, rocm_gib: int = 48) -> Fleet:
    """One worker with two CUDA cards and two larger ROCm cards."""
    on = fleet(f"1x2xA-{cuda_gib}")
    first = on.gpu_rows[1]
    for n in (0, 1):
        size = rocm_gib * 2**30
        on.put_gpu(replace(first, id=10 + n, index=n, type="rocm", vram_total=size, capacity=size))
    return on


@pytest.mark.parametrize("need", [8, 30])
def test_a_mixed_host_gives_only_the_cards_that_the_version_runs_on(need):
    wanted = demand(need, model(backend="mine"), engine=Engine.CUSTOM)
    made = place(mixed(), wanted, policy=known(own("mine", v1=CUDA)))
    assert made.parts[0].gpu_type == "cuda"
    made = place(mixed(), wanted, policy=known(own("mine", v1=ROCM)))
    assert made.parts[0].gpu_type == "rocm"


def test_room_on_the_wrong_cards_is_no_room():
    wanted = demand(60, model(backend="mine"), engine=Engine.CUSTOM)
    outcome = no(mixed(), wanted, known(own("mine", v1=CUDA)))
    assert "24.00 GiB" in outcome.message
    assert "rocm" not in outcome.message
    assert Cure.BACKENDS in outcome.cures
    place(mixed(), wanted, policy=known(own("mine", v1=CUDA, v2=ROCM)))


def test_picked_cards_of_the_wrong_kind_are_refused_by_name():
    spec = model(backend="mine", gpu_ids=["w1:rocm:0"])
    outcome = no(mixed(), demand(8, spec, engine=Engine.CUSTOM), known(own("mine", v1=CUDA)))
    assert "w1:rocm:0: mine does not run there" in outcome.message
    spec = model(backend="mine", gpu_ids=["w1:cuda:0"])
    made = place(mixed(), demand(8, spec, engine=Engine.CUSTOM), policy=known(own("mine", v1=CUDA)))
    assert seats(made) == [("w1", (0,))]


def test_a_picked_worker_that_cannot_run_the_engine_says_why():
    spec = model(backend="vLLM", gpu_ids=["w1:cuda:0"])
    assert "12.8 or newer" in no(cuda("11.8"), demand(8, spec)).message


def test_several_workers_take_part_only_with_cards_that_the_engine_runs_on():
    on = fleet("2x2xA-24 + 2x2xA-24[type=neuware]")
    wanted = demand(80, model(backend="vLLM", distributed_inference_across_workers=True))
    assert {p.gpu_type for p in place(on, wanted, policy=known()).parts} == {"cuda"}


# -- without accelerators --------------------------------------------------------------------------------


def kept(on: Fleet, wanted: Demand, *rows: Any) -> list[str]:
    found = [f for f in chain.chain(wanted, known(*rows)) if isinstance(f, FrameworkFilter)]
    bits = chain.failures(found, on, np.arange(on.count))
    return [on.row(w).name for w in np.flatnonzero(bits == 0).tolist()]


def test_a_version_for_the_cpu_admits_workers_without_cards_and_no_card():
    on = fleet("1xcpu + 1x1xA-24")
    wanted = demand(8, model(backend="mine"), engine=Engine.CUSTOM)
    assert kept(on, wanted, own("mine", v1=CPU)) == ["w1"]
    assert kept(on, wanted, own("mine", v1={"built_in_frameworks": ["cpu"]})) == ["w1"]
    assert kept(on, wanted, own("mine", v1={"custom_framework": "any"})) == ["w1", "w2"]
    assert kept(on, wanted, own("mine", v1={})) == []


def test_a_place_on_the_cpu_needs_a_version_for_the_cpu():
    spec = model(backend="mine", cpu_offloading=True)
    wanted = demand(100, spec, engine=Engine.CUSTOM, ram=10)
    on = fleet("1x1xA-24")
    assert place(on, wanted, policy=known(own("mine", v1=CUDA, v2=CPU))).parts[0].gpu_ids == ()
    refused(fleet("1x1xA-24"), wanted, policy=known(own("mine", v1=CUDA)))
    made = place(fleet("1x1xA-24"), demand(8, spec, engine=Engine.CUSTOM), policy=known(own("mine", v1=CPU)))
    assert made.parts[0].gpu_ids == ()


def test_a_worker_without_cards_is_told_apart():
    outcome = no(fleet("1xcpu"), vllm())
    assert [r.code for r in outcome.reasons] == ["backend.no_version_cpu"]
    assert "no accelerator" in outcome.message


@pytest.mark.parametrize("spec", [
    model(backend="Custom"), model(backend="vLLM", image_name="mine:1"),
    model(local_path="/m/x.gguf", source=Source.LOCAL_PATH),
])  # fmt: skip
def test_some_models_go_anywhere(spec):
    wanted = demand(8, spec, engine=Engine.CUSTOM)
    assert kept(fleet("1xcpu + 1x1xA-24[type=neuware]"), wanted) == ["w1", "w2"]


def test_a_router_takes_no_accelerator_and_is_not_held_to_the_engines_images():
    assert kept(fleet("1xcpu"), demand(0, model(backend="vLLM"), engine=Engine.ROUTER)) == ["w1"]


def test_where_nothing_is_known_of_backends_nobody_is_dropped():
    place(fleet("1x1xA-24[type=neuware]"), vllm(), policy=Policy())


# -- versions and owners ---------------------------------------------------------------------------------


@pytest.mark.parametrize("pin", ["0.11.0", "v0.11.0", "0.11", "==0.11.*", ">=0.11,<0.12"])
def test_a_version_is_the_same_however_it_is_written(pin):
    place(cuda("12.9"), vllm(backend_version=pin), policy=known())


def test_a_version_that_does_not_exist_is_refused_by_name():
    outcome = no(cuda("12.9"), vllm(backend_version="0.99.0"))
    assert [r.code for r in outcome.reasons] == ["backend.version_unsupported"]
    assert "vLLM 0.99.0: that version does not exist for cuda 12.9" in outcome.message


def test_a_range_that_cannot_be_read_is_the_models_fault():
    outcome = no(cuda("12.9"), vllm(backend_version=">=new"))
    assert "backend_version" in outcome.message
    assert outcome.cures == Cure.MODEL


def test_an_owner_sees_the_platforms_versions_and_its_own_which_go_first():
    on = fleet("1x1xA-24 + 1x1xA-24[type=rocm]")
    rows = (own("mine", v1=CUDA), own("mine", "a", v1=ROCM, v2=CUDA))
    custom = Engine.CUSTOM
    assert kept(on, demand(8, model(backend="mine"), engine=custom), *rows) == ["w1"]
    for pin, owner, expected in [
        ("1", "a", ["w2"]),
        ("1.0", "a", ["w2"]),
        ("2", "a", ["w1"]),
        ("2", "b", []),
    ]:
        wanted = demand(8, model(backend="mine", backend_version=pin, owner=owner), engine=custom)
        assert kept(on, wanted, *rows) == expected
    assert kept(on, demand(8, model(backend="mine", owner="a"), engine=custom), *rows) == ["w1", "w2"]


def test_a_registered_version_of_the_catalogues_is_held_to_its_levels():
    row = own("vLLM", v0_11_0={"built_in_frameworks": ["cuda"]})
    pinned = vllm(backend_version="0.11.0")
    assert kept(cuda("12.9"), pinned, row) == ["w1"]
    assert kept(cuda("11.8"), pinned, row) == []
    assert kept(cuda("11.8"), vllm(backend_version="0.11.0-mine"), own("vLLM", **{"v0.11.0-mine": CUDA})) == [
        "w1"
    ]
    assert kept(
        cuda("11.8"), vllm(backend_version="77"), own("vLLM", v77={"built_in_frameworks": ["cuda"]})
    ) == ["w1"]


def test_a_registered_version_lets_an_engine_run_where_the_catalogue_has_nothing():
    on = fleet("1x1xA-24[type=neuware]")
    assert kept(on, vllm()) == []
    assert kept(on, vllm(), own("vLLM", v1={"custom_framework": "neuware"})) == ["w1"]


# -- the answers -----------------------------------------------------------------------------------------


def test_causes_are_counted_once_per_worker_and_grouped():
    on = fleet("3x1xA-24 + 2x1xA-24[type=neuware] + 1xcpu")
    for name in ("w1", "w2", "w3"):
        told(on, name, runtime_version="11.8")
    outcome = no(on, vllm())
    own_reasons = [r for r in outcome.reasons if r.filter == "backend"]
    assert [(r.params["dropped"], r.params["runtime"]) for r in own_reasons] == [(3, "cuda"), (2, "neuware"),
                                                                                 (1, "cpu")]  # fmt: skip
    assert sum(r.params["dropped"] for r in own_reasons) == 6


def test_a_worker_with_several_kinds_is_told_by_its_nearest_miss():
    on = mixed()
    for gpu_id in (1, 2):
        on.put_gpu(replace(on.gpu_rows[gpu_id], type="cuda", runtime_version="11.8", version=1))
    for gpu_id in (10, 11):
        gpu = on.gpu_rows[gpu_id]
        on.drop_gpu(gpu_id)
        on.put_gpu(replace(gpu, type="neuware"))
    [reason] = [r for r in no(on, vllm()).reasons if r.filter == "backend"]
    assert reason.params["cause"] == "level"


def test_many_kinds_make_no_flood():
    on = fleet("300x1xA-24[type=neuware]")
    for n in range(1, 301):
        told(on, f"w{n}", runtime_version=f"{n}.{'0' * 200}")
    outcome = no(on, vllm())
    assert len(outcome.message.encode()) < 4096
    assert sum(r.params["dropped"] for r in outcome.reasons if r.filter == "backend") == 300


CAUSES = {
    "1x1xA-24[cluster=2,zone=a]": "1 worker is not in the model's cluster",
    "1x1xA-24[zone=b]": "1 worker does not match worker_selector (zone=a)",
    "1x1xA-24[zone=a,state=NOT_READY]": "1 worker is NOT_READY",
    "1x1xA-24[zone=a,state=MAINTENANCE]": "1 worker is MAINTENANCE",
    "1x1xA-24[zone=a,type=neuware]": "1 worker (w5) cannot run vLLM: no known version runs on neuware",
    "1x1xA-8[zone=a]": "not enough free GPU memory on 1 worker",
}
"""FR-20: six workers, each of which fails for one cause."""


def test_six_workers_that_fail_for_one_cause_each_are_told_apart():
    spec = model(cluster_id=1, worker_selector={"zone": "a"}, backend="vLLM")
    outcome = no(fleet(" + ".join(CAUSES)), demand(20, spec))
    for words in CAUSES.values():
        assert words in outcome.message
    assert [(s.filter, s.kept) for s in outcome.pool] == [("cluster", 5), ("labels", 4), ("status", 2),
                                                          ("backend", 1)]  # fmt: skip


@pytest.mark.parametrize("gone", CAUSES)
def test_a_cause_that_is_gone_is_not_told(gone):
    spec = model(cluster_id=1, worker_selector={"zone": "a"}, backend="vLLM")
    said = no(fleet(" + ".join(c for c in CAUSES if c != gone)), demand(20, spec)).message
    for text, words in CAUSES.items():
        words = words.replace("(w5)", "(w4)") if gone != "1x1xA-8[zone=a]" else words
        assert (words in said) == (text != gone)


# -- keeping up ------------------------------------------------------------------------------------------


def test_kept_results_follow_what_workers_report_and_what_is_registered():
    on, memo, wanted = cuda("11.8"), SearchCache(), vllm()
    assert isinstance(ask(on, wanted, policy=known(), memo=memo), NoFit)
    told(on, "w1", runtime_version="12.8")
    assert not isinstance(ask(on, wanted, policy=known(), memo=memo), NoFit)
    told(on, "w1", runtime_version="11.8")
    assert isinstance(ask(on, wanted, policy=known(), memo=memo), NoFit)
    entry = known(own("vLLM", v1=CUDA))
    assert not isinstance(ask(on, wanted, policy=entry, memo=memo), NoFit)
    occupy(on, "w1", [0], 24)
    assert isinstance(ask(on, wanted, policy=entry, memo=memo), NoFit)


def test_equal_backends_share_kept_results():
    memo, on, wanted = SearchCache(), fleet("1x1xA-24"), vllm()
    for _ in range(3):
        ask(on, wanted, policy=known(own("x", v1=CUDA)), memo=memo)
    assert (memo.misses, memo.hits) == (1, 2)
