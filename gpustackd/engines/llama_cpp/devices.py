"""Which layer llama.cpp puts on which device.

Public source: `load_tensors` in llama.cpp's `src/llama-model.cpp`, in its 32-bit arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LayerDevices = NDArray[np.int64]

MOST_DEVICES = 15
"""llama.cpp schedules over 16 devices (`GGML_SCHED_MAX_BACKENDS`), of which the host is one."""


def offloaded_devices(shares: Sequence[float], layers: int) -> LayerDevices:
    """(layers,) device of each offloaded layer, in order. `shares`: one or more, as in `--tensor-split`.

    Of A layers the t-th goes to the first device whose cumulative share exceeds t / A.
    """
    bounds = np.add.accumulate(np.array(shares, np.float32), dtype=np.float32)
    bounds = bounds / bounds[-1]
    steps = np.arange(layers, dtype=np.float32) / np.float32(layers)
    return np.minimum(np.searchsorted(bounds, steps, side="right"), len(shares) - 1)


def layers_per_device(shares: Sequence[float], layers: int) -> tuple[int, ...]:
    """Number of offloaded layers on each device."""
    if not layers:
        return (0,) * len(shares)
    return tuple(np.bincount(offloaded_devices(shares, layers), minlength=len(shares)).tolist())


def layer_devices(all_layers: int, offload_layers: int, shares: Sequence[float]) -> LayerDevices:
    """(all_layers + 1,) device of each block, and of the output at the end; the host is `len(shares)`.

    The last blocks are offloaded first, and the output before all.
    """
    host = len(shares)
    count = all_layers + 1
    found = np.full(count, host, np.int64)
    offloaded = min(offload_layers, count) if host else 0
    if offloaded > 0:
        found[count - offloaded :] = offloaded_devices(shares, offloaded)
    return found
