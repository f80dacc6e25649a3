"""The settings of the peer's estimator, out of `backend_parameters` (estimate-gguf spec section 14)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpustackd.domain.backend_parameters import BackendParameters
from gpustackd.domain.gguf_facts import BY_NAME, F16, ElementType
from gpustackd.errors import BadRow
from gpustackd.estimate.gguf.serving import CACHE_TYPES

MIB = 1024**2
CONTEXT = 8192
SLOTS = 4
BATCH = 2048
UBATCH = 512

_NUMBER = re.compile(r"\d{1,9}\Z")


@dataclass(frozen=True, slots=True)
class PeerFlags:
    """What the peer's estimator is told."""

    context: int = CONTEXT
    slots: int = SLOTS
    batch: int = BATCH
    ubatch: int = UBATCH
    cache_k: ElementType = F16
    cache_v: ElementType = F16
    flash: bool = False
    mmap: bool = False
    offload_cache: bool = True
    full_windows: bool = False
    overrides: tuple[re.Pattern[str], ...] = ()
    """Names of tensors that are moved to RAM."""
    host_platform: int = 150 * MIB
    device_platform: int = 500 * MIB
    old: bool = False
    """As an older version of the estimator, from which the published samples stem: one row of logits, and
    other rules for what is moved."""


def peer_flags(flags: BackendParameters) -> PeerFlags:
    """Read the flags that are passed on; one that cannot be read makes the peer ignore them all."""
    try:
        return _flags(flags)
    except BadRow:
        return PeerFlags()


def _flags(flags: BackendParameters) -> PeerFlags:
    def cache(*names: str) -> ElementType:
        word = (flags.text(*names) or "f16").lower()
        # anything unknown, and bf16, is taken for f16
        return BY_NAME[word] if word in CACHE_TYPES and word != "bf16" else F16

    def count(default: int, *names: str) -> int:
        found = flags.integer(*names)
        return found if found is not None and found > 0 else default

    flash = flags.has("flash-attention", "flash-attn", "diffusion-fa", "fa")
    cache_v = cache("cache-type-v", "ctv")
    host, device = 150 * MIB, 500 * MIB
    stated = (flags.text("platform-footprint") or "").split(",")
    if len(stated) == 2 and all(_NUMBER.match(x) for x in stated):
        host, device = (int(x) * MIB for x in stated)
    patterns = [p.rpartition("=") for raw in flags.values("override-tensor", "ot") for p in raw.split(",")]
    return PeerFlags(
        context=count(CONTEXT, "ctx-size", "c"),
        slots=count(SLOTS, "parallel-size", "parallel", "np"),
        batch=count(BATCH, "batch-size", "b"),
        ubatch=count(UBATCH, "ubatch-size", "ub"),
        cache_k=cache("cache-type-k", "ctk"),
        cache_v=cache_v if flash or cache_v.elements == 1 else F16,
        flash=flash,
        mmap=flags.flag("mmap"),
        offload_cache=not flags.flag("no-kv-offload", "nkvo"),
        full_windows=flags.flag("swa-full"),
        overrides=tuple(re.compile(p) for p, _, where in patterns if p and where.upper() in {"CPU", "AMX"}),
        host_platform=host,
        device_platform=device,
    )
