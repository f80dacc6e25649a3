"""Every engine and every way to be placed, on real rows: what is booked, for whom, and that all comes back.

One daemon serves all tests of this file; each has a cluster of its own. Expected bytes are worked examples of
the specifications where there is one.
"""

from __future__ import annotations

import pytest

from tests.acceptance import shapes
from tests.acceptance.daemons import within
from tests.acceptance.machines import GIB
from tests.acceptance.shop import (
    CARD_24,
    CARD_80,
    DEEPSEEK,
    HALF_GIB,
    WHISPER,
    Booked,
    Card,
    Shop,
    llm,
)
from tests.hub import Repo, safetensors

pytestmark = pytest.mark.anyio


# -- vLLM -----------------------------------------------------------------------------------------------


async def test_vllm_books_its_share_of_one_card(shop: Shop) -> None:
    await shop.worker("w", Card(CARD_24))
    row = await shop.placed(await shop.model(llm()))
    await shop.holds(row, {"w": Booked("main", {"cuda:0": 23_413_653_504})})
    assert row["computed_resource_claim"]["vram_utilization"] == 0.9
    assert row["distributed_servers"] is None
    filled = await shop.filled(row["model_id"])
    assert filled["categories"] == ["llm"]
    assert filled["distributed_inference_across_workers"] is True
    await shop.gives_all_back(row["id"])


async def test_vllm_over_two_workers_books_cards_and_ram_of_main_and_subordinate(shop: Shop) -> None:
    for name in ("a", "b"):
        await shop.worker(name, *[Card(CARD_80)] * 8)
    extended = {"enabled": True, "ram_size": 8}
    weights = int(769 * GIB / 1.2)  # a claim of 771 GiB
    model = await shop.model(llm(weights, DEEPSEEK), extended_kv_cache=extended)
    row = await shop.placed(model)
    main = row["worker_name"].rpartition("-")[0]
    other = {"a": "b", "b": "a"}[main]
    share = {f"cuda:{n}": 77_309_411_328 for n in range(8)}
    await shop.holds(
        row, {main: Booked("main", share, 8 * GIB), other: Booked("subordinate", share, 8 * GIB)}
    )
    servers = row["distributed_servers"]
    assert servers["mode"] == "initialize_later"
    assert [s["total_gpus"] for s in servers["subordinate_workers"]] == [8]
    # a worker serves one such instance at a time, and what it books is what keeps the next one out
    (waiting,) = await shop.site.instances(model)
    (refused,) = await shop.site.refused([waiting], timeout=within(1))
    assert "771.00 GiB" in refused["state_message"]
    await shop.site.delete("model_instances", row["id"])
    (after,) = await shop.site.placed([waiting], timeout=within(1))
    await shop.gives_all_back(after["id"])


async def test_vllm_by_its_own_executor_spans_workers_as_its_sizes_allow(shop: Shop) -> None:
    for name in ("a", "b", "c"):
        await shop.worker(name, *[Card(CARD_80)] * 8)
    flags = ["--tensor-parallel-size 8", "--data-parallel-size=2", "--data-parallel-size-local", "1"]
    model = await shop.model(llm(200 * GIB, DEEPSEEK), image_name="own/vllm", backend_parameters=flags)
    row = await shop.placed(model)
    (sub,) = row["distributed_servers"]["subordinate_workers"]
    share = {f"cuda:{n}": 77_309_411_328 for n in range(8)}
    expected = {row["worker_name"]: "main", sub["worker_name"]: "subordinate"}
    await shop.holds(row, {n.rpartition("-")[0]: Booked(p, share) for n, p in expected.items()})
    await shop.gives_all_back(row["id"])
    # three nodes, two for each rank: the layout does not come out, and the text has the numbers
    await shop.site.update("models", model, backend_parameters=["--tp=16", "--dp=3", "--dpl=1"])
    refused = await shop.refused(model)
    assert "the model needs 48 GPUs" in refused["state_message"]
    assert "dp is 3, but 2 nodes hold 1 ranks of 2 nodes" in refused["state_message"]


async def test_an_embedding_model_books_what_it_needs(shop: Shop) -> None:
    await shop.worker("w", Card(CARD_24))
    row = await shop.placed(await shop.model(llm(875_952_869, shapes.BERT)))
    await shop.holds(row, {"w": Booked("main", {"cuda:0": 1_588_014_354})})
    assert (await shop.filled(row["model_id"]))["categories"] == ["embedding"]
    await shop.gives_all_back(row["id"])


# -- SGLang ---------------------------------------------------------------------------------------------


async def test_sglang_books_the_fraction_that_the_card_leaves_it(shop: Shop) -> None:
    await shop.worker("w", Card(CARD_24))
    row = await shop.placed(await shop.model(llm(), backend="SGLang"))
    await shop.holds(row, {"w": Booked("main", {"cuda:0": 22_060_864_634})})
    assert row["computed_resource_claim"]["vram_utilization"] == 0.848
    await shop.gives_all_back(row["id"])


async def test_sglang_over_two_workers_has_exactly_its_world_size(shop: Shop) -> None:
    for name in ("a", "b", "c"):
        await shop.worker(name, *[Card(CARD_80)] * 8)
    model = await shop.model(llm(400 * GIB, DEEPSEEK), backend="SGLang", backend_parameters=["--tp-size=16"])
    row = await shop.placed(model)
    (sub,) = row["distributed_servers"]["subordinate_workers"]
    fraction = row["computed_resource_claim"]["vram_utilization"]
    # 512 + 12 288 for the chunk + 1 024 for the graphs + 2 048 for 16 ranks, of 81 920 MiB
    assert fraction == round((81_920 - 15_872) / 81_920, 3)
    assert sub["computed_resource_claim"]["vram_utilization"] == fraction
    share = {f"cuda:{n}": int(CARD_80 * fraction) for n in range(8)}
    names = {row["worker_name"]: "main", sub["worker_name"]: "subordinate"}
    await shop.holds(row, {n.rpartition("-")[0]: Booked(p, share) for n, p in names.items()})
    assert row["distributed_servers"]["mode"] == "initialize_later"
    await shop.gives_all_back(row["id"])


# -- images and speech ----------------------------------------------------------------------------------

FLUX = {"transformer": 45_000_000_000, "text_encoder": 12_000_000_000, "vae": 699_249_390}


async def test_an_image_model_books_its_weights_alone(shop: Shop) -> None:
    await shop.worker("w", Card(CARD_80), Card(CARD_80))
    need = sum(FLUX.values())
    repo = shapes.pipeline(FLUX)
    for backend, flags, expected, ram in (
        ("SGLang", None, {"cuda:0": need}, 0),
        ("SGLang", ["--tp-size=2"], {"cuda:0": need, "cuda:1": need}, 0),
        ("vLLM", None, {"cuda:0": need}, need // 10),
    ):
        row = await shop.placed(await shop.model(repo, backend=backend, backend_parameters=flags))
        if len(expected) == 1:
            expected = {f"cuda:{row['gpu_indexes'][0]}": need}
        await shop.holds(row, {"w": Booked("main", expected, ram)})
        assert (await shop.filled(row["model_id"]))["categories"] == ["image"]
        await shop.gives_all_back(row["id"])


async def test_voxbox_and_a_speaking_model_book_by_their_own_factors(shop: Shop) -> None:
    await shop.worker("w", Card(CARD_24))
    hears = await shop.placed(await shop.model(llm(3_000_000_000, WHISPER), backend="VoxBox"))
    need = int(3_000_000_000 * 1.2) + HALF_GIB
    await shop.holds(hears, {"w": Booked("main", {"cuda:0": need}, 2 * GIB)})
    model = await shop.filled(hears["model_id"])
    assert model["categories"] == ["speech_to_text"]
    assert "en" in model["meta"]["languages"]
    config = {"architectures": ["Qwen3TTSForConditionalGeneration"], "tts_model_type": "voice_design"}
    speaks = await shop.placed(await shop.model(llm(4 * GIB, config)))
    await shop.holds(speaks, {"w": Booked("main", {"cuda:0": 13_421_772_800}, 2 * GIB)})
    assert (await shop.filled(speaks["model_id"]))["meta"]["task_type"] == "VoiceDesign"
    await shop.gives_all_back(hears["id"], speaks["id"])


# -- MindIE ---------------------------------------------------------------------------------------------


async def test_a_custom_engine_books_what_its_command_says_and_a_tenth_in_ram(shop: Shop) -> None:
    await shop.worker("w", Card(CARD_24), ram=64)
    repo = llm(8 * GIB)
    for command, flags, claim in (
        ("serve --gpu-memory-utilization 0.3", ["--gpu-memory-utilization=0.9"], 23_413_653_504),
        ("serve 'unclosed", ["--mem-fraction-static=0.3"], 12_455_405_158),
        (None, None, 12_455_405_158),
    ):
        model = await shop.model(repo, backend="Custom", run_command=command, backend_parameters=flags)
        row = await shop.placed(model)
        await shop.holds(row, {"w": Booked("main", {"cuda:0": claim}, 2 * GIB)})
        await shop.gives_all_back(row["id"])


async def test_a_custom_engine_splits_over_cards_and_runs_on_the_cpu_where_it_may(shop: Shop) -> None:
    await shop.worker("cards", *[Card(17_171_480_576)] * 4, ram=64)
    await shop.worker("plain", ram=64)
    env = {"GPUSTACK_MODEL_VRAM_CLAIM": "28991029248"}
    row = await shop.placed(await shop.model(llm(), backend="Custom", env=env))
    part = 28_991_029_248 // 2
    expected = {f"cuda:{n}": part for n in row["gpu_indexes"]}
    assert len(expected) == 2
    await shop.holds(row, {"cards": Booked("main", expected, 2_899_102_924)})
    await shop.gives_all_back(row["id"])

    large = {"GPUSTACK_MODEL_VRAM_CLAIM": str(100 * GIB)}
    model = await shop.model(llm(), backend="Custom", env=large, cpu_offloading=True)
    row = await shop.placed(model)
    assert row["gpu_indexes"] is None
    assert row["computed_resource_claim"]["vram"] in ({}, None)
    name = row["worker_name"].rpartition("-")[0]
    await shop.holds(row, {name: Booked("main", {}, 10 * GIB)})
    await shop.gives_all_back(row["id"])
    await shop.site.update("models", model, cpu_offloading=False)
    assert "100.00 GiB" in (await shop.refused(model))["state_message"]


# -- pools of cards -------------------------------------------------------------------------------------


async def test_lora_adapters_and_an_override_change_what_is_claimed(shop: Shop) -> None:
    await shop.worker("w", *[Card(CARD_80)] * 2)
    adapter = shapes.written(
        shop.folder / "adapter", Repo({"adapter_model.safetensors": safetensors([("a", "U8", (8 * GIB,))])})
    )
    flags = ["--gpu-memory-utilization=0.9"]
    lora = [{"lora_name": "style", "source": "local_path", "local_path": str(adapter)}]
    alone = await shop.placed(await shop.model(llm(56 * GIB), backend_parameters=flags))
    assert len(alone["gpu_indexes"]) == 1, "69.2 GiB fit into 72"
    await shop.gives_all_back(alone["id"])
    with_it = await shop.placed(await shop.model(llm(56 * GIB), backend_parameters=flags, lora_list=lora))
    assert len(with_it["gpu_indexes"]) == 2, "78.8 GiB do not"
    await shop.gives_all_back(with_it["id"])
    env = {"GPUSTACK_MODEL_VRAM_CLAIM": str(70 * GIB)}
    forced = await shop.placed(
        await shop.model(llm(56 * GIB), backend_parameters=flags, lora_list=lora, env=env)
    )
    assert len(forced["gpu_indexes"]) == 1
    await shop.gives_all_back(forced["id"])
