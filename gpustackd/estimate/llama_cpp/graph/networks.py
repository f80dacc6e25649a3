"""Which network an architecture has."""

from __future__ import annotations

from collections.abc import Callable

from gpustackd.domain.gguf_facts import GgufFacts
from gpustackd.estimate.llama_cpp.graph import decoders, encoders, hybrids, latent, recurrent
from gpustackd.estimate.llama_cpp.graph.forward_pass import ForwardPass
from gpustackd.estimate.llama_cpp.graph.styles import STYLES

_NETWORKS: dict[str, Callable[[ForwardPass], None]] = {
    "gemma2": decoders.gemma,
    "gemma3": decoders.gemma,
    "gemma-embedding": decoders.gemma_embedding,
    "deepseek2": latent.deepseek2,
    "mistral4": latent.deepseek2,
    "jamba": hybrids.hybrid,
    "granitehybrid": hybrids.hybrid,
    "lfm2": hybrids.hybrid,
    "lfm2moe": hybrids.hybrid,
    "qwen3next": hybrids.hybrid,
    "qwen35": hybrids.hybrid,
    "qwen35moe": hybrids.hybrid,
    "nemotron_h": hybrids.nemotron_h,
    "nemotron_h_moe": hybrids.nemotron_h,
    "falcon-h1": recurrent.falcon_h1,
    "mamba": recurrent.mamba,
    "mamba2": recurrent.mamba,
    "bert": encoders.bert,
    "nomic-bert": encoders.bert,
    "nomic-bert-moe": encoders.bert,
    "jina-bert-v2": encoders.bert,
    "jina-bert-v3": encoders.bert,
}


def network_of(facts: GgufFacts) -> Callable[[ForwardPass], None]:
    """The builder of a pass for this architecture."""
    return _NETWORKS.get(facts.architecture, decoders.decoder)


def is_known(facts: GgufFacts) -> bool:
    """Whether the network of this architecture is laid out here; another one is taken for a usual decoder."""
    return facts.architecture in _NETWORKS or facts.architecture in STYLES
