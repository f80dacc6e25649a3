"""What a model asks for: the first line of every refusal for lack of room."""

from __future__ import annotations

from typing import Any

from gpustackd.domain.demand import Demand
from gpustackd.domain.outcome import Reason
from gpustackd.placement.diagnostics.wording import GIB, gib, gib_number
from gpustackd.placement.rules.resource_rules import ClaimPolicy, ResourceRules

_MOST = 2.0**62


def needs(demand: Demand, rules: ResourceRules) -> Reason:
    """VRAM and RAM altogether, and what that is of cards where the engine takes a share of each."""
    v = rules.vram
    text = f"The model needs {gib(v)} of GPU memory"
    params: dict[str, Any] = {"vram_bytes": v, "vram_gib": gib_number(v)}
    ram = max(rules.ram, rules.ram_static or 0)
    if ram:
        text += f" and {gib(ram)} of RAM"
        params |= {"ram_bytes": ram, "ram_gib": gib_number(ram)}
    u = max((*rules.share_of_type.values(), rules.share), default=0.0)
    if u > 0 and rules.claim_policy is ClaimPolicy.SHARE:
        # MindIE's figure follows from the need as it is shown, to two decimals
        shown = gib_number(v) * GIB if rules.addresses else v
        total = int(min(shown / u, _MOST))  # a share next to nothing asks for more than can be counted
        text += f"; at {rules.share_flag} {u:g} it needs {gib(total)} of GPUs, {int(u * 100)} % of each"
        params |= {
            "flag": rules.share_flag,
            "share": u,
            "total_bytes": total,
            "per_gpu_percent": int(u * 100),
        }
    if rules.gpu_count:
        text += f", on {rules.gpu_count} GPU{'s' if rules.gpu_count > 1 else ''}"
        params["gpu_count"] = rules.gpu_count
    return Reason("fit.needs", "fit", text, params, "info")
