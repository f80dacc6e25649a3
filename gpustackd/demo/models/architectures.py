"""Which tensors the files of a model hold: names, types and shapes from its `config.json`.

Each function walks one family of architectures in the order in which its checkpoints list them. The
shapes are those of the published models, so that the sum of all tensors explains the size of the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "I64": 8}
_CONFIG_DTYPE = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

Config = Mapping[str, Any]


class UnknownArchitecture(ValueError):
    """The tensors of the architecture that a configuration names are not known."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One entry of a safetensors header."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


def tensors_of(config: Config, *, bare: bool = False, stored_head: bool | None = None) -> list[Tensor]:
    """Every tensor of a model, in the order of its checkpoint.

    `bare`: the files hold the network without its head and without the `model.` prefix, as embedding
    models are published. `stored_head`: whether `lm_head.weight` is in the files; None = unless tied.
    Raise UnknownArchitecture for one that is not listed here.
    """
    name = (config.get("architectures") or ["?"])[0]
    walk = _FAMILIES.get(name)
    if walk is None:
        raise UnknownArchitecture(f"{name}: known are {', '.join(sorted(_FAMILIES))}")
    tensors = list(walk(config))
    if bare:
        return [Tensor(t.name.removeprefix("model."), t.dtype, t.shape) for t in tensors]
    if stored_head is None:
        stored_head = name != "BertModel" and not config.get("tie_word_embeddings", False)
    if stored_head:
        tensors.append(
            Tensor("lm_head.weight", _dtype(config), (config["vocab_size"], config["hidden_size"]))
        )
    return tensors


def _dtype(config: Config) -> str:
    return _CONFIG_DTYPE[config.get("torch_dtype", "bfloat16")]


def _decoder(config: Config, feed_forward: Callable[[Config, str], Iterator[Tensor]]) -> Iterator[Tensor]:
    """Grouped-query attention with rotary positions: Llama, Mistral, Qwen2, Qwen3 and their mixtures."""
    name, dtype, hidden = config["architectures"][0], _dtype(config), config["hidden_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries = head * config["num_attention_heads"]
    keys = head * config["num_key_value_heads"]
    yield Tensor("model.embed_tokens.weight", dtype, (config["vocab_size"], hidden))
    for n in range(config["num_hidden_layers"]):
        at = f"model.layers.{n}."
        for part, width in (("q", queries), ("k", keys), ("v", keys)):
            yield Tensor(f"{at}self_attn.{part}_proj.weight", dtype, (width, hidden))
            if name.startswith("Qwen2"):
                yield Tensor(f"{at}self_attn.{part}_proj.bias", dtype, (width,))
        yield Tensor(f"{at}self_attn.o_proj.weight", dtype, (hidden, queries))
        if name.startswith("Qwen3"):
            yield Tensor(f"{at}self_attn.q_norm.weight", dtype, (head,))
            yield Tensor(f"{at}self_attn.k_norm.weight", dtype, (head,))
        yield from feed_forward(config, at)
        yield Tensor(f"{at}input_layernorm.weight", dtype, (hidden,))
        yield Tensor(f"{at}post_attention_layernorm.weight", dtype, (hidden,))
    yield Tensor("model.norm.weight", dtype, (hidden,))


def _gated(at: str, dtype: str, hidden: int, inner: int) -> Iterator[Tensor]:
    yield Tensor(f"{at}gate_proj.weight", dtype, (inner, hidden))
    yield Tensor(f"{at}up_proj.weight", dtype, (inner, hidden))
    yield Tensor(f"{at}down_proj.weight", dtype, (hidden, inner))


def _dense(config: Config, at: str) -> Iterator[Tensor]:
    yield from _gated(f"{at}mlp.", _dtype(config), config["hidden_size"], config["intermediate_size"])


def _qwen_experts(config: Config, at: str) -> Iterator[Tensor]:
    dtype, hidden = _dtype(config), config["hidden_size"]
    yield Tensor(f"{at}mlp.gate.weight", dtype, (config["num_experts"], hidden))
    for n in range(config["num_experts"]):
        yield from _gated(f"{at}mlp.experts.{n}.", dtype, hidden, config["moe_intermediate_size"])


def _mixtral_experts(config: Config, at: str) -> Iterator[Tensor]:
    dtype, hidden, inner = _dtype(config), config["hidden_size"], config["intermediate_size"]
    yield Tensor(f"{at}block_sparse_moe.gate.weight", dtype, (config["num_local_experts"], hidden))
    for n in range(config["num_local_experts"]):
        for part, shape in (("w1", (inner, hidden)), ("w2", (hidden, inner)), ("w3", (inner, hidden))):
            yield Tensor(f"{at}block_sparse_moe.experts.{n}.{part}.weight", dtype, shape)


def _deepseek(config: Config) -> Iterator[Tensor]:
    """DeepSeek-V3 and -R1: latent attention, blocks of FP8 with a scale each, one prediction layer on top."""
    hidden, block = config["hidden_size"], config["quantization_config"]["weight_block_size"]
    heads, latent = config["num_attention_heads"], config["kv_lora_rank"]
    rope, nope = config["qk_rope_head_dim"], config["qk_nope_head_dim"]

    def quantized(name: str, rows: int, columns: int) -> Iterator[Tensor]:
        yield Tensor(f"{name}.weight", "F8_E4M3", (rows, columns))
        scales = (ceil(rows / block[0]), ceil(columns / block[1]))
        yield Tensor(f"{name}.weight_scale_inv", "F32", scales)

    def gated(at: str, inner: int) -> Iterator[Tensor]:
        yield from quantized(f"{at}gate_proj", inner, hidden)
        yield from quantized(f"{at}up_proj", inner, hidden)
        yield from quantized(f"{at}down_proj", hidden, inner)

    def layer(n: int) -> Iterator[Tensor]:
        at = f"model.layers.{n}."
        yield Tensor(f"{at}input_layernorm.weight", "BF16", (hidden,))
        yield from quantized(f"{at}self_attn.q_a_proj", config["q_lora_rank"], hidden)
        yield Tensor(f"{at}self_attn.q_a_layernorm.weight", "BF16", (config["q_lora_rank"],))
        yield from quantized(f"{at}self_attn.q_b_proj", heads * (nope + rope), config["q_lora_rank"])
        yield from quantized(f"{at}self_attn.kv_a_proj_with_mqa", latent + rope, hidden)
        yield Tensor(f"{at}self_attn.kv_a_layernorm.weight", "BF16", (latent,))
        yield from quantized(f"{at}self_attn.kv_b_proj", heads * (nope + config["v_head_dim"]), latent)
        yield from quantized(f"{at}self_attn.o_proj", hidden, heads * config["v_head_dim"])
        yield Tensor(f"{at}post_attention_layernorm.weight", "BF16", (hidden,))
        if n < config["first_k_dense_replace"]:
            yield from gated(f"{at}mlp.", config["intermediate_size"])
            return
        experts, inner = config["n_routed_experts"], config["moe_intermediate_size"]
        yield Tensor(f"{at}mlp.gate.weight", "BF16", (experts, hidden))
        yield Tensor(f"{at}mlp.gate.e_score_correction_bias", "F32", (experts,))
        yield from gated(f"{at}mlp.shared_experts.", inner * config["n_shared_experts"])
        for e in range(experts):
            yield from gated(f"{at}mlp.experts.{e}.", inner)

    vocabulary = (config["vocab_size"], hidden)
    yield Tensor("model.embed_tokens.weight", "BF16", vocabulary)
    count = config["num_hidden_layers"]
    for n in range(count):
        yield from layer(n)
    yield Tensor("model.norm.weight", "BF16", (hidden,))
    for n in range(count, count + config.get("num_nextn_predict_layers", 0)):
        at = f"model.layers.{n}."
        yield from layer(n)
        yield Tensor(f"{at}embed_tokens.weight", "BF16", vocabulary)
        yield Tensor(f"{at}enorm.weight", "BF16", (hidden,))
        yield Tensor(f"{at}hnorm.weight", "BF16", (hidden,))
        yield Tensor(f"{at}eh_proj.weight", "BF16", (hidden, 2 * hidden))
        yield Tensor(f"{at}shared_head.norm.weight", "BF16", (hidden,))
        yield Tensor(f"{at}shared_head.head.weight", "BF16", vocabulary)


def _bert(config: Config) -> Iterator[Tensor]:
    """Encoders as in BERT: learned positions, biases everywhere, a pooler on top."""
    dtype, hidden, inner = _dtype(config), config["hidden_size"], config["intermediate_size"]

    def linear(name: str, rows: int, columns: int) -> Iterator[Tensor]:
        yield Tensor(f"{name}.weight", dtype, (rows, columns))
        yield Tensor(f"{name}.bias", dtype, (rows,))

    def norm(name: str) -> Iterator[Tensor]:
        yield Tensor(f"{name}.LayerNorm.weight", dtype, (hidden,))
        yield Tensor(f"{name}.LayerNorm.bias", dtype, (hidden,))

    positions = config["max_position_embeddings"]
    yield Tensor("embeddings.position_ids", "I64", (1, positions))
    yield Tensor("embeddings.word_embeddings.weight", dtype, (config["vocab_size"], hidden))
    yield Tensor("embeddings.position_embeddings.weight", dtype, (positions, hidden))
    yield Tensor("embeddings.token_type_embeddings.weight", dtype, (config["type_vocab_size"], hidden))
    yield from norm("embeddings")
    for n in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{n}."
        for part in ("query", "key", "value"):
            yield from linear(f"{at}attention.self.{part}", hidden, hidden)
        yield from linear(f"{at}attention.output.dense", hidden, hidden)
        yield from norm(f"{at}attention.output")
        yield from linear(f"{at}intermediate.dense", inner, hidden)
        yield from linear(f"{at}output.dense", hidden, inner)
        yield from norm(f"{at}output")
    yield from linear("pooler.dense", hidden, hidden)


_FAMILIES: Mapping[str, Callable[[Config], Iterator[Tensor]]] = {
    **{
        name: lambda config: _decoder(config, _dense)
        for name in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
    },
    "Qwen3MoeForCausalLM": lambda config: _decoder(config, _qwen_experts),
    "MixtralForCausalLM": lambda config: _decoder(config, _mixtral_experts),
    "DeepseekV3ForCausalLM": _deepseek,
    "BertModel": _bert,
}
