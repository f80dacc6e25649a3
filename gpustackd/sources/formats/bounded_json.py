"""JSON that strangers wrote: parsed within limits of size, depth and number of values, or refused by name.

A hostile document may be small on the wire and large in memory (ten bytes of `[[],[],` become a
hundred), so the number of values is bounded before the parser runs, not after.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpustackd.errors import ModelUnreadable

MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class JsonBounds:
    """How large a document may be: bytes, and values in it (counted roughly, by commas and brackets)."""

    size: int
    values: int


CONFIG = JsonBounds(10_000_000, 300_000)
"""config.json, model_index.json, adapter_config.json. Real ones stay below 1 MB."""
INDEX = JsonBounds(32_000_000, 500_000)
"""*.index.json: one value per tensor. The largest public models have about 100,000 tensors."""
API = JsonBounds(32_000_000, 1_000_000)
"""A hub's answer about one repository."""


def parse(data: bytes, name: str, bounds: JsonBounds = CONFIG) -> Any:
    """Parse one document. `name` is what messages call it. Raise ModelUnreadable (`bad_json`,
    `too_large`)."""
    if len(data) > bounds.size:
        raise too_large(name, len(data), bounds.size)
    values = data.count(b",") + data.count(b"[") + data.count(b"{")
    if values > bounds.values:
        raise ModelUnreadable("too_large", f"{name} has about {values} values; the limit is {bounds.values}")
    try:
        document = json.loads(data)  # Infinity and NaN pass: configurations of Mamba models hold them
    except RecursionError:
        raise _too_deep(name) from None
    except ValueError as e:  # JSONDecodeError, UnicodeDecodeError, numbers of thousands of digits
        raise ModelUnreadable("bad_json", f"{name} is not valid JSON: {_short(e)}") from None
    _check_depth(document, name)
    return document


def parse_object(data: bytes, name: str, bounds: JsonBounds = CONFIG) -> Mapping[str, Any]:
    """Like `parse`, and the document has to be an object. Raise ModelUnreadable."""
    document = parse(data, name, bounds)
    if not isinstance(document, dict):
        raise ModelUnreadable("bad_json", f"{name} is a JSON {type(document).__name__}, not an object")
    return document


def too_large(name: str, size: int, limit: int) -> ModelUnreadable:
    """The error for a file beyond its limit; the file itself need not have been read."""
    return ModelUnreadable("too_large", f"{name} is {size} bytes long; the limit is {limit}")


def _check_depth(document: Any, name: str) -> None:
    level = [document] if isinstance(document, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        if not level:
            return
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, (dict, list))
        ]
    raise _too_deep(name)


def _too_deep(name: str) -> ModelUnreadable:
    return ModelUnreadable("bad_json", f"{name} is nested more than {MAX_DEPTH} levels deep")


def _short(e: ValueError) -> str:
    text = str(e)
    return text if len(text) <= 120 else text[:117] + "..."
