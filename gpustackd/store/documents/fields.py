"""Checks of single fields in documents: each takes a value as read and returns what goes into the column."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime
from math import isfinite
from typing import Any

from gpustackd.store.postgres.jsonb import MAX_DEPTH

Check = Callable[[Any], Any]
"""Raises ValueError with a phrase that follows the field's name."""

LARGEST = 2**63 - 1
MANY = 200_000
"""Values in one list or map. A few YAML aliases can unfold into billions."""

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
          "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}  # fmt: skip
_SIZE = re.compile(r"(\d+)(?:\.(\d{1,6}))?\s*([KMGT]I?)?B?", re.IGNORECASE)


def text(value: Any) -> str:
    """Words; numbers are taken as they are written."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"must be text, not {kind_of(value)}")
    words = str(value)
    if "\0" in words:
        raise ValueError("holds a NUL character, which PostgreSQL cannot store")
    if any("\ud800" <= mark <= "\udfff" for mark in words):
        raise ValueError("holds half of a surrogate pair, which is no character")
    return words


def name(value: Any) -> str:
    words = text(value)
    if not words.strip():
        raise ValueError("must not be empty")
    return words


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {kind_of(value)}")
    return value


def whole(value: Any, least: int = -LARGEST, most: int = LARGEST) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"must be a whole number, not {kind_of(value)}")
    if not least <= value <= most:
        raise ValueError(f"must be from {least} to {most} (it is {value})")
    return value


def count(value: Any) -> int:
    return whole(value, 0)


def port(value: Any) -> int:
    return whole(value, 1, 65535)


def size(value: Any) -> int:
    """Bytes, as a number or with a unit: `85899345920`, `80GiB`, `81559 MiB`."""
    if isinstance(value, str):
        found = _SIZE.fullmatch(value.strip())
        if found is None:
            raise ValueError(f"must be bytes, such as 85899345920 or 80GiB (it is {value!r})")
        digits, fraction = found[1], found[2] or ""
        exact = int(digits + fraction) * _UNITS[(found[3] or "").upper()]
        value, rest = divmod(exact, 10 ** len(fraction))
        if rest:
            raise ValueError("must come to whole bytes")
    elif isinstance(value, float) and value.is_integer():  # 8e10 in YAML or JSON
        value = int(value)
    return whole(value, 0)


def moment(value: Any) -> datetime:
    """A time with its zone; none given = UTC."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            value = None
    if not isinstance(value, datetime):
        raise ValueError("must be a time such as 2026-01-31T12:00:00Z")
    return value if value.tzinfo else value.replace(tzinfo=UTC)


def one_of(words: Sequence[str]) -> Check:
    def check(value: Any) -> str:
        if value not in words:
            raise ValueError(f"must be one of {', '.join(words)} (it is {value!r})")
        return str(value)

    return check


def labels(value: Any) -> dict[str, str]:
    """A map of words to words."""
    return {k: "true" if v is True else "false" if v is False else text(v) for k, v in mapping(value).items()}


def mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"must be a map, not {kind_of(value)}")
    plain = data(value)
    assert isinstance(plain, dict)
    return plain


def array(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"must be a list, not {kind_of(value)}")
    plain = data(value)
    assert isinstance(plain, list)
    return plain


def texts(value: Any) -> list[str]:
    return [text(x) for x in array(value)]


def indexes(value: Any) -> list[int]:
    """GPU indexes of one worker and type: whole numbers, none of them twice."""
    found = [count(x) for x in array(value)]
    if len(set(found)) != len(found):
        raise ValueError("names a GPU twice")
    return found


def data(value: Any) -> Any:
    """Maps, lists and scalars that jsonb can hold. Keys become text."""
    left = MANY

    def plain(inner: Any, depth: int) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"holds more than {MANY} values")
        if isinstance(inner, Mapping | list | tuple) and depth == MAX_DEPTH:  # YAML may even go in circles
            raise ValueError(f"is nested more than {MAX_DEPTH} levels deep")
        if isinstance(inner, Mapping):
            return {text(k): plain(v, depth + 1) for k, v in inner.items()}
        if isinstance(inner, list | tuple):
            return [plain(v, depth + 1) for v in inner]
        if isinstance(inner, str):
            return text(inner)
        if inner is None or isinstance(inner, bool | int) or (isinstance(inner, float) and isfinite(inner)):
            return inner
        if isinstance(inner, date | datetime):
            raise ValueError(f"holds the time {inner}; put it in quotes")
        raise ValueError(f"holds {inner!r}, which JSON cannot")

    return plain(value, 0)


def kind_of(value: Any) -> str:
    """What a value is, in the words of a document."""
    if value is None:
        return "null"
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list"}
    return kinds.get(type(value), "a map" if isinstance(value, Mapping) else type(value).__name__)
