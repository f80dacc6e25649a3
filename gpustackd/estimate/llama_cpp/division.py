"""What a GGUF model holds on each device and on the host, part by part, for one way to divide it. Bytes."""

from __future__ import annotations

from dataclasses import dataclass

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
