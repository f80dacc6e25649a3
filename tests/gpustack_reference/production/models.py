"""Models before scheduling: what their files say, whether they are accepted, and on how many GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gpustackd.domain.facts import HyperParameters, ModelFacts
from gpustackd.domain.model_spec import ModelSpec, model_spec
from gpustackd.domain.sizes import quantity
from gpustackd.engines.parallelism import WorldSize
from gpustackd.errors import BadRow, ModelUnreadable
from gpustackd.estimate.demand import build_demand
from gpustackd.estimate.evaluate import evaluate, gpus_per_replica
from gpustackd.placement.rules.registry import rules_of
from gpustackd.placement.rules.resource_rules import gpu_count
from gpustackd.sources.formats.config_json import hyper_parameters
from gpustackd.sources.worker_files import WorkerFiles
from tests.gpustack_reference.production.decisions import PARSED
from tests.worker_api import WorkerApi

MIB = 1024**2


def _spec(columns: Mapping[str, Any]) -> ModelSpec:
    row: dict[str, Any] = {"id": 1, "version": 1, "name": "m", "source": "huggingface"}
    return model_spec(row | {k: v for k, v in columns.items() if v is not None})


# -- numbers of GPUs -----------------------------------------------------------------------------------------


def skips_count_check(columns: Mapping[str, Any]) -> bool:
    """Whether the model's env lets picked GPUs and parallel sizes contradict each other."""
    return _spec(columns).skips_gpu_count_check


def count_of(columns: Mapping[str, Any], size: int | None, labels: Iterable[str]) -> int | str:
    """How many GPUs, for a world size that flags give; or the text of the refusal."""
    asked = None if not size else WorldSize(size, tuple(labels))
    try:
        return gpu_count(_spec(columns), asked)[0]
    except BadRow as problem:
        return str(problem)


def filled_in(columns: Mapping[str, Any]) -> int | None:
    """GPUs of one replica as the row says, or as they are filled in."""
    spec = _spec(columns)
    stated = spec.gpu_selector.gpus_per_replica if spec.gpu_selector else None
    return stated or gpus_per_replica(spec)


def divides(backend: str, parameters: list[str], sizes: Mapping[str, int | None]) -> tuple[bool, str | None]:
    """Whether a model of these sizes splits over `tp_size` GPUs by its engine's rules, and what does not."""
    hyper = HyperParameters(
        num_attention_heads=sizes.get("num_attention_heads"),
        vision_heads=sizes.get("vision_num_attention_heads"),
        vocab_size=sizes.get("vocab_size"),
    )
    spec = _spec({"backend": backend, "backend_parameters": parameters})
    facts = ModelFacts(0, hyper=hyper, categories=("llm",))
    divisors = rules_of(build_demand(spec, facts)).divisors
    complaint = divisors.complaint(sizes["tp_size"] or 0)
    return divisors.allows(sizes["tp_size"] or 0), None if complaint is None else str(complaint)


def mebibytes(quantities: Iterable[Any]) -> list[int]:
    """Quantities of memory in MiB; 0 where one cannot be read."""
    return [(quantity(q) or 0) // MIB for q in quantities]


# -- configurations ------------------------------------------------------------------------------------------

DIMENSIONS = {**{k: k for k in HyperParameters.__dataclass_fields__}, **PARSED}


def dimension(config: dict[str, Any], name: str) -> Any:
    """One dimension that is read out of a configuration."""
    found = getattr(hyper_parameters(config), DIMENSIONS[name])
    return list(found) if isinstance(found, tuple) else found


def evaluated(
    columns: Mapping[str, Any], config: Mapping[str, Any] | None, *, diffusers: bool, remote_code: bool | None
) -> tuple[bool, list[str], list[str]]:
    """(accepted, codes of problems, categories) of a model with this configuration."""
    hyper = hyper_parameters(dict(config)) if config else None
    facts = ModelFacts(1, config=dict(config or {}), hyper=hyper, is_diffusers=diffusers)
    found = evaluate(_spec(columns), facts, needs_remote_code=remote_code)
    return not found.problems, [p.code for p in found.problems], list(found.categories)


# -- files of workers ----------------------------------------------------------------------------------------


async def file_from_workers(
    path: str, workers: list[Mapping[str, Any]], content: Any
) -> tuple[str | None, str, int]:
    """Ask workers for a file: (who gave it, what went wrong, requests that are still under way)."""
    good = [w for w in workers if w.get("ok", True)]
    quickest = min((w.get("answers_after_s", 0) for w in good), default=0)
    api = WorkerApi({w["name"]: {path: content} if w in good else {} for w in workers})
    api.silent = {w["name"] for w in good if w.get("answers_after_s", 0) > quickest}
    winner, problem = None, ""
    async with api:
        files = WorkerFiles()
        try:
            document, winner = await files.json_file(api.hosts(), path)
            assert document == content
        except ModelUnreadable as error:
            problem = str(error)
        await api.idle()
        running = api.running
        await files.aclose()
    return winner, problem, running
