"""Headers of well-known GGUF models by their published dimensions: keys, and tensors (name, shape, type)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from gpustackd.domain.demand import Demand
from gpustackd.domain.facts import ModelFacts
from gpustackd.domain.gguf_facts import GgufFacts
from gpustackd.estimate.demand import build_demand
from tests import gguf_files
from tests.fleets import model

Tensor = tuple[str, Sequence[int], str]


@dataclass(frozen=True)
class Shape:
    """One model: keys of its architecture without prefix, tensors of a block and beside the blocks."""

    architecture: str
    vocabulary: int
    keys: tuple[tuple[str, Any], ...]
    tensors: tuple[Tensor, ...]

    def values(self) -> dict[str, Any]:
        """All keys, with a vocabulary of its true length."""
        made: dict[str, Any] = {"general.architecture": self.architecture}
        made |= {f"{self.architecture}.{k}": v for k, v in self.keys}
        made["tokenizer.ggml.model"] = "gpt2"
        made["tokenizer.ggml.tokens"] = [f"t{n}" for n in range(self.vocabulary)]
        return made

    def write(self, path: Path) -> Path:
        """The file: header, and a hole for the data."""
        return gguf_files.write(path, self.values(), self.tensors)

    @property
    def facts(self) -> GgufFacts:
        """What reading the file says."""
        return _facts(self)


@lru_cache(maxsize=16)
def _facts(shape: Shape) -> GgufFacts:
    head = gguf_files.Writer().head(shape.values(), shape.tensors)
    return gguf_files.facts_of(gguf_files.read(head, gguf_files.file_bytes(head, shape.tensors)))


def demand(shape: Shape, *flags: str, n: int = 1, **fields: Any) -> Demand:
    """What a model of this shape asks for with these flags, sized as the daemon does."""
    spec = model(n, source="local_path", local_path="/m/model.gguf", backend_parameters=flags, **fields)
    return build_demand(spec, ModelFacts(0, categories=("llm",), gguf=shape.facts, digest=str(hash(shape))))


def _dense(layers: int, width: int, heads: int, kv: int, head: int, forward: int, kind: str) -> list[Tensor]:
    found: list[Tensor] = []
    for i in range(layers):
        b = f"blk.{i}."
        found += [
            (b + "attn_norm.weight", (width,), "f32"),
            (b + "attn_q.weight", (width, heads * head), kind),
            (b + "attn_k.weight", (width, kv * head), kind),
            (b + "attn_v.weight", (width, kv * head), kind),
            (b + "attn_output.weight", (heads * head, width), kind),
            (b + "ffn_norm.weight", (width,), "f32"),
            (b + "ffn_gate.weight", (width, forward), kind),
            (b + "ffn_up.weight", (width, forward), kind),
            (b + "ffn_down.weight", (forward, width), kind),
        ]
    return found


def llama(
    layers: int, width: int, heads: int, kv: int, forward: int, vocabulary: int = 128256, kind: str = "q8_0"
) -> Shape:
    """Llama 3 and its like."""
    tensors = [
        ("token_embd.weight", (width, vocabulary), kind),
        ("output_norm.weight", (width,), "f32"),
        ("output.weight", (width, vocabulary), kind),
        *_dense(layers, width, heads, kv, width // heads, forward, kind),
    ]
    keys = {
        "block_count": layers, "context_length": 131072, "embedding_length": width,
        "feed_forward_length": forward, "attention.head_count": heads, "attention.head_count_kv": kv,
        "attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": width // heads,
        "rope.freq_base": 500000.0,
    }  # fmt: skip
    return Shape("llama", vocabulary, tuple(keys.items()), tuple(tensors))


def gemma3(layers: int, width: int, heads: int, kv: int, head: int, forward: int, kind: str) -> Shape:
    """Gemma 3: five layers with a window, then one without; output tied to the token table."""
    tensors = [
        ("token_embd.weight", (width, 262144), kind),
        ("output_norm.weight", (width,), "f32"),
    ]
    for i in range(layers):
        tensors += [
            (f"blk.{i}.{name}.weight", (size,), "f32")
            for name, size in (
                ("attn_q_norm", head), ("attn_k_norm", head), ("post_attention_norm", width),
                ("post_ffw_norm", width),
            )
        ]  # fmt: skip
    tensors += _dense(layers, width, heads, kv, head, forward, kind)
    keys = {
        "block_count": layers, "context_length": 131072, "embedding_length": width,
        "feed_forward_length": forward, "attention.head_count": heads, "attention.head_count_kv": kv,
        "attention.key_length": head, "attention.value_length": head, "attention.sliding_window": 1024,
        "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1000000.0,
    }  # fmt: skip
    return Shape("gemma3", 262144, tuple(keys.items()), tuple(tensors))


def deepseek(kind: str = "q8_0", layers: int = 61, dense: int = 3) -> Shape:
    """DeepSeek V3 and R1, as published before their caches were compressed."""
    width, heads, experts = 7168, 128, 256
    tensors: list[Tensor] = [
        ("token_embd.weight", (width, 129280), kind),
        ("output_norm.weight", (width,), "f32"),
        ("output.weight", (width, 129280), kind),
    ]
    for i in range(layers):
        b = f"blk.{i}."
        tensors += [
            (b + "attn_norm.weight", (width,), "f32"),
            (b + "attn_q_a.weight", (width, 1536), kind),
            (b + "attn_q_a_norm.weight", (1536,), "f32"),
            (b + "attn_q_b.weight", (1536, heads * 192), kind),
            (b + "attn_kv_a_mqa.weight", (width, 576), kind),
            (b + "attn_kv_a_norm.weight", (512,), "f32"),
            (b + "attn_kv_b.weight", (512, heads * 256), kind),
            (b + "attn_output.weight", (heads * 128, width), kind),
            (b + "ffn_norm.weight", (width,), "f32"),
        ]
        if i < dense:
            tensors += [
                (b + "ffn_gate.weight", (width, 18432), kind),
                (b + "ffn_up.weight", (width, 18432), kind),
                (b + "ffn_down.weight", (18432, width), kind),
            ]
            continue
        tensors += [
            (b + "ffn_gate_inp.weight", (width, experts), "f32"),
            (b + "exp_probs_b.bias", (experts,), "f32"),
            (b + "ffn_gate_exps.weight", (width, 2048, experts), kind),
            (b + "ffn_up_exps.weight", (width, 2048, experts), kind),
            (b + "ffn_down_exps.weight", (2048, width, experts), kind),
            (b + "ffn_gate_shexp.weight", (width, 2048), kind),
            (b + "ffn_up_shexp.weight", (width, 2048), kind),
            (b + "ffn_down_shexp.weight", (2048, width), kind),
        ]
    keys: Mapping[str, Any] = {
        "block_count": layers, "context_length": 163840, "embedding_length": width,
        "feed_forward_length": 18432, "attention.head_count": heads, "attention.head_count_kv": heads,
        "attention.layer_norm_rms_epsilon": 1e-6, "attention.q_lora_rank": 1536,
        "attention.kv_lora_rank": 512, "attention.key_length": 192, "attention.value_length": 128,
        "expert_count": experts, "expert_used_count": 8, "expert_shared_count": 1,
        "expert_feed_forward_length": 2048, "expert_weights_scale": 2.5, "expert_weights_norm": True,
        "expert_gating_func": 2, "leading_dense_block_count": dense, "rope.dimension_count": 64,
        "rope.scaling.type": "yarn", "rope.scaling.factor": 40.0,
        "rope.scaling.original_context_length": 4096, "rope.scaling.yarn_log_multiplier": 0.1,
    }  # fmt: skip
    return Shape("deepseek2", 129280, tuple(keys.items()), tuple(tensors))


LLAMA_8B = llama(32, 4096, 32, 8, 14336)
LLAMA_70B = llama(80, 8192, 64, 8, 28672, kind="q4_k")
LLAMA_405B = llama(126, 16384, 128, 8, 53248, kind="q4_k")
GEMMA_27B = gemma3(62, 5376, 32, 16, 128, 21504, "q4_0")
R1_Q8 = deepseek("q8_0")
R1_BF16 = deepseek("bf16")
R1_Q4 = deepseek("q4_k")
