"""The ladder for GGUF models: one GPU, several GPUs of one worker, several workers, partial offload, CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpustackd.placement import gguf_peer

if TYPE_CHECKING:
    from gpustackd.placement.engine_steps import EngineStep
    from gpustackd.placement.search import Search


def ladder(search: Search) -> tuple[EngineStep, ...]:
    """The steps for one demand, in the order of the spec."""
    if search.rules.compat:
        return gguf_peer.ladder(search)
    return ()
