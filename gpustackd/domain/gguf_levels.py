"""What a GGUF model needs on each device, for any number of offloaded layers and any split over devices.

`estimate` computes these values, `placement` reads them. All sizes are the bytes to book: they include the
runtime's allowance and the margin.

Devices are in llama.cpp's order: remote ones (RPC) first, then those of the main worker. Layers are the
repeating blocks and, as the last one, the output: `total_layers` = blocks + 1. A level is the number of
offloaded layers; level n holds the last n layers (the output is offloaded first), the first of them on the
first device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Share:
    """What one device holds. Sizes in bytes."""

    layers: int
    """Repeating layers on the device."""
    vram: int
    """Booked where the device has memory of its own."""
    unified: int
    """Booked where the device shares the host's memory."""


@dataclass(frozen=True, slots=True)
class Level:
    """One number of offloaded layers. Sizes in bytes."""

    offload_layers: int
    devices: tuple[Share, ...]
    ram: int
    """Booked on the main worker, where memory is not unified."""
    ram_unified: int
    """Booked on the main worker where it is, in addition to the devices' `unified`."""
    full: bool = False
    """Every layer is offloaded."""


class LevelSizes(Protocol):
    """Sizes of one model with its flags. Pure; an implementation may cache."""

    @property
    def total_layers(self) -> int:
        """Repeating layers, and one for the output."""

    @property
    def layer_bytes(self) -> Sequence[int]:
        """Bytes that each layer adds to its device (weights and cache): `total_layers` entries, the output
        last. The rest of a `Share` is buffers, which hardly depend on the number of layers."""

    def levels(self, split: tuple[float, ...] = (), remotes: int = 0) -> Sequence[Level]:
        """Levels 0 to `total_layers` over `len(split)` devices (none = one device), the first `remotes` of
        them remote. `split` are proportions as in `--tensor-split`."""

    def level(self, offload_layers: int, split: tuple[float, ...] = (), remotes: int = 0) -> Level:
        """One of `levels`. Where the proportions are whole numbers that add up to the number of layers, each
        device gets exactly that many."""


@dataclass(frozen=True, slots=True)
class GgufNeed:
    """What an instance of a GGUF model needs beyond what every model does."""

    sizes: LevelSizes
    distributable: bool = True
    """Whether layers may be split over several workers; false for adapters."""
    image: bool = False
    """A diffusion model, which is not split into layers: one GPU holds it."""
    sized_for: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Context size, parallelism and cache types that the sizes hold for; part of the claim."""
