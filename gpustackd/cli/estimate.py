"""`gpustackd estimate`: what a model needs, part by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import typer

from gpustackd.cli.options import ConfigOption, Form, FormOption, load_settings
from gpustackd.cli.output import console, print_json
from gpustackd.errors import BadRow, Refused, UsageError

if TYPE_CHECKING:
    from gpustackd.domain.facts import ModelFacts
    from gpustackd.domain.model_spec import ModelSpec
    from gpustackd.settings import Settings


_LARGEST_CARD = 2**50


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
        typer.Option(
            "--source", help="Where it is. [default: local_path where that path exists, else huggingface]"
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend", metavar="NAME", help="vLLM, SGLang, MindIE, …. [default: vLLM; Custom for GGUF]"
        ),
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option("--param", metavar="FLAG", help="An engine flag, as in the example. May be repeated."),
    ] = None,
    category: Annotated[
        list[str] | None,
        typer.Option(
            "--category", metavar="NAME", help="llm, embedding, …. May be repeated. [default: detected]"
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="REV", help="Branch, tag or commit of the repository.")
    ] = None,
    card: Annotated[
        str | None,
        typer.Option(
            "--card",
            metavar="SIZE",
            help="Memory of one GPU, as in 80GiB: says how many it takes, what is booked there, and whether"
            " that holds one longest sequence. Not for GGUF.",
        ),
    ] = None,
    devices: Annotated[
        int | None, typer.Option("--devices", min=1, max=15, help="GGUF: number of GPUs. [default: 1]")
    ] = None,
    tensor_split: Annotated[
        str | None,
        typer.Option("--tensor-split", metavar="SHARES", help="GGUF: shares of the GPUs, as in 3,1."),
    ] = None,
    n_outputs: Annotated[
        int | None,
        typer.Option(
            "--n-outputs",
            min=0,
            help="GGUF: rows of logits to reserve, 0 = one per token of a batch."
            " [default: one per slot, as llama-server does]",
        ),
    ] = None,
    output: FormOption = Form.TEXT,
    config: ConfigOption = None,
) -> None:
    """Estimate what a model needs, part by part, without a database.

    For a GGUF file also at every number of layers on GPUs. Exit 1 where the size of the model is not known,
    where it fits on no number of the cards that --card describes, or where its engine would not start.

    Example: gpustackd estimate Qwen/Qwen3-8B --param=--max-model-len=8192
    """
    spec = spec_of(model, source, backend, param or (), category or (), revision)
    memory = None if card is None else _card_memory(card)
    if spec.is_gguf and memory is not None:
        raise UsageError(
            "--card is not for GGUF files", "leave it out: their table shows every number of layers"
        )
    facts = anyio.run(_read, load_settings(config), spec)
    try:
        if spec.is_gguf:
            known = _estimate_gguf(model, spec, facts, output, devices, tensor_split, n_outputs)
        else:
            known = _estimate(model, spec, facts, output, memory)
    except BadRow as error:  # of this command line, not of a row
        raise UsageError(error.problem.replace("backend_parameters", "--param", 1), error.remedy) from error
    if not known:
        raise typer.Exit(1)


def spec_of(
    model: str,
    source: Hub | None,
    backend: str | None,
    parameters: Sequence[str],
    categories: Sequence[str],
    revision: str | None,
) -> ModelSpec:
    """The model that the command line describes. Raise UsageError where it names neither a path nor
    a repository."""
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
            f"{model} is neither an existing path nor a repository",
            "write a repository as owner/name, such as Qwen/Qwen3-8B",
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


def _card_memory(text: str) -> int:
    """Bytes of one card. Raise UsageError for anything that is not the size of a card."""
    from gpustackd.store.documents.fields import size

    try:
        memory = size(text)
    except ValueError as error:
        raise UsageError(f"--card {error}", "give the memory of one GPU, such as --card=80GiB") from None
    if not 0 < memory <= _LARGEST_CARD:
        problem = f"--card is {text[:40]}, which no card has"
        raise UsageError(problem, "give the memory of one GPU, such as --card=80GiB")
    return memory


async def _read(settings: Settings, spec: ModelSpec) -> ModelFacts:
    from gpustackd.daemon.configure import reader_options
    from gpustackd.sources.reader import Reader

    async with Reader(reader_options(settings)) as reader:
        return await reader.facts(spec)


def _estimate(model: str, spec: ModelSpec, facts: ModelFacts, output: Form, memory: int | None) -> bool:
    """Print what the model needs, with `memory` also on cards of so many bytes; whether that is known and
    fits. Raise BadRow for flags that cannot be read."""
    from gpustackd.cli.estimate_cards import with_cards, with_refusal
    from gpustackd.cli.estimate_text import show_breakdown, show_cards
    from gpustackd.estimate.breakdown import breakdown

    need, cards = (breakdown(spec, facts), None) if memory is None else with_cards(spec, facts, memory)
    need = with_refusal(need, spec, facts)
    if output is Form.JSON:
        print_json(need.as_json() | ({} if cards is None else {"card": asdict(cards)}))
    else:
        show_breakdown(console(), model, need)
        if cards is not None:
            show_cards(console(), cards)
    return need.claim_vram is not None and (cards is None or cards.gpus > 0)


def _estimate_gguf(
    model: str,
    spec: ModelSpec,
    facts: ModelFacts,
    output: Form,
    devices: int | None,
    split: str | None,
    rows: int | None,
) -> bool:
    """Print what the model needs over so many `devices`; whether that is known. Raise BadRow for flags that
    cannot be read, Refused where llama.cpp would not start."""
    from gpustackd.cli.estimate_text import show_table
    from gpustackd.estimate.llama_cpp.table import table

    levels = table(spec, facts, devices=devices, split=split, rows=rows)
    if output is Form.JSON:
        print_json(levels.as_json())
    elif not levels.refused:
        show_table(console(), model, levels)
    if levels.refused:
        raise Refused(f"llama.cpp refuses to start {model}: {levels.refused}", "change its flags")
    return levels.claim_vram is not None
