"""vLLM: parallel sizes, share of a card, executor, and the layouts that it can run over several nodes.

Public source: `EngineArgs` in vLLM's `vllm/engine/arg_utils.py`, `ParallelConfig` in `vllm/config/`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gpustackd.domain.demand import Demand
from gpustackd.domain.facts import HyperParameters
from gpustackd.engines.flags import COLUMN, BackendParameters
from gpustackd.engines.parallelism import WorldSize, positive, world
from gpustackd.engines.serving import BATCHED_TOKENS, LONGEST, SEQUENCES, ServingFlags, tokens
from gpustackd.errors import BadRow

TP = ("tensor-parallel-size", "tp")
PP = ("pipeline-parallel-size", "pp")
PCP = ("prefill-context-parallel-size", "pcp")
DP = ("data-parallel-size", "dp")
DPL = ("data-parallel-size-local", "dpl")
SHARE = "gpu-memory-utilization"
DEFAULT_SHARE = 0.9

POOLING_LANGUAGE_MODELS = frozenset(
    {
        "Qwen3ForCausalLM",
        "Qwen3ForSequenceClassification",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLForSequenceClassification",
    }
)
"""Architectures that reserve their share of the card even as embedding or reranker models."""

_VERSION = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?")


def world_size(parameters: BackendParameters) -> WorldSize | None:
    """GPUs that the flags ask for: the product of tp, pp, pcp and dp; with a hybrid load balancer the local
    dp takes dp's place. None where no flag is given. Raise BadRow for a size that is not positive."""
    positive(parameters, DPL)
    if not parameters.flag("data-parallel-hybrid-lb"):
        return world(parameters, (("tp", TP), ("pp", PP), ("pcp", PCP), ("dp", DP)))
    if positive(parameters, DPL) is None:
        world(parameters, (("tp", TP), ("pp", PP), ("pcp", PCP), ("dp", DP)))
        return None
    return world(parameters, (("tp", TP), ("pp", PP), ("pcp", PCP), ("dpl", DPL)))


def serving_flags(parameters: BackendParameters, hyper: HyperParameters) -> ServingFlags:
    """Lengths, batch and cache type; what cannot be read counts as absent."""
    return ServingFlags(
        tokens(parameters.text("max-model-len")) or min(hyper.max_sequence_length, LONGEST),
        tokens(parameters.text("max-num-batched-tokens")) or BATCHED_TOKENS,
        tokens(parameters.text("max-num-seqs")) or SEQUENCES,
        parameters.text("kv-cache-dtype"),
        parameters.flag("enforce-eager"),
    )


def splits_vision(demand: Demand, parameters: BackendParameters) -> bool:
    """Whether the vision tower is split with the rest. A tower with an odd number of heads (25 in InternViT)
    splits by no size that is in use: vLLM then keeps it whole on every GPU, as it does when told to."""
    if parameters.flag("language-model-only"):
        return False
    heads = (demand.facts.hyper.vision_heads or 0) if demand.facts.hyper else 0
    return heads % 2 == 0 and parameters.text("mm-encoder-tp-mode") != "data"


def share(demand: Demand, parameters: BackendParameters) -> float:
    """The share of every card that vLLM takes (`--gpu-memory-utilization`, 0.9 by default); 0 = it takes what
    the model needs, as pooling models without a KV cache do. Raise BadRow outside of (0, 1]."""
    named = architectures(demand, parameters)  # unreadable overrides stop the engine in any case
    given = parameters.number(SHARE)
    if given is not None:
        if not 0 < given <= 1:
            raise BadRow(COLUMN, f"--{SHARE} is {given:g}, it must be above 0 and at most 1")
        return given
    categories = demand.categories
    if not categories or "llm" in categories or "speech_to_text" in categories:
        return DEFAULT_SHARE
    if POOLING_LANGUAGE_MODELS & set(named):
        return DEFAULT_SHARE
    return 0.0


def architectures(demand: Demand, parameters: BackendParameters) -> tuple[str, ...]:
    """The model's architectures, or those that `--hf-overrides` puts in their place. Raise BadRow."""
    own = demand.facts.hyper.architectures if demand.facts.hyper else ()
    return overridden_architectures(parameters) or own


def overridden_architectures(parameters: BackendParameters) -> tuple[str, ...] | None:
    """Architectures of the last `--hf-overrides`; None where it names none. Raise BadRow where it is no JSON
    object."""
    raw = parameters.text("hf-overrides")
    if raw is None:
        return None
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise BadRow(COLUMN, f"--hf-overrides is {raw[:60]!r}, not a JSON object")
    names = document.get("architectures")
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        return None
    return tuple(names)


def executor(demand: Demand, parameters: BackendParameters) -> str:
    """`mp` or `ray`: what starts the ranks on several workers."""
    given = parameters.text("distributed-executor-backend")
    if given is not None:
        return "mp" if given == "mp" else "ray"
    if demand.spec.image_name:
        return "mp"
    version = demand.spec.backend_version or ""
    found = _VERSION.match(version)
    if "-custom" in version and found and (int(found[1]), int(found[2])) >= (0, 18):
        return "mp"
    return "ray"


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """Parallel sizes that the user gave; None = not given."""

    tp: int | None = None
    pp: int | None = None
    pcp: int | None = None
    dp: int | None = None
    dpl: int | None = None


def parallel_sizes(parameters: BackendParameters) -> ParallelSizes:
    """The sizes given. Raise BadRow for one out of limits, or where local ranks do not divide all of them."""
    sizes = ParallelSizes(*(positive(parameters, f) for f in (TP, PP, PCP, DP, DPL)))
    if sizes.dp and sizes.dpl and sizes.dp % sizes.dpl:
        raise BadRow(COLUMN, f"--{DP[0]} {sizes.dp} is no multiple of --{DPL[0]} {sizes.dpl}")
    return sizes


@dataclass(frozen=True, slots=True)
class RankLayout:
    """How ranks lie on nodes: data-parallel ranks per node, and nodes per rank."""

    tp: int
    dp: int
    local: tuple[int, ...]
    nodes_per_rank: int = 1

    @property
    def kind(self) -> str:
        """`data_parallel`: no rank spans nodes; `model_parallel`: one spans all; `nested`: some span some."""
        if self.nodes_per_rank == 1:
            return "data_parallel"
        return "model_parallel" if self.dp == 1 else "nested"


class Unworkable(ValueError):
    """These nodes and sizes do not go together; the text has the numbers."""


def layout(gpus: Sequence[int], sizes: ParallelSizes) -> RankLayout:
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


def _ranks_in_nodes(gpus: Sequence[int], sizes: ParallelSizes, tp: int, rank: int) -> RankLayout:
    local = tuple(g // rank for g in gpus)
    if sizes.dp is not None and sizes.dp != sum(local):
        raise Unworkable(f"dp is {sizes.dp}, but these nodes hold {sum(local)} ranks of {rank} GPUs")
    if sizes.dpl is not None and any(n != sizes.dpl for n in local):
        raise Unworkable(f"dpl is {sizes.dpl}, but the nodes hold {_list(local)} ranks of {rank} GPUs")
    return RankLayout(tp, sum(local), local)


def _nodes_in_rank(gpus: Sequence[int], sizes: ParallelSizes, tp: int, rank: int) -> RankLayout:
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
    return RankLayout(tp, n // k, (1,) * n, k)


def _list(numbers: Sequence[int]) -> str:
    shown = ", ".join(str(n) for n in numbers[:8])
    return shown + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
