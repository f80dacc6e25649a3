"""`gpustackd estimate` of a GGUF file: its parts, and the table by the number of layers on GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import typer

from gpustackd.cli.options import Form
from gpustackd.cli.output import console, print_json, print_table
from gpustackd.errors import BadRow, Refused, UsageError

if TYPE_CHECKING:
    from gpustackd.domain.model_spec import ModelSpec
    from gpustackd.estimate.llama_cpp.division import DeviceShare, HostShare
    from gpustackd.estimate.llama_cpp.table import Table
    from gpustackd.settings import Settings

_WORDS = {
    "weights": "weights",
    "kv_cache": "KV cache and state",
    "compute": "compute buffers",
    "output": "logits",
    "beside": "projector, draft, adapters",
    "prompt_cache": "cached prompts (--cache-ram)",
    "overhead": "runtimes of GPUs and process",
    "allowance": "safety allowance of the claim",
}


def answer(
    model: str,
    spec: ModelSpec,
    settings: Settings,
    form: Form,
    *,
    devices: int | None,
    split: str | None,
    rows: int | None,
) -> None:
    """Print what the model needs over so many `devices`. Raise Refused where llama.cpp would not start, Exit
    where the need is not known."""

    async def made() -> Table:
        from gpustackd.daemon.configure import reader_options
        from gpustackd.estimate.llama_cpp.table import table
        from gpustackd.sources.reader import Reader

        async with Reader(reader_options(settings)) as models:
            facts = await models.facts(spec)
        try:
            return table(spec, facts, devices=devices, split=split, rows=rows)
        except BadRow as error:  # of this command line, not of a row
            raise UsageError(
                error.problem.replace("backend_parameters", "--param", 1), error.remedy
            ) from error

    answered = anyio.run(made)
    if form is Form.JSON:
        print_json(answered.as_json())
    elif not answered.refused:
        _show(model, answered)
    if answered.refused:
        raise Refused(f"llama.cpp refuses to start {model}: {answered.refused}", "change its flags")
    if answered.claim_vram is None:
        raise typer.Exit(1)


def _show(model: str, found: Table) -> None:
    out = console()
    kinds = f" ({', '.join(found.categories)})" if found.categories else ""
    out.print(f"{model}: {found.architecture}{kinds}, by {found.backend}", markup=False)
    if found.sized_for:
        told = found.sized_for
        shared = " that share one cache" if told["kv_unified"] and told["parallel"] > 1 else ""
        out.print(
            f"sized for {told['context']} tokens, {told['parallel']} slots{shared}, a cache of"
            f" {told['cache_type_k']} and {told['cache_type_v']}, flash attention {told['flash_attention']}"
        )
    gpus = [f"GPU {i}" for i in range(found.devices)] if found.devices > 1 else ["GPU"]
    if found.chosen is not None:
        out.print()
        level = found.chosen
        held: list[DeviceShare | HostShare] = [*level.devices, level.host]
        by_part = {
            "weights": [h.weights for h in held],
            "kv_cache": [h.kv_cache for h in held],
            "compute": [h.compute for h in held],
            "output": [0] * found.devices + [level.host.output],
            "beside": [h.extras for h in held],
            "prompt_cache": [0] * found.devices + [level.host.prompt_cache],
        }
        rows = [[_WORDS[part], *map(_size, sizes)] for part, sizes in by_part.items() if any(sizes)]
        rows.append(["runtimes and safety allowance", *(_size(h.allowance) for h in held)])
        headings = [f"PART, {level.offload_layers} OF {level.total_layers} LAYERS ON GPUS", *gpus, "HOST"]
        print_table(out, headings, rows, right=headings[1:])
    if len(found.levels) > 1:
        out.print()
        headings = ["LAYERS ON GPUS", *gpus, "HOST"]
        table = [
            [
                str(x.offload_layers),
                *(_size(d.claim if d.used else 0) for d in x.devices),
                _size(x.host.claim),
            ]
            for x in found.levels
        ]
        print_table(out, headings, table, right=headings)
    ram = f", and the host {_size(found.claim_ram)} of RAM"
    out.print(f"\nall GPUs together must offer {_size(found.claim_vram)}{ram}", style="bold")
    for warning in found.warnings:
        out.print(f"note: {warning}", markup=False)


def _size(size: int | None) -> str:
    if size is None:
        return ""
    if not size:
        return "0"
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
