"""What a GGUF model holds on each device and on the host, part by part, for one way to divide it. Bytes."""

from __future__ import annotations

from dataclasses import dataclass

from gpustackd.domain.gguf_facts import GgufFacts
from gpustackd.domain.gguf_levels import Level, Share


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """One device. `allowance`: what the claim adds for the runtime and for safety."""

    layers: int
    """Blocks; the output is counted apart."""
    output: bool
    weights: int
    kv_cache: int
    compute: int
    extras: int = 0
    """A projector, a draft model, adapters."""
    allowance: int = 0
    unified_allowance: int = 0
    """… where the device takes its memory from the host's, and there is no runtime of its own."""

    @property
    def used(self) -> bool:
        """Whether anything runs there; a device that is not used opens no context."""
        return self.output or self.layers > 0 or self.needed > 0

    @property
    def needed(self) -> int:
        """Before any allowance."""
        return self.weights + self.kv_cache + self.compute + self.extras

    @property
    def claim(self) -> int:
        """What has to be booked."""
        return self.needed + self.allowance

    @property
    def unified(self) -> int:
        """What has to be booked of a memory that device and host share."""
        return self.needed + self.unified_allowance


@dataclass(frozen=True, slots=True)
class HostShare:
    """The host's part. Weights of a file that is memory mapped lie in the page cache: counted all the same,
    since the model runs well only while they stay there."""

    weights: int
    kv_cache: int
    compute: int
    output: int
    """Rows of logits (and vectors) that are read back."""
    extras: int = 0
    prompt_cache: int = 0
    """Prompts that llama-server keeps (`--cache-ram`)."""
    allowance: int = 0
    """The process, its vocabulary, its libraries."""

    @property
    def needed(self) -> int:
        """Before any allowance."""
        return self.weights + self.kv_cache + self.compute + self.output + self.extras

    @property
    def claim(self) -> int:
        """RAM that has to be booked."""
        return self.needed + self.prompt_cache + self.allowance


@dataclass(frozen=True, slots=True)
class Division:
    """One way to divide a model. `offload_layers` counts the output layer first, as llama.cpp does: 1 is the
    output alone, n are the output and the last n - 1 blocks."""

    offload_layers: int
    total_layers: int
    devices: tuple[DeviceShare, ...]
    host: HostShare

    @property
    def full(self) -> bool:
        """Whether everything is on devices."""
        return self.offload_layers == self.total_layers


def level_of(division: Division) -> Level:
    """What placement reads of it."""
    return Level(
        offload_layers=division.offload_layers,
        devices=tuple(
            Share(d.layers, d.claim, d.unified) if d.used else Share(0, 0, 0) for d in division.devices
        ),
        ram=division.host.claim,
        ram_unified=division.host.claim,
        full=division.full,
    )


MIB = 1024**2
TOKEN = 100
"""RAM for each token of the vocabulary, besides its text."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """`runtime`: a GPU's context and libraries on each device; `process`: the same on the host."""

    runtime: int = 500 * MIB
    unified_runtime: int = 100 * MIB
    """Where devices share the host's memory: command buffers and kernels, no context of their own."""
    process: int = 200 * MIB
    margin: float = 0.02
    """Of the compute buffer."""

    def device(self, compute: int) -> tuple[int, int]:
        """What one device gets on top: with memory of its own, and with the host's."""
        margin = int(self.margin * compute)
        return self.runtime + margin, self.unified_runtime + margin

    def host(self, facts: GgufFacts) -> int:
        """What the process takes besides weights and buffers."""
        return self.process + facts.metadata_bytes + TOKEN * facts.vocabulary
