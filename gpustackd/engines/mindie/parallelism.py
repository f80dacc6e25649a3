"""How many NPUs MindIE's parallel sizes ask for, in all and on one worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpustackd.domain.facts import HyperParameters
from gpustackd.engines.flags import COLUMN, BackendParameters
from gpustackd.engines.mindie.flags import PARALLEL, parallel_sizes
from gpustackd.engines.parallelism import Parallel, WorldSize
from gpustackd.errors import BadRow

UNSET = -1


@dataclass(frozen=True, slots=True)
class Ranks:
    """Parallel sizes in effect; -1 = undetermined, left to the search."""

    pp: int = 1
    tp: int = UNSET
    dp: int = UNSET
    cp: int = UNSET
    sp: int = UNSET
    moe_tp: int = UNSET
    moe_ep: int = UNSET
    world: int = UNSET
    """NPUs of one instance."""
    local: int = UNSET
    """NPUs of it on each worker."""
    labels: tuple[str, ...] = ()
    """Sizes that were given, as answers name them."""

    @property
    def world_size(self) -> WorldSize | None:
        """The world size for the rule of GPU counts; None where nothing fixes it."""
        return WorldSize(self.world, self.labels) if self.labels and self.world > 0 else None


def ranks(sizes: Mapping[str, int]) -> Ranks:
    """Derive what was not given, then check all sizes against each other.

    `sizes` by the keys of `PARALLEL`, -1 = not given, pp 1. Raises BadRow where they contradict each other.
    """
    labels = tuple(k for k in PARALLEL if (sizes[k] > 1 if k == "pp" else sizes[k] > 0))
    r = _derived(sizes, labels)
    _check(r, sizes["dp"])
    if r.world > 0 and r.local > 0 and r.world % r.local:
        raise BadRow(
            COLUMN, f"{r.world} NPUs in all ({'/'.join(labels)}) cannot be divided into workers of {r.local}",
            "the world size must be a multiple of the tensor-parallel size",
        )  # fmt: skip
    return r


def parallel(flags: BackendParameters) -> Parallel:
    """Sizes that estimates divide a model by. Raises BadRow where they contradict each other."""
    found = ranks(parallel_sizes(flags))
    return Parallel(max(found.tp, 1), found.pp, found.world if found.world > 0 else None)


def _derived(sizes: Mapping[str, int], labels: tuple[str, ...]) -> Ranks:
    pp, tp, dp, cp = sizes["pp"], sizes["tp"], sizes["dp"], sizes["cp"]
    moe_tp, moe_ep = sizes["moe_tp"], sizes["moe_ep"]
    local = UNSET
    if pp > 1:
        tp = _or(tp, 1)
        world, local = pp * tp, tp
    else:
        world = tp if tp > 0 else UNSET
        if dp > 1:
            tp = _or(tp, 1)
            world, local = dp * tp, tp
        elif cp > 1:
            tp, dp = _or(tp, 1), 1
            world, local = cp * tp, tp
        if moe_ep > 1:
            moe_tp = _or(moe_tp, 1)
            tp = _or(tp, moe_tp)
            local = _or(local, tp)
            world = moe_ep * moe_tp
    if moe_ep <= 1:
        moe_tp = _or(moe_tp, world)
    return Ranks(pp, tp, dp, cp, sizes["sp"], moe_tp, moe_ep, world, local, labels)


def _or(size: int, default: int) -> int:
    return size if size > 0 else default


def _check(r: Ranks, dp_given: int) -> None:
    """Raises BadRow at the first pair of sizes that do not go together."""
    if r.pp != 1 and dp_given != UNSET:
        _clash(f"pipeline parallelism ({r.pp}) and data parallelism ({dp_given}) exclude each other")
    if r.dp > 1 and r.cp > 1:
        _clash(f"data parallelism ({r.dp}) and context parallelism ({r.cp}) exclude each other")
    if r.pp == 1 and r.tp > 0 and r.world > 0 and not (r.tp == r.world or 0 < r.tp <= r.local):
        _clash(
            f"tensor-parallel size {r.tp} is neither within a worker ({r.local}) nor the world ({r.world})"
        )
    if r.pp == 1 and r.dp > 1 and r.world != r.dp * r.tp:
        _clash(f"world size {r.world} is not data-parallel {r.dp} x tensor-parallel {r.tp}")
    if r.pp == 1 and r.dp <= 1 and r.cp > 1 and r.world != r.cp * r.tp:
        _clash(f"world size {r.world} is not context-parallel {r.cp} x tensor-parallel {r.tp}")
    if r.moe_ep > 1:
        if r.world != r.moe_ep * r.moe_tp:
            _clash(
                f"world size {r.world} is not expert-parallel {r.moe_ep} x expert tensor-parallel {r.moe_tp}"
            )
        if r.moe_tp != r.world and not 0 < r.moe_tp <= r.local:
            _clash(f"expert tensor-parallel size {r.moe_tp} is more than the {r.local} of a worker")
    elif r.world > 0 and r.moe_tp != r.world:
        _clash(f"expert tensor-parallel size {r.moe_tp} is not the world size {r.world}")
    if r.sp > 1 and r.sp != r.tp:
        _clash(f"sequence-parallel size {r.sp} is not the tensor-parallel size {r.tp}")


def _clash(problem: str) -> None:
    raise BadRow(COLUMN, problem, "change the parallel sizes of the model")


def check_model(r: Ranks, hyper: HyperParameters | None) -> None:
    """Raise BadRow where the model cannot be split by these sizes. Heads must divide by
    the tensor-parallel size.
    """
    heads = hyper.num_attention_heads if hyper else None
    if hyper is not None and heads:
        by = r.tp if r.pp > 1 or r.world > 0 else r.world
        if by > 0 and heads % by:
            _indivisible(f"{heads} attention heads", by, _sizes(r))
        if r.pp == 1:
            _experts(r, hyper)
    vocabulary = hyper.vocab_size if hyper else None
    if vocabulary and r.tp > 0 and vocabulary % r.tp:
        _indivisible(f"{vocabulary} vocabulary entries", r.tp, f"tp {r.tp}")


def _experts(r: Ranks, hyper: HyperParameters) -> None:
    experts, width = hyper.moe_num_experts, hyper.moe_intermediate_size
    if r.moe_ep > 1 and experts and experts % r.moe_ep:
        _indivisible(f"{experts} experts", r.moe_ep, f"moe-ep {r.moe_ep}")
    if r.moe_tp > 1 and width and width % r.moe_tp:
        _indivisible(f"{width} channels of an expert", r.moe_tp, f"moe-tp {r.moe_tp}")


def _sizes(r: Ranks) -> str:
    if r.pp > 1:
        return f"tp {r.tp}"
    if r.dp > 1:
        return f"world {r.world}, dp {r.dp}, tp {r.tp}"
    if r.cp > 1:
        return f"world {r.world}, cp {r.cp}, tp {r.tp}"
    if r.moe_ep > 1:
        return f"world {r.world}, moe-ep {r.moe_ep}, moe-tp {r.moe_tp}"
    return f"tp {r.tp}"


def _indivisible(what: str, by: int, sizes: str) -> None:
    raise BadRow(COLUMN, f"{what} cannot be split evenly by {by} ({sizes})", "change the parallel sizes")
