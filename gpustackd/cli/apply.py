"""`gpustackd apply`: create or update rows from documents."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import anyio
import typer

from gpustackd.cli.options import ConfigOption, DatabaseOption, FilesOption, Form, FormOption, database
from gpustackd.cli.output import console, print_json, print_table
from gpustackd.errors import GpustackdError, UsageError

_LARGEST = 32 << 20
"""Bytes of one file of documents."""

if TYPE_CHECKING:
    from gpustackd.store.documents.apply import Applied
    from gpustackd.store.documents.reading import Document


def apply(
    file: FilesOption,
    output: FormOption = Form.TEXT,
    config: ConfigOption = None,
    database_url: DatabaseOption = None,
) -> None:
    """Create or update rows from documents.

    Clusters, workers with their GPUs, models, instances and the other kinds, by name.

    Each file is one transaction: a refused document refuses its file, the other files are applied. Fields
    have the names of columns; cluster, worker and model can be given by name instead of by id. An instance
    with worker, gpu_type, gpu_indexes and computed_resource_claim is adopted where it runs.

    Example: gpustackd apply -f deploy/examples/fleet.yaml -f models.yaml
    """
    url = database(config, database_url)
    texts = [read_file(path) for path in file]
    applied, refused = anyio.run(_apply, url, texts)
    if output is Form.JSON:
        refusals = [{"problem": e.problem, "next": e.remedy} for e in refused]
        print_json({"applied": [a.as_json() for a in applied], "refused": refusals})
    elif applied:
        rows = [(a.kind, a.name, a.action, a.note) for a in applied]
        print_table(console(), ["KIND", "NAME", "DONE", ""], rows)
    if refused:
        from gpustackd.cli import failure

        raise typer.Exit(max(failure.report(error) for error in refused))


def read_file(path: Path) -> tuple[str, str]:
    """(text, name) of one file. Raise UsageError where it cannot be read."""
    try:
        if str(path) == "-":
            return _within_bounds(sys.stdin.buffer, "standard input"), "standard input"
        with path.open("rb") as file:
            return _within_bounds(file, str(path)), str(path)
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text", "write documents as YAML or JSON in UTF-8") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", "check the path") from error


def _within_bounds(file: BinaryIO, name: str) -> str:
    """Read it whole, if it is of a sensible size: /dev/zero never ends."""
    content = file.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise UsageError(f"{name} is larger than {_LARGEST >> 20} MiB", "split it into several files")
    return content.decode("utf-8")


async def _apply(url: str, texts: Sequence[tuple[str, str]]) -> tuple[list[Applied], list[GpustackdError]]:
    from gpustackd.errors import Refused
    from gpustackd.store.documents.apply import apply_documents
    from gpustackd.store.documents.reading import read_documents
    from gpustackd.store.postgres.connect import connected

    applied: list[Applied] = []
    refused: list[GpustackdError] = []
    files: list[list[Document]] = []
    for text, name in texts:
        try:
            files.append(read_documents(text, name))
        except Refused as error:
            refused.append(error)
    async with connected(url, "gpustackd apply", lock_timeout="30s") as connection:
        for documents in files:
            try:
                applied.extend(await apply_documents(connection, documents))
            except Refused as error:
                refused.append(error)
    return applied, refused
