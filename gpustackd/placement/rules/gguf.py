"""Rules of GGUF models: what their flags ask of the search."""

from __future__ import annotations

from gpustackd.domain.demand import Demand
from gpustackd.engines.flags import COLUMN, parse_flags
from gpustackd.engines.llama_cpp.devices import MOST_DEVICES
from gpustackd.engines.llama_cpp.flags import gpu_layers, tensor_split
from gpustackd.errors import BadRow
from gpustackd.placement.rules.resource_rules import ClaimPolicy, GgufRules, ResourceRules, demand_fields


def gguf_rules(demand: Demand) -> ResourceRules:
    """Raises BadRow where flags cannot be read, or contradict each other or the model's other settings."""
    spec, need = demand.spec, demand.gguf
    if need is None:
        raise BadRow("source", "the sizes of this GGUF model are not known")
    flags = parse_flags(spec.backend_parameters)
    total = need.sizes.total_layers
    asked = GgufRules(
        sizes=need.sizes,
        total=total,
        layers=gpu_layers(flags, total),
        split=_several(tensor_split(flags)),
        cpu_offloading=bool(spec.cpu_offloading),
        image=need.image,
        sized_for=need.sized_for,
    )
    _check(asked, picked=bool(spec.gpu_ids))
    per = spec.gpu_selector.gpus_per_replica if spec.gpu_selector else None
    return ResourceRules(
        **demand_fields(demand),
        claim_policy=ClaimPolicy.SPLIT,
        gpu_count=(per or len(spec.gpu_ids)) if spec.gpu_ids else 0,
        distributed=bool(spec.distributed_inference_across_workers) and need.distributable,
        mode="delegated",
        gguf=asked,
    )


def _check(asked: GgufRules, *, picked: bool) -> None:
    layers = asked.layers
    if layers == 0 and picked:
        raise BadRow(COLUMN, "--gpu-layers is 0, but GPUs are selected", "drop one of them")
    if layers is not None and layers < asked.total and not asked.cpu_offloading:
        raise BadRow(
            COLUMN,
            f"--gpu-layers is {layers} of {asked.total}: the other layers would stay in RAM",
            "allow that with cpu_offloading, or leave the number out",
        )
    if len(asked.split) > MOST_DEVICES:
        raise BadRow(
            COLUMN, f"--tensor-split names {len(asked.split)} devices; llama.cpp runs {MOST_DEVICES}"
        )


def _several(shares: tuple[float, ...]) -> tuple[float, ...]:
    """`--tensor-split` without devices at its end that get nothing; none where it names one device only."""
    while len(shares) > 1 and not shares[-1]:
        shares = shares[:-1]
    return shares if len(shares) > 1 else ()
