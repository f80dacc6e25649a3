"""`gpustackd plan`: what would happen if documents were applied now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anyio
import typer

from gpustackd.cli.apply import read_file
from gpustackd.cli.options import ConfigOption, DatabaseOption, FilesOption, Form, FormOption, load_settings
from gpustackd.cli.output import console, print_json
from gpustackd.domain.outcome import NoFit, Placed

if TYPE_CHECKING:
    from gpustackd.daemon.whatif.plan import Plan, PlannedDecision
    from gpustackd.settings import Settings


def plan(
    file: FilesOption,
    output: FormOption = Form.TEXT,
    config: ConfigOption = None,
    database_url: DatabaseOption = None,
) -> None:
    """Show what would happen if documents were applied now.

    Every instance that they ask for (ModelInstance documents, and the missing replicas of Model documents) is
    placed on a copy of the present fleet, by the same code that daemons run. Nothing is written. Exit 1 where
    something does not fit.

    Example: gpustackd plan -f models.yaml
    """
    settings = load_settings(config, database_url)
    texts = [read_file(path) for path in file]
    answer = anyio.run(plan_documents, settings, settings.require_database(), texts)
    if output is Form.JSON:
        print_json({k: v for k, v in answer.items() if k != "fleet"})
    else:
        from gpustackd.cli.plan_text import show

        show(console(), answer)
    if not answer["fits"]:
        raise typer.Exit(1)


async def plan_documents(settings: Settings, url: str, texts: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """The plan of documents, each a (text, name) of a file, as data. Raise Refused where `apply` would
    refuse one, DatabaseUnavailable or WrongRevision."""
    from gpustackd.daemon.compose import make_plan, no_garbage_collection
    from gpustackd.store.documents.reading import read_documents

    files = [read_documents(text, name) for text, name in texts]
    async with no_garbage_collection(), make_plan(url, settings, files) as (made, names):
        return _as_data(made, names)


def _as_data(made: Plan, names: Mapping[int, tuple[str, str]]) -> dict[str, Any]:
    """The plan as data. `names`: (instance, model) by id, of every instance that holds memory."""
    from gpustackd.cli.planned_fleet import gpu_rows, remaining, worker_rows

    known = {**names, **{t.id: (t.name, t.model) for t in made.trials}}
    fleet = made.snapshot.fleet
    asked = [t for t in made.trials if t.asked]
    return {
        "fits": made.fits,
        "models": [
            {
                "name": m.name, "new": m.new, "instances": m.instances, "placed": m.placed, "added": m.added,
                "fits": m.fits,
                "peak": None if m.peak is None else {"replicas": m.peak.replicas, "placed": m.peak.placed},
            }
            for m in made.models
        ],
        "placements": [_placement(t, t.outcome) for t in asked if isinstance(t.outcome, Placed)],
        "unplaced": [_refusal(t, t.outcome) for t in asked if isinstance(t.outcome, NoFit)],
        "others": [
            {"instance": t.name, "model": t.model, "placed": t.placed} for t in made.trials if not t.asked
        ],
        "left": remaining(fleet),
        "warnings": list(made.warnings),
        "fleet": (worker_rows(fleet), gpu_rows(fleet, known)),
    }  # fmt: skip


def _placement(trial: PlannedDecision, outcome: Placed) -> dict[str, Any]:
    placement = outcome.placement
    parts = [
        {
            "worker": p.worker_name, "gpu_type": p.gpu_type, "gpu_indexes": list(p.gpu_indexes),
            "vram": {str(i): v for i, v in zip(p.gpu_indexes, p.vram, strict=True)}, "ram": p.ram,
        }
        for p in placement.parts
    ]  # fmt: skip
    return {
        "instance": trial.name, "model": trial.model, "new": trial.new, **parts[0], "subordinates": parts[1:],
        "score": round(placement.score, 4), "strategy": placement.strategy,
        "offload_layers": placement.offload_layers, "total_layers": placement.total_layers,
    }  # fmt: skip


def _refusal(trial: PlannedDecision, outcome: NoFit) -> dict[str, Any]:
    return {
        "instance": trial.name, "model": trial.model, "new": trial.new, "message": outcome.message,
        "reasons": [r.as_json() for r in outcome.reasons],
    }  # fmt: skip
