"""The tape of one forward pass: which intermediate results exist, how large they are, what each reads.

Only sizes are kept, nothing is computed. A result is written in the order in which llama.cpp would run it,
since the peak of a buffer depends on the order. Shapes begin with the row, as in ggml; sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from gpustackd.domain.gguf_facts import F32, I32, ElementType

Shape: TypeAlias = tuple[int, int, int, int]

IN_PLACE = 1
"""May take over the memory of an operand with the same layout."""
VIEW = 2
"""Another look at the memory of its operand: no work, no place of its own."""
FREE = 4
"""Runs wherever its neighbours run, even if an operand is a weight (positions, sinks: too small to
decide)."""


class Node:
    """One tensor of the pass. `root` is what it is a view of; `home` the device that already holds it."""

    __slots__ = (
        "elem",
        "held",
        "home",
        "kept",
        "kind",
        "nb",
        "ne",
        "pin",
        "place",
        "readers",
        "root",
        "size",
        "source",
        "srcs",
        "start",
        "views",
        "weight",
    )

    def __init__(
        self,
        elem: ElementType,
        ne: Shape,
        srcs: tuple[Node, ...] = (),
        kind: int = 0,
        root: Node | None = None,
        nb: Shape | None = None,
    ) -> None:
        self.elem = elem
        self.ne = ne
        self.srcs = srcs
        self.kind = kind
        self.root = root
        if nb is None:
            row = ne[0] // elem.elements * elem.size
            nb = (elem.size, row, row * ne[1], row * ne[1] * ne[2])
            self.size = nb[3] * ne[3]
        elif 0 in ne:
            self.size = 0
        else:  # a copy of a view keeps its strides
            inner = (ne[1] - 1) * nb[1] + (ne[2] - 1) * nb[2] + (ne[3] - 1) * nb[3]
            first = elem.size + (ne[0] - 1) * nb[0] if elem.elements == 1 else ne[0] * nb[0] // elem.elements
            self.size = first + inner
        self.nb = nb
        self.home: int | None = None
        self.weight = False
        self.source = False
        """An input that is written before each pass."""
        self.kept = False
        """An output that outlives the pass."""
        self.pin: int | None = None
        """The device that has to run it."""
        # while memory is handed out: who still needs it, and where it lies
        self.readers = self.views = self.place = self.start = 0
        self.held = False

    @property
    def contiguous(self) -> bool:
        """Whether its elements lie one after the other."""
        row = self.ne[0] // self.elem.elements * self.elem.size
        ne, nb = self.ne, self.nb
        return nb[0] == self.elem.size and nb[1:] == (row, row * ne[1], row * ne[1] * ne[2])


class Tape:
    """Results in order. Operations make nodes; `run` puts a node and all that it needs on the tape."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.leaves: list[Node] = []
        self._seen: set[Node] = set()

    def run(self, *wanted: Node) -> None:
        """Write these results down, operands first."""
        for node in wanted:
            if node not in self._seen:
                self._visit(node)

    def _visit(self, node: Node) -> None:
        seen = self._seen
        seen.add(node)
        for operand in node.srcs:
            if operand not in seen:
                self._visit(operand)
        (self.nodes if node.srcs else self.leaves).append(node)


def shape(*ne: int) -> Shape:
    """Four dimensions; missing ones are 1."""
    return (*ne, 1, 1, 1, 1)[:4]  # type: ignore[return-value]


# -- what is there before the pass -------------------------------------------------------------------------


def new_input(elem: ElementType, *ne: int) -> Node:
    """An input: tokens, positions, masks."""
    node = Node(elem, shape(*ne))
    node.source = True
    return node


def new_stored(elem: ElementType, ne: Iterable[int], home: int, *, weight: bool = True) -> Node:
    """A weight (or a part of the cache) that lies on device `home`."""
    node = Node(elem, shape(*ne))
    node.home = home
    node.weight = weight
    return node


# -- operations --------------------------------------------------------------------------------------------


def matmul(weight: Node, x: Node) -> Node:
    """Product with a matrix: one row of `weight` per element of the result's row."""
    return Node(F32, (weight.ne[1], x.ne[1], x.ne[2], x.ne[3]), (weight, x))


def matmul_by_id(experts: Node, x: Node, chosen: Node) -> Node:
    """Product with the chosen experts of every token."""
    return Node(F32, (experts.ne[1], chosen.ne[0], x.ne[2], 1), (experts, x, chosen))


def get_rows(table: Node, ids: Node) -> Node:
    """Rows of a table by number."""
    elem = table.elem if table.elem is I32 else F32
    return Node(elem, (table.ne[0], ids.ne[0], ids.ne[1], ids.ne[2]), (table, ids))


def pointwise(x: Node, *others: Node) -> Node:
    """Element by element, in place where the layout allows: add, multiply, scale, activate, norm by squares,
    clamp, soft-max."""
    return Node(x.elem, x.ne, (x, *others), IN_PLACE)


def new_like(x: Node, *others: Node) -> Node:
    """A result of the same shape that never takes over memory: layer norm, copy into order, gated units."""
    return Node(x.elem, x.ne, (x, *others))


def rope(x: Node, positions: Node, factors: Node | None = None) -> Node:
    """Rotated by position."""
    srcs = (x, positions) if factors is None else (x, positions, factors)
    return Node(x.elem, x.ne, srcs, IN_PLACE | FREE)


def new_node(elem: ElementType, ne: Iterable[int], *srcs: Node) -> Node:
    """A result of its own shape."""
    return Node(elem, shape(*ne), srcs)


def cast(x: Node, elem: ElementType) -> Node:
    """In another element type."""
    return Node(elem, x.ne, (x,))


def make_contiguous(x: Node, *ne: int) -> Node:
    """Copied into order, in a new shape."""
    return Node(x.elem, shape(*ne) if ne else x.ne, (x,))


def concatenate(a: Node, b: Node, axis: int) -> Node:
    """Two results one after the other along an axis."""
    ne = list(a.ne)
    ne[axis] += b.ne[axis]
    return Node(a.elem, (ne[0], ne[1], ne[2], ne[3]), (a, b))


def sum_rows(x: Node) -> Node:
    """The sum of each row."""
    return Node(x.elem, (1, *x.ne[1:]), (x,))


def top_k(x: Node, count: int) -> Node:
    """Numbers of the largest elements of each row: all are sorted, the first are looked at."""
    order = Node(I32, x.ne, (x,))
    return view(order, count, *order.ne[1:], nb=order.nb)


def flash_attention(q: Node, k: Node, v: Node, mask: Node, sinks: Node | None = None) -> Node:
    """Fused attention over permuted operands."""
    srcs = (q, k, v, mask) if sinks is None else (q, k, v, mask, sinks)
    return Node(F32, (v.ne[0], q.ne[2], q.ne[1], q.ne[3]), srcs, FREE)


# -- views -------------------------------------------------------------------------------------------------


def view(x: Node, *ne: int, nb: Shape | None = None) -> Node:
    """Part of a result, or all of it in another shape (contiguous where no strides are given)."""
    return Node(x.elem, shape(*ne), (x,), VIEW, x.root or x, nb)


def permute(x: Node, a: int, b: int, c: int, d: int) -> Node:
    """Axes in another order: axis 0 becomes axis `a`, and so on."""
    ne, nb = [0] * 4, [0] * 4
    for old, new in enumerate((a, b, c, d)):
        ne[new], nb[new] = x.ne[old], x.nb[old]
    return Node(x.elem, tuple(ne), (x,), VIEW, x.root or x, tuple(nb))  # type: ignore[arg-type]


def transpose(x: Node) -> Node:
    """The first two axes exchanged."""
    return permute(x, 1, 0, 2, 3)


def copy_into(target: Node, *srcs: Node) -> Node:
    """Results copied into memory that is there already."""
    return Node(target.elem, target.ne, (*srcs, target), 0, target.root or target, target.nb)
