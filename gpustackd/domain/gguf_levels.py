"""What a GGUF model takes on each device, for any number of layers on GPUs and any division of them.

`estimate` fills these values, `placement` reads them. All sizes are bytes as they are to be booked: runtime
allowance and margin are in them.

Devices are in llama.cpp's order: remote ones (RPC) first, then those of the main worker. Layers are the
`blocks` repeating ones and, as the last one, the output: `total_layers` = blocks + 1. A level is the number
of layers on devices; level n holds the last n layers (the output is the first to go to a device), the first
of them on the first device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Share:
    """What one device holds."""

    layers: int
    """Repeating layers that run there."""
    vram: int
    """Booked where the device has memory of its own."""
    unified: int
    """Booked where the device takes its memory from the host's."""


@dataclass(frozen=True, slots=True)
class Level:
    """One number of layers on devices."""

    offload_layers: int
    devices: tuple[Share, ...]
    ram: int
    """Booked on the main worker, where memory is not unified."""
    ram_unified: int
    """Booked on the main worker where it is; the devices' `unified` comes on top."""
    full: bool = False
    """Every layer is on a device."""


class LevelSizes(Protocol):
    """Sizes one model with its flags. Pure: equal questions have equal answers; kept results are the
    implementation's business."""

    @property
    def total_layers(self) -> int:
        """Repeating layers and the output."""

    @property
    def layer_bytes(self) -> Sequence[int]:
        """What each layer adds to the device that runs it (weights and cache), `total_layers` entries, the
        output last. The rest of a `Share` is buffers, which hardly depend on how many layers there are."""

    def levels(self, split: tuple[float, ...] = (), remotes: int = 0) -> Sequence[Level]:
        """All levels 0 … `total_layers`, by their number, over `len(split)` devices (none = one device), the
        first `remotes` of them remote. `split` are shares as in `--tensor-split`."""

    def level(self, offload_layers: int, split: tuple[float, ...] = (), remotes: int = 0) -> Level:
        """One of `levels`. Where the sum of whole shares is the number of layers, every device gets exactly
        so many."""


@dataclass(frozen=True, slots=True)
class GgufNeed:
    """What an instance of a GGUF model asks, beyond what every model does."""

    sizes: LevelSizes
    distributable: bool = True
    """Whether layers may lie on several workers (never for adapters; for every model)."""
    image: bool = False
    """A diffusion model: not divided into layers, one GPU holds it."""
    sized_for: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Context, parallelism and cache types that the sizes hold for; goes into the claim."""
