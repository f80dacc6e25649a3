"""FR-06: packed weights are sized by their bytes on disk, never by type times number of parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpustackd.domain.model_spec import model_spec
from gpustackd.estimate.breakdown import Breakdown, breakdown
from gpustackd.sources.reader import Reader
from tests.acceptance import shapes
from tests.acceptance.daemons import crew, within
from tests.acceptance.machines import GIB, Site, W
from tests.acceptance.record import Record, watching
from tests.hub import Repo

pytestmark = pytest.mark.anyio

SETTINGS = {"lease": 60, "rescan_interval": 600}

SHARE = int(48 * GIB * 0.9)

MODELS: dict[str, tuple[Repo, int]] = {
    "as reported": (
        shapes.repository(
            {
                **shapes.QWEN_72B,
                "torch_dtype": "float16",
                "quantization_config": shapes.GPTQ,
                "max_position_embeddings": 262_144,
            },
            42_000_000_000,
        ),
        2,
    ),
    "gptq": (shapes.of_72b(shapes.GPTQ, "float16"), 2),
    "awq": (shapes.of_72b(shapes.AWQ, "float16"), 2),
    "compressed-tensors": (shapes.of_72b(shapes.COMPRESSED), 2),
    "fp8": (shapes.of_72b(shapes.FP8), 2),
    "bf16": (shapes.of_72b(), 4),
}
"""Each with the number of 48 GiB cards that it takes at 0.9 of each."""


async def estimate(folder: Path) -> Breakdown:
    spec = model_spec({"id": 1, "name": folder.name, "source": "local_path", "local_path": str(folder)})
    async with Reader() as reader:
        return breakdown(spec, await reader.facts(spec))


async def test_a_72b_model_takes_as_many_cards_as_its_bytes_need_whatever_packs_them(
    site: Site, record: Record, tmp_path: Path
) -> None:
    await site.fleet(*[W(f"w{n}", 512, "4x48", "2/1") for n in range(len(MODELS))])
    waiting: dict[int, str] = {}
    for name, (repo, _) in MODELS.items():
        folder = shapes.written(tmp_path / "models" / name, repo)
        model = await site.model(name=name, source="local_path", local_path=str(folder))
        waiting[(await site.instances(model))[0]] = name
        found = await estimate(folder)
        assert found.weights == shapes.weights_of(repo)
        assert found.parts["weights"] == found.weights
        assert found.claim_vram is not None
        assert found.weights < found.claim_vram < 1.2 * found.weights + 2 * GIB + 1
        if name == "as reported":
            assert 39.1 * GIB < found.claim_vram < 60 * GIB
    async with crew(site.url, tmp_path / "logs", **SETTINGS) as daemons, watching(site.url):
        (daemon,) = await daemons.start()
        for row in await site.placed(waiting, timeout=within(5)):
            _, cards = MODELS[waiting[row["id"]]]
            claim = row["computed_resource_claim"]
            assert len(set(row["gpu_indexes"])) == len(row["gpu_indexes"]) == cards, waiting[row["id"]]
            assert claim["vram"] == {str(n): SHARE for n in row["gpu_indexes"]}
            assert claim["vram_utilization"] == 0.9
        # what is left of the booking holds no longest sequence: 80 GiB for the first, 10 for the others
        assert await daemon.stop() == 0
        told = {line["model"]: line["reason"] for line in daemon.whole("placement.tight")}
        assert told.keys() == {"as reported", "fp8", "bf16"}
        assert "80.00 GiB of KV cache" in told["as reported"]
    assert await record.broken() == []
