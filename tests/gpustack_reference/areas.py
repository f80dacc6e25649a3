"""Which judge an area of cases has."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.gpustack_reference import combinations, filtering, models, queues, schedules, scoring, selectors
from tests.gpustack_reference.cases import Case, Unreadable
from tests.gpustack_reference.judgement import Finding

Judge = Callable[[Case], Iterator[Finding]]

AREAS: dict[str, Judge] = {
    "selector.vllm": selectors.judge,
    "selector.sglang": selectors.judge,
    "selector.mindie": selectors.judge,
    "selector.custom": selectors.judge,
    "selector.vgpu": selectors.judge,
    "selector.gguf": selectors.judge,
    "selector.gguf_slow": selectors.judge,
    "gguf_combinations": combinations.judge,
    "scorer.placement": scoring.judge,
    "scorer.file_locality": scoring.judge,
    "scorer.chain": scoring.judge,
    "scorer.instance_chain": scoring.judge,
    "scale_down": scoring.judge,
    "evaluate": models.evaluate,
    "config_parse": models.config_parse,
    "gpu_count": models.gpu_count,
    "tp_divisibility": models.tp_divisibility,
    "vgpu_quantity": models.vgpu_quantity,
    "local_path_config": models.local_path_config,
    "filter.backend_framework": filtering.judge,
    "filter.label_matching": filtering.judge,
    "filter.cluster": filtering.judge,
    "filter.gpu_matching": filtering.judge,
    "filter.status": filtering.judge,
    "queue": queues.judge,
    "scaling_schedule": schedules.judge,
}


def judge(case: Case) -> Iterator[Finding]:
    """What a case expects against what production gives."""
    if case["area"] not in AREAS:
        raise Unreadable("area", f"{case['area']!r} is not known to the runner")
    return AREAS[case["area"]](case)
