"""What every answer of `gpustackd estimate` states, whichever engine runs the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Estimate(Protocol):
    """Sizes in bytes; None = not known."""

    @property
    def source(self) -> str: ...
    @property
    def backend(self) -> str: ...
    @property
    def architecture(self) -> str | None: ...
    @property
    def categories(self) -> tuple[str, ...]: ...
    @property
    def weights(self) -> int | None: ...
    @property
    def claim_vram(self) -> int | None: ...
    @property
    def claim_ram(self) -> int: ...
    @property
    def parts(self) -> Mapping[str, int]: ...


def common_fields(found: Estimate) -> dict[str, Any]:
    """The first keys of `-o json`; keys may be added, none is renamed or removed."""
    return {
        "source": found.source,
        "backend": found.backend,
        "architecture": found.architecture,
        "categories": list(found.categories),
        "weights": found.weights,
        "claim": {"vram": found.claim_vram, "ram": found.claim_ram},
        "parts": dict(found.parts),
    }
