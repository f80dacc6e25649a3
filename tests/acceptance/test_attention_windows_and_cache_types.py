"""FR-12: layers with a window, cache types, slots and the context that really runs decide what is booked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.daemons import crew, gpustackd, within
from tests.acceptance.machines import GIB, Site, W
from tests.acceptance.record import Record, watching
from tests.command_line import command_in_process
from tests.gguf_models import GEMMA_27B, LLAMA_8B

REPORTED = ("--ctx-size=128000", "--cache-type-k=q8_0", "--cache-type-v=f16", "--flash-attn=on")
"""62 layers of 16 KV heads x 128, five of six with a window of 1,024 tokens."""


def gib_of_cache(said: dict[str, Any]) -> float:
    return float(said["parts"]["kv_cache"]) / GIB


Estimate = Callable[..., dict[str, Any]]


@pytest.fixture
def estimate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Estimate:
    """What `gpustackd estimate` says of a file and flags, with all layers on one GPU."""
    command = command_in_process(monkeypatch, capsys)

    def run(path: Path, *flags: str) -> dict[str, Any]:
        answer = command("estimate", str(path), *arguments(*flags))
        assert answer.code == 0, answer.err
        found: dict[str, Any] = json.loads(answer.out)
        return found

    return run


def arguments(*flags: str) -> list[str]:
    return [*[f"--param={f}" for f in (*flags, "--gpu-layers=all")], "-o", "json"]


def test_the_cache_follows_windows_types_slots_and_context(tmp_path: Path, estimate: Estimate) -> None:
    path = GEMMA_27B.write(tmp_path / "gemma-27b-q4.gguf")

    def cache(*flags: str) -> float:
        return gib_of_cache(estimate(path, *REPORTED, *flags))

    said = estimate(path, *REPORTED)
    reported = gib_of_cache(said)
    assert 23 * GIB < said["claim"]["vram"] < 48 * GIB
    one_slot = cache("-np=1")
    assert 7.5 < one_slot < 8.2
    both_f16 = cache("-np=1", "--cache-type-k=f16")
    assert 10.0 < both_f16 < 10.6
    assert one_slot < reported, "four slots hold four windows in every layer that has one"
    assert cache("--ctx-size=64000") < reported
    assert cache("--swa-full") >= 46
    assert 60 < cache("--swa-full", "--cache-type-k=f16") < 61


def test_a_context_beyond_the_models_own_is_sized_as_the_engine_will_run_it(
    tmp_path: Path, estimate: Estimate
) -> None:
    path = LLAMA_8B.write(tmp_path / "llama-8b.gguf")
    beyond = gib_of_cache(estimate(path, "--ctx-size=262143"))
    assert beyond == gib_of_cache(estimate(path, "--ctx-size=262144"))
    assert beyond == 2 * gib_of_cache(estimate(path, "--ctx-size=131072"))


@pytest.mark.anyio
async def test_what_is_booked_is_what_was_sized_and_says_for_what(
    site: Site, record: Record, tmp_path: Path
) -> None:
    path = GEMMA_27B.write(tmp_path / "gemma-27b-q4.gguf")
    code, out, err = await gpustackd("", "estimate", str(path), *arguments(*REPORTED))
    assert code == 0, err
    said = json.loads(out)
    await site.fleet(W("w1", 64, "1x32"), W("w2", 64, "1x24"))
    here = {"source": "local_path", "local_path": str(path), "backend": "Custom"}
    fits = await site.model(name="windows", backend_parameters=list(REPORTED), **here)
    full = await site.model(name="all-of-it", backend_parameters=[*REPORTED, "--swa-full"], **here)
    async with (
        crew(site.url, tmp_path / "logs", lease=60, rescan_interval=600) as daemons,
        watching(site.url),
    ):
        await daemons.start()
        (row,) = await site.placed(await site.instances(fits), timeout=within(5))
        claim = row["computed_resource_claim"]
        assert row["worker_name"] == "w1"
        assert claim["vram"] == {"0": said["claim"]["vram"]}
        assert claim["ram"] == said["claim"]["ram"]
        assert (claim["offload_layers"], claim["total_layers"]) == (63, 63)
        assert claim["sized_for"] == {
            "context": 128000, "parallel": 4, "kv_unified": True, "ubatch": 512, "cache_type_k": "q8_0",
            "cache_type_v": "f16", "flash_attention": "on",
        }  # fmt: skip
        (refused,) = await site.refused(await site.instances(full), timeout=within(5))
        assert "61.40 GiB" in refused["state_message"]
        assert "23.00 GiB" in refused["state_message"], "what the other one holds is not free"
    assert await record.broken() == []
