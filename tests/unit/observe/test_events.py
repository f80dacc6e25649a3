"""The list of log events, which people and their tools rely on."""

from __future__ import annotations

import re

from gpustackd.observe.events import EVENTS

CONTRACT = {
    "daemon.started", "daemon.stopping", "rescan.done", "instance.enqueued", "instance.analyzing",
    "instance.scheduled", "instance.unschedulable", "placement.conflict", "lease.expired",
    "worker.state_changed", "replicas.synced", "database.lost", "database.back",
}  # fmt: skip


def test_the_events_of_the_contract_are_listed() -> None:
    assert EVENTS.keys() >= CONTRACT


def test_names_of_events_have_one_form() -> None:
    assert [name for name in EVENTS if not re.fullmatch(r"[a-z]+\.[a-z_]+", name)] == []
