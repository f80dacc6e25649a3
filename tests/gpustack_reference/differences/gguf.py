"""Where a GGUF model is divided otherwise."""

from __future__ import annotations

import re
from typing import Any

from tests.gpustack_reference import cases
from tests.gpustack_reference.cases import Case
from tests.gpustack_reference.differences.difference import KEEP, Difference
from tests.gpustack_reference.judgement import Finding, Holds, Tells
from tests.gpustack_reference.oracles import gguf_places
from tests.gpustack_reference.oracles.layers import of_case
from tests.gpustack_reference.oracles.room import hosts

GIB = 1024**3
DEVICES = 15
"""GPUs of one llama.cpp server; it has room for sixteen devices, the host among them."""
WHERE = ("place", "final", "candidate *")


def _listed(case: Case) -> list[dict[str, Any]]:
    return (case["expect"].get("candidates") or []) if case["area"].startswith("selector.gguf") else []


def _place(case: Case, finding: Finding) -> Any:
    """Any place that is right by the sizes of the case."""
    if "gguf_estimates" not in case["model"]:
        return Holds("a place by the header", lambda got: gguf_places.rough_complaint(case, got))
    if finding.what.startswith("candidate"):
        case = _of_one(case, finding.expected)
    model = of_case(case)
    return Holds("a place by the sizes of the case", lambda got: gguf_places.complaint(case, model, got))


def _of_one(case: Case, candidate: dict[str, Any]) -> Case:
    """The case with the GPUs of one candidate alone."""
    parts = [candidate, *(candidate.get("subordinates") or ())]
    names: dict[str, set[int]] = {}
    for p in parts:
        names.setdefault(p["worker"], set()).update(p.get("gpu_indexes") or ())
    kept = []
    for described in case["workers"]:
        one = cases.workers({"workers": [described]})[0]
        if one["name"] in names:
            gpus = [g for g in one.get("gpus") or [] if g["index"] in names[one["name"]]]
            kept.append({"inline": {**one, "gpus": gpus}})
    return case | {"workers": kept}


def _by_header(case: Case, finding: Finding) -> Any:
    return _place(case, finding) if _listed(case) and "gguf_metadata_fixture" in case["model"] else KEEP


def _over_workers(case: Case, finding: Finding) -> Any:
    return _place(case, finding) if any(c.get("subordinates") for c in _listed(case)) else KEEP


def _partial(case: Case, finding: Finding) -> Any:
    listed = [c for c in _listed(case) if not c.get("subordinates")]
    some = any((c["claim"].get("offload_layers") or 0) < c["claim"].get("total_layers", 0) for c in listed)
    return _place(case, finding) if some else KEEP


def _several(case: Case, finding: Finding) -> Any:
    return _place(case, finding) if any(len(c.get("gpu_indexes") or ()) > 1 for c in _listed(case)) else KEEP


def _figures(case: Case, finding: Finding) -> Any:
    """Figures of a refusal: so many layers are one block less, and the output."""
    if not case["area"].startswith("selector.gguf") or "gguf_estimates" not in case["model"]:
        return KEEP
    asked, model = gguf_places.requested(case), of_case(case)
    if asked is None or not 0 < asked < model.total_layers:
        return KEEP
    unified = any(h.unified for h in hosts(case).values())
    first = model.total_layers - asked
    vram = model.device(first, model.total_layers, unified=unified, leads=True)
    ram = (model.ram_unified if unified else model.ram)[asked]
    if finding.what.endswith("vram_gib") and "model_needs" in finding.what:
        return Tells((f"{vram / GIB:.2f}",))
    if finding.what.endswith("ram_gib") and "model_needs" in finding.what:
        return Tells((f"{(ram + vram * unified) / GIB:.2f}",))
    return KEEP


def _pool(case: Case, finding: Finding) -> Any:
    there = list(hosts(case).values())
    if not case["area"].startswith("selector.gguf") or not there or not all(h.unified for h in there):
        return KEEP
    return Tells((f"{max(h.ram for h in there) / GIB:.2f}",))


def _sets(case: Case, finding: Finding) -> Any:
    if case["area"] != "gguf_combinations":
        return KEEP
    main = len(cases.workers(case)[0].get("gpus") or [])
    extra = 0 if case["inputs"]["scope"] == "one_worker_multi_gpu" else main - 1
    return {n: int(n) + extra <= DEVICES for n in finding.expected}


def _layer(case: Case, finding: Finding) -> Any:
    """One of the last layers, the output apart: its weights, and a part more for cache and buffers."""
    if "gguf_metadata_fixture" not in case["model"]:
        return KEEP
    picked = len((case["model"].get("gpu_selector") or {}).get("gpu_ids") or ())
    least = min(gguf_places.layer_weights(case)[-max(picked, 2) : -1]) / GIB

    def complaint(got: Any) -> str | None:
        lines = [line for line in got.splitlines() if "too small" in line and "one layer" in line]
        told = [float(n) for line in lines for n in re.findall(r"\d+\.\d+", line)]
        if not any(least <= n <= 1.3 * least for n in told):
            return f"does not tell what one layer needs; its weights are {least:.2f} GiB"
        return None

    return Holds("what one layer needs", complaint)


GGUF = (
    Difference(
        "sizes_of_llama_cpp",
        "where a file's header is given, a GGUF model is sized as llama.cpp allocates it",
        "The peer's estimator is up to a half off (caches of latent attention, windows, buffers of "
        "several devices). Ours is held against what llama.cpp allocated (tests/unit/gguf/test_truth.py), "
        "so that claims are others, and with them layers and GPUs.",
        "who runs GGUF models: no engine dies of memory that was not counted, none is refused that fits",
        WHERE,
        _by_header,
    ),
    Difference(
        "rpc_by_whole_layers",
        "over several workers layers are divided whole, by what each GPU holds, and every process books RAM",
        "The peer divides by free memory, tries one main worker and subsets of at most eight of sixteen "
        "GPUs, and books no RAM where a GPU is served from. Here every worker is tried as the main one, "
        "remote GPUs are taken until the layers fit, and those that are not needed are given back.",
        "who splits a model over workers: more layers on GPUs, on fewer of them, and no worker out of RAM",
        WHERE,
        _over_workers,
    ),
    Difference(
        "output_goes_first",
        "with some layers on GPUs the output is the first of them, as llama.cpp has it now",
        "The peer counts blocks and leaves the output in RAM.",
        "who offloads a part: the engine starts with the layers that were booked",
        WHERE,
        _partial,
    ),
    Difference(
        "whole_layers",
        "over several GPUs of a worker the split is a number of layers for each",
        "The peer splits by bytes of free memory, which llama.cpp rounds to layers; what a GPU then holds "
        "depends on its neighbours' free memory, and sets that would do are passed over.",
        "who needs several GPUs: each gets what it holds, and as few as possible are taken",
        WHERE,
        _several,
    ),
    Difference(
        "figures_of_whole_layers",
        "figures of a refusal are those of layers that count the output first",
        "As the places are.",
        "who reads the refusal: the figures are those of the engine's own flag",
        ("message.model_needs.*",),
        _figures,
    ),
    Difference(
        "no_walk_over_sets",
        "sets of GPUs are not tried one by one; a model that needs so many GPUs is placed on so many",
        "The peer runs its estimator for every set of a size, of which there are tens of thousands, and "
        "gives up over sixteen GPUs. Here layers are filled into the GPUs with most room.",
        "who waits for a GGUF model on a large fleet: milliseconds instead of minutes",
        ("count_by_gpu_number",),
        _sets,
    ),
    Difference(
        "layer_of_llama_cpp",
        "what one layer needs is told as llama.cpp allocates it",
        "As of places.",
        "who reads the refusal",
        ("message.selected_gpu_too_small.needs_gib",),
        _layer,
    ),
    Difference(
        "one_pool",
        "on unified memory a refusal tells the free memory of the one pool",
        "The peer tells GPU memory and RAM apart, though one byte cannot serve twice.",
        "who reads the refusal on such a machine",
        ("message.largest_worker_no_split.vram_gib",),
        _pool,
    ),
)
