"""The answers of `gpustackd estimate` for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from gpustackd.cli.output import print_table, print_text, size_of

if TYPE_CHECKING:
    from gpustackd.estimate.breakdown import Breakdown
    from gpustackd.estimate.llama_cpp.division import DeviceShare, HostShare
    from gpustackd.estimate.llama_cpp.table import Table
    from gpustackd.placement.on_cards import OnCards

_PARTS = {
    "weights": "weights",
    "lora": "LoRA adapters",
    "draft": "draft model",
    "kv_cache": "KV cache of one longest sequence",
    "compute": "activations",
    "overhead": "the engine itself",
    "allowance": "safety allowance of the claim",
}
_GGUF_PARTS = {
    "weights": "weights",
    "kv_cache": "KV cache and state",
    "compute": "compute buffers",
    "output": "logits",
    "beside": "projector, draft, adapters",
    "prompt_cache": "cached prompts (--cache-ram)",
}


def show_breakdown(out: Console, model: str, need: Breakdown) -> None:
    """Parts of the need, altogether and on each GPU, and what must be free."""
    what = need.architecture or "unknown architecture"
    kinds = f" ({', '.join(need.categories)})" if need.categories else ""
    out.print(f"{model}: {what}{kinds}, on {need.backend}\n", markup=False)
    each = need.per_gpu
    count = need.parallel.tp * need.parallel.pp
    if each is not None:
        of_one = {
            "weights": each.weights,
            "kv_cache": each.kv_sequence,
            "compute": each.compute,
            "overhead": each.overhead,
        }
        rows = [
            (_PARTS.get(part, part), size_of(size), size_of(of_one.get(part)) if count > 1 else "")
            for part, size in need.parts.items()
            if size
        ]
        headings = ["PART", "ALTOGETHER", f"ON EACH OF {count} GPUS" if count > 1 else ""]
        print_table(out, headings, rows, right=headings[1:])
        if each.kv_per_token:
            out.print(f"\neach token of context takes {each.kv_per_token / 1024:.0f} KiB on each GPU")
            out.print(f"the longest sequence has {need.max_len} tokens")
    claim = "an unknown amount of memory" if need.claim_vram is None else size_of(need.claim_vram)
    ram = f", and {size_of(need.claim_ram)} of RAM" if need.claim_ram else ""
    _show_claim(out, f"{claim}{ram}", need.warnings)


def show_table(out: Console, model: str, table: Table) -> None:
    """A GGUF model: parts of its need at the chosen level, and every number of layers on GPUs."""
    kinds = f" ({', '.join(table.categories)})" if table.categories else ""
    out.print(f"{model}: {table.architecture}{kinds}, on {table.backend}", markup=False)
    if table.sized_for:
        sized = table.sized_for
        shared = " that share one cache" if sized["kv_unified"] and sized["parallel"] > 1 else ""
        out.print(
            f"sized for {sized['context']} tokens, {sized['parallel']} slots{shared}, a cache of"
            f" {sized['cache_type_k']} and {sized['cache_type_v']}, flash attention"
            f" {sized['flash_attention']}"
        )
    gpus = [f"GPU {i}" for i in range(table.devices)] if table.devices > 1 else ["GPU"]
    if table.chosen is not None:
        out.print()
        level = table.chosen
        shares: list[DeviceShare | HostShare] = [*level.devices, level.host]
        by_part = {
            "weights": [h.weights for h in shares],
            "kv_cache": [h.kv_cache for h in shares],
            "compute": [h.compute for h in shares],
            "output": [0] * table.devices + [level.host.output],
            "beside": [h.extras for h in shares],
            "prompt_cache": [0] * table.devices + [level.host.prompt_cache],
        }
        rows = [[_GGUF_PARTS[part], *map(size_of, sizes)] for part, sizes in by_part.items() if any(sizes)]
        rows.append(["runtimes and safety allowance", *(size_of(h.allowance) for h in shares)])
        headings = [f"PART, {level.offload_layers} OF {level.total_layers} LAYERS ON GPUS", *gpus, "HOST"]
        print_table(out, headings, rows, right=headings[1:])
    if len(table.levels) > 1:
        out.print()
        headings = ["LAYERS ON GPUS", *gpus, "HOST"]
        levels = [
            [
                str(x.offload_layers),
                *(size_of(d.claim if d.used else 0) for d in x.devices),
                size_of(x.host.claim),
            ]
            for x in table.levels
        ]
        print_table(out, headings, levels, right=headings)
    claim = f"{size_of(table.claim_vram)}, and the host {size_of(table.claim_ram)} of RAM"
    _show_claim(out, claim, table.warnings)


def show_cards(out: Console, cards: OnCards) -> None:
    """How many cards of one size the model takes, in a sentence."""
    size = f"{cards.memory / 2**30:.2f} GiB"
    if not cards.gpus:
        out.print(f"\non cards of {size}:\n{cards.message}", markup=False)
        return
    number = f"{cards.gpus} cards" if cards.gpus > 1 else "one card"
    workers = f" of {cards.workers} workers" if cards.workers > 1 else ""
    each = f"{cards.booked / cards.gpus / 2**30:.2f} GiB booked on {'each' if cards.gpus > 1 else 'it'}"
    out.print(f"on cards of {size} it takes {number}{workers}, {each}", markup=False, style="bold")


def _show_claim(out: Console, claim: str, warnings: Sequence[str]) -> None:
    out.print(f"\nall GPUs together must offer {claim}", style="bold")
    for warning in warnings:
        print_text(out, warning, "      ", "note: ")
