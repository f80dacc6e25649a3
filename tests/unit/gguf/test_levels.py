"""Levels of a GGUF model as placement reads them: what is booked for every number of layers on devices."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from gpustackd.domain.demand import Engine
from gpustackd.domain.facts import ModelFacts
from gpustackd.domain.gguf_facts import GgufFacts
from gpustackd.domain.gguf_levels import GgufNeed, LevelSizes
from gpustackd.errors import BadRow
from gpustackd.estimate.demand import build_demand
from gpustackd.estimate.llama_cpp.need import gguf_need, header_digest, sizer_of
from tests.gguf_truth import headers
from tests.specs import a_model

GIB = 1024**3
MIB = 1024**2
LLAMA, GEMMA = "full-llama-3.1-8b-q4_k_m", "full-gemma-3-27b-q4_k_m"


def asked(model: str | GgufFacts, *flags: str) -> tuple[Any, GgufNeed]:
    header = headers()[model] if isinstance(model, str) else model
    spec = a_model(huggingface_filename="m.gguf", backend_parameters=list(flags))
    need, found = gguf_need(spec, ModelFacts(weight_bytes=header.file_bytes, gguf=header))
    assert found is not None
    return need, found


def sizes(model: str | GgufFacts, *flags: str) -> LevelSizes:
    return asked(model, *flags)[1].sizes


def cache(model: str, *flags: str) -> int:
    sizer = sizer_of(headers()[model], flags)
    return sum(d.kv_cache for d in sizer.division(sizer.total_layers).devices)


def test_levels_run_from_none_to_all_and_the_output_goes_first() -> None:
    levels = sizes(LLAMA).levels()
    assert [x.offload_layers for x in levels] == list(range(34))
    assert [x.devices[0].layers for x in levels] == [0, *range(33)]
    assert [x.full for x in levels] == [False] * 33 + [True]
    assert levels[0].devices[0].vram == 0
    assert all(a.ram > b.ram for a, b in pairwise(levels[1:]))
    assert all(a.devices[0].vram < b.devices[0].vram for a, b in pairwise(levels))


def test_from_one_level_to_the_next_a_device_gets_what_that_layer_takes() -> None:
    found = sizes(LLAMA)
    levels = found.levels()
    for n in range(4, 32):  # buffers stay as they are between these
        more = levels[n + 1].devices[0].unified - levels[n].devices[0].unified
        assert more == found.layer_bytes[33 - (n + 1)]


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_weights_are_counted_once_however_they_are_divided(devices: int) -> None:
    header = headers()[LLAMA]
    sizer = sizer_of(header, ())
    whole = sum(t.size for t in header.tensors)
    for level in sizer.divisions((1.0,) * devices):
        held = sum(d.weights for d in level.devices) + level.host.weights
        copies = sum(d.layers > 0 for d in level.devices) * sizer.memory.everywhere
        assert whole <= held <= whole + copies


def test_a_device_without_layers_books_nothing() -> None:
    level = sizes(LLAMA).level(2, (1.0, 1.0, 1.0))
    assert [d.vram > 0 for d in level.devices] == [True, True, False]
    assert [d.layers for d in level.devices] == [1, 0, 0]


@pytest.mark.parametrize("shares", [(20.0, 13.0), (1.0, 32.0), (11.0, 11.0, 11.0), (5.0, 0.0, 28.0)])
def test_whole_shares_of_all_layers_are_layers(shares: tuple[float, ...]) -> None:
    level = sizes(LLAMA).level(33, shares)
    counts = [d.layers for d in level.devices]
    counts[-1] += 1  # the output, the last of the layers
    assert counts == list(shares)


def test_remote_devices_take_what_local_ones_do() -> None:
    found = sizes(LLAMA)
    assert found.level(33, (1.0, 1.0), remotes=1) == found.level(33, (1.0, 1.0))


def test_runtime_and_margin_are_in_what_is_booked() -> None:
    sizer = sizer_of(headers()[LLAMA], ())
    division = sizer.division(33)
    device = division.devices[0]
    level = sizes(LLAMA).level(33)
    margin = int(0.02 * device.compute)
    assert level.devices[0].vram == device.needed + 500 * MIB + margin
    assert level.devices[0].unified == device.needed + 100 * MIB + margin
    host = division.host
    assert level.ram == host.needed + 8 * GIB + 200 * MIB + 100 * 128256 + headers()[LLAMA].metadata_bytes


def test_cached_prompts_are_booked_unless_they_are_turned_off() -> None:
    ram = [sizes(LLAMA, f"--cache-ram={n}").level(33).ram for n in (0, 1024)]
    assert ram[1] - ram[0] == GIB


def test_the_same_question_has_the_same_answer_whatever_was_asked_between() -> None:
    found = sizes(GEMMA)
    first = [found.level(n, (3.0, 1.0)) for n in (0, 20, 40, 63)]
    for n in range(64):
        found.level(n, (1.0, 2.0, 3.0))
    assert [found.level(n, (3.0, 1.0)) for n in (0, 20, 40, 63)] == first
    fresh = sizes(replace(headers()[GEMMA], version=2))
    assert [fresh.level(n, (3.0, 1.0)) for n in (0, 20, 40, 63)] == first


def test_what_was_sized_for_is_told() -> None:
    _, found = asked(LLAMA, "--ctx-size=16384", "-np", "2", "-ctk", "q8_0", "-ub", "256")
    assert dict(found.sized_for) == {
        "context": 16384, "parallel": 2, "kv_unified": False, "ubatch": 256,
        "cache_type_k": "q8_0", "cache_type_v": "f16", "flash_attention": "auto",
    }  # fmt: skip


def test_windows_and_cache_types_count_at_long_context() -> None:
    """FR-12: a 27B model, 128,000 tokens, keys of q8_0 and values of f16."""
    long = ["--ctx-size=128000", "--parallel=1"]
    mixed = cache(GEMMA, *long, "--cache-type-k=q8_0")
    plain = cache(GEMMA, *long)
    # the report counts 1,024 cells of a window; llama.cpp keeps room for one more batch of 512 beside them
    assert mixed / GIB == pytest.approx(7.8, rel=0.03)
    assert plain / GIB == pytest.approx(10.2, rel=0.03)
    assert cache(GEMMA, *long, "--cache-type-k=q8_0", "--swa-full") / GIB >= 46
    assert cache(GEMMA, "--ctx-size=64000", "--parallel=1") < plain
    assert cache(GEMMA, "--ctx-size=128000", "--parallel=4", "--kv-unified") > plain
    level = sizes(GEMMA, *long, "--cache-type-k=q8_0").level(63)
    assert 23 <= level.devices[0].vram / GIB <= 48


def test_a_context_above_the_trained_one_is_sized_as_it_was_asked_for() -> None:
    header = headers()[LLAMA]
    short = replace(header, values={**header.values, "llama.context_length": 32768})
    _, found = asked(short, "--ctx-size=65535")
    assert found.sized_for["context"] == 65535
    assert found.sizes.level(33) == sizes(LLAMA, "--ctx-size=65535").level(33)


def test_a_projector_a_draft_and_adapters_go_to_the_first_device() -> None:
    header = headers()["llama-gqa"]
    alone = sizes(header).level(13, (1.0, 1.0))
    projector = GgufFacts("clip", "mmproj", tensors=header.tensors[:20], file_bytes=1000, data_bytes=900)
    seen = sizes(replace(header, projector=projector)).level(13, (1.0, 1.0))
    weights = sum(t.size for t in projector.tensors)
    assert seen.devices[0].vram - alone.devices[0].vram >= weights
    assert seen.devices[1] == alone.devices[1]
    on_host = sizes(replace(header, projector=projector), "--no-mmproj-offload").level(13, (1.0, 1.0))
    assert on_host.devices[0] == alone.devices[0]
    assert on_host.ram - alone.ram >= weights
    drafted = sizes(replace(header, draft=header)).level(13)
    assert drafted.devices[0].vram > 1.5 * (sizes(header).level(13).devices[0].vram - 500 * MIB)


def test_experts_may_stay_on_the_host() -> None:
    header = headers()["full-mixtral-8x7b-q4_k_m"]
    experts = sum(t.size for t in header.tensors if "_exps" in t.name)
    usual = sizes(header).level(33)
    moved = sizes(header, "--cpu-moe").level(33)
    assert usual.devices[0].vram - moved.devices[0].vram == pytest.approx(experts, rel=0.03)
    assert moved.ram - usual.ram == pytest.approx(experts, rel=0.03)
    some = sizes(header, "--n-cpu-moe=8").level(33)
    assert some.ram - usual.ram == pytest.approx(experts / 4, rel=0.08)


def test_a_demand_carries_the_levels_and_changes_with_the_header() -> None:
    header = headers()["llama-gqa"]
    facts = ModelFacts(weight_bytes=1, gguf=header, digest=header_digest(header), categories=("llm",))
    spec = a_model(huggingface_filename="m.gguf")
    demand = build_demand(spec, facts)
    assert demand.engine is Engine.GGUF
    assert demand.gguf is not None
    assert demand.need.vram == demand.gguf.sizes.level(13).devices[0].vram
    other = replace(header, values={**header.values, "general.name": "another"})
    again = build_demand(spec, replace(facts, gguf=other, digest=header_digest(other)))
    assert again.digest != demand.digest


def test_a_header_that_is_not_known_leaves_the_need_unknown() -> None:
    need, found = gguf_need(a_model(), ModelFacts(weight_bytes=None, unknown_because="the hub is away"))
    assert (need.vram, need.unknown_because, found) == (None, "the hub is away", None)


def test_an_unknown_architecture_is_bounded_and_that_is_said() -> None:
    header = headers()["llama-gqa"]
    values = {k.replace("llama.", "newcomer."): v for k, v in header.values.items()}
    need, found = asked(replace(header, architecture="newcomer", values=values))
    known = sizes(header).level(13)
    level = found.sizes.level(13)
    assert level.devices[0].vram >= 0.97 * known.devices[0].vram
    assert level.ram >= 0.97 * known.ram
    assert any("newcomer" in w for w in need.warnings)


def test_flags_that_stop_the_engine_make_the_row_unusable() -> None:
    with pytest.raises(BadRow, match=r"llama\.cpp refuses to start: quantized V cache"):
        asked(LLAMA, "--flash-attn=off", "--cache-type-v=q4_0")
