"""Asking workers for a model's path: over their file API, bounded, remembered, not waiting for the mute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from gpustackd.daemon.scheduling import path_probe
from gpustackd.daemon.scheduling.file_locations import FileLocations
from gpustackd.daemon.scheduling.fleet_feed import FleetFeed
from gpustackd.daemon.scheduling.path_probe import KEPT, NOBODY_TO_ASK, PathProbe
from gpustackd.domain.fleet.rows import WorkerRow
from gpustackd.domain.model_spec import ModelSpec, Source
from gpustackd.domain.paths import Presence
from gpustackd.errors import ModelUnreadable
from gpustackd.ports import Wake
from gpustackd.sources.abandonable_threads import AbandonableThreads
from gpustackd.sources.worker_files import WorkerFiles, WorkerHost
from gpustackd.store.memory.store import MemoryStore
from tests.fleets import model
from tests.worker_api import WorkerApi

pytestmark = pytest.mark.anyio

PATH = "/models/m"
HERE, MISSING, SILENT = Presence.HERE, Presence.MISSING, Presence.SILENT


def spec(path: str = PATH, **fields: Any) -> ModelSpec:
    return model(source=Source.LOCAL_PATH, local_path=path, **fields)


def locations(
    *names: str, port: int | None = 80, files: Any = None, feed: FleetFeed | None = None
) -> FileLocations:
    """READY workers 1, 2, … with a file API."""
    store = MemoryStore()
    feed = feed or FleetFeed(store)
    made = FileLocations(store, feed)
    made.ready_files = files or {}
    for n, name in enumerate(names, 1):
        feed.fleet.put_worker(
            WorkerRow(id=n, name=name, cluster_id=1, state="READY", ip="127.0.0.1", port=port)
        )
    return made


class Asked:
    """Workers that answer at once, or never; counts who is asked, and how many at a time."""

    def __init__(self, answers: Mapping[str, Any]) -> None:
        self.answers = dict(answers)
        self.asked: list[str] = []
        self.now = 0
        self.most = 0

    async def exists(self, host: WorkerHost, path: str) -> bool:
        self.asked.append(host.name)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            answer = self.answers[host.name]
            if answer is None:
                raise ModelUnreadable("worker_silent", "no answer", retryable=True)
            if answer == "mute":
                await anyio.sleep_forever()
            await anyio.lowlevel.checkpoint()
            return bool(answer)
        finally:
            self.now -= 1


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def probe(asker: Any, where: FileLocations) -> tuple[PathProbe, Clock, list[Wake]]:
    clock, wakes = Clock(), list[Wake]()
    return PathProbe(asker, where, AbandonableThreads(), clock, wakes.append), clock, wakes


def said(made: PathProbe, path: str = PATH) -> dict[int, Presence]:
    known = made.paths.get(path)
    return {} if known is None else dict(known.workers)


async def test_workers_are_asked_over_their_file_api() -> None:
    async with WorkerApi(
        {"w1": {f"{PATH}/config.json": {}}, "w2": {"/other": {}}, "w3": {}}, token="t"
    ) as api:
        api.status["w3"] = 500
        files = WorkerFiles("t", total=5, connect=5)

        class Loopback:
            async def exists(self, host: WorkerHost, path: str) -> bool:
                return await files.exists(api.host(host.name), path)

        made, _, _ = probe(Loopback(), locations("w1", "w2", "w3"))
        await made.look(spec())
        assert said(made) == {1: HERE, 2: MISSING, 3: SILENT}
        assert {path for _, path in api.asked} == {PATH}
        await files.aclose()


async def test_a_worker_with_a_ready_file_or_without_a_port_is_not_asked() -> None:
    asker = Asked({"w1": True, "w2": False, "w3": False})
    where = locations("w1", "w2", "w3", files={f"path:{PATH}": {2: 1}, spec().source_index: {3: 1}})
    made, _, _ = probe(asker, where)
    await made.look(spec())
    assert (asker.asked, said(made)) == (["w1"], {1: HERE})
    nobody, _, _ = probe(asker, locations("w1", port=None))
    await nobody.look(spec())
    assert asker.asked == ["w1"]
    assert said(nobody) == {}
    assert nobody.current(spec())


async def test_only_workers_that_the_model_may_use_are_asked() -> None:
    asker = Asked({"w1": True, "w2": True, "w3": True})
    feed = FleetFeed(MemoryStore())
    where = locations("w1", "w2", "w3", feed=feed)
    feed.fleet.put_worker(replace(feed.fleet.row(1), state="MAINTENANCE"))
    feed.fleet.put_worker(replace(feed.fleet.row(2), cluster_id=2))
    made, _, _ = probe(asker, where)
    await made.look(spec(cluster_id=1))
    assert asker.asked == ["w1"]


async def test_answers_are_believed_for_a_while_and_the_rest_is_asked_again() -> None:
    asker = Asked({"w1": True, "w2": False, "w3": None})
    made, clock, _ = probe(asker, locations("w1", "w2", "w3"))
    assert not made.current(spec())
    await made.look(spec())
    await made.look(spec())
    assert sorted(asker.asked) == ["w1", "w2", "w3"]
    asker.asked.clear()
    clock.now += KEPT[SILENT] + 1
    assert not made.current(spec())
    await made.look(spec())
    assert asker.asked == ["w3"]
    clock.now += KEPT[MISSING]
    await made.look(spec())
    assert sorted(asker.asked) == ["w2", "w3", "w3"]
    clock.now += KEPT[HERE]
    await made.look(spec())
    assert "w1" in asker.asked


async def test_a_worker_that_came_is_asked_and_the_others_are_not() -> None:
    asker = Asked({"w1": True, "w2": True})
    feed = FleetFeed(MemoryStore())
    made, _, _ = probe(asker, locations("w1", feed=feed))
    await made.look(spec())
    feed.fleet.put_worker(replace(feed.fleet.row(0), id=2, name="w2"))
    assert made.current(spec())
    made.workers_changed()
    assert not made.current(spec())
    await made.look(spec())
    assert asker.asked == ["w1", "w2"]


async def test_no_more_than_sixteen_are_asked_at_a_time() -> None:
    names = [f"w{n}" for n in range(1, 201)]
    asker = Asked(dict.fromkeys(names, True))
    made, _, _ = probe(asker, locations(*names))
    await made.look(spec())
    assert (len(asker.asked), asker.most) == (200, 16)
    assert set(said(made).values()) == {HERE}


async def test_the_mute_cost_no_more_than_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_probe, "BUDGET", 0.05)
    names = [f"w{n}" for n in range(1, 40)]
    asker = Asked(dict.fromkeys(names, "mute") | {"w1": True})
    made, clock, _ = probe(asker, locations(*names))
    await made.look(spec())
    assert said(made) == {1: HERE}  # of the others nothing is known: they are not dropped
    assert made.current(spec())
    clock.now += path_probe.ASK_REST_AFTER + 1
    assert not made.current(spec())


async def test_a_silent_worker_is_not_asked_about_every_other_path(tmp_path: Path) -> None:
    asker = Asked({"w1": None, "w2": True})
    made, clock, _ = probe(asker, locations("w1", "w2"))
    await made.look(spec())
    await made.look(spec("/other"))
    assert sorted(asker.asked) == ["w1", "w2", "w2"]
    assert said(made, "/other") == {1: SILENT, 2: HERE}
    clock.now += KEPT[SILENT] + 1
    await made.look(spec("/third"))
    assert asker.asked.count("w1") == 2


@pytest.mark.parametrize("there", [True, False])
async def test_a_path_on_this_host_may_be_on_a_file_system_that_silent_workers_share(
    tmp_path: Path, there: bool
) -> None:
    path = str(tmp_path if there else tmp_path / "gone")
    made, _, _ = probe(Asked({"w1": None}), locations("w1"))
    await made.look(spec(path))
    assert made.paths[path].shared is there


async def test_paths_that_no_file_system_takes_do_no_harm() -> None:
    made, _, _ = probe(Asked({"w1": None}), locations("w1"))
    for path in ("/m\0x", "/" + "x" * 10_000):
        await made.look(spec(path))
        assert made.paths[path].shared is False


async def test_what_waits_is_woken_when_a_worker_that_had_nothing_has_it_now() -> None:
    asker = Asked({"w1": False})
    made, clock, wakes = probe(asker, locations("w1"))
    await made.look(spec())
    assert (made.may_hold_up(spec()), wakes) == (False, [])
    clock.now += KEPT[MISSING] + 1
    assert made.may_hold_up(spec())
    asker.answers["w1"] = True
    await made.look(spec())
    assert [w.kind for w in wakes] == ["files"]
    assert not made.may_hold_up(spec())


async def test_every_change_makes_a_new_value() -> None:
    made, clock, _ = probe(Asked({"w1": True}), locations("w1"))
    values = [made.paths]
    for _ in range(2):
        await made.look(spec())
        clock.now += KEPT[HERE] + 1
        values.append(made.paths)
    assert len({id(value) for value in values}) == 3


async def test_models_of_hubs_have_nothing_to_ask() -> None:
    asker = Asked({"w1": True})
    made, _, _ = probe(asker, locations("w1"))
    hub = model(source=Source.HUGGINGFACE, huggingface_repo_id="a/b")
    assert made.current(hub)
    await made.look(hub)
    assert asker.asked == []


async def test_paths_that_nobody_asks_for_any_more_are_forgotten() -> None:
    made, _, _ = probe(Asked({"w1": True}), locations("w1"))
    for n in range(path_probe.MOST + 5):
        await made.look(spec(f"/m{n}"))
    assert len(made.paths) == path_probe.MOST
    assert "/m0" not in made.paths


async def test_two_that_ask_for_one_path_at_once_ask_once() -> None:
    asker = Asked({"w1": True})
    made, _, _ = probe(asker, locations("w1"))
    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(made.look, spec())
    assert asker.asked == ["w1"]


async def test_where_there_is_nobody_to_ask_that_is_remembered_too() -> None:
    made, clock, _ = probe(Asked({}), locations())
    await made.look(spec())
    assert made.current(spec())
    clock.now += NOBODY_TO_ASK + 1
    assert not made.current(spec())
