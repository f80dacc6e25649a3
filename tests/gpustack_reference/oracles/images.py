"""Whether a worker can run an engine, by the rows of the image catalogue and the registered versions.

The rows are data of the product; how they are looked up is worked out here by itself: an image for the
runtime, the chip, the version asked for, whose runtime level is no newer than the host's or of the same
major.
"""

from __future__ import annotations

import re
from typing import Any

from tests.gpustack_reference import cases
from tests.gpustack_reference.cases import Case

CHIPS = (
    ("910_93", "a3"), ("910_95", "950"), ("Ascend950", "950"), ("910A", "910"), ("910Pro", "910"),
    ("910Premium", "910"), ("910B", "910b"), ("310P", "310p"), ("310B", "310b"),
)  # fmt: skip
"""Parts of chips' names -> variants of images; a chip that is not reported is taken for the 910b."""


def able(case: Case, rows: list[Any]) -> list[str]:
    """Names of the workers that can run the model's engine. `rows`: images with runtime, level, variant,
    service, version and deprecated."""
    return [w["name"] for w in cases.workers(case) if _able(case, w, rows)]


def _able(case: Case, worker: dict[str, Any], rows: list[Any]) -> bool:
    asked = case["model"]
    name = asked.get("backend") or "vLLM"
    if asked.get("image_name") or name == "Custom":
        return True
    pin = asked.get("backend_version") or None
    cards = worker.get("gpus") or []
    if not cards:
        return any(_stored(e, "cpu", pin, v) for v, e in _versions(case, name))
    return any(_card(case, g, name, pin, rows) for g in cards)


def _card(case: Case, card: dict[str, Any], name: str, pin: str | None, rows: list[Any]) -> bool:
    if any(_stored(e, card["type"], pin, v) for v, e in _versions(case, name)):
        return True
    mine = [
        r
        for r in rows
        if (r.runtime, r.service) == (card["type"], name.lower())
        and (_same(r.version, pin) if pin else not r.deprecated)
        and (card["type"] != "cann" or r.variant in ("", _chip(card.get("arch_family"))))
    ]
    host = card.get("runtime_version") or ""
    return any(
        not host or _number(r.level) <= _number(host) or _number(r.level)[:1] == _number(host)[:1]
        for r in mine
    )


def _versions(case: Case, name: str) -> list[tuple[str, dict[str, Any]]]:
    """Registered versions that the model's owner sees."""
    owner = case["model"].get("owner_principal_id")
    merged: dict[str, dict[str, Any]] = {}
    rows = [r for r in case["inputs"].get("backends") or [] if r["name"].lower() == name.lower()]
    for row in sorted(rows, key=lambda r: r.get("owner") is not None):
        if row.get("owner") in (None, owner):
            merged |= row.get("versions") or {}
    return list(merged.items())


def _stored(entry: dict[str, Any], runtime: str, pin: str | None, version: str) -> bool:
    if pin and not _same(version, pin):
        return False
    listed = entry.get("frameworks") or entry.get("built_in_frameworks") or []
    return entry.get("custom_framework") in (runtime, "any") or runtime in listed or "any" in listed


def _same(version: str, pin: str | None) -> bool:
    return version.removeprefix("v") == (pin or "").removeprefix("v")


def _number(level: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", level)]


def _chip(name: str | None) -> str:
    if not name:
        return "910b"
    return next((v for part, v in CHIPS if part in name), "unknown")
