"""Layouts that vLLM's multiprocessing executor can run over several nodes (selectors spec section 9.4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """Parallel sizes that the user gave; None = not given."""

    tp: int | None = None
    pp: int | None = None
    pcp: int | None = None
    dp: int | None = None
    dpl: int | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """How ranks lie on nodes: data-parallel ranks per node, and nodes per rank."""

    tp: int
    dp: int
    local: tuple[int, ...]
    nodes_per_rank: int = 1

    @property
    def kind(self) -> str:
        if self.nodes_per_rank == 1:
            return "data_parallel"
        return "model_parallel" if self.dp == 1 else "nested"


class Unworkable(ValueError):
    """These nodes and sizes do not go together; the text has the numbers."""


def layout(gpus: Sequence[int], sizes: ParallelSizes) -> Layout:
    """The layout over nodes with so many GPUs each. Raises Unworkable where there is none."""
    for flag in ("tp", "pp", "pcp", "dp", "dpl"):
        value = getattr(sizes, flag)
        if value is not None and value <= 0:
            raise Unworkable(f"{flag} is {value}, it must be positive")
    if not gpus or min(gpus) <= 0:
        raise Unworkable("a node without GPUs cannot take part")
    pp, pcp = sizes.pp or 1, sizes.pcp or 1
    tp = sizes.tp or _derived_tp(gpus, sizes.dp, pp, pcp)
    rank = tp * pp * pcp
    return (
        _ranks_in_nodes(gpus, sizes, tp, rank) if rank <= min(gpus) else _nodes_in_rank(gpus, sizes, tp, rank)
    )


def _derived_tp(gpus: Sequence[int], dp: int | None, pp: int, pcp: int) -> int:
    if dp is None:
        return math.gcd(*gpus)
    total = sum(gpus)
    if total % (dp * pp * pcp):
        raise Unworkable(
            f"{total} GPUs cannot be divided by dp {dp} x pp {pp} x pcp {pcp}; give a tensor-parallel size"
        )
    return total // (dp * pp * pcp)


def _ranks_in_nodes(gpus: Sequence[int], sizes: ParallelSizes, tp: int, rank: int) -> Layout:
    local = tuple(g // rank for g in gpus)
    if sizes.dp is not None and sizes.dp != sum(local):
        raise Unworkable(f"dp is {sizes.dp}, but these nodes hold {sum(local)} ranks of {rank} GPUs")
    if sizes.dpl is not None and any(n != sizes.dpl for n in local):
        raise Unworkable(f"dpl is {sizes.dpl}, but the nodes hold {_list(local)} ranks of {rank} GPUs")
    return Layout(tp, sum(local), local)


def _nodes_in_rank(gpus: Sequence[int], sizes: ParallelSizes, tp: int, rank: int) -> Layout:
    g, n = gpus[0], len(gpus)
    if any(x != g for x in gpus):
        raise Unworkable(f"a rank of {rank} GPUs spans nodes, and these have different counts: {_list(gpus)}")
    if rank % g:
        raise Unworkable(f"a rank of {rank} GPUs is no multiple of the {g} GPUs of a node")
    k = rank // g
    if n % k:
        raise Unworkable(f"{n} nodes cannot be divided into ranks of {k} nodes")
    if sizes.dp is not None and sizes.dp != n // k:
        raise Unworkable(f"dp is {sizes.dp}, but {n} nodes hold {n // k} ranks of {k} nodes")
    if sizes.dpl is not None and sizes.dpl != 1:
        raise Unworkable(f"dpl is {sizes.dpl}, it must be 1 where a rank spans nodes")
    return Layout(tp, n // k, (1,) * n, k)


def _list(numbers: Sequence[int]) -> str:
    shown = ", ".join(str(n) for n in numbers[:8])
    return shown + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
