"""Engine flags rewritten: one flag takes another value, or goes."""

from __future__ import annotations

from collections.abc import Sequence

from gpustackd.engines.flags import is_key, parse_flags


def with_flag(parameters: Sequence[str], names: Sequence[str], value: str) -> tuple[str, ...]:
    """The list with the flag (under any of its names) set to a value.

    Where it stands as an element of its own it is replaced; one that is written together with others stays
    and is overruled by a last element, as engines take the last of several.
    """
    kept, where = _without(parameters, names)
    element = f"--{_spelt(parameters, names)}={value}"
    if any(parse_flags([p]).has(*names) for p in kept):
        return (*kept, element)
    at = len(kept) if where is None else where
    return (*kept[:at], element, *kept[at:])


def without_flag(parameters: Sequence[str], names: Sequence[str]) -> tuple[str, ...] | None:
    """The list without the flag; None where it is written together with others and cannot be taken out."""
    kept, where = _without(parameters, names)
    return None if where is None or parse_flags(kept).has(*names) else kept


def _without(parameters: Sequence[str], names: Sequence[str]) -> tuple[tuple[str, ...], int | None]:
    """What is left, and where the first element that went was."""
    kept: list[str] = []
    where: int | None = None
    at = 0
    while at < len(parameters):
        element = parameters[at]
        flags = parse_flags([element]).flags
        alone = len(flags) == 1 and parse_flags([element]).has(*names)
        at += 1
        if not alone:
            kept.append(element)
            continue
        where = len(kept) if where is None else where
        bare = flags[0].value is None
        if bare and at < len(parameters) and not is_key(parameters[at].strip()):
            at += 1  # its value
    return tuple(kept), where


def _spelt(parameters: Sequence[str], names: Sequence[str]) -> str:
    """The name by which the list calls the flag, else its first one."""
    found = parse_flags(parameters)
    return next((n for n in names if found.has(n)), names[0])
