"""What `gpu_type_selector` asks of a pool: slices of cards, a hardware partition, or whole cards."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from gpustackd.domain.demand import Demand, Engine
from gpustackd.domain.pools import GpuPool
from gpustackd.engines import sglang, vllm
from gpustackd.engines.flags import parse_flags
from gpustackd.engines.mindie.parallelism import check_model
from gpustackd.engines.parallelism import Divisors, WorldSize, positive
from gpustackd.errors import BadRow
from gpustackd.placement.rules.engines import mindie_ranks
from gpustackd.placement.rules.resource_rules import (
    ClaimPolicy,
    PoolRequest,
    ResourceRules,
    check_split,
    demand_fields,
    divisors,
)

COLUMN = "gpu_type_selector"
PROFILE = "accelerator_partitioned_profile"
MEMORY = "accelerator_sliced_memory_percentage"
CORES = "accelerator_sliced_cores_percentage"
DISTRIBUTING = {"vLLM": Engine.VLLM, "SGLang": Engine.SGLANG, "MindIE": Engine.MINDIE}


def pool_rules(demand: Demand) -> ResourceRules:
    """Raises BadRow where the selector cannot be used."""
    spec = demand.spec
    ask = ask_of(demand)
    divides = divisors(demand, vision=_splits_vision(demand, ask.backend))
    _check_tp(demand, ask.backend, divides)
    return ResourceRules(
        **demand_fields(demand),
        claim_policy=ClaimPolicy.EACH,
        gpu_count=ask.cards if ask.whole and ask.cards > 1 else 0,
        pool=ask,
        unchanged=ask.whole,
        divisors=divides,
        distributed=spec.distributed_inference_across_workers is not False,
        mode="initialize_later" if ask.backend is not Engine.CUSTOM else None,
    )


def ask_of(demand: Demand) -> PoolRequest:
    """The selector as a checked value. Raises BadRow naming the field."""
    spec = demand.spec
    raw = spec.gpu_type_selector or {}
    name = raw.get("type")
    if not isinstance(name, str) or not name.strip():
        raise BadRow(f"{COLUMN}.type", "must name an instance type")
    if spec.gpu_ids:
        raise BadRow(COLUMN, "a pool and hand-picked GPUs exclude each other", "remove one of the selectors")
    if spec.cluster_id is None:
        raise BadRow(
            COLUMN, f"instance type {name[:60]!r} means nothing without a cluster", "set the model's cluster"
        )
    profile = raw.get(PROFILE) or ""
    if not isinstance(profile, str):
        raise BadRow(f"{COLUMN}.{PROFILE}", "must be the name of a partition")
    memory, cores = percentages(raw, bool(profile))
    whole = not profile and not memory
    per = spec.gpu_selector.gpus_per_replica if spec.gpu_selector else None
    if per and per > 1 and not whole:
        raise BadRow("gpu_selector.gpus_per_replica", f"is {per}: a part of a card is one GPU per replica")
    found = world_of(demand)
    size = found.size if found else 0
    return PoolRequest(
        name, profile, memory, cores, max(size, 1) if whole else 1, size,
        DISTRIBUTING.get(spec.effective_backend, Engine.CUSTOM),
    )  # fmt: skip


def percentages(raw: Mapping[str, Any], partitioned: bool) -> tuple[float, float]:
    """Shares of memory and of compute; (0, 0) = a whole card or a partition. Raises BadRow."""
    memory, cores = _percentage(raw, MEMORY), _percentage(raw, CORES)
    if partitioned:
        if memory or cores:
            raise BadRow(f"{COLUMN}.{PROFILE}", "a partition and percentages exclude each other")
        return 0, 0
    if not memory:
        if cores:
            raise BadRow(f"{COLUMN}.{CORES}", f"is {cores:g}, but {MEMORY} is not set", "set both, or none")
        return 0, 0
    if cores == 0:
        raise BadRow(
            f"{COLUMN}.{CORES}", f"is 0 where {MEMORY} is {memory:g}", "leave it out, or set 1 to 100"
        )
    return memory, 100 if cores is None else cores


def _percentage(raw: Mapping[str, Any], name: str) -> float | None:
    value = raw.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 100:
        raise BadRow(f"{COLUMN}.{name}", f"is {str(value)[:40]!r}, it must be a number from 0 to 100")
    return value


# -- world size ----------------------------------------------------------------------------------------


def world_of(demand: Demand) -> WorldSize | None:
    """Parallel sizes that the engine's flags give, None where they give none. Raises BadRow where they cannot
    be read."""
    spec = demand.spec
    backend = spec.effective_backend
    if backend == "vLLM":
        return vllm.world_size(parse_flags(spec.backend_parameters))
    if backend == "SGLang":
        return sglang.world_size(parse_flags(spec.backend_parameters))
    if backend == "MindIE":
        return mindie_ranks(demand).world_size
    return None


def _splits_vision(demand: Demand, backend: Engine) -> bool:
    """Whether the engine splits the vision part with the rest, by its own flags."""
    parameters = parse_flags(demand.spec.backend_parameters)
    if backend is Engine.VLLM:
        return vllm.splits_vision(demand, parameters)
    return backend is Engine.SGLANG and sglang.splits_vision(parameters)


def _check_tp(demand: Demand, backend: Engine, divides: Divisors) -> None:
    """Raises BadRow where the model cannot be split by the sizes that its flags give."""
    if backend is Engine.MINDIE:
        check_model(mindie_ranks(demand), demand.facts.hyper)
        return
    flags = {Engine.VLLM: vllm.TP, Engine.SGLANG: sglang.TP}.get(backend)
    if flags:
        check_split(divides, flags[0], positive(parse_flags(demand.spec.backend_parameters), flags))


# -- which device belongs to the pool ------------------------------------------------------------------


def belongs(manufacturer: str | None, product: str | None, pool: GpuPool) -> bool:
    """Whether a device of this vendor and name is a card of the pool: equal names, or the device's ends with
    the pool's (`NVIDIA L40S-48G` and `L40S 48G`), whatever parts the words."""
    wanted = plain(pool.product)
    if not pool.manufacturer or not wanted or not manufacturer:
        return False
    if manufacturer.strip().lower() != pool.manufacturer.lower():
        return False
    name = plain(product or "")
    return name == wanted or name.endswith(" " + wanted)


@lru_cache(maxsize=4096)
def plain(name: str) -> str:
    """Lower case, every run of other characters one space."""
    return re.sub(r"[^a-z0-9]+", " ", name.lower()).strip()
