"""Which device runs what, and which results travel: llama.cpp's rules for dividing a pass over devices.

Devices are numbered 0, 1, …; the host is the last. A result runs where its weights are; what has none follows
its neighbours, a device before the host. Wherever the device changes a part begins, and what the part reads
from elsewhere is copied at its beginning.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gpustackd.estimate.llama_cpp.graph.tape import FREE, VIEW, Node, Tape

COPIES = 4
"""Of every input, when several devices work on different batches at once."""
MOST_INPUTS = 30
"""Copies at the beginning of one part before a new part is begun."""


@dataclass(slots=True)
class Program:
    """The pass with its copies, in order, and the device of each step."""

    steps: list[Node] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    first: list[Node] = field(default_factory=list)
    """What is given a place before everything else."""
    first_places: list[int] = field(default_factory=list)
    parts: int = 0


@dataclass(slots=True)
class _Part:
    place: int
    start: int
    end: int = 0
    inputs: list[Node] = field(default_factory=list)


def split_over_devices(tape: Tape, host: int, *, pipelined: bool = False) -> Program:
    """Divide a pass. `pipelined`: several batches are under way at once, inputs are held `COPIES` times."""
    place = _assigned(tape, host)
    return _divided(tape, place, COPIES if pipelined else 1)


def _assigned(tape: Tape, host: int) -> dict[Node, int]:
    place: dict[Node, int] = {}
    for leaf in tape.leaves:
        if leaf.home is not None:
            place[leaf] = leaf.home
        elif leaf.source:
            place[leaf] = host
    for node in tape.nodes:
        if (found := _own_place(node, host)) is not None:
            place[node] = found
    working = [n for n in tape.nodes if not n.kind & VIEW]
    # first the devices spread over what is undecided, then the host
    for only_devices in (True, False):
        for order in (working, working[::-1]):
            current = -1
            for node in order:
                here = place.get(node, -1)
                if here >= 0:
                    current = -1 if only_devices and here == host else here
                elif current >= 0:
                    place[node] = current
    for node in tape.nodes:
        if node not in place:
            place[node] = place.get(node.root, host) if node.root is not None else host
        for operand in node.srcs:
            if operand not in place:
                root = operand.root
                place[operand] = place.get(root, place[node]) if root is not None else place[node]
    return place


def _own_place(node: Node, host: int) -> int | None:
    if node.pin is not None:
        return node.pin
    root = node.root if node.root is not None else node
    if root.home is not None:
        return root.home
    if node.source:
        return host
    if not node.kind & FREE:
        for operand in node.srcs:
            if operand.weight:
                return operand.home
    return None


def _divided(tape: Tape, place: dict[Node, int], copies: int) -> Program:
    parts: list[_Part] = []
    copied: dict[tuple[Node, int], list[Node]] = {}
    sources: list[Node] = []
    doubled: dict[Node, list[Node]] = {}
    nodes = tape.nodes
    replaced: dict[Node, tuple[Node, ...]] = {}
    part: _Part | None = None
    for i, node in enumerate(nodes):
        if node.kind & VIEW:
            continue
        here = place[node]
        if part is None:
            part = _Part(here, 0)
            parts.append(part)
        elif here != part.place or (part.inputs and _needs_part(node, part, place, copied)):
            part.end = i
            part = _Part(here, i)
            parts.append(part)
        srcs = node.srcs
        for j, operand in enumerate(srcs):
            there = place[operand]
            if copies > 1 and operand.source and operand not in doubled:
                doubled[operand] = [operand] + [_copy(operand, copies) for _ in range(copies - 1)]
                operand.kept = True  # so that nothing writes over it while batches overlap
                sources.append(operand)
            if there == part.place:
                continue
            key = (operand, part.place)
            if key not in copied:
                copied[key] = [_copy(operand, copies) for _ in range(copies)]
                part.inputs.append(operand)
            if srcs is node.srcs:
                srcs = tuple(srcs)
            srcs = (*srcs[:j], copied[key][0], *srcs[j + 1 :])
        if srcs is not node.srcs:
            replaced[node] = srcs
    if part is not None:
        part.end = len(nodes)
    for node, srcs in replaced.items():
        node.srcs = srcs
    program = Program(parts=len(parts))
    for part in parts:
        for operand in part.inputs:
            watch = Node(operand.elem, operand.ne, (operand,), VIEW, operand.root or operand, operand.nb)
            watch.kind = WATCH
            program.steps += (watch, copied[operand, part.place][0])
            program.places += (place[operand], part.place)
        program.steps += nodes[part.start : part.end]
        program.places += [place[n] for n in nodes[part.start : part.end]]
    if copies > 1:
        for operand in sources:
            program.first += doubled[operand]
            program.first_places += [place[operand]] * copies
        for part in parts:
            for operand in part.inputs:
                program.first += copied[operand, part.place]
                program.first_places += [part.place] * copies
    program.first += tape.leaves
    program.first_places += [place.get(n, 0) for n in tape.leaves]
    return program


WATCH = VIEW | 8
"""Keeps its operand until here, and is no view that anybody waits for."""


def _needs_part(
    node: Node, part: _Part, place: dict[Node, int], copied: dict[tuple[Node, int], list[Node]]
) -> bool:
    """A weight from elsewhere begins a part, so that the memory of the one before is free again."""
    for operand in node.srcs:
        if place[operand] != part.place:
            if operand.weight:
                return True
            if len(part.inputs) >= MOST_INPUTS and (operand, part.place) not in copied:
                return True
    return False


def _copy(operand: Node, copies: int) -> Node:
    node = Node(operand.elem, operand.ne, nb=operand.nb)
    if copies > 1:
        node.source = node.kept = True
    return node
