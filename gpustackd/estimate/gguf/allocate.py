"""How much memory a program needs on each device: places are given, taken over and given back step by step.

The rules are those of llama.cpp's graph allocator: the smallest gap that fits, else the end; an operation
that may work in place takes over an operand that nobody reads any more; memory is counted in units of the
alignment.
"""

from __future__ import annotations

from gpustackd.estimate.gguf.schedule import WATCH, Program
from gpustackd.estimate.gguf.tape import IN_PLACE, Node

ALIGNMENT = 32


class Arena:
    """The memory of one device: gaps in order of their address, the last one without end."""

    def __init__(self) -> None:
        self._starts = [0]
        self._sizes = [1 << 62]
        self.peak = 0

    def take(self, size: int) -> int:
        """An address for `size` bytes."""
        sizes = self._sizes
        last = len(sizes) - 1
        chosen, smallest = last, 1 << 62
        for i in range(last):
            if size <= sizes[i] <= smallest:
                chosen, smallest = i, sizes[i]
        start = self._starts[chosen]
        if sizes[chosen] == size:
            del self._starts[chosen], sizes[chosen]
        else:
            self._starts[chosen] += size
            sizes[chosen] -= size
        self.peak = max(self.peak, start + size)
        return start

    def give(self, start: int, size: int) -> None:
        """Give back `size` bytes at `start`; gaps that touch become one."""
        starts, sizes = self._starts, self._sizes
        end = start + size
        for i in range(len(starts)):
            if starts[i] + sizes[i] == start:
                sizes[i] += size
                if i + 1 < len(starts) and end == starts[i + 1]:
                    sizes[i] += sizes[i + 1]
                    del starts[i + 1], sizes[i + 1]
                return
            if end == starts[i]:
                starts[i] = start
                sizes[i] += size
                if i and starts[i - 1] + sizes[i - 1] == start:
                    sizes[i - 1] += sizes[i]
                    del starts[i], sizes[i]
                return
        i = 0
        while i < len(starts) and starts[i] < start:
            i += 1
        starts.insert(i, start)
        sizes.insert(i, size)


class _Slot:
    __slots__ = ("held", "place", "readers", "start", "views")

    def __init__(self) -> None:
        self.readers = 0
        self.views = 0
        self.held = False
        self.place = 0
        self.start = 0


def peaks(program: Program, devices: int) -> list[int]:
    """Bytes of the buffer on every device, the host being the last."""
    return _Allocation(devices).run(program)


class _Allocation:
    def __init__(self, devices: int) -> None:
        self._arenas = [Arena() for _ in range(devices)]
        self._slots: dict[Node, _Slot] = {}

    def run(self, program: Program) -> list[int]:
        slot = self._slot
        for leaf, place in zip(program.first, program.first_places, strict=True):
            self._allocate(leaf, place)
        for node, place in zip(program.steps, program.places, strict=True):
            if node.root is not None and node.kind != WATCH:
                slot(node.root).views += 1
            if node.source:
                self._allocate(node, place)
            for operand in node.srcs:
                slot(operand).readers += 1
                if operand.source:
                    self._allocate(operand, place)
        for node, place in zip(program.steps, program.places, strict=True):
            for operand in node.srcs:
                self._allocate(operand, place)
            self._allocate(node, place)
            for operand in node.srcs:
                self._read(operand)
        return [arena.peak for arena in self._arenas]

    def _slot(self, node: Node) -> _Slot:
        found = self._slots.get(node)
        if found is None:
            found = self._slots[node] = _Slot()
        return found

    def _read(self, operand: Node) -> None:
        """One reader fewer; what nobody reads any more is given back."""
        slot = self._slots[operand]
        slot.readers -= 1
        if slot.readers or slot.views:
            return
        if operand.root is not None:
            root = self._slot(operand.root)
            root.views -= 1
            if not root.views and not root.readers and root.held:
                self._free(operand.root, root)
        elif slot.held:
            self._free(operand, slot)

    def _free(self, node: Node, slot: _Slot) -> None:
        if node.kept:
            return
        self._arenas[slot.place].give(slot.start, _padded(node.size))
        slot.held = False

    def _allocate(self, node: Node, place: int) -> None:
        if node.root is not None or node.home is not None:
            return
        slot = self._slot(node)
        if slot.held:
            return
        slot.held = True
        if node.kind & IN_PLACE and self._take_over(node, slot):
            return
        slot.place = place
        slot.start = self._arenas[place].take(_padded(node.size))

    def _take_over(self, node: Node, slot: _Slot) -> bool:
        for operand in node.srcs:
            root = operand.root
            mine = self._slots[operand]
            if root is None:
                if not mine.held or operand.kept:
                    continue
            elif root.kept or not mine.held:
                continue  # a view holds no memory itself, so that it is never taken over
            if operand.ne != node.ne or operand.nb != node.nb or operand.elem is not node.elem:
                continue
            if mine.readers == 1 and mine.views == 0:
                mine.held = False
                slot.place, slot.start = mine.place, mine.start
                return True
        return False


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
