"""A hundred mixed demands as models on disk: sparse directories with real headers, read as any other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpustackd.demo.models.sparse import SparseModel, write_model

ONE, MANY, OVER = "one", "many", "over"


@dataclass(frozen=True, slots=True)
class Kind:
    """A class of models: how many, and the dimensions that their sizes follow from."""

    name: str
    count: int
    hidden: int
    layers: range
    pool: str
    """Label of the workers that its models select."""
    parameters: tuple[str, ...] = ()


KINDS = (
    # 2 to 9 billion parameters on one card
    Kind(ONE, 48, 4096, range(8, 40), "common"),
    # the same beside others on one card
    Kind(ONE, 16, 4096, range(4, 12), "common", ("--gpu-memory-utilization=0.3",)),
    # 20 to 80 billion: two to eight cards of one worker
    Kind(MANY, 32, 8192, range(24, 88), "common"),
    # 350 billion and more: two whole workers
    Kind(OVER, 4, 16384, range(100, 104), "large"),
)


@dataclass(frozen=True, slots=True)
class BenchModel:
    """One row of `models`."""

    name: str
    kind: str
    path: Path
    pool: str
    parameters: tuple[str, ...]


def config(hidden: int, layers: int) -> dict[str, Any]:
    """`config.json` of a plain decoder."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": hidden * 7 // 2, "num_hidden_layers": layers, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 128_000, "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    }  # fmt: skip


def write_models(into: Path) -> list[BenchModel]:
    """All hundred, mixed as they come: consecutive ones are of different kinds and sizes."""
    made: list[BenchModel] = []
    for kind in KINDS:
        step = max(len(kind.layers) // kind.count, 1)
        for n in range(kind.count):
            layers = kind.layers[(n * step) % len(kind.layers)]
            path = into / f"{kind.name}-{len(made)}"
            write_model(path, SparseModel(config(kind.hidden, layers)))
            made.append(BenchModel(path.name, kind.name, path, kind.pool, kind.parameters))
    return [made[n * 37 % len(made)] for n in range(len(made))]
