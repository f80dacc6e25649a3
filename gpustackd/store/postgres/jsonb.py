"""jsonb as Python values. One hostile value must not make the whole statement fail."""

from __future__ import annotations

import json
from typing import Any

MAX_DEPTH = 64


class Unreadable(str):
    """Stands for a value that was not decoded; the text says why."""

    __slots__ = ()


async def set_codec(connection: Any) -> None:
    """Encode and decode jsonb on this connection."""
    await connection.set_type_codec(
        "jsonb", encoder=json.dumps, decoder=decode, schema="pg_catalog", format="text"
    )


def decode(text: str) -> Any:
    """The value, or an `Unreadable`. Never raises: an error here would fail the whole statement."""
    if text.count("[") + text.count("{") > MAX_DEPTH and _deep(text):
        return Unreadable(f"is nested more than {MAX_DEPTH} levels deep")
    try:
        return json.loads(text)
    except ValueError:  # jsonb holds numbers of any length
        return Unreadable("holds a number of thousands of digits")


def _deep(text: str) -> bool:
    depth, quoted = 0, False
    skip = False
    for mark in text:
        if skip:
            skip = False
        elif quoted:
            skip = mark == "\\"
            quoted = mark != '"'
        elif mark == '"':
            quoted = True
        elif mark in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                return True
        elif mark in "]}":
            depth -= 1
    return False
