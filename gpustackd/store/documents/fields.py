"""Checks of single fields in documents: each takes the value as read and returns the column's value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime
from math import isfinite
from typing import Any

from gpustackd.domain.sizes import parse_size
from gpustackd.store.postgres.jsonb import MAX_DEPTH

Check = Callable[[Any], Any]
"""Raises ValueError with a phrase to follow the field's name."""

MAX_INTEGER = 2**63 - 1
"""Of a bigint column."""
MAX_VALUES = 200_000
"""Values in one list or map: a few YAML aliases can expand into billions."""


def text(value: Any) -> str:
    """Text; numbers count as they are written."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"must be text, not {kind_of(value)}")
    words = str(value)
    if "\0" in words:
        raise ValueError("holds a NUL character, which PostgreSQL cannot store")
    if any("\ud800" <= mark <= "\udfff" for mark in words):
        raise ValueError("holds half of a surrogate pair, which is no character")
    return words


def name(value: Any) -> str:
    """Text that is not blank."""
    words = text(value)
    if not words.strip():
        raise ValueError("must not be empty")
    return words


def flag(value: Any) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {kind_of(value)}")
    return value


def whole(value: Any, lowest: int = -MAX_INTEGER, highest: int = MAX_INTEGER) -> int:
    """A whole number in a range."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"must be a whole number, not {kind_of(value)}")
    if not lowest <= value <= highest:
        raise ValueError(f"must be from {lowest} to {highest} (it is {value})")
    return value


def count(value: Any) -> int:
    """A whole number, not negative."""
    return whole(value, 0)


def port(value: Any) -> int:
    """A TCP port."""
    return whole(value, 1, 65535)


def size(value: Any) -> int:
    """Bytes, as a number or with a unit: `85899345920`, `80GiB`, `81559 MiB`."""
    if isinstance(value, str):
        exact = parse_size(value)
        if exact is None:
            raise ValueError(f"must be bytes, such as 85899345920 or 80GiB (it is {value!r})")
        if exact.denominator != 1:
            raise ValueError("must come to whole bytes")
        value = exact.numerator
    elif isinstance(value, float) and value.is_integer():  # 8e10 in YAML or JSON
        value = int(value)
    return whole(value, 0)


def moment(value: Any) -> datetime:
    """A time; without a zone it is UTC."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            value = None
    if not isinstance(value, datetime):
        raise ValueError("must be a time such as 2026-01-31T12:00:00Z")
    return value if value.tzinfo else value.replace(tzinfo=UTC)


def one_of(words: Sequence[str]) -> Check:
    """A check for one of these words."""

    def check(value: Any) -> str:
        if value not in words:
            raise ValueError(f"must be one of {', '.join(words)} (it is {value!r})")
        return str(value)

    return check


def labels(value: Any) -> dict[str, str]:
    """A map of text to text."""
    return {k: "true" if v is True else "false" if v is False else text(v) for k, v in mapping(value).items()}


def mapping(value: Any) -> dict[str, Any]:
    """A map that jsonb can hold."""
    if not isinstance(value, Mapping):
        raise ValueError(f"must be a map, not {kind_of(value)}")
    plain = data(value)
    assert isinstance(plain, dict)
    return plain


def array(value: Any) -> list[Any]:
    """A list that jsonb can hold."""
    if not isinstance(value, list):
        raise ValueError(f"must be a list, not {kind_of(value)}")
    plain = data(value)
    assert isinstance(plain, list)
    return plain


def texts(value: Any) -> list[str]:
    """A list of text."""
    return [text(x) for x in array(value)]


def indexes(value: Any) -> list[int]:
    """GPU indexes of one worker and type: whole numbers without duplicates."""
    numbers = [count(x) for x in array(value)]
    if len(set(numbers)) != len(numbers):
        raise ValueError("names a GPU twice")
    return numbers


def data(value: Any) -> Any:
    """Maps, lists and scalars that jsonb can hold; keys become text."""
    left = MAX_VALUES

    def plain(inner: Any, depth: int) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"holds more than {MAX_VALUES} values")
        if isinstance(inner, Mapping | list | tuple) and depth == MAX_DEPTH:  # YAML may even be circular
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
    """The type of a value, as people name it."""
    if value is None:
        return "null"
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list"}
    return kinds.get(type(value), "a map" if isinstance(value, Mapping) else type(value).__name__)
