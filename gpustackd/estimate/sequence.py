"""The cache of one sequence of the longest length that an engine accepts."""

from __future__ import annotations

from collections.abc import Collection

from gpustackd.domain.facts import HyperParameters, ModelFacts
from gpustackd.domain.model_spec import ModelSpec
from gpustackd.engines.flags import parse_flags
from gpustackd.engines.parallelism import Parallel
from gpustackd.engines.registry import parallel_of, serving_flags
from gpustackd.engines.serving import ServingFlags
from gpustackd.errors import BadRow
from gpustackd.estimate.categories import EMBEDDING, RERANKER, is_llm
from gpustackd.estimate.kv_cache import KvCache, kv_cache


def is_encoder(hyper: HyperParameters, categories: Collection[str]) -> bool:
    """Whether nothing is cached between steps: embedding models and rerankers of the BERT kind, whose
    configurations know no KV heads."""
    pooled = EMBEDDING in categories or RERANKER in categories
    return pooled and not is_llm(categories) and not hyper.kv_heads_stated


def cache_of(
    facts: ModelFacts, categories: Collection[str], serving: ServingFlags, parallel: Parallel
) -> KvCache | None:
    """The cache on one GPU; None where the model keeps none or its dimensions are not stated."""
    if facts.hyper is None or is_encoder(facts.hyper, categories):
        return None
    return kv_cache(facts.hyper, tp=parallel.tp, pp=parallel.pp, dtype=serving.kv_dtype)


def sequence_bytes(spec: ModelSpec, facts: ModelFacts, categories: Collection[str]) -> int | None:
    """Bytes over all GPUs of one copy of the model; None = not known, or no cache at all."""
    try:
        flags = parse_flags(spec.backend_parameters)
        parallel = parallel_of(spec.effective_backend, flags)
        serving = serving_flags(spec.effective_backend, flags, facts.hyper or HyperParameters())
    except BadRow:
        return None  # the search names the flag at fault
    cache = cache_of(facts, categories, serving, parallel)
    return None if cache is None else cache.sequence(serving.max_len) * parallel.tp * parallel.pp
