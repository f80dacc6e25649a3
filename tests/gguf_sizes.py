"""A GGUF model for tests whose sizes can be added up by hand: layers, and buffers by the device's place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpustackd.domain.demand import Demand, Engine, Need
from gpustackd.domain.facts import ModelFacts
from gpustackd.domain.gguf_levels import GgufNeed, Level, Share
from gpustackd.domain.model_spec import ModelSpec
from gpustackd.engines.llama_cpp.devices import layers_per_device
from tests.fleets import GIB, model

SIZED_FOR = {"context": 8192, "parallel": 4, "kv_unified": True, "ubatch": 512, "cache_type_k": "f16",
             "cache_type_v": "f16", "flash_attention": "auto"}  # fmt: skip


@dataclass(frozen=True)
class Toy:
    """`adds` are bytes of the blocks and, last, of the output. Several devices that hold everything work on
    several batches at once, which takes `copies` more on each."""

    adds: tuple[int, ...]
    buffer: int = GIB // 2
    logits: int = GIB // 4
    copies: int = GIB // 8
    allowance: int = GIB // 2
    host: int = GIB

    @property
    def total_layers(self) -> int:
        return len(self.adds)

    @property
    def layer_bytes(self) -> Sequence[int]:
        return self.adds

    def levels(self, split: tuple[float, ...] = (), remotes: int = 0) -> tuple[Level, ...]:
        return tuple(self.level(n, split, remotes) for n in range(len(self.adds) + 1))

    def level(self, offload_layers: int, split: tuple[float, ...] = (), remotes: int = 0) -> Level:
        counts = layers_per_device(split or (1.0,), offload_layers)
        start = len(self.adds) - offload_layers
        full = not start
        shares = []
        for n, count in enumerate(counts):
            held = sum(self.adds[start : start + count])
            start += count
            extra = self.buffer if count else 0
            if count and start == len(self.adds):
                extra += self.logits
            if full and len(counts) > 1:
                extra += self.copies
            output = bool(count) and start == len(self.adds)
            allowance = self.allowance if count else 0
            shares.append(Share(count - output, held + extra + allowance, held + extra))
            del n
        kept = sum(self.adds[: len(self.adds) - offload_layers])
        ram = self.host + kept
        return Level(offload_layers, tuple(shares), ram, ram - GIB // 4, full)


def toy(blocks: int, gib: float, output: float | None = None, **more: Any) -> Toy:
    """So many blocks of so many GiB each."""
    return Toy((int(gib * GIB),) * blocks + (int((gib if output is None else output) * GIB),), **more)


def layered(sizes: Toy, spec: ModelSpec | None = None, *, distributable: bool = True, image: bool = False,
            **fields: Any) -> Demand:  # fmt: skip
    """What a model of these sizes asks for."""
    spec = spec or model(source="local_path", local_path="/m/x.gguf", **fields)
    full = sizes.level(sizes.total_layers)
    need = Need(full.devices[0].vram, full.ram)
    digest = f"{sizes}{distributable}{image}"
    return Demand(spec, ModelFacts(None, categories=("llm",)), need, Engine.GGUF, digest,
                  GgufNeed(sizes, distributable, image, SIZED_FOR))  # fmt: skip
