"""`gpustackd estimate`: what a model needs, part by part."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import typer

from gpustackd.cli import gguf_table
from gpustackd.cli.estimate_cards import as_json, card_memory, show_cards, with_cards, with_refusal
from gpustackd.cli.options import ConfigOption, Form, FormOption, load_settings
from gpustackd.cli.output import console, print_json, print_table
from gpustackd.errors import BadRow, UsageError

if TYPE_CHECKING:
    from gpustackd.domain.model_spec import ModelSpec
    from gpustackd.estimate.breakdown import Breakdown
    from gpustackd.placement.on_cards import OnCards
    from gpustackd.settings import Settings

_WORDS = {
    "weights": "weights",
    "lora": "LoRA adapters",
    "draft": "draft model",
    "kv_cache": "KV cache of one longest sequence",
    "compute": "activations",
    "overhead": "the engine itself",
    "allowance": "safety allowance of the claim",
}


class Hub(StrEnum):
    """Where a model is read from."""

    HUGGINGFACE = "huggingface"
    MODEL_SCOPE = "model_scope"
    LOCAL_PATH = "local_path"


def estimate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="PATH_OR_REPO",
            help="A directory, a .gguf file, a repository of a hub, or owner/name/file.gguf of one.",
        ),
    ],
    source: Annotated[
        Hub | None,
        typer.Option("--source", help="Where it is. [default: a path that is there, else huggingface]"),
    ] = None,
    backend: Annotated[
        str | None, typer.Option("--backend", help="vLLM (the default), SGLang, MindIE, …")
    ] = None,
    param: Annotated[
        list[str] | None, typer.Option("--param", help="One engine flag, as in --param=--max-model-len=8192.")
    ] = None,
    category: Annotated[
        list[str] | None, typer.Option("--category", help="llm, embedding, …; detected where not given.")
    ] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Of the repository.")] = None,
    card: Annotated[
        str | None,
        typer.Option(
            "--card",
            metavar="SIZE",
            help="Memory of one GPU, as in 80GiB: how many it takes, what is booked there, and whether"
            " that holds one longest sequence. Not for GGUF.",
        ),
    ] = None,
    devices: Annotated[
        int | None, typer.Option("--devices", min=1, max=15, help="GGUF: over how many GPUs. [default: 1]")
    ] = None,
    tensor_split: Annotated[
        str | None, typer.Option("--tensor-split", help="GGUF: shares of the GPUs, as in 3,1.")
    ] = None,
    n_outputs: Annotated[
        int | None,
        typer.Option(
            "--n-outputs",
            min=0,
            help="GGUF: logit rows that are reserved, 0 = one per token of a batch."
            " [default: one per slot, as llama-server does]",
        ),
    ] = None,
    output: FormOption = Form.TEXT,
    config: ConfigOption = None,
) -> None:
    """What a model needs, part by part; needs no database.

    Of a GGUF file also for every number of layers on GPUs. Exit 1 where the size of the model cannot be
    known, it fits on no number of the cards that --card describes, or its engine would not start.

    Example: gpustackd estimate Qwen/Qwen2.5-7B-Instruct --param=--tensor-parallel-size=2
    """
    spec = spec_of(model, source, backend, param or (), category or (), revision)
    memory = None if card is None else card_memory(card)
    if spec.is_gguf:
        if memory is not None:
            raise UsageError("--card is not for GGUF files", "their table shows every number of layers")
        gguf_table.answer(
            model, spec, load_settings(config), output, devices=devices, split=tensor_split, rows=n_outputs
        )
        return
    found, placed = anyio.run(_breakdown, load_settings(config), spec, memory)
    if output is Form.JSON:
        print_json(found.as_json() | ({} if placed is None else {"card": as_json(placed)}))
    else:
        _show(model, found)
        if placed is not None:
            show_cards(placed)
    if found.claim_vram is None or (placed is not None and not placed.gpus):
        raise typer.Exit(1)


def spec_of(
    model: str,
    source: Hub | None,
    backend: str | None,
    parameters: Sequence[str],
    categories: Sequence[str],
    revision: str | None,
) -> ModelSpec:
    """The model that the command line describes. Raise UsageError where it is no path and no repository."""
    from gpustackd.domain.model_spec import model_spec

    path = Path(model).expanduser()
    if source is None:
        looks_local = model.startswith(("/", ".", "~")) or path.exists()
        source = Hub.LOCAL_PATH if looks_local else Hub.HUGGINGFACE
    file = None
    if source is not Hub.LOCAL_PATH and model.endswith(".gguf") and model.count("/") > 1:
        owner, name, file = model.split("/", 2)
        model = f"{owner}/{name}"
    if source is not Hub.LOCAL_PATH and model.count("/") != 1:
        raise UsageError(
            f"{model} is neither a path that is there nor a repository",
            "a repository is owner/name, as in Qwen/Qwen3-8B",
        )
    column = {
        Hub.LOCAL_PATH: "local_path",
        Hub.HUGGINGFACE: "huggingface_repo_id",
        Hub.MODEL_SCOPE: "model_scope_model_id",
    }[source]
    row: dict[str, Any] = {
        "id": 0,
        "name": model,
        "source": source.value,
        column: _absolute(path) if source is Hub.LOCAL_PATH else model,
        "backend": backend,
        "backend_parameters": list(parameters),
        "categories": list(categories),
        "revision": revision,
    }
    if file is not None:
        row["model_scope_file_path" if source is Hub.MODEL_SCOPE else "huggingface_filename"] = file
    return model_spec(row)


def _absolute(path: Path) -> str:
    """A file keeps its name, though it is a link to one that is called otherwise (as in a hub's cache)."""
    if path.suffix == ".gguf":
        return str(path.parent.resolve() / path.name)
    return str(path.resolve())


async def _breakdown(
    settings: Settings, spec: ModelSpec, memory: int | None
) -> tuple[Breakdown, OnCards | None]:
    from gpustackd.daemon.configure import reader_options
    from gpustackd.estimate.breakdown import breakdown
    from gpustackd.sources.reader import Reader

    async with Reader(reader_options(settings)) as models:
        facts = await models.facts(spec)
    try:
        whole, placed = (breakdown(spec, facts), None) if memory is None else with_cards(spec, facts, memory)
        return with_refusal(whole, spec, facts), placed
    except BadRow as error:  # of this command line, not of a row
        raise UsageError(error.problem.replace("backend_parameters", "--param", 1), error.remedy) from error


def _show(model: str, found: Breakdown) -> None:
    out = console()
    what = found.architecture or "an unknown architecture"
    kinds = f" ({', '.join(found.categories)})" if found.categories else ""
    out.print(f"{model}: {what}{kinds}, by {found.backend}\n", markup=False)
    each = found.per_gpu
    count = found.parallel.tp * found.parallel.pp
    if each is not None:
        of_one = {
            "weights": each.weights,
            "kv_cache": each.kv_sequence,
            "compute": each.compute,
            "overhead": each.overhead,
        }
        rows = [
            (_WORDS.get(part, part), _size(size), _size(of_one.get(part)) if count > 1 else "")
            for part, size in found.parts.items()
            if size
        ]
        headings = ["PART", "ALTOGETHER", f"ON EACH OF {count} GPUS" if count > 1 else ""]
        print_table(out, headings, rows, right=headings[1:])
        if each.kv_per_token:
            out.print(f"\none token of context takes {each.kv_per_token / 1024:.0f} KiB on each GPU")
            out.print(f"the longest sequence has {found.max_len} tokens")
    claim = "not known" if found.claim_vram is None else _size(found.claim_vram)
    ram = f", and {_size(found.claim_ram)} of RAM" if found.claim_ram else ""
    out.print(f"\nall GPUs together must offer {claim}{ram}", style="bold")
    for warning in found.warnings:
        out.print(f"note: {warning}", markup=False)


def _size(size: int | None) -> str:
    if size is None:
        return ""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
