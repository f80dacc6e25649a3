"""A GGUF model as a case gives it: the estimates that were captured for it, as layers on devices.

The captured list for one device has a line for each number of blocks on it, and is linear in them: buffers,
and so much for each block; the output comes on top where it lies. While blocks stay in RAM the first device
of the main worker has larger buffers than others; what they have is read from a list for several devices,
where the case has one. Sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tests.gpustack_reference import cases
from tests.gpustack_reference.cases import Case, Unreadable

Items = list[list[Any]]
"""Lines of [blocks on devices, whether whole, RAM, devices]; RAM and devices have (unified, own, …)."""


@dataclass(frozen=True)
class LayerModel:
    """What layers take; the last layer is the output, which is the first to go to a device."""

    adds: tuple[int, ...]
    base: int
    lead: int
    """What the first device of the main worker has more, unless all layers are on devices."""
    adds_unified: tuple[int, ...]
    base_unified: int
    ram: tuple[int, ...]
    """On the main worker, by the number of layers on devices."""
    ram_unified: tuple[int, ...]

    @property
    def total_layers(self) -> int:
        return len(self.adds)

    def device(self, first: int, last: int, *, unified: bool = False, leads: bool = False) -> int:
        """What a device takes that holds the layers from `first` up to and without `last`; nothing for none.
        `leads`: it is the first one of the main worker, and some layers stay in RAM."""
        if last <= first:
            return 0
        if unified:
            return self.base_unified + sum(self.adds_unified[first:last])
        return self.base + leads * self.lead + sum(self.adds[first:last])

    def devices(
        self, counts: Sequence[int], unified: Sequence[bool] | None = None, remotes: int = 0
    ) -> list[int]:
        """What devices take that hold so many layers each, the last ones of the model, in this order."""
        first, found = self.total_layers - sum(counts), []
        partial = first > 0
        for n, count in enumerate(counts):
            leads = partial and n == remotes
            found.append(self.device(first, first + count, unified=bool(unified and unified[n]), leads=leads))
            first += count
        return found

    def fill(
        self, room: Sequence[int], level: int, unified: Sequence[bool] | None = None, remotes: int = 0
    ) -> list[int] | None:
        """Layers for each device so that `level` of them lie on these, each filled before the next; None
        where they do not fit."""
        first, counts = self.total_layers - level, []
        partial = first > 0
        for n, free in enumerate(room):
            last, own = first, bool(unified and unified[n])
            leads = partial and n == remotes
            while last < self.total_layers and self.device(first, last + 1, unified=own, leads=leads) <= free:
                last += 1
            counts.append(last - first)
            first = last
        return counts if first == self.total_layers else None


def uniform(gpu: int, count: int) -> LayerModel:
    """A model of equal layers, four to a GPU of this size, which needs exactly `count` of them."""
    total = 4 * (count - 1) + 1
    adds, ram = (gpu // 4,) * total, (0,) * (total + 1)
    return LayerModel(adds, 0, 0, adds, 0, ram, ram)


def shared_out(split: Sequence[float], layers: int) -> list[int]:
    """How llama.cpp divides layers by shares: layer t of n goes to the first device whose cumulative share is
    more than t / n. Whole shares that add up to n are the numbers themselves."""
    if sum(split) == layers and all(s == int(s) for s in split):
        return [int(s) for s in split]
    counts, whole = [0] * len(split), sum(split)
    for t in range(layers):
        reached = 0.0
        for n, share in enumerate(split):
            reached += share
            if reached / whole > t / layers:
                counts[n] += 1
                break
    return counts


def of_case(case: Case) -> LayerModel:
    """The model of a case."""
    single: Items | None = None
    several: Items | None = None
    for n, said in enumerate(case["model"]["gguf_estimates"]):
        name, field = said["estimate"], f"model.gguf_estimates[{n}]"
        items = cases.fixture("gguf-estimates.json", "estimates", name, field)["items"]
        if len(items) < 3:
            continue
        if not said.get("tensor_split"):
            single = items
        elif len(items[0][3]) > 1 and not (said.get("extra") or {}).get("rpc"):
            several = items
    if single is None:
        raise Unreadable("model.gguf_estimates", "has none for one device and any number of layers")
    return of_items(single, several)


def of_items(single: Items, several: Items | None = None) -> LayerModel:
    """From the list for one device, and one for several."""
    own, unified = ([i[3][0][k] for i in single] for k in (1, 0))
    blocks, blocks_unified = _steps(own), _steps(unified)
    first = own[1] - blocks[0]
    base = min(first, _base_of_others(several, blocks) if several else first)
    # going up, each line has one block more, the last ones first
    adds = [*reversed(blocks), own[-1] - sum(blocks) - base]
    base_unified = unified[1] - blocks_unified[0]
    adds_unified = [*reversed(blocks_unified), unified[-1] - sum(blocks_unified) - base_unified]
    ram, ram_unified = (_ram([i[2][k] for i in single]) for k in (1, 0))
    return LayerModel(
        tuple(adds), base, first - base, tuple(adds_unified), base_unified, tuple(ram), tuple(ram_unified)
    )


def _steps(line: Sequence[int]) -> list[int]:
    """What each further block takes; the first one as the second (its line has the buffers in it)."""
    steps = [b - a for a, b in pairwise(line[1:-1])]
    return steps[:1] + steps


def _base_of_others(several: Items, blocks: list[int]) -> int:
    """Buffers of a device that is not the first one: of the line with two blocks, one of them there."""
    for blocks_there, _, _, devices in several:
        second = [d for d in devices[1:] if d[2] == 1]
        if blocks_there == 2 and second:
            return int(second[0][1] - blocks[0])
    return 2**62


def _ram(line: Sequence[int]) -> Iterable[int]:
    """By numbers of layers that count the output first: so many are one block less, and the output."""
    lifted = max(line[-2] - line[-1], 0)
    return [line[0], *(r - lifted for r in line[:-2]), line[-1]]
