"""Cases as they are written: one JSON object a line, with fixtures that they name.

`GPUSTACKD_PEER_CASES` names another file of cases, `GPUSTACKD_PEER_FIXTURES` a folder with other fixtures;
what that folder does not have comes from here. A case that cannot be read raises `Unreadable` with the
field at fault.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

Case = dict[str, Any]

FIXTURES = Path(__file__).parent / "fixtures"
OWN_CASES = FIXTURES / "peer-cases.jsonl"


class Unreadable(Exception):
    """A case says something that the runner does not know."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


def read_cases(*areas: str, own: bool = False) -> list[Case]:
    """Cases of these areas (none named = all), in the order of the file; `own`: those of this repository."""
    path = OWN_CASES if own else Path(os.environ.get("GPUSTACKD_PEER_CASES") or OWN_CASES)
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            case = json.loads(line)
            kind = case["area"], case["id"], case["expect"]
        except (ValueError, KeyError, TypeError) as error:
            raise Unreadable(f"{path.name}, line {number}", f"is no case: {error!r}") from None
        if not areas or kind[0] in areas:
            found.append(case)
    return found


# -- fixtures ------------------------------------------------------------------------------------------------


def fixture(file: str, key: str, name: str, field: str) -> Any:
    """The entry `name` of a fixture file."""
    for folder in (os.environ.get("GPUSTACKD_PEER_FIXTURES") or FIXTURES, FIXTURES):
        entries = _entries(Path(folder) / file, key)
        if name in entries:
            return entries[name]
    raise Unreadable(field, f"{name!r} is not in {file}")


def names(file: str, key: str) -> list[str]:
    """Names of the entries of a fixture file, those of the folder that is set before our own."""
    folders = (os.environ.get("GPUSTACKD_PEER_FIXTURES") or FIXTURES, FIXTURES)
    return list(dict.fromkeys(n for f in folders for n in _entries(Path(f) / file, key)))


@lru_cache(maxsize=16)
def _entries(path: Path, key: str) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    found: Mapping[str, Any] = json.loads(path.read_text())[key]
    return found


def known_models() -> dict[str, Any]:
    """Facts of public models by repository name: configuration and bytes of weights."""
    return dict(_entries(FIXTURES / "models.json", "models"))


WORKER_KEYS = {"fixture", "inline", "set", "gpus", "gpus_take", "gpus_patch"}


def workers(case: Case) -> list[dict[str, Any]]:
    """The workers of a case: a fixture or inline, then `set`, `gpus`, `gpus_take`, `gpus_patch`."""
    return [_worker(w, f"workers[{n}]") for n, w in enumerate(case.get("workers") or [])]


def _worker(described: Mapping[str, Any], field: str) -> dict[str, Any]:
    known(described, WORKER_KEYS, field)
    if "inline" in described:
        base = described["inline"]
    elif "fixture" in described:
        base = fixture("fixtures-workers.json", "fixtures", described["fixture"], f"{field}.fixture")
    else:
        raise Unreadable(field, "has neither fixture nor inline")
    made: dict[str, Any] = json.loads(json.dumps(base))
    for key, value in (described.get("set") or {}).items():
        if value is None:
            made.pop(key, None)
        else:
            made[key] = value
    if "gpus" in described:
        made["gpus"] = json.loads(json.dumps(described["gpus"] or []))
    if described.get("gpus_take") is not None:
        made["gpus"] = (made.get("gpus") or [])[: described["gpus_take"]]
    for position, fields in (described.get("gpus_patch") or {}).items():
        try:
            made["gpus"][int(position)].update(fields)
        except (IndexError, ValueError, KeyError):
            raise Unreadable(f"{field}.gpus_patch", f"there is no GPU at position {position}") from None
    return made


def config_of(case: Case) -> dict[str, Any]:
    """The model's configuration, inline or by name."""
    asked = case["model"]
    if ref := asked.get("config_ref"):
        entry = fixture("models.json", "models", ref, "model.config_ref")
        return dict(entry.get("hf_config") or {})
    return dict(asked.get("config") or {})


def existing(case: Case) -> list[dict[str, Any]]:
    """What is placed already: each instance as its parts, the main one first, with `claim` of each."""
    return [{**i, "parts": parts(i)} for i in case.get("existing_instances") or []]


def parts(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Main part and subordinates of a candidate or an instance."""
    subordinates = entry.get("subordinates") or entry.get("subordinate_workers") or []
    kind = entry.get("gpu_type")
    return [
        {
            **p,
            "claim": p.get("claim") or p.get("computed_resource_claim") or {},
            "gpu_type": p.get("gpu_type") or kind,
        }
        for p in [entry, *subordinates]
    ]


# -- checks of shapes ----------------------------------------------------------------------------------------


def known(found: Any, keys: Iterable[str], field: str) -> None:
    """Raise Unreadable for the first key of a map that is not one of these."""
    if not isinstance(found, Mapping):
        raise Unreadable(field, f"is {type(found).__name__}, not a map")
    for key in found:
        if key not in keys:
            raise Unreadable(f"{field}.{key}", "is not known to the runner")


def one_of(found: Any, values: Iterable[Any], field: str) -> Any:
    """`found`, which is one of `values`."""
    if found not in values:
        raise Unreadable(field, f"{found!r} is not known to the runner")
    return found


def needed(found: Mapping[str, Any], key: str, field: str) -> Any:
    """The value of a key that has to be there."""
    if key not in found:
        raise Unreadable(f"{field}.{key}", "is missing")
    return found[key]
