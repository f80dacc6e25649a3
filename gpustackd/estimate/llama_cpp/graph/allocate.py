"""How much memory a program needs on each device: places are given, taken over and given back step by step.

The rules are those of llama.cpp's graph allocator: the smallest gap that fits, else the end; an operation
that may work in place takes over an operand that nobody reads any more; memory is counted in units of the
alignment.
"""

from __future__ import annotations

from gpustackd.estimate.llama_cpp.graph.schedule import WATCH, Program
from gpustackd.estimate.llama_cpp.graph.tape import IN_PLACE, Node
from gpustackd.estimate.llama_cpp.tensors import padded


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


def peaks(program: Program, devices: int) -> list[int]:
    """Bytes of the buffer on every device, the host being the last. A program is allocated once: its nodes
    keep where they lie."""
    arenas = [Arena() for _ in range(devices)]
    for leaf, place in zip(program.first, program.first_places, strict=True):
        _allocate(arenas, leaf, place)
    steps, places = program.steps, program.places
    for node, place in zip(steps, places, strict=True):
        if node.root is not None and node.kind != WATCH:
            node.root.views += 1
        if node.source:
            _allocate(arenas, node, place)
        for operand in node.srcs:
            operand.readers += 1
            if operand.source:
                _allocate(arenas, operand, place)
    for node, place in zip(steps, places, strict=True):
        srcs = node.srcs
        for operand in srcs:
            if not operand.held:
                _allocate(arenas, operand, place)
        if not node.held:
            _allocate(arenas, node, place)
        for operand in srcs:
            operand.readers -= 1
            if not operand.readers and not operand.views:
                _read(arenas, operand)
    return [arena.peak for arena in arenas]


def _read(arenas: list[Arena], operand: Node) -> None:
    """What nobody reads any more is given back."""
    root = operand.root
    if root is not None:
        root.views -= 1
        if not root.views and not root.readers and root.held:
            _free(arenas, root)
    elif operand.held:
        _free(arenas, operand)


def _free(arenas: list[Arena], node: Node) -> None:
    if node.kept:
        return
    arenas[node.place].give(node.start, padded(node.size))
    node.held = False


def _allocate(arenas: list[Arena], node: Node, place: int) -> None:
    if node.root is not None or node.home is not None or node.held:
        return
    node.held = True
    if node.kind & IN_PLACE and _take_over(node):
        return
    node.place = place
    node.start = arenas[place].take(padded(node.size))


def _take_over(node: Node) -> bool:
    for operand in node.srcs:
        root = operand.root
        if not operand.held or (operand.kept if root is None else root.kept):
            continue  # a view holds no memory itself, so that it is never taken over
        if operand.ne != node.ne or operand.nb != node.nb or operand.elem is not node.elem:
            continue
        if operand.readers == 1 and operand.views == 0:
            operand.held = False
            node.place, node.start = operand.place, operand.start
            return True
    return False
