"""Models of field reports as repositories: true configurations and true headers, holes for weights.

A repository of these can be written to a directory (`written`) or served by `tests.hub`. Tensors are triples
(name, type, shape), as a safetensors header lists them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.hub import File, Repo, Sparse, repo_of, safetensors, size_of

Tensor = tuple[str, str, tuple[int, ...]]

QWEN_72B: Mapping[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "torch_dtype": "bfloat16",
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
}
BERT: Mapping[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "torch_dtype": "float32",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
}

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "group_size": 128, "strategy": "group"},
        }
    },
    "ignore": ["lm_head"],
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}


def repository(config: Mapping[str, Any], weights: int, **more: Any) -> Repo:
    """One weight file that is `weights` bytes long, header included."""
    head = safetensors([("model.weight", "U8", (weights,))]).head
    repo = repo_of(config, [("model.weight", "U8", (weights - len(head),))], **more)
    assert weights_of(repo) == weights
    return repo


def of_72b(quantization: Mapping[str, Any] | None = None, dtype: str = "bfloat16") -> Repo:
    """A model of 72.7 billion parameters with its linear layers as this quantisation packs them."""
    config = {**QWEN_72B, "torch_dtype": dtype}
    if quantization:
        config["quantization_config"] = dict(quantization)
    return repo_of(config, list(_tensors(config, quantization or {})))


def weights_of(repo: Repo) -> int:
    """Bytes of its safetensors files."""
    return sum(size_of(f) for name, f in repo.files.items() if name.endswith(".safetensors"))


def written(folder: Path, repo: Repo) -> Path:
    """The repository as a directory; needs next to no disk."""
    for name, file in repo.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as out:
            out.write(file.head if isinstance(file, Sparse) else file)
            out.truncate(size_of(file))
    return folder


def pipeline(weights: Mapping[str, int]) -> Repo:
    """A diffusers pipeline: component -> bytes of its weights; and the same weights once more in a precision
    that is not loaded."""
    index: dict[str, Any] = {"_class_name": "FluxPipeline", "_diffusers_version": "0.35.0"}
    index |= {"safety_checker": [None, None]} | {part: ["diffusers", "Part"] for part in weights}
    files: dict[str, File] = {"model_index.json": json.dumps(index).encode()}
    for part, size in weights.items():
        head = safetensors([("weight", "U8", (size,))]).head
        tensors = [("weight", "U8", (size - len(head),))]
        files[f"{part}/model.safetensors"] = safetensors(tensors)
        files[f"{part}/model.fp16.safetensors"] = safetensors(tensors)
    return Repo(files)


def _tensors(config: Mapping[str, Any], quantization: Mapping[str, Any]) -> Iterator[Tensor]:
    kind = "F16" if config["torch_dtype"] == "float16" else "BF16"
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    yield "model.embed_tokens.weight", kind, (config["vocab_size"], hidden)
    for n in range(config["num_hidden_layers"]):
        at = f"model.layers.{n}"
        for part, rows in (("q", hidden), ("k", kv), ("v", kv)):
            yield from _linear(f"{at}.self_attn.{part}_proj", rows, hidden, kind, quantization)
            yield f"{at}.self_attn.{part}_proj.bias", kind, (rows,)
        yield from _linear(f"{at}.self_attn.o_proj", hidden, hidden, kind, quantization)
        yield from _linear(f"{at}.mlp.gate_proj", inner, hidden, kind, quantization)
        yield from _linear(f"{at}.mlp.up_proj", inner, hidden, kind, quantization)
        yield from _linear(f"{at}.mlp.down_proj", hidden, inner, kind, quantization)
        yield f"{at}.input_layernorm.weight", kind, (hidden,)
        yield f"{at}.post_attention_layernorm.weight", kind, (hidden,)
    yield "model.norm.weight", kind, (hidden,)
    yield "lm_head.weight", kind, (config["vocab_size"], hidden)


def _linear(
    name: str, rows: int, columns: int, kind: str, quantization: Mapping[str, Any]
) -> Iterator[Tensor]:
    """The tensors of one linear layer, `columns` in and `rows` out; 4-bit values are packed into 32 bits."""
    method, group, pack = quantization.get("quant_method"), 128, 8
    if method == "gptq":
        yield f"{name}.qweight", "I32", (columns // pack, rows)
        yield f"{name}.qzeros", "I32", (columns // group, rows // pack)
        yield f"{name}.scales", kind, (columns // group, rows)
        yield f"{name}.g_idx", "I32", (columns,)
    elif method == "awq":
        yield f"{name}.qweight", "I32", (columns, rows // pack)
        yield f"{name}.qzeros", "I32", (columns // group, rows // pack)
        yield f"{name}.scales", kind, (columns // group, rows)
    elif method == "compressed-tensors":
        yield f"{name}.weight_packed", "I32", (rows, columns // pack)
        yield f"{name}.weight_scale", kind, (rows, columns // group)
        yield f"{name}.weight_shape", "I64", (2,)
    elif method == "fp8":
        yield f"{name}.weight", "F8_E4M3", (rows, columns)
        yield f"{name}.weight_scale_inv", "F32", (-(-rows // group), -(-columns // group))
    else:
        yield f"{name}.weight", kind, (rows, columns)
