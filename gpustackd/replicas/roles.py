"""How many members each role of a model asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpustackd.errors import BadRow


def role_numbers(value: Any) -> dict[str, int]:
    """Read `models.roles`: role name -> number of members; empty for a model without roles. Raises BadRow."""
    if value is None or value == []:
        return {}
    if not isinstance(value, list):
        raise BadRow("roles", "must be a list of roles")
    numbers: dict[str, int] = {}
    for n, role in enumerate(value):
        name = role.get("name") if isinstance(role, Mapping) else None
        if not isinstance(name, str) or not name:
            raise BadRow(f"roles[{n}].name", "is missing")
        number = role.get("replicas", 1)
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise BadRow(f"roles[{n}].replicas", f"must be a whole number (it is {number!r})")
        if name in numbers:
            raise BadRow(f"roles[{n}].name", f"names the role {name} twice")
        numbers[name] = number
    return numbers
