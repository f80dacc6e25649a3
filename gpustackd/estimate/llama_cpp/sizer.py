"""Sizes one GGUF model under one set of flags, for any number of layers on any devices.

Weights and caches are sums over layers, taken for all levels at once; compute buffers come from a pass that
is laid out once for each kind of division and kept. Pure: equal questions have equal answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gpustackd.domain.gguf_facts import F16, GgufFacts
from gpustackd.engines.llama_cpp.devices import LayerDevices, layer_devices
from gpustackd.engines.llama_cpp.flags import LlamaServing
from gpustackd.estimate.llama_cpp.architecture import dimensions
from gpustackd.estimate.llama_cpp.compute import ComputeBuffers
from gpustackd.estimate.llama_cpp.division import Allowance, DeviceShare, Division, HostShare
from gpustackd.estimate.llama_cpp.extras import extras
from gpustackd.estimate.llama_cpp.memory import Memory, memory_of
from gpustackd.estimate.llama_cpp.tensors import padded, sort_tensors

KEPT = 4096
SPARE = 0.006
"""Share of a model up to which the copies of an activation are counted that llama.cpp's dry run, by which its
server fits models to devices, holds on every device after the first, and its real run does not."""


class Sizer:
    """All that one instance of a model may hold. `facts.warnings` and `warnings` say what was assumed."""

    def __init__(self, facts: GgufFacts, serving: LlamaServing, allowance: Allowance | None = None) -> None:
        self.facts = facts
        self.serving = serving
        self.allowance = allowance or Allowance()
        self.dims = dimensions(facts)
        tensors = sort_tensors(facts, self.dims.all_layers)
        self.memory: Memory = memory_of(facts, self.dims, tensors, serving)
        self.buffers = ComputeBuffers(facts, self.dims, tensors, serving)
        self._extras = self._beside_model()
        self._kept: dict[tuple[int, tuple[float, ...]], Division] = {}

    @property
    def total_layers(self) -> int:
        """Blocks and the output."""
        return self.dims.all_layers + 1

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was assumed where no rule is known."""
        return self.buffers.warnings

    def divisions(self, shares: Sequence[float] = (1.0,)) -> tuple[Division, ...]:
        """Every level over these devices: index 0 is the host alone, the last one is full."""
        return tuple(self.division(n, shares) for n in range(self.total_layers + 1))

    def division(self, offload_layers: int, shares: Sequence[float] = (1.0,)) -> Division:
        """So many layers (the output first) over devices with these shares of them."""
        count = min(max(offload_layers, 0), self.total_layers)
        key = (count, tuple(shares))
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= KEPT:
                self._kept.clear()
            at = layer_devices(self.dims.all_layers, count, shares)
            found = self._kept[key] = self.division_at(at, len(shares))
        return found

    def division_at(self, at: LayerDevices, devices: int) -> Division:
        """With each block and the output where `at` says; the host is the number `devices`."""
        memory, host = self.memory, devices
        blocks, output = at[:-1], int(at[-1])
        weights = np.bincount(blocks, memory.layers, devices + 1).astype(np.int64)
        cache_at = blocks if self.serving.offload_cache else np.full_like(blocks, host)
        cache = np.bincount(cache_at, memory.cache, devices + 1).astype(np.int64)
        layers = np.bincount(blocks, minlength=devices + 1)
        weights[layers > 0] += memory.everywhere
        weights[int(blocks[0]) if len(blocks) else host] += memory.first
        weights[host] += memory.inputs + int(memory.kept.sum())
        weights[output] += memory.output - (memory.tied if output == host else 0)
        for device, size in memory.overrides.items():
            weights[min(device, host)] += size
        compute = self.buffers.of(at.tolist(), devices)
        used = [d for d in range(devices) if layers[d] or output == d]
        if self.buffers.pipelined(at.tolist(), devices):
            spare = self.buffers.activation_copies
            if spare <= SPARE * (int(weights.sum() + cache.sum()) + sum(compute)):
                compute = tuple(c + (spare if d in used[1:] else 0) for d, c in enumerate(compute))
        extra_vram, extra_ram = self._extras
        shares = []
        for d in range(devices):
            extra = extra_vram if used and d == used[0] else 0
            allowed = self.allowance.device(compute[d]) if d in used else (0, 0)
            shares.append(
                DeviceShare(
                    layers=int(layers[d]),
                    output=output == d,
                    weights=int(weights[d]),
                    kv_cache=int(cache[d]),
                    compute=compute[d] if d in used else 0,
                    extras=extra,
                    allowance=allowed[0],
                    unified_allowance=allowed[1],
                )
            )
        return Division(
            offload_layers=int((at < host).sum()),
            total_layers=self.total_layers,
            devices=tuple(shares),
            host=HostShare(
                weights=int(weights[host]),
                kv_cache=int(cache[host]),
                compute=compute[-1],
                output=self.output_rows,
                extras=extra_ram + (0 if used else extra_vram),
                prompt_cache=0 if self.serving.embeddings else self.serving.cache_ram,
                allowance=self.allowance.host(self.facts),
            ),
        )

    def _beside_model(self) -> tuple[int, int]:
        """Bytes of adapters, projector and draft model: on the first device, and on the host."""
        vram, ram = extras(self.facts, self.serving)
        if self.facts.draft is not None:
            own = replace(
                self.serving, cache_k=F16, cache_v=F16, overrides=(), gpu_layers=None, tensor_split=()
            )
            drafted = Sizer(replace(self.facts.draft, draft=None, projector=None, adapters=()), own)
            found = drafted.division(drafted.total_layers)
            vram += found.devices[0].needed
            ram += found.host.needed
        return vram, ram

    @property
    def output_rows(self) -> int:
        """Rows of logits that the host holds, one per slot; vectors beside them where they are asked for."""
        width = self.dims.vocabulary + (self.dims.embedding if self.serving.embeddings else 0)
        return padded(4 * width * self.serving.parallel)
