"""Registered inference backends, read whole: they are few and change seldom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gpustackd.domain.backends import Backends, backend_row

BACKENDS = "SELECT name, owner, versions FROM inference_backends ORDER BY id"


def backends_of(rows: Iterable[Mapping[str, Any]]) -> Backends:
    """From rows of the table; what cannot be read in one of them supports nothing."""
    return Backends.of(backend_row(r["name"], r["owner"], r["versions"]) for r in rows)
