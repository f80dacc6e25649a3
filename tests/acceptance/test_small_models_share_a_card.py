"""FR-08: an embedding model books about what it uses, so that several share a card."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpustackd.domain.model_spec import model_spec
from gpustackd.estimate.breakdown import breakdown
from gpustackd.sources.reader import Reader
from tests.acceptance import shapes
from tests.acceptance.daemons import crew, within
from tests.acceptance.machines import GIB, Site, W
from tests.acceptance.record import Record, watching
from tests.hub import Sparse

pytestmark = pytest.mark.anyio

SETTINGS = {"lease": 60, "rescan_interval": 600}

TWICE = {"pytorch_model__bin": Sparse(b"", 400_000_000)}
"""The same weights once more, in an older format."""


async def test_three_embedding_models_share_one_card_of_16_gib(
    site: Site, record: Record, tmp_path: Path
) -> None:
    await site.fleet(W("w1", 64, "1x16", "2/1"))
    folder = shapes.written(tmp_path / "m", shapes.repository(shapes.BERT, 400_000_000, **TWICE))
    row = {"id": 1, "name": "bert", "source": "local_path", "local_path": str(folder)}
    spec = model_spec({**row, "categories": ["embedding"]})
    async with Reader() as reader:
        claim = breakdown(spec, await reader.facts(spec)).claim_vram
    assert claim is not None
    assert 0.4 * GIB < claim <= 2.0 * GIB
    async with crew(site.url, tmp_path / "logs", **SETTINGS) as daemons, watching(site.url):
        await daemons.start()
        ids = []
        for name in ("one", "two", "three"):
            model = await site.model(
                name=name,
                source="local_path",
                local_path=str(folder),
                categories=["embedding"],
                backend_parameters=None,
            )
            ids += await site.instances(model)
        for found in await site.placed(ids, timeout=within(5)):
            assert found["gpu_indexes"] == [0]
            assert found["computed_resource_claim"]["vram"] == {"0": claim}
        # what nobody said is found out: the architecture says what kind of model it is
        silent = await site.model(source="local_path", local_path=str(folder), categories=None, backend=None)
        (found,) = await site.placed(await site.instances(silent), timeout=within(5))
        assert found["computed_resource_claim"]["vram"] == {"0": claim}
        told = "SELECT categories ->> 0 FROM models WHERE id = $1"
        assert await site.until(told, silent) == "embedding"
    assert await record.broken() == []


async def test_a_size_that_cannot_be_found_out_is_unknown_and_never_nothing(
    site: Site, record: Record, tmp_path: Path
) -> None:
    await site.fleet(W("w1", 64, "1x16", "2/1"))
    folder = shapes.written(tmp_path / "m", shapes.repository(shapes.BERT, 400_000_000))
    (folder / "model.safetensors").unlink()
    async with crew(site.url, tmp_path / "logs", **SETTINGS) as daemons, watching(site.url):
        await daemons.start()
        model = await site.model(source="local_path", local_path=str(folder), categories=["embedding"])
        (row,) = await site.refused(await site.instances(model), timeout=within(5))
        assert "no weight files" in row["state_message"]
        assert str(folder) in row["state_message"]
        assert await site.sql.fetchval("SELECT count(*) FROM instance_claims") == 0
    assert await record.broken() == []
