"""Rules of GGUF models: what their flags ask of the search (GGUF selector spec sections 2 and 5)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpustackd.domain.demand import Demand
from gpustackd.domain.gguf_levels import LevelSizes
from gpustackd.engines.flags import COLUMN, BackendParameters, parse_flags
from gpustackd.errors import BadRow
from gpustackd.placement.rules.resource_rules import ClaimPolicy, ResourceRules

LAYERS = ("gpu-layers", "n-gpu-layers", "ngl")
SPLIT = ("tensor-split", "ts")
MOST_DEVICES = 15
"""llama.cpp schedules over 16 devices, of which the host is one."""

_WHOLE = re.compile(r"\d{1,9}\Z", re.ASCII)


@dataclass(frozen=True, slots=True, eq=False)
class GgufRules:
    """What is asked beside the sizes. `layers` None = as many as fit; 0 = none."""

    sizes: LevelSizes
    total: int
    layers: int | None
    split: tuple[float, ...]
    cpu_offloading: bool
    image: bool
    sized_for: Mapping[str, Any]

    @property
    def whole(self) -> bool:
        """Whether a place for all layers is looked for."""
        return self.layers is None or self.layers == self.total

    @property
    def partial(self) -> bool:
        """Whether a place for some layers is."""
        return self.cpu_offloading and not self.image and self.layers not in (0, self.total)

    @property
    def host_only(self) -> bool:
        """Whether a place without a GPU is."""
        return self.cpu_offloading and not self.image and self.layers in (None, 0)


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
        layers=_layers(flags, total),
        split=_split(flags),
        cpu_offloading=bool(spec.cpu_offloading),
        image=need.image,
        sized_for=need.sized_for,
    )
    _check(asked, picked=bool(spec.gpu_ids))
    per = spec.gpu_selector.gpus_per_replica if spec.gpu_selector else None
    return ResourceRules(
        engine=demand.engine,
        vram=demand.need.vram or 0,
        taking=ClaimPolicy.SPLIT,
        ram=demand.need.ram,
        ram_static=demand.need.ram_static,
        gpu_count=(per or len(spec.gpu_ids)) if spec.gpu_ids else 0,
        distributed=bool(spec.distributed_inference_across_workers) and need.distributable,
        mode="delegated",
        replicas=1 if spec.replicas is None else spec.replicas,
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


def _layers(flags: BackendParameters, total: int) -> int | None:
    """`--gpu-layers`, at most all; -1 and `auto` mean as many as fit, -2 and `all` mean all."""
    raw = flags.text(*LAYERS)
    word = "auto" if raw is None else raw.strip().lower()
    if word in {"auto", "-1"}:
        return None
    if word in {"all", "-2"}:
        return total
    if not _WHOLE.match(word):
        raise BadRow(COLUMN, f"--{LAYERS[0]} is {word[:40]!r}", "use a number, auto or all")
    return min(int(word), total)


def _split(flags: BackendParameters) -> tuple[float, ...]:
    """`--tensor-split`; none where it names one device only."""
    raw = flags.text(*SPLIT)
    if not raw:
        return ()
    try:
        shares = tuple(float(x) for x in re.split(r"[,/]+", raw.strip()) if x)
    except ValueError:
        shares = ()
    if not shares or not all(0 <= x < 2**63 for x in shares) or not sum(shares):
        raise BadRow(COLUMN, f"--{SPLIT[0]} is {raw[:60]!r}, not a list of shares", "as in 3,1")
    while len(shares) > 1 and not shares[-1]:
        shares = shares[:-1]
    return shares if len(shares) > 1 else ()
