"""FR-10: numbers come from the language part of a nested configuration, not from the vision part."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gpustackd.sources.formats.config_json import hyper_parameters
from tests.acceptance import shapes
from tests.acceptance.daemons import crew, within
from tests.acceptance.machines import GIB, Site, W
from tests.acceptance.record import Record, watching

pytestmark = pytest.mark.anyio

SETTINGS = {"lease": 60, "rescan_interval": 600}

TEXT = {
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "vocab_size": 151_676,
    "max_position_embeddings": 32768,
}
VISION = {"hidden_size": 3200, "num_hidden_layers": 45, "num_attention_heads": 25}
TOWER = {"depth": 27, "hidden_size": 1152, "num_heads": 16}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "as reported": {"text_config": TEXT, "vision_config": VISION},
    "layers called depth": {"text_config": TEXT, "vision_config": TOWER},
    "depth alone": {"text_config": TEXT, "vision_config": {"depth": 27}},
    "llm_config": {"llm_config": TEXT, "vision_config": VISION},
    "thinker_config": {"thinker_config": {"text_config": TEXT, "vision_config": TOWER}},
    "no vision part": {"text_config": TEXT},
    "root beside it": {**TEXT, "num_attention_heads": 7, "text_config": TEXT, "vision_config": TOWER},
}
WEIGHTS = 156_000_000_000


def config(variant: str) -> dict[str, Any]:
    return {"architectures": ["InternVLChatModel"], "torch_dtype": "bfloat16", **VARIANTS[variant]}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_heads_are_those_of_the_language_part(variant: str) -> None:
    found = hyper_parameters(config(variant))
    assert found.num_attention_heads == 64
    assert found.num_key_value_heads == 8
    assert found.num_hidden_layers == 80
    assert found.is_multimodal == (variant != "no vision part")


async def towers_that_split(site: Site, folder: Path) -> None:
    """A tower with an even number of heads is split with the rest, unless the engine is told to keep it."""
    nested = {**config("as reported"), "vision_config": VISION | {"num_attention_heads": 26}}
    path = shapes.written(folder / "even", shapes.repository(nested, WEIGHTS))
    columns = {"source": "local_path", "local_path": str(path)}
    model = await site.model(cards=4, **columns)
    (row,) = await site.refused(await site.instances(model), timeout=within(5))
    assert "--tensor-parallel-size 4: 26 vision heads" in row["state_message"]
    await site.worker(W("one-more", 512, "4x80", "2/1"))
    flags = ["--tensor-parallel-size=4", "--mm-encoder-tp-mode=data"]
    await site.update("models", model, backend_parameters=flags)
    (row,) = await site.placed([row["id"]], timeout=within(5))
    assert row["worker_name"] == "one-more"


@pytest.mark.parametrize("backend", ["vLLM", "SGLang"])
async def test_a_78b_model_is_split_over_the_four_cards_that_it_asks_for(
    backend: str, site: Site, record: Record, tmp_path: Path
) -> None:
    variants = [v for v in VARIANTS if backend == "vLLM" or VARIANTS[v].get("vision_config") != VISION]
    await site.fleet(*[W(f"w{n}", 512, "4x80", "2/1") for n in range(len(variants))])
    waiting: dict[int, str] = {}
    flag = "--tensor-parallel-size=4" if backend == "vLLM" else "--tp-size=4"
    for name in variants:
        folder = shapes.written(tmp_path / name, shapes.repository(config(name), WEIGHTS))
        model = await site.model(
            name=name, source="local_path", local_path=str(folder), backend=backend, backend_parameters=[flag]
        )
        waiting[(await site.instances(model))[0]] = name
    async with crew(site.url, tmp_path / "logs", **SETTINGS) as daemons, watching(site.url):
        (daemon,) = await daemons.start()
        for row in await site.placed(waiting, timeout=within(5)):
            claim = row["computed_resource_claim"]
            assert sorted(row["gpu_indexes"]) == [0, 1, 2, 3]
            assert len(set(claim["vram"].values())) == 1
            assert claim["vram"]["0"] == int(80 * GIB * claim["vram_utilization"])
            if backend == "vLLM":
                assert claim["vram_utilization"] == 0.9
        if backend == "vLLM":
            await towers_that_split(site, tmp_path)
        noted = await daemon.logged("model.noted", model="depth alone")
        assert "no vision heads" in noted["reason"]
    assert await record.broken() == []
