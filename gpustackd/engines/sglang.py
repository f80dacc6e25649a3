"""SGLang: parallel sizes, and the part of a card that it reserves for weights and cache.

The part is worked out as the engine does it, from the smallest card, in MiB. Public source: `ServerArgs` in
SGLang's `python/sglang/srt/server_args.py` (`mem_fraction_static`, chunk and graph batch by card).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpustackd.domain.facts import HyperParameters
from gpustackd.engines.flags import COLUMN, BackendParameters
from gpustackd.engines.parallelism import WorldSize, positive, world
from gpustackd.engines.serving import BATCHED_TOKENS, LONGEST, SEQUENCES, ServingFlags, tokens
from gpustackd.errors import BadRow

TP = ("tp-size", "tensor-parallel-size", "tp")
PP = ("pp-size", "pipeline-parallel-size", "pp")
DP = ("dp-size", "data-parallel-size", "dp")
FRACTION = "mem-fraction-static"

MIB = 1024**2
UNKNOWN_CARD = 0.88

_TABLE = (
    # below (MiB), NPUs only, chunk, graph batch for T < 4, and for T >= 4
    (20_480, False, 2048, 8, 8),
    (32_768, True, 32_768, 16, 64),
    (35_840, False, 2048, 24, 80),
    (61_440, False, 4096, 32, 160),
    (65_536, True, 32_768, 64, 128),
    (163_840, False, 8192, 256, 512),
    (float("inf"), False, 16_384, 512, 512),
)


def world_size(parameters: BackendParameters) -> WorldSize | None:
    """GPUs that the flags ask for: the product of tp, pp and dp as given; with DP attention the data-parallel
    ranks share the GPUs. None where no flag is given. Raise BadRow for a size that is not positive."""
    sizes = [("tp", TP), ("pp", PP)]
    positive(parameters, DP)
    if not parameters.flag("enable-dp-attention"):
        sizes.append(("dp", DP))
    return world(parameters, sizes)


def serving_flags(parameters: BackendParameters, hyper: HyperParameters) -> ServingFlags:
    """Lengths, batch and cache type; what cannot be read counts as absent."""
    return ServingFlags(
        tokens(parameters.text("context-length")) or min(hyper.max_sequence_length, LONGEST),
        tokens(parameters.text("chunked-prefill-size")) or BATCHED_TOKENS,
        tokens(parameters.text("cuda-graph-max-bs", "max-running-requests")) or SEQUENCES,
        parameters.text("kv-cache-dtype"),
        parameters.flag("disable-cuda-graph"),
    )


def splits_vision(parameters: BackendParameters) -> bool:
    """Whether the vision tower is loaded, and split with the rest."""
    return not parameters.flag("language-only")


def fraction(parameters: BackendParameters) -> float | None:
    """The fraction that the flag gives; None where it gives none. Raises BadRow outside of (0, 1)."""
    given = parameters.number(FRACTION)
    if given is not None and not 0 < given < 1:
        raise BadRow(COLUMN, f"--{FRACTION} is {given:g}, it must lie between 0 and 1")
    return given


def check(parameters: BackendParameters, heads: int) -> None:
    """Raise BadRow where flags contradict each other, or where `heads` attention heads (0 = not known) cannot
    be split: what `ServerArgs` of SGLang asserts at its start."""
    tp = positive(parameters, TP) or 1
    pp, dp = positive(parameters, PP) or 1, positive(parameters, DP) or 1
    nodes = positive(parameters, ("nnodes",)) or 1
    for name in ("chunked-prefill-size", "piecewise-cuda-graph-max-tokens", "cuda-graph-max-bs"):
        parameters.integer(name)  # used with the cards, checked here
    positive(parameters, ("cuda-graph-max-bs",))
    speculative = parameters.text("speculative-algorithm")
    mixed = parameters.flag("enable-mixed-chunk")
    if heads and heads % tp:
        raise BadRow(COLUMN, f"--{TP[0]} {tp}: {heads} heads cannot be split evenly over {tp} GPUs")
    if (tp * pp) % nodes:
        raise BadRow(COLUMN, f"--{TP[0]} {tp} x --{PP[0]} {pp} is no multiple of --nnodes {nodes}")
    if pp > 1 and speculative:
        raise BadRow(COLUMN, f"--{PP[0]} {pp} and --speculative-algorithm {speculative} exclude each other")
    if pp > 1 and mixed:
        raise BadRow(COLUMN, f"--{PP[0]} {pp} and --enable-mixed-chunk exclude each other")
    if dp > 1 and nodes != 1 and not parameters.flag("enable-dp-attention"):
        raise BadRow(COLUMN, f"--{DP[0]} {dp} on --nnodes {nodes} needs --enable-dp-attention")
    if speculative and mixed:
        raise BadRow(COLUMN, "--speculative-algorithm and --enable-mixed-chunk exclude each other")


@dataclass(frozen=True, slots=True)
class CardShape:
    """What the fraction depends on besides flags: the cards of one type that may be used."""

    smallest: int
    """Bytes of the smallest card; 0 = unknown."""
    npu: bool = False
    per_worker: int = 0
    """Most hand-picked cards on one worker (or cards per replica, where more)."""
    workers: int = 0
    """Workers with hand-picked cards."""


@dataclass(frozen=True, slots=True)
class Fraction:
    """`value` as the engine would have it, at most 3 decimals; `reserved` and `card` in MiB say why."""

    value: float
    card: float
    reserved: float


def static_fraction(
    parameters: BackendParameters,
    shape: CardShape,
    vision: Mapping[str, Any] | None,
    model_type: str = "",
) -> Fraction:
    """The fraction for one GPU type; it is 0 or less where a card cannot hold what is reserved.

    `vision` is the vision part of a multimodal model's configuration, None for others; `model_type` the
    type that the whole configuration states.
    """
    t = max(positive(parameters, TP) or 1, shape.per_worker)
    p = max(positive(parameters, PP) or 1, shape.workers)
    m = round(shape.smallest / MIB, 2)
    chunk, batch = _sizes(m, shape.npu, t)
    given_chunk = parameters.integer("chunked-prefill-size")
    given_batch = parameters.integer("cuda-graph-max-bs")
    chunk = chunk if given_chunk is None else given_chunk
    batch = batch if given_batch is None else given_batch
    reserved = 512.0
    if chunk > 0:
        reserved += max(chunk, 2048) * 1.5
    reserved += batch * 2
    reserved += t * p / 8 * 1024
    if parameters.flag("enable-dp-attention"):
        dp = positive(parameters, DP) or 1
        reserved += batch * dp * 3
        if batch > 300:
            reserved += batch * dp * 1.5
    if m > 61_440:
        reserved = max(reserved, 10_240)
    reserved += _speculative(parameters)
    if parameters.flag("enable-piecewise-cuda-graph"):
        reserved += (parameters.integer("piecewise-cuda-graph-max-tokens") or 0) // 4
    value = round((m - reserved) / m, 3) if m else UNKNOWN_CARD
    if vision is not None:
        value = round(value * 0.95 * _vision(vision, model_type), 3)
    return Fraction(value, m, reserved)


def _sizes(m: float, npu: bool, t: int) -> tuple[int, int]:
    if not m:
        return 4096, 160
    for below, npus_only, chunk, few, many in _TABLE:
        if m < below and (npu or not npus_only):
            return chunk, few if t < 4 else many
    raise AssertionError("the last row takes every card")


def _speculative(parameters: BackendParameters) -> int:
    algorithm = parameters.text("speculative-algorithm")
    if not algorithm or algorithm == "NGRAM":
        return 0
    return 6144 if algorithm == "STANDALONE" else 2048


HIDDEN_OF_TYPE: Mapping[str, int] = {"qwen2_vl": 3584}
"""Width that the engine's configuration class assumes where a model's file states none."""


def _vision(config: Mapping[str, Any], model_type: str) -> float:
    """Less for a vision tower larger than 24 layers of 1024, a little more for a smaller one."""
    layers = _whole(config.get("num_hidden_layers")) or _whole(config.get("depth")) or 24
    hidden = _whole(config.get("hidden_size")) or HIDDEN_OF_TYPE.get(model_type, 1024)
    size = layers * hidden**2 / (24 * 1024**2)
    return min(max(1 - 0.1 * (size - 1), 0.8), 1.05)


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
