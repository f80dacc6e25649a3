"""Every engine and every way to be placed, on real rows: what is booked, for whom, and that all comes back.

One daemon serves all tests of this file; each has a cluster of its own. Expected bytes are worked examples of
the specifications where there is one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance import shapes
from tests.acceptance.daemons import crew, within
from tests.acceptance.machines import GIB, Site, site_on
from tests.acceptance.record import Record
from tests.conftest import Server, fresh_database
from tests.hub import Repo, safetensors

pytestmark = pytest.mark.anyio

MIB = 2**20
CARD_24 = 26_015_170_560
CARD_80 = 80 * GIB
NPU_64 = 64 * GIB
HALF_GIB = 512 * MIB
RAM = 512
"""GiB of every worker unless said; the reserves are 2 GiB of RAM and 1 GiB of each card."""

QWEN_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "torch_dtype": "bfloat16",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152_064,
    "max_position_embeddings": 32768,
}
QWEN_7B_WEIGHTS = 15_231_271_864
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "torch_dtype": "bfloat16",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 129_280,
    "max_position_embeddings": 4096,
}
WHISPER = {"architectures": ["WhisperForConditionalGeneration"], "torch_dtype": "float16", "d_model": 1280}
A100 = {
    "memory": "81920Mi",
    "manufacturer": "nvidia",
    "product": "A100",
    "sliced_detail": {"physical": {"profiles": [{"name": "3g.40gb", "count": 2, "memory_mib": 40_960}]}},
}
_names = count(1)


@dataclass(frozen=True)
class Card:
    """One GPU row."""

    total: int
    type: str = "cuda"
    vendor: str = "nvidia"
    name: str = "A100"
    index: int | None = None
    network: dict[str, str] | None = None


@dataclass
class Booked:
    """What the ledger holds of one instance on one worker. Bytes; cards as `type:index`."""

    part: str
    vram: dict[str, int] = field(default_factory=dict)
    ram: int = 0


class Shop:
    """One cluster of one test."""

    def __init__(self, site: Site, record: Record, cluster: int, folder: Path) -> None:
        self.site = site
        self.record = record
        self.cluster = cluster
        self.folder = folder

    async def worker(self, name: str, *cards: Card, ram: float = RAM, **columns: Any) -> int:
        name = f"{name}-{self.cluster}"
        columns = {"state": "READY", "ram_reserved": 2 * GIB, "vram_reserved": GIB, **columns}
        async with self.site.sql.transaction():
            worker = await self.site.insert(
                "workers", name=name, cluster_id=self.cluster, ram_total=int(ram * GIB), **columns
            )
            for n, c in enumerate(cards):
                await self.site.insert(
                    "gpu_devices", worker_id=worker, index=n if c.index is None else c.index, type=c.type,
                    vendor=c.vendor, name=c.name, vram_total=c.total, network=c.network,
                )  # fmt: skip
        return worker

    async def model(self, repo: Repo | None, **columns: Any) -> int:
        """A model on files of its own; None where `columns` name a source."""
        name = f"m{next(_names)}"
        if repo is not None:
            path = shapes.written(self.folder / name, repo)
            columns = {"source": "local_path", "local_path": str(path), **columns}
        return await self.site.insert("models", name=name, cluster_id=self.cluster, **columns)

    async def placed(self, model: int) -> dict[str, Any]:
        """An instance of it, once it is SCHEDULED."""
        (row,) = await self.site.placed(await self.site.instances(model), patience=within(1))
        assert row["state"] == "SCHEDULED"
        return row

    async def filled(self, model: int) -> dict[str, Any]:
        """Its row, once what the files say has been filled in."""
        await self.site.until("SELECT categories IS NOT NULL FROM models WHERE id = $1", model)
        return await self.site.row("models", model)

    async def refused(self, model: int) -> dict[str, Any]:
        (row,) = await self.site.refused(await self.site.instances(model), patience=within(1))
        return row

    async def booked(self, instance: int) -> dict[str, Booked]:
        """The ledger's rows, by name of the worker without its cluster."""
        rows = await self.site.sql.fetch(
            "SELECT w.name, c.part, c.vram, c.ram, g.type, g.index FROM instance_claims c"
            " JOIN workers w ON w.id = c.worker_id LEFT JOIN gpu_devices g ON g.id = c.gpu_device_id"
            " WHERE c.instance_id = $1 ORDER BY g.type, g.index",
            instance,
        )
        found: dict[str, Booked] = {}
        for r in rows:
            here = found.setdefault(r["name"].rpartition("-")[0], Booked(r["part"]))
            assert here.part == r["part"]
            if r["type"] is not None:
                here.vram[f"{r['type']}:{r['index']}"] = r["vram"]
            here.ram += r["ram"]
        return found

    async def holds(self, row: Mapping[str, Any], expected: dict[str, Booked]) -> None:
        """The ledger is as expected, the row tells the same, and every rule of the contract holds."""
        assert await self.booked(row["id"]) == expected
        parts = [row, *(row["distributed_servers"] or {}).get("subordinate_workers", [])]
        told: dict[str, Booked] = {}
        for n, p in enumerate(parts):
            claim = p["computed_resource_claim"]
            name = p["worker_name"].rpartition("-")[0]
            vram = {f"{p['gpu_type']}:{i}": claim["vram"][str(i)] for i in p["gpu_indexes"] or []}
            told[name] = Booked("subordinate" if n else "main", vram, claim.get("ram") or 0)
            assert len(vram) == len(p["gpu_indexes"] or [])
        assert told == expected
        await self.site.clean()

    async def gives_all_back(self, *ids: int) -> None:
        """DELETE leaves nothing booked in this cluster."""
        await self.site.delete("model_instances", *ids)
        left = await self.site.sql.fetchval(
            "SELECT coalesce(sum(w.ram_allocated), 0) + coalesce(sum(g.vram_allocated), 0)"
            " + (SELECT count(*) FROM instance_claims WHERE instance_id = ANY ($2::bigint[]))"
            " FROM workers w LEFT JOIN gpu_devices g ON g.worker_id = w.id WHERE w.cluster_id = $1",
            self.cluster,
            list(ids),
        )
        assert left == 0
        await self.site.clean()
        assert await self.record.broken() == []


@pytest.fixture(scope="module")
def stage(postgres_server: Server) -> Iterator[str]:
    from gpustackd.store.migrate import upgrade

    with fresh_database(postgres_server, postgres_server.migrated_template(upgrade)) as url:
        yield url


@pytest.fixture(scope="module")
async def house(stage: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Site, Record]]:
    """One daemon on one database, for all tests of this file."""
    folder = tmp_path_factory.mktemp("engines")
    async with site_on(stage, folder) as site:
        record = await Record.install(site.sql)
        async with crew(stage, folder / "logs", lease=60, rescan_interval=600) as daemons:
            await daemons.start()
            yield site, record


@pytest.fixture
async def shop(house: tuple[Site, Record], tmp_path: Path) -> Shop:
    site, record = house
    cluster = await site.insert("clusters", name=f"c{next(_names)}")
    return Shop(site, record, cluster, tmp_path)


def llm(weights: int = QWEN_7B_WEIGHTS, config: Mapping[str, Any] = QWEN_7B) -> Repo:
    return shapes.repository(config, weights)


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
    (refused,) = await shop.site.refused([waiting], patience=within(1))
    assert "771.00 GiB" in refused["state_message"]
    await shop.site.delete("model_instances", row["id"])
    (after,) = await shop.site.placed([waiting], patience=within(1))
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
    assert "48 GPUs are asked for" in refused["state_message"]
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


def npus(number: int, *, at: int) -> list[Card]:
    return [
        Card(NPU_64, "cann", "ascend", "910B3", network={"status": "up", "inet": f"10.0.{at}.{n}/24"})
        for n in range(number)
    ]


async def test_mindie_takes_one_npu_and_the_ram_of_its_own_formula(shop: Shop) -> None:
    await shop.worker("w", *npus(4, at=1))
    flags = ["--cpu-mem-size=4", "--max-preempt-count", "1"]
    row = await shop.placed(await shop.model(llm(), backend="MindIE", backend_parameters=flags))
    (at,) = row["gpu_indexes"]
    await shop.holds(row, {"w": Booked("main", {f"cann:{at}": 54_975_581_388}, int(4.5 * GIB))})
    assert row["gpu_addresses"] == [f"10.0.1.{at}"]
    await shop.gives_all_back(row["id"])


async def test_mindie_over_two_workers_writes_the_addresses_of_the_npus_it_takes(shop: Shop) -> None:
    for n, name in enumerate(("a", "b", "c")):
        await shop.worker(name, *npus(8, at=n))
    row = await shop.placed(await shop.model(llm(642 * GIB, DEEPSEEK), backend="MindIE"))
    (sub,) = row["distributed_servers"]["subordinate_workers"]
    share = {f"cann:{n}": 54_975_581_388 for n in range(8)}
    names = {row["worker_name"]: "main", sub["worker_name"]: "subordinate"}
    await shop.holds(row, {n.rpartition("-")[0]: Booked(p, share, HALF_GIB) for n, p in names.items()})
    for part in (row, sub):
        at = "abc".index(part["worker_name"][0])
        assert part["gpu_addresses"] == [f"10.0.{at}.{n}" for n in part["gpu_indexes"]]
    await shop.gives_all_back(row["id"])


# -- custom backends ------------------------------------------------------------------------------------


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


async def test_a_slice_a_partition_and_whole_cards_are_booked_on_cards_that_are_picked(shop: Shop) -> None:
    await shop.worker("w", *[Card(CARD_80)] * 4)
    await shop.site.insert("instance_types", cluster_id=shop.cluster, name="pool", detail=A100)
    half = {"type": "pool", "accelerator_sliced_memory_percentage": 50}
    profile = {"type": "pool", "accelerator_partitioned_profile": "3g.40gb"}
    weights = int(28 * GIB / 1.2)  # a claim of 30 GiB
    rows = []
    for selector in (half, profile):
        row = await shop.placed(await shop.model(llm(weights), gpu_type_selector=selector))
        (at,) = row["gpu_indexes"]
        await shop.holds(row, {"w": Booked("main", {f"cuda:{at}": 42_949_672_960})})
        rows.append(row)
    whole = await shop.model(
        llm(100 * GIB), gpu_type_selector={"type": "pool"}, backend_parameters=["--tensor-parallel-size=2"]
    )
    row = await shop.placed(whole)
    shared = {i for r in rows for i in r["gpu_indexes"]}
    assert len(row["gpu_indexes"]) == 2
    assert not shared & set(row["gpu_indexes"]), "a whole card is one that nobody sits on"
    # all that can be booked of a card: the worker's reserve stays out
    expected = {f"cuda:{n}": CARD_80 - GIB for n in row["gpu_indexes"]}
    await shop.holds(row, {"w": Booked("main", expected)})
    refused = await shop.refused(whole)
    assert "in use" in refused["state_message"]
    await shop.site.delete("model_instances", *[r["id"] for r in rows])
    await shop.site.placed([refused["id"]], patience=within(1))
    await shop.gives_all_back(row["id"], refused["id"])


# -- other machines -------------------------------------------------------------------------------------


async def test_on_unified_memory_cards_and_ram_come_from_one_pool(shop: Shop) -> None:
    # 64 GiB in all, 2 + 1 reserved: the cards of two fit, the 16 GiB of RAM of the second do not any more
    worker = await shop.worker("w", Card(60 * GIB), ram=64, unified_memory=True)
    share = int(60 * GIB * 0.3)
    flags = ["--gpu-memory-utilization=0.3"]
    extended = {"enabled": True, "ram_size": 16}
    model = await shop.model(llm(8 * GIB), backend_parameters=flags, extended_kv_cache=extended)
    row = await shop.placed(model)
    await shop.holds(row, {"w": Booked("main", {"cuda:0": share}, 16 * GIB)})
    assert row["computed_resource_claim"]["is_unified_memory"] is True
    assert (await shop.site.row("workers", worker))["ram_allocated"] == share + 16 * GIB
    waiting = await shop.refused(model)
    assert "27.00 GiB of its one memory are free, 34.00 GiB are needed" in waiting["state_message"]
    plain = await shop.model(llm(8 * GIB), backend_parameters=flags)
    second = await shop.placed(plain)
    await shop.holds(second, {"w": Booked("main", {"cuda:0": share})})
    await shop.site.delete("models", model)
    await shop.gives_all_back(second["id"])


async def test_a_worker_with_two_types_of_gpu_keeps_both_and_books_the_right_one(shop: Shop) -> None:
    amd = [Card(64 * GIB, "rocm", "amd", "MI", index=n) for n in range(2)]
    nvidia = [Card(24 * GIB, index=n) for n in range(2)]
    await shop.worker("w", nvidia[0], amd[0], nvidia[1], amd[1])
    large = await shop.placed(await shop.model(llm(int(48 * GIB / 1.2))))
    assert large["gpu_type"] == "rocm"
    (at,) = large["gpu_indexes"]
    await shop.holds(large, {"w": Booked("main", {f"rocm:{at}": int(64 * GIB * 0.9)})})
    # two cards of one type, never one of each: 40 GiB needs both of 24 GiB where one of 64 GiB is taken twice
    second = await shop.placed(await shop.model(llm(int(48 * GIB / 1.2))))
    assert second["gpu_type"] == "rocm"
    assert second["gpu_indexes"] == [1 - at]
    both = await shop.placed(await shop.model(llm(int(38 * GIB / 1.2))))
    share = {f"cuda:{n}": int(24 * GIB * 0.9) for n in range(2)}
    await shop.holds(both, {"w": Booked("main", share)})
    assert (both["gpu_type"], both["gpu_indexes"]) == ("cuda", [0, 1])
    await shop.gives_all_back(large["id"], second["id"], both["id"])


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
