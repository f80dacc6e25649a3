"""Which layer goes to which device: llama.cpp's rule, in its 32-bit arithmetic (estimate-gguf spec section
5)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.int64]


def places(all_layers: int, offload_layers: int, shares: Sequence[float]) -> Places:
    """Device of each block, and of the output at the end; the host is `len(shares)`.

    The last blocks go first, the output before all. Of the A offloaded layers the t-th goes to the first
    device whose cumulative share exceeds t / A.
    """
    host = len(shares)
    count = all_layers + 1
    found = np.full(count, host, np.int64)
    offloaded = min(offload_layers, count) if host else 0
    if offloaded <= 0:
        return found
    single = np.float32
    running, bounds = single(0), []
    for share in shares:
        running = single(running + single(share))
        bounds.append(running)
    limits = np.array([single(b / running) for b in bounds], single)
    steps = np.array([single(single(t) / single(offloaded)) for t in range(offloaded)], single)
    found[count - offloaded :] = np.searchsorted(limits, steps, side="right")
    return np.minimum(found, host)
