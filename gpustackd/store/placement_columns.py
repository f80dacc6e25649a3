"""The columns of an instance that say where it is placed, from the placement."""

from __future__ import annotations

import json
from typing import Any

from gpustackd.domain.outcome import Part, Placement

_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode


def as_json(value: Any) -> str | None:
    """JSON text for a jsonb argument; SQL NULL for None."""
    return None if value is None else _encode(value)


def claim_json(part: Part, placement: Placement) -> dict[str, Any]:
    """`computed_resource_claim` of one part: what the engine there may use. Sizes in bytes, `vram` by GPU
    index."""
    claim: dict[str, Any] = {
        "ram": part.ram,
        "vram": {str(i): v for i, v in zip(part.gpu_indexes, part.vram, strict=True)},
        "vram_utilization": placement.vram_utilization,
        "is_unified_memory": part.unified,
    }
    layers = placement.offload_layers if part.offload_layers is None else part.offload_layers
    known = {"offload_layers": layers, "total_layers": placement.total_layers}
    claim |= {name: value for name, value in known.items() if value is not None}
    if placement.tensor_split is not None and part is placement.parts[0]:
        claim["tensor_split"] = list(placement.tensor_split)
    if placement.sized_for is not None:
        claim["sized_for"] = dict(placement.sized_for)
    return claim


def distributed_json(placement: Placement) -> dict[str, Any] | None:
    """`distributed_servers`: the coordination mode and every subordinate worker; None for one worker."""
    if len(placement.parts) < 2:
        return None
    return {
        "mode": placement.mode,
        "subordinate_workers": [
            {
                "worker_id": p.worker_id,
                "worker_name": p.worker_name,
                "worker_ip": p.worker_ip,
                "worker_advertise_address": p.worker_advertise_address,
                "worker_ifname": p.worker_ifname,
                "total_gpus": p.total_gpus,
                "gpu_type": p.gpu_type,
                "gpu_indexes": list(p.gpu_indexes),
                "gpu_addresses": list(p.gpu_addresses) or None,
                "computed_resource_claim": claim_json(p, placement),
            }
            for p in placement.parts[1:]
        ],
    }
