"""FR-26: a model that cannot be read costs nobody else anything."""

from __future__ import annotations

import json
import os
from pathlib import Path

import anyio
import pytest

from tests.acceptance.daemons import Daemon, crew, within
from tests.acceptance.machines import CONFIG, GIB, Site, W, model_directory
from tests.acceptance.record import Record, watching
from tests.acceptance.wire import black_hole
from tests.waiting import elapse

pytestmark = pytest.mark.anyio

MIB = 2**20
HELD_UP = 10.0
"""Seconds for an answer of a daemon that nothing holds up; a hub that is tried again held one up for 15."""
LOCAL = ("missing", "json", "layers", "header", "fifo")


def bad_directory(folder: Path, kind: str) -> Path:
    """A model's directory with one thing wrong."""
    if kind == "missing":
        return folder
    model_directory(folder, need=14)
    if kind == "json":
        (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "hidden_size": ')
    elif kind == "layers":
        (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 0}))
    elif kind == "header":
        with (folder / "model.safetensors").open("wb") as file:
            file.write((2**40).to_bytes(8, "little") + b'{"w":')
            file.truncate(20 * GIB)
    elif kind == "fifo":
        (folder / "config.json").unlink()
        os.mkfifo(folder / "config.json")
    return folder


async def keeps_answering(daemon: Daemon, answers: list[int]) -> None:
    """Ask `/healthz` ten times a second for ever."""
    while True:
        answers.append((await daemon.get("/healthz", timeout=HELD_UP))[0])
        await elapse(0.1, "between two questions")


async def test_ten_bad_models_end_with_reasons_and_ten_good_ones_are_placed_at_once(
    site: Site, record: Record, tmp_path: Path
) -> None:
    await site.fleet(*[W(f"w{n}", 256, "4x24") for n in range(3)])
    good: list[int] = []
    bad: dict[int, str] = {}
    with black_hole() as nobody:
        settings = {"lease": 30, "rescan_interval": 600, "HF_ENDPOINT": nobody}
        async with (
            crew(site.url, tmp_path / "logs", **settings) as daemons,
            watching(site.url, stuck_after=10),
            anyio.create_task_group() as asking,
        ):
            (daemon,) = await daemons.start()
            answers: list[int] = []
            asking.start_soon(keeps_answering, daemon, answers)
            read = daemon.bytes_read()
            for n in range(10):  # in mixed order
                if n % 2:
                    kind = LOCAL[n // 2]
                    path = bad_directory(tmp_path / f"bad{n}", kind)
                    model = await site.model(source="local_path", local_path=str(path), name=kind)
                else:
                    kind = f"lab/hub{n}"
                    model = await site.model(source="huggingface", huggingface_repo_id=kind, name=kind)
                bad[(await site.instances(model))[0]] = kind
                good += await site.instances(await site.model(need=14))
            await site.placed(good, timeout=within(5))
            for id_ in good:
                assert await record.states(id_) == ["PENDING", "ANALYZING", "SCHEDULED"]
            rows = {bad[r["id"]]: r for r in await site.refused(bad, timeout=60)}
            for kind, row in rows.items():
                assert kind in row["state_message"], row["state_message"]
                assert row["reasons"]
                delay = (row["next_attempt_at"] - row["updated_at"]).total_seconds()
                assert delay > 0.7 * 2 ** (row["attempts"] - 1), "the delays double"
            assert "is not on this host" in rows["missing"]["state_message"]
            assert "not valid JSON" in rows["json"]["state_message"]
            assert "num_hidden_layers" in rows["layers"]["state_message"]
            assert str(2**40) in rows["header"]["state_message"]
            assert "is a FIFO" in rows["fifo"]["state_message"]
            # the missing one is tried again by itself, later and later, and found when it is there
            again = next(i for i, kind in bad.items() if kind == "missing")
            await site.until("SELECT attempts >= 2 FROM model_instances WHERE id = $1", again)
            model_directory(tmp_path / "bad1", need=14)
            await site.update("models", rows["missing"]["model_id"], env={"EDITED": "1"})
            await site.placed([again], timeout=within(5))
            assert daemon.bytes_read() - read < 32 * MIB
            assert answers.count(200) == len(answers) >= 10
            asking.cancel_scope.cancel()
    assert await record.broken() == []
