"""What used to be silent is logged and counted: a full queue, a deaf listener, an unreadable model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpustackd.daemon.scheduling.file_locations import FileLocations
from gpustackd.daemon.scheduling.fleet_feed import FleetFeed
from gpustackd.daemon.scheduling.model_catalog import ModelCatalog
from gpustackd.daemon.scheduling.path_probe import PathProbe
from gpustackd.daemon.surface.reporter import Reporter
from gpustackd.domain.outcome import NoFit
from gpustackd.errors import ModelUnreadable
from gpustackd.observe.logging import start_logging
from gpustackd.observe.metrics import Metrics, exposition
from gpustackd.store.memory.store import MemoryStore
from gpustackd.store.postgres.listen import ListenerStatus

pytestmark = pytest.mark.anyio


class Desk:
    """A reporter with a real log and real metrics."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "log"
        self.stream = self.path.open("w")
        self.logging = start_logging(stream=self.stream, form="json")
        self.metrics = Metrics("1", "r")
        self.reporter = Reporter(self.logging.log, self.metrics)

    def lines(self) -> list[dict[str, Any]]:
        """All that was logged; nothing more can be after it."""
        self.logging.close()
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def counted(self, name: str) -> float:
        text = exposition(self.metrics.registry)[0].decode()
        [line] = [x for x in text.splitlines() if x.startswith(f"{name} ")]
        return float(line.split()[-1])


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made.logging.close()
    made.stream.close()


def test_a_full_queue_is_counted_each_time_and_logged_once_in_a_while(desk: Desk) -> None:
    for dropped in (3, 4):
        desk.reporter.queue_overflow(dropped, 100_000)
    assert desk.counted("gpustackd_queue_dropped_total") == 7
    [line] = desk.lines()
    assert (line["event"], line["count"], line["waiting"]) == ("queue.overflow", 3, 100_000)


def test_a_deaf_connection_is_told_from_a_lost_one(desk: Desk) -> None:
    desk.reporter.listening(ListenerStatus(listening=True))
    assert desk.counted("gpustackd_listening") == 1
    desk.reporter.listening(ListenerStatus(listening=False, deaf=True))
    desk.reporter.listening(ListenerStatus(listening=False))
    assert desk.counted("gpustackd_listening") == 0
    assert [line["event"] for line in desk.lines()] == ["listen.started", "listen.deaf", "listen.lost"]


class Unreadable:
    """A reader of models that finds something wrong."""

    def __init__(self) -> None:
        self.problem = "the disk is on fire"

    def cached(self, _: object) -> None:
        return None

    def doubt(self) -> None: ...

    async def facts(self, _: object) -> Any:
        raise ModelUnreadable("model.bad", self.problem, retryable=True)


async def test_a_model_that_cannot_be_read_is_counted_each_time_and_logged_for_each_reason(
    desk: Desk,
) -> None:
    store, reader, now = MemoryStore(), Unreadable(), [0.0]
    model = store.database.insert("models", name="m", source="local_path", local_path="/models/m")
    feed = FleetFeed(store)
    probe = PathProbe(None, FileLocations(store, feed), None, lambda: now[0])
    catalog = ModelCatalog(store, reader, probe, desk.reporter, lambda: now[0])
    for reason in ("the disk is on fire", "the disk is on fire", "the disk is gone"):
        reader.problem = reason
        assert isinstance(await catalog.read(model), NoFit)
        now[0] += 60
    assert desk.counted("gpustackd_model_read_failures_total") == 3
    lines = desk.lines()
    assert [line["event"] for line in lines] == ["model.unreadable"] * 2
    assert [line["reason"] for line in lines] == ["the disk is on fire", "the disk is gone"]
    assert lines[0]["model"] == "m"
